// Applies the controls: whenever one changes, it chooses again and draws everything again.

function figure(number, words) {
  return element("div", { class: "figure" }, element("strong", {}, number), " ", words);
}

function orNone(number, words) {
  return number === null ? "–" : words(number);
}

// Rounds a number of users as the plan does (`Choice.users`).
function people(users) {
  return whole(Math.max(Math.floor(users + ROUNDING), Math.min(1, Math.ceil(users))));
}

const COLUMNS = [
  ["Tokens/s per user", (found) => digits(found.user), "ttl"],
  ["Tokens/s per GPU", (found) => digits(found.gpu)],
  ["ms during a prefill", (found) => orNone(found.ttlBeside, (ttl) => digits(1e3 * ttl)), "ttlBeside"],
  ["TTFT, s", (found) => orNone(found.ttft, digits), "ttft"],
  ["Users", (found) => people(found.users)],
  ["Requests/s", (found) => orNone(found.rate, digits)],
  ["Cost of 1M tokens", (found) => orNone(found.cost, digits)],
  ["GPUs", (found) => whole(found.gpus), "gpus"],
];

function strategyRow(strategy, found, shown) {
  const pressed = String(found !== null && found.point === shown?.point && found.chunk === shown.chunk);
  const name = element("button", { type: "button", "aria-pressed": pressed }, strategy.title);
  name.style.setProperty("--swatch", `var(--${strategy.name})`);
  const row = element("tr", {}, element("th", { scope: "row" }, name));
  if (found === null) {
    name.disabled = true;
    row.append(element("td", { colspan: COLUMNS.length }, "does not fit"));
    return row;
  }
  name.addEventListener("click", () => draw(found));
  row.append(...COLUMNS.map(([label, words, target]) => {
    const missed = found.missed[target] > 0;
    return element("td", { "data-label": label, ...(missed ? { class: "missed", title: "over the target" } : {}) },
      (missed ? "✗ " : "") + words(found));
  }));
  return row;
}

function memoryBar(table, found) {
  const capacity = plan.capacity_bytes / (plan.shares_capacity ? found.layout.gpus : 1);
  const bytes = [["weights", table.point.weights_bytes[found.point]], ["KV", table.point.kv_bytes[found.point]],
    ["activations", found.activations_bytes]];
  const used = bytes.reduce((sum, [, size]) => sum + size, 0);
  const words = bytes.map(([name, size]) => `${name} ${scaled(size, "B") || "0"}`).join(", ");
  const bar = element("div", { class: "memory", role: "img", "aria-label": words },
    ...bytes.map(([name, size]) => element("div", { class: name, style: `width:${(100 * size) / capacity}%` })));
  return [bar, element("p", { class: "note" }, `${scaled(used, "B")} of ${scaled(capacity, "B")} per GPU: ${words}`)];
}

function missedWords(found, state) {
  const targets = [
    ["ttl", "time per token", time(found.ttl), state.ttl && time(state.ttl)],
    ["ttlBeside", "time per token during a prefill", time(found.ttlBeside), state.ttlBeside && time(state.ttlBeside)],
    ["ttft", "TTFT", time(found.ttft), state.ttft && time(state.ttft)], ["gpus", "GPUs", whole(found.gpus), state.cap]];
  return targets.filter(([target]) => found.missed[target] > 0)
    .map(([, name, has, most]) => `${name} (${has}, over ${most})`).join(" and ");
}

function drawChosen(state, found) {
  const copies = found.replicas > 1 ? `${found.replicas} × ` : "";
  const chunks = found.chunk === null ? "no memory left for a chunk of a prompt" : `chunks of ${whole(found.chunk)}`;
  at("chosen").replaceChildren(
    element("div", { class: "figures" },
      figure(digits(found.user), "tokens/s per user"), figure(digits(found.gpu), "tokens/s per GPU"),
      figure(orNone(found.ttft, time), "TTFT"), figure(people(found.users), "users"),
      ...(found.rate === null ? [] : [figure(digits(found.rate), "requests/s")]),
      ...(found.cost === null ? [] : [figure(digits(found.cost), "for 1M tokens")]),
      figure(whole(found.gpus), noun(found.gpus, "GPU"))),
    element("p", {}, element("b", {}, found.strategy.title), `: ${copies}${layoutWords(found.layout)}, `
      + `${plural(found.batch, "request")} at once, ${chunks}`),
    element("p", {}, `${time(found.ttl)} per token, ${orNone(found.ttlBeside, time)} during a prefill`),
    ...memoryBar(state.table, found),
    ...(found.far > 0 ? [element("p", { class: "missed" }, `It misses ${missedWords(found, state)}.`)] : []));
}

function drawNothing(state) {
  const short = state.table.short_bytes[state.capIndex];
  const reason = short > 0
    ? `Nothing fits: for one request of ${tokens(state.tokens)} tokens, the closest layout lacks `
      + `${scaled(short, "B")} per GPU. Allow more GPUs, or choose a narrower dtype or shorter requests.`
    : "No request fits together with a chunk of its prompt. Allow more GPUs, or choose a narrower dtype or shorter "
      + "requests.";
  at("chosen").replaceChildren(element("p", { class: "nothing" }, reason));
}

function titleOf(state, shown) {
  if (picked !== null) return "Your selection";
  if (shown === null) return "Nothing fits";
  if (shown.far > 0) return "No configuration meets all targets; the closest";
  return hasTargets(state) ? "The best within the targets" : "A balance of speed and throughput";
}

let state = null;
let shown = null;

// Draws the page. choice: the configuration that the user selected, or null for the best one.
function draw(choice) {
  const next = stateSet();
  if (next === null) return;
  [state, picked] = [next, choice];
  showSliders(state);
  const rows = bests(state);
  shown = picked ?? first(rows.filter((found) => found !== null), state);
  at("chosen-title").textContent = titleOf(state, shown);
  at("back").hidden = picked === null;
  document.querySelector("#strategies tbody").replaceChildren(
    ...state.strategies.map((strategy, index) => strategyRow(strategy, rows[index], shown)));
  document.body.classList.toggle("empty", shown === null);
  if (shown === null) {
    drawNothing(state);
  } else {
    drawChosen(state, shown);
    drawStep(itemsOf(state.table, shown.point), state.table.point.ttl_s[shown.point]);
    drawLayout(shown, state.tokens);
  }
  drawHeadline(state, shown);
  drawFrontier(state, shown);
}

function watchWidth() {
  const main = document.querySelector("main");
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    drawFrontier(state, shown);
    drawCompared();
  }).observe(main);
}

function start() {
  at("title").textContent = `${plan.model} on ${plan.system}`;
  document.title = `${plan.model} on ${plan.system}: longhelix plan`;
  at("about").textContent = `Predicted by a cost model from ${whole(plan.looked_at)} configurations. Away from the `
    + "original question, with fewer batches and chunk sizes.";
  at("strategies").querySelector("thead tr").append(
    ...COLUMNS.map(([label]) => element("th", { scope: "col" }, label)));
  startControls(draw);
  at("back").addEventListener("click", () => draw(null));
  watchFrontier((point) => draw(atPoint(state, point)), () => shown?.point);
  watchComparison();
  draw(null);
  watchWidth();
}

start();
