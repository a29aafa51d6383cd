// The requests that run, each in the colour of its KV blocks.

import { byId, element, write } from "./dom.js";
import { plural, whole } from "./numbers.js";

/** @typedef {import("./live.js").Running} Running */

const MOST = 12;

/**
 * @param {Running[]} running
 * @param {import("./pools.js").Palette} palette
 * @param {string} client by which the engine knows this page
 */
export function showRequests(running, palette, client) {
  byId("no-requests").hidden = running.length > 0;
  // Rows are few, and stay where they are: those of this page first, then by their age.
  const ordered = [...running].sort((a, b) => Number(b.client === client) - Number(a.client === client) || a.id - b.id);
  const rows = ordered.slice(0, MOST).map((request) => row(request, palette, request.client === client));
  byId("requests").replaceChildren(...rows);
  const more = byId("more-requests");
  more.hidden = running.length <= MOST;
  write(more, `and ${plural(running.length - MOST, "more request")}`);
}

/** @param {Running} request @param {import("./pools.js").Palette} palette @param {boolean} own */
function row(request, palette, own) {
  const { id, placement, prompt_tokens: prompt, prefilled_tokens: prefilled, cached_tokens: cached } = request;
  const reads = prefilled < prompt;
  const said = [reads ? `reading ${whole(prefilled)} of ${whole(prompt)}` : `prompt ${whole(prompt)}`];
  if (cached) said.push(`${whole(cached)} cached`);
  said.push(plural(request.new_tokens, "new token"));
  if (request.preemptions) said.push(`preempted ${plural(request.preemptions, "time")}`);
  const filled = element("i"), hit = element("i", { class: "from-cache" });
  filled.style.width = `${(100 * prefilled) / prompt}%`;
  hit.style.width = `${(100 * Math.min(cached, prefilled)) / prompt}%`;
  const whose = own ? [element("em", {}, "this page")] : [element("em", { class: "quiet" }, request.client)];
  return element("li", { class: palette.of(id), "data-request": String(id) },
    element("span", { class: "who" }, element("i", { class: "swatch", "aria-hidden": "true" }), `#${id}`,
      ...(request.client ? whose : [])),
    element("span", { class: `placement ${placement}` }, placement),
    element("span", { class: "fill", "aria-hidden": "true" }, filled, hit),
    element("span", { class: "said quiet" }, said.join(" · ")),
    element("span", { class: "blocks quiet" }, `${request.kv_blocks_per_rank.map(whole).join(" + ")} blocks`),
  );
}
