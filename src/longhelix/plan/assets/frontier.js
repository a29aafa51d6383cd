// The decode frontiers: one line per strategy, the target, and the current configuration.

const LOOKS = {
  tp: "square", dp_ep: "diamond", dp_tp: "triangle", tied: "cross", helix_exposed: "circle", helix: "circle",
  helix_dp: "wedge",
};
const TITLES = ["tokens/s per user", "tokens/s per GPU"];
let drawnLines = [];

function lineOf(state, strategy) {
  const { table } = state;
  const points = table.frontiers[state.capIndex][plan.strategies.indexOf(strategy)];
  return {
    name: strategy.title, color: `var(--${strategy.name})`, shape: LOOKS[strategy.name] ?? "circle", dashed: false,
    points: points.map((point) => {
      const { user, gpu } = speeds(table, point);
      const { gpus } = layoutOf(table, point);
      const words = `${plural(gpus, "GPU")}, batch ${whole(table.point.batch[point])}, ${digits(user)} tokens/s per `
        + `user, ${digits(gpu)} per GPU`;
      return { x: user, y: gpu, key: point, words: `${strategy.title}: ${words}` };
    }),
  };
}

function drawFrontier(state, shown) {
  const lines = state.strategies.map((strategy) => lineOf(state, strategy)).filter(({ points }) => points.length);
  const target = state.ttl === null ? null : { x: 1 / state.ttl, words: `${time(state.ttl)} per token` };
  const chosen = shown && { x: shown.user, y: shown.gpu };
  drawnLines = drawChart(at("frontier"), { lines, titles: TITLES, target, chosen });
  legend(at("legend"), lines);
  at("readout").textContent = "";
}

// The point that an arrow key moves to: left and right along a line, up and down between lines.
function pointAfter(key, shown) {
  const line = Math.max(0, drawnLines.findIndex(({ placed }) => placed.some((point) => point.key === shown)));
  const { placed } = drawnLines[line] ?? { placed: [] };
  const position = Math.max(0, placed.findIndex((point) => point.key === shown));
  const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
  if (step) return placed[position + step];
  const next = drawnLines[line + { ArrowDown: 1, ArrowUp: -1 }[key]]?.placed;
  return next?.reduce((nearest, point) =>
    (Math.abs(point.left - placed[position].left) < Math.abs(nearest.left - placed[position].left) ? point : nearest));
}

function placeIn(event) {
  const box = at("frontier").getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function watchFrontier(pick, shownPoint) {
  const holder = at("frontier");
  holder.addEventListener("pointermove", (event) => {
    const near = pointNear(drawnLines, ...placeIn(event));
    at("readout").textContent = near?.words ?? "";
    holder.classList.toggle("near", near !== null);
  });
  holder.addEventListener("click", (event) => {
    const near = pointNear(drawnLines, ...placeIn(event));
    if (near) pick(near.key);
  });
  holder.addEventListener("keydown", (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = pointAfter(event.key, shownPoint());
    if (!next) return;
    pick(next.key);
    at("readout").textContent = next.words;
  });
}

// Tokens/s per GPU of a line at a speed, interpolated between its points as drawn; 0 beyond its fastest point.
function gpuAt(points, user) {
  const next = points.findIndex((point) => point.x >= user);
  if (next < 0) return 0;
  if (next === 0) return points[0].y;
  const [from, to] = [points[next - 1], points[next]];
  const share = Math.log(user / from.x) / Math.log(to.x / from.x);
  return from.y * (to.y / from.y) ** share;
}

// Helix's gain over the best other strategy: at the target, and the largest anywhere.
function gains(state) {
  const lines = state.strategies
    .map((strategy) => ({ ...lineOf(state, strategy), helix: strategy.name.startsWith("helix") }))
    .filter((line) => line.points.length);
  const [ours, others] = [true, false].map((helix) => lines.filter((line) => line.helix === helix));
  if (!ours.length || !others.length) return null;
  const best = (group, user) => Math.max(...group.map(({ points }) => gpuAt(points, user)));
  const pair = (user) => ({ user, ours: best(ours, user), others: best(others, user) });
  const fastest = (group) => Math.max(...group.map(({ points }) => points.at(-1).x));
  const reached = Math.min(fastest(ours), fastest(others));
  const users = lines.flatMap(({ points }) => points.map(({ x }) => x)).filter((user) => user <= reached);
  const largest = users.map(pair)
    .reduce((most, each) => (each.ours / each.others > most.ours / most.others ? each : most));
  return {
    largest: { gain: largest.ours / largest.others, user: largest.user }, speed: fastest(ours) / fastest(others),
    target: state.ttl === null ? null : pair(1 / state.ttl),
  };
}

// The same, but with Python's values from all configurations while the controls show the original question.
function gainsAsAnswered(state) {
  const { headline, at_ttl: answered } = plan.answer;
  const found = gains(state);
  if (!isAsked(state) || !headline || !found) return found;
  return {
    largest: { gain: headline.throughput_gain, user: headline.throughput_gain_at_tokens_per_s_per_user },
    speed: headline.interactivity_gain,
    target: answered && { ours: answered.helix_tokens_per_s_per_gpu, others: answered.others_tokens_per_s_per_gpu },
  };
}

function targetWords({ ours, others }, ttl) {
  const target = `At ${time(ttl)} per token`;
  if (ours && others) {
    return `${target}, Helix has ${(ours / others).toFixed(2)}× the tokens/s per GPU of the best other strategy `
      + `(${digits(ours)} and ${digits(others)}).`;
  }
  if (ours) return `${target}, only Helix gets there, with ${digits(ours)} tokens/s per GPU.`;
  return `${target}, ${others ? "Helix does not get there, but others do" : "no strategy gets there"}.`;
}

function gainWords(state) {
  const found = gainsAsAnswered(state);
  if (found === null) return "";
  const atTarget = found.target ? `${targetWords(found.target, state.ttl)} ` : "";
  return `${atTarget}Largest gain of Helix: ${digits(found.largest.gain)}× the tokens/s per GPU, at `
    + `${digits(found.largest.user)} tokens/s per user; its maximum tokens/s per user is ${digits(found.speed)}×. `
    + "Decode only, as papers compare it.";
}

// The answer in one line, and below it Helix's gain.
function drawHeadline(state, shown) {
  at("headline").hidden = shown === null;
  if (shown === null) return;
  const users = people(shown.users);
  const answer = `${users} ${users === "1" ? "user" : "users"} on ${plural(shown.gpus, "GPU")}`;
  const ttft = shown.ttft === null ? "" : `, first token after ${time(shown.ttft)}`;
  at("headline").replaceChildren(element("strong", { id: "answer" }, answer),
    element("span", {}, `${time(shown.ttl)} per token${ttft}, with ${shown.strategy.title}`
      + `${shown.far > 0 ? "; it misses a target" : ""}`),
    element("small", { id: "gain" }, gainWords(state)));
}
