// Compares this plan with another one: the user opens or drops its plan.json or plan.html.

const PLANS = [["This plan", "var(--helix)", "circle", false], ["Other plan", "var(--tp)", "square", true]];

async function answerIn(text) {
  if (!text.trimStart().startsWith("<")) return JSON.parse(text);
  const page = new DOMParser().parseFromString(text, "text/html");
  return (await (await unpacked(page.getElementById("document").textContent)).json()).answer;
}

async function answerOf(file) {
  const found = await answerIn(await file.text());
  if (typeof found?.system !== "string" || !Array.isArray(found.frontier) || !found.targets) throw new TypeError();
  return found;
}

function targetsOf({ targets, max_gpus: gpus }) {
  return [
    targets.ttl_s && `${time(targets.ttl_s)} per token`,
    targets.ttl_with_prefill_s && `${time(targets.ttl_with_prefill_s)} per token during a prefill`,
    targets.ttft_s && `TTFT ${time(targets.ttft_s)}`,
    targets.users > 1 && plural(targets.users, "user"),
    targets.rate_per_s && `${digits(targets.rate_per_s)} requests/s`,
    targets.fewest_gpus && "fewest GPUs", `up to ${plural(gpus, "GPU")}`,
  ].filter(Boolean).join(", ");
}

// The rows of the comparison, as pairs of a label and a text: null where the value is unknown.
function answerRows(answer) {
  const found = answer.best ?? answer.nearest?.[0] ?? null;
  const known = (value, words) => (value === null || value === undefined ? null : words(value));
  const of = (name, words) => known(found?.[name], words);
  return [
    ["Model", `${answer.model ?? "?"} on ${answer.system}`],
    ["Weights, KV", `${weightWords(answer.weight_dtype, answer.expert_dtype)}, ${answer.kv_dtype}`],
    ["Tokens per step", known(answer.accepted_tokens, (accepted) => digits(accepted))],
    ["Requests", `${tokens(answer.context)} tokens`],
    ["Targets", targetsOf(answer)],
    ["Answer", found && (answer.best ? "meets the targets" : `closest, misses ${found.violates.join(", ")}`)],
    ["Strategy", of("strategy", (name) => plan.strategies.find((each) => each.name === name)?.title ?? name)],
    ["Layout", of("layout", layoutWords)],
    ["GPUs", of("gpus", whole)],
    ["Users", of("users", whole)],
    ["Requests/s", of("rate_per_s", digits)],
    ["Tokens/s per user", of("tokens_per_s_per_user", digits)],
    ["Tokens/s per GPU", of("tokens_per_s_per_gpu", digits)],
    ["Time per token, mean", of("ttl_s", time)],
    ["Time per token during a prefill", of("ttl_p95_s", time)],
    ["TTFT", of("ttft_s", time)],
    ["Cost of 1M tokens", of("cost_per_million_tokens", digits)],
    ["Helix's gain at the target", known(answer.at_ttl?.throughput_gain, (gain) => `${gain.toFixed(2)}×`)],
    ["Helix's largest gain", known(answer.headline?.throughput_gain, (gain) => `${digits(gain)}×`)],
  ];
}

function comparedLine(answer, [name, stroke, shape, dashed]) {
  const points = answer.frontier.map((each, key) =>
    ({ x: each.tokens_per_s_per_user, y: each.tokens_per_s_per_gpu, key, words: "" }));
  return { name, color: stroke, shape, dashed, points };
}

let other = null;

function drawCompared() {
  at("compared").hidden = other === null;
  if (other === null) return;
  const [ours, theirs] = [answerRows(plan.answer), answerRows(other)];
  document.querySelector("#answers tbody").replaceChildren(...ours.map(([name, words], row) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...[words, theirs[row][1]].map((each, column) =>
      element("td", { "data-label": PLANS[column][0] }, each ?? "–")))));
  const lines = [plan.answer, other].map((answer, index) => comparedLine(answer, PLANS[index]));
  drawChart(at("compared-frontiers"), { lines, titles: TITLES, target: null, chosen: null });
  legend(at("compared-legend"), lines);
}

async function compareWith(file) {
  try {
    other = await answerOf(file);
    at("compare-note").textContent = "";
  } catch {
    at("compare-note").textContent = `${file.name} is not a plan: choose the plan.json or plan.html of another plan.`;
    return;
  }
  drawCompared();
  at("compared-title").focus();
}

function watchComparison() {
  at("other-plan").addEventListener("change", ({ target }) => {
    if (target.files.length) compareWith(target.files[0]);
    target.value = "";
  });
  at("compare-close").addEventListener("click", () => {
    other = null;
    drawCompared();
    at("other-plan").focus();
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) compareWith(event.dataTransfer.files[0]);
  });
}
