// The ranks by both of their names: KVP x TPA in attention, TPF x EP in the FFN, stage by stage.

import { byId, element, write } from "./dom.js";
import { range } from "./numbers.js";

/** @typedef {import("./live.js").Server} Server @typedef {import("./live.js").Rank} Rank */

/** @param {Server} server */
export function showGrids(server) {
  const { layout, ranks } = server;
  const copies = layout.ffn_replicas > 1 ? ` × ${layout.ffn_replicas} copies` : "";
  const stages = layout.pp > 1 ? ` · ${layout.pp} stages` : "";
  const ffn = `TPF ${layout.tpf} × EP ${layout.ep}${copies}`;
  write(byId("layout"), `KVP ${layout.kvp} × TPA ${layout.tpa} ⇄ ${ffn}${stages}`);
  const places = byId("grids");
  places.replaceChildren();
  for (let stage = 0; stage < layout.pp; stage += 1) {
    const own = ranks.filter((rank) => rank.stage === stage);
    if (layout.pp > 1) places.append(element("h4", {}, `Stage ${stage}, ${range(own[0].layers, "layer")}`));
    const kvp = (/** @type {Rank} */ rank) => rank.kvp, tpa = (/** @type {Rank} */ rank) => rank.tpa;
    const tpf = (/** @type {Rank} */ rank) => rank.tpf;
    const groups = layout.ep > 1 || layout.ffn_replicas === 1 ? "EP" : "Copy";
    const copy = (/** @type {Rank} */ rank) => Math.floor((rank.rank % own.length) / layout.tpf);
    places.append(element("div", { class: "pair" },
      grid(own, "Attention", ["KVP", layout.kvp, kvp], ["TPA", layout.tpa, tpa]),
      element("span", { class: "arrow", "aria-hidden": "true" }, "⇄"),
      grid(own, "FFN", ["TPF", layout.tpf, tpf], [groups, own.length / layout.tpf, copy]),
    ));
  }
  for (const cell of places.querySelectorAll("[data-rank]")) {
    const named = `[data-rank="${cell.getAttribute("data-rank")}"]`;
    const light = (/** @type {boolean} */ on) => () => {
      for (const same of places.querySelectorAll(named)) same.classList.toggle("same", on);
    };
    cell.addEventListener("pointerenter", light(true));
    cell.addEventListener("pointerleave", light(false));
  }
}

/**
 * @param {Rank[]} ranks @param {string} title
 * @param {[string, number, (rank: Rank) => number]} across name, how many, a rank's
 * @param {[string, number, (rank: Rank) => number]} down
 */
function grid(ranks, title, [acrossName, columns, column], [downName, rows, row]) {
  const places = (/** @type {number} */ count) => Array.from({ length: count }, (_, place) => place);
  const cell = (/** @type {number} */ at, /** @type {number} */ line) => {
    const rank = ranks.find((each) => column(each) === at && row(each) === line);
    return rank === undefined ? element("td") : element("td", { "data-rank": String(rank.rank) }, String(rank.rank));
  };
  const names = places(columns).map((at) => element("th", { scope: "col" }, `${acrossName} ${at}`));
  const lines = places(rows).map((line) => element("tr", {},
    element("th", { scope: "row" }, `${downName} ${line}`), ...places(columns).map((at) => cell(at, line))));
  const table = element("table", {}, element("caption", {}, `${title}: ${acrossName} × ${downName}`),
    element("thead", {}, element("tr", {}, element("td"), ...names)), element("tbody", {}, ...lines));
  return element("div", { class: "grid", tabindex: "0", role: "region", "aria-label": title }, table);
}
