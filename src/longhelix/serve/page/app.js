// The page: a chat with the model, beside what the engine does meanwhile.

import { call, key, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element, write } from "./dom.js";
import { showGrids } from "./grids.js";
import { Live } from "./live.js";
import { digits, plural, time, whole } from "./numbers.js";
import { Palette, Pools } from "./pools.js";
import { showRequests } from "./requests.js";
import { Strip } from "./strip.js";

const RATE_S = 5, CONTEXTS_MS = 30_000;
// A name for this tab, by which it knows its own requests in the engine; clients share the engine fairly by it, too.
const client = `page-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;

const palette = new Palette(), pools = new Pools(palette), strip = new Strip();
const chat = new Chat(client, () => askForKey());
/** @type {import("./live.js").Server | null} */
let server = null;
/** @type {{atS: number, answered: number, read: number}[]} */
let recent = [];
let beganS = 0;
/** @type {boolean | undefined} */
let hasContexts;

const live = new Live({
  server(come) {
    server = come;
    recent = [];
    beganS = performance.now() / 1000;
    chat.model = come.model;
    document.title = `${come.model} · longhelix`;
    write(byId("model"), come.model);
    byId("model").title = `longhelix ${come.version}, weights ${come.weight_dtype}, KV ${come.kv_dtype}`;
    const ranks = come.ranks.length;
    const room = `A conversation may have ${whole(come.max_model_len)} tokens`;
    write(byId("room"), `${room}; its keys and values lie on ${plural(ranks, "rank")}.`);
    pools.begin(come);
    strip.begin();
    showGrids(come);
    hasContexts = undefined;
    showContexts();
  },
  state(come) {
    const { observation, steps } = come;
    byId("live-note").hidden = !come.is_draining;
    write(byId("live-note"), "The server is about to end: it takes no more questions.");
    byId("live-body").hidden = false;
    palette.update(observation.running.map((request) => request.id));
    pools.update(come);
    strip.update(steps, server?.layout.pp ?? 1);
    showRequests(observation.running, palette, client);
    const read = steps.reduce((all, step) => all + step.chunks.reduce((sum, chunk) => sum + chunk.num_tokens, 0), 0);
    recent.push({ atS: performance.now() / 1000, answered: come.new_tokens, read });
    showNumbers(come);
    showRates();
  },
  status(state, words) {
    const place = byId("connection");
    place.dataset.state = state;
    write(place, { connecting: "Connecting", on: "Connected", off: "Reconnecting", refused: "Wants a key" }[state]);
    const note = byId("live-note");
    if (state === "on") {
      note.hidden = server !== null && !byId("live-body").hidden;
      write(note, "Connecting to the engine.");
      return;
    }
    note.hidden = false;
    write(note, state === "refused" ? words : `${words} This page connects again by itself.`);
    if (state === "refused") askForKey();
  },
});

/** @param {import("./live.js").State} state */
function showNumbers({ observation, ttft_s: ttft, tbt_s: tbt }) {
  write(byId("running"), whole(observation.running.length));
  write(byId("waiting"), `${whole(observation.num_waiting)} waiting`);
  write(byId("ttft"), ttft === null ? "–" : time(ttft.p50));
  write(byId("ttft-p95"), ttft === null ? "p50, p95" : `p95 ${time(ttft.p95)}`);
  write(byId("tbt"), tbt === null ? "–" : time(tbt.p50));
  write(byId("tbt-p95"), tbt === null ? "p50, p95" : `p95 ${time(tbt.p95)}`);
  const held = observation.ranks.reduce((all, rank) => all + rank.held, 0);
  const total = observation.ranks.reduce((all, rank) => all + rank.total, 0);
  write(byId("kv-used"), `${digits((100 * held) / total)}%`);
  write(byId("kv-tokens"), `of ${whole(total * observation.block_tokens)} tokens`);
}

/** Over the last seconds; they fall where nothing comes. */
function showRates() {
  const nowS = performance.now() / 1000;
  recent = recent.filter((each) => each.atS > nowS - RATE_S);
  const seconds = Math.max(1, Math.min(RATE_S, nowS - beganS));
  const rate = (/** @type {"answered" | "read"} */ name) => recent.reduce((all, each) => all + each[name], 0) / seconds;
  write(byId("tokens-rate"), digits(rate("answered")));
  write(byId("prompt-rate"), digits(rate("read")));
}

/** Where the server has them; asked for only where it says that it does. */
async function showContexts() {
  try {
    hasContexts ??= (await (await call("/openapi.json")).json()).paths["/v1/contexts"]?.get !== undefined;
    const found = hasContexts ? (await (await call("/v1/contexts")).json()).data : [];
    byId("contexts-section").hidden = found.length === 0;
    byId("contexts").replaceChildren(...found.map((/** @type {any} */ context) => element("li", {},
      element("span", { class: "name" }, String(context.id)),
      element("span", { class: "quiet" }, ` ${plural(Number(context.num_tokens), "token")}`))));
  } catch {
    byId("contexts-section").hidden = true;
  }
}

function askForKey() {
  byId("access").open = true;
  byId("key").focus();
}

/** Escape closes it, and so does whatever happens elsewhere. @param {any} details */
function closes(details) {
  details.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape" || !details.open) return;
    event.stopPropagation();
    details.open = false;
    details.querySelector("summary").focus();
  });
  for (const elsewhere of ["pointerdown", "focusin"]) {
    document.addEventListener(elsewhere, (event) => {
      if (!details.contains(event.target)) details.open = false;
    });
  }
}

function listen() {
  byId("key").value = key();
  byId("access-form").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("access").open = false;
    byId("question").focus();
    live.connect();
  });
  for (const id of ["access", "sampling"]) closes(byId(id));
  for (const choice of document.querySelectorAll(".views button")) {
    choice.addEventListener("click", () => {
      const { view } = /** @type {HTMLElement} */ (choice).dataset;
      document.documentElement.dataset.view = view;
      for (const each of document.querySelectorAll(".views button")) {
        each.setAttribute("aria-pressed", String(each === choice));
      }
    });
  }
  const dark = matchMedia("(prefers-color-scheme: dark)"), theme = byId("theme");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    write(theme, isDark() ? "Light" : "Dark");
    theme.setAttribute("aria-label", isDark() ? "Light theme" : "Dark theme");
    pools.redraw();
    strip.draw();
  };
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("longhelix-theme", document.documentElement.dataset.theme);
    } catch {
      // a browser that keeps nothing
    }
    showTheme();
  });
  dark.addEventListener("change", showTheme);
  showTheme();
  setInterval(showRates, 500);
  setInterval(() => { if (!document.hidden) showContexts(); }, CONTEXTS_MS);
}

listen();
live.connect();
byId("question").focus();
