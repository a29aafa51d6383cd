// The controls, what they choose, and everything drawn anew when one of them moves.

const at = (id) => document.getElementById(id);
const [LEAST_TTL, MOST_TTL] = ttlLimits();
const ROUNDING = 1e-6;
let picked = null;

function chosenState() {
  const state = {
    context: plan.contexts[at("context").value],
    cap: Number(at("gpus").value),
    target: LEAST_TTL * (MOST_TTL / LEAST_TTL) ** at("ttl").value,
    weightDtype: at("weight-dtype").value,
    kvDtype: at("kv-dtype").value,
  };
  const leftOut = at("hop-b").checked ? "helix_exposed" : "helix";
  state.table = tableOf(state.context, state.weightDtype, state.kvDtype);
  state.lines = plan.strategies
    .map((strategy, index) => ({ strategy, points: state.table.frontiers[state.cap][index] }))
    .filter(({ strategy }) => strategy.name !== leftOut);
  return state;
}

// Frontiers ascend in tokens/s/user, and descend in tokens/s/GPU: the first that is fast enough is the best.
function bestOf(table, points, target) {
  return points.find((point) => value(table, "ttl_s", point) <= target * (1 + ROUNDING)) ?? null;
}

function best(table, points) {
  return points.reduce((most, point) => (speeds(table, point).gpu > speeds(table, most).gpu ? point : most));
}

function strategyRow(state, { strategy, point }, shown) {
  const pressed = String(point !== null && point === shown);
  const name = element("button", { type: "button", "aria-pressed": pressed }, strategy.title);
  name.style.setProperty("--swatch", `var(--${strategy.name})`);
  const row = element("tr", {}, element("th", { scope: "row" }, name));
  if (point === null) {
    name.disabled = true;
    row.append(element("td", { colspan: 4 }, "not within the target"));
    return row;
  }
  name.addEventListener("click", () => pick(point));
  const found = configuration(state.table, point);
  row.append(...[digits(found.user), digits(found.gpu), whole(found.gpus), whole(found.batch)]
    .map((words) => element("td", {}, words)));
  return row;
}

function layoutWords(found) {
  const { tpf, ep, pp, ffn_replicas: copies } = found;
  return [attentionWords(found), `TPF ${tpf} × EP ${ep}${copies > 1 ? ` × ${copies} copies` : ""}`,
    ...(pp > 1 ? [`PP ${pp}`] : [])].join(", ");
}

function memoryBar(found) {
  const bytes = [["weights", found.weights_bytes], ["KV", found.kv_bytes], ["activations", found.activations_bytes]];
  const used = bytes.reduce((sum, [, size]) => sum + size, 0);
  const words = bytes.map(([name, size]) => `${name} ${scaled(size, "B")}`).join(", ");
  const bar = element("div", { class: "memory", role: "img", "aria-label": words, title: words },
    ...bytes.map(([name, size]) =>
      element("div", { class: name, style: `width:${(100 * size) / plan.capacity_bytes}%` })));
  return [bar, element("p", { class: "note" },
    `${scaled(used, "B")} of ${scaled(plan.capacity_bytes, "B")} per GPU: ${words}`)];
}

function figure(number, words) {
  return element("div", { class: "figure" }, element("strong", {}, number), " ", words);
}

// How much more throughput than the best of all other strategies within the target.
function comparison(state, bests, found) {
  const others = bests.filter(({ strategy, point }) => point !== null && strategy !== found.strategy);
  if (picked !== null || !others.length) return [];
  const point = best(state.table, others.map((other) => other.point));
  const { strategy } = others.find((other) => other.point === point);
  const gain = digits(found.gpu / speeds(state.table, point).gpu);
  return [element("p", {}, `${gain}× the tokens/s per GPU of ${strategy.title}, the next best`)];
}

function drawChosen(found, compared) {
  at("chosen").replaceChildren(
    element("div", { class: "figures" },
      figure(digits(found.user), "tokens/s per user"), figure(digits(found.gpu), "tokens/s per GPU"),
      figure(whole(found.gpus), noun(found.gpus, "GPU")),
      figure(whole(found.batch), `${noun(found.batch, "request")} at once`)),
    element("p", {}, element("b", {}, found.strategy.title), `: ${layoutWords(found)}`),
    ...memoryBar(found), ...compared);
}

function drawNothing(state) {
  const short = state.table.short_bytes[state.cap];
  const reason = short > 0
    ? `Nothing fits: for one request of ${tokens(state.context)} tokens the nearest layout lacks ${scaled(short, "B")} `
      + "on a GPU. More GPUs, a narrower dtype or a shorter context would help."
    : `No configuration takes ${time(state.target)} or less per token. A higher target, or more GPUs, would help.`;
  at("chosen").replaceChildren(element("p", { class: "nothing" }, reason));
}

function fill(id, shown) {
  at(`${id}-shown`).textContent = shown;
  at(id).setAttribute("aria-valuetext", shown);
}

function draw() {
  const state = chosenState();
  fill("context", `${tokens(state.context)} tokens`);
  fill("gpus", plural(plan.gpu_caps[state.cap], "GPU"));
  fill("ttl", time(state.target));
  const bests = state.lines.filter(({ points }) => points.length)
    .map((line) => ({ ...line, point: bestOf(state.table, line.points, state.target) }));
  const reaching = bests.map(({ point }) => point).filter((point) => point !== null);
  const shown = picked ?? (reaching.length ? best(state.table, reaching) : null);
  const found = shown === null ? null : configuration(state.table, shown);
  at("chosen-title").textContent = picked === null ? `Best within ${time(state.target)} per token` : "As picked";
  at("back").hidden = picked === null;
  at("strategies").hidden = !bests.length;
  document.querySelector("#strategies tbody").replaceChildren(
    ...bests.map((line) => strategyRow(state, line, shown)));
  document.body.classList.toggle("empty", found === null);
  if (found === null) {
    drawNothing(state);
  } else {
    drawChosen(found, comparison(state, bests, found));
    drawStep(found);
    drawLayout(found, state.context);
  }
  return drawFrontier(state.table, state.lines, state.target, found);
}

function pick(point) {
  picked = point;
  draw();
}

function start() {
  const { asked } = plan;
  at("title").textContent = `${plan.model} on ${plan.system}`;
  document.title = `${plan.model} on ${plan.system}: longhelix plan`;
  at("about").textContent = `Decoding, predicted by a cost model from ${whole(plan.configurations)} configurations`;
  at("context").max = plan.contexts.length - 1;
  at("context").value = plan.contexts.indexOf(asked.context);
  at("gpus").max = at("gpus").value = plan.gpu_caps.length - 1;
  at("ttl").max = 1;
  at("ttl").value = Math.log(asked.ttl_s / LEAST_TTL) / Math.log(MOST_TTL / LEAST_TTL);
  for (const [id, dtypes, dtype] of [["weight-dtype", plan.weight_dtypes, asked.weight_dtype],
    ["kv-dtype", plan.kv_dtypes, asked.kv_dtype]]) {
    at(id).append(...dtypes.map((name) => element("option", {}, name)));
    at(id).value = dtype;
  }
  at("controls").addEventListener("input", () => pick(null));
  at("back").addEventListener("click", () => pick(null));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw().then((plot) => plot.on("plotly_click", ({ points: [clicked] }) => {
    if (clicked.customdata !== undefined) pick(clicked.customdata);
  }));
}

start();
