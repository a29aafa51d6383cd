// The controls and their values. An empty field means no target.

const at = (id) => document.getElementById(id);
// Number fields. unit: the field's unit in SI units; words: its name in messages; asked: the value at the start, in SI
// units; whole: whether it must be an integer.
const NUMBERS = {
  ttl: { unit: 1e-3, words: "ms per token", asked: plan.asked.ttl_s },
  ttlBeside: { unit: 1e-3, words: "ms during a prefill", asked: plan.asked.ttl_with_prefill_s },
  ttft: { unit: 1, words: "TTFT", asked: plan.asked.ttft_s },
  users: { unit: 1, words: "users", asked: plan.asked.users > 1 ? plan.asked.users : null, whole: true },
  rate: { unit: 1, words: "requests/s", asked: plan.asked.rate_per_s },
  price: { unit: 1, words: "the price of a GPU hour", asked: plan.asked.gpu_hour },
};
// Strategies whose layouts exist without HOP-B and with it.
const EXPOSED = ["helix_exposed"];
const OVERLAPPED = ["helix", "helix_dp"];
let picked = null;

// The number in a field, in SI units: null if the field is empty, NaN if it is invalid.
function numberIn(id) {
  const control = at(id);
  const { unit, whole: isWhole } = NUMBERS[id];
  if (control.disabled || (control.value.trim() === "" && !control.validity.badInput)) return null;
  const number = Number(control.value);
  const allowed = !control.validity.badInput && Number.isFinite(number) && number > 0 && (!isWhole || number % 1 === 0);
  return allowed ? number * unit : NaN;
}

// The first invalid field and a message about it, or [null, ""].
function complaint(found) {
  const wrong = Object.keys(NUMBERS).find((id) => Number.isNaN(found[id]));
  if (wrong) {
    const { words, whole: isWhole } = NUMBERS[wrong];
    const allowed = isWhole ? "an integer of 1 or more" : "a number above 0";
    return [wrong, `Set ${words} to ${allowed}, or leave it empty.`];
  }
  if (found.rate !== null && found.users !== null) {
    return ["users", "The number of users follows from the rate: leave users or requests/s empty."];
  }
  return [null, ""];
}

function numbersSet() {
  const found = Object.fromEntries(Object.keys(NUMBERS).map((id) => [id, numberIn(id)]));
  const [wrong, words] = complaint(found);
  for (const id of Object.keys(NUMBERS)) at(id).setAttribute("aria-invalid", String(id === wrong));
  at("complaint").textContent = words;
  return wrong === null ? found : null;
}

// The values of all controls; null if one of them is invalid.
function stateSet() {
  const found = numbersSet();
  if (found === null) return null;
  const [length, dtypes, capIndex] = ["length", "dtypes", "gpus"].map((id) => Number(at(id).value));
  const leftOut = at("hop-b").checked ? EXPOSED : OVERLAPPED;
  return {
    ...found, users: found.users ?? 1, length, dtypes, capIndex, cap: plan.gpu_caps[capIndex],
    leastChunk: found.ttlBeside === null ? plan.least_chunk : 0,
    tokens: plan.lengths[length], fewest: at("fewest").checked, table: tableOf(length, dtypes),
    strategies: plan.strategies.filter((strategy, index) =>
      !leftOut.includes(strategy.name) && plan.layouts.some((layout) => layout.strategy === index)),
  };
}

// Whether the controls show the question that Python answered, as far as the frontiers and the target depend on it.
function isAsked({ length, dtypes, capIndex, ttl, strategies }) {
  const { asked } = plan;
  const sameTarget = (ttl === null) === (asked.ttl_s === null)
    && (ttl === null || Math.abs(ttl / asked.ttl_s - 1) < ROUNDING);
  return sameTarget && length === asked.length && dtypes === 0 && capIndex === plan.gpu_caps.length - 1
    && strategies.some(({ name }) => name === "helix");
}

function setAsAsked() {
  at("length").value = plan.asked.length;
  at("gpus").value = plan.gpu_caps.length - 1;
  at("dtypes").value = 0;
  at("hop-b").checked = true;
  at("fewest").checked = plan.asked.fewest_gpus;
  for (const [id, { unit, asked }] of Object.entries(NUMBERS)) {
    at(id).value = asked === null ? "" : String(Number((asked / unit).toPrecision(6)));
  }
}

function showSliders(state) {
  const shown = { length: `${tokens(state.tokens)} tokens`, gpus: plural(state.cap, "GPU") };
  for (const [id, words] of Object.entries(shown)) {
    at(`${id}-shown`).textContent = words;
    at(id).setAttribute("aria-valuetext", words);
  }
}

function startControls(draw) {
  at("length").max = plan.lengths.length - 1;
  at("gpus").max = plan.gpu_caps.length - 1;
  at("dtypes").append(...plan.dtypes.map(([weights, kv], index) =>
    element("option", { value: index }, `${weightWords(weights, plan.expert_dtypes[index])}, ${kv}`)));
  if (plan.output_tokens === null) {
    at("rate").disabled = true;
    at("rate").title = at("rate").placeholder = "needs --isl, --osl";
  }
  setAsAsked();
  at("controls").addEventListener("input", () => draw(null));
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("reset").addEventListener("click", () => {
    setAsAsked();
    draw(null);
  });
}
