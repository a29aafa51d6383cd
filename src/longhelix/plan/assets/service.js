// Latency, users and rate of configurations, and the best one within targets. Follows service.py and choice.py of
// longhelix/plan, with numbers that Python computed.

const LATE = 0.05;
const MOST_BUSY = 0.95;
const HALVINGS = 40;
const ROUNDING = 1e-6;

// TTFT of the longest prompt when prefill takes a share `busy` of the time, in seconds.
function ttftOf({ longest_s, wait_s }, busy) {
  return longest_s + (wait_s / (1 - busy)) * Math.log(Math.max(busy, LATE) / LATE);
}

function mostBusy(prompts, target, limit) {
  let [least, most] = [0, Math.min(limit, MOST_BUSY)];
  const ttft = prompts.longest_s <= target ? target : 2 * prompts.longest_s;
  if (target === null || ttftOf(prompts, most) <= ttft) return most;
  for (let halving = 0; halving < HALVINGS; halving += 1) {
    const half = (least + most) / 2;
    [least, most] = ttftOf(prompts, half) <= ttft ? [half, most] : [least, half];
  }
  return least;
}

// What one instance serves. Without output_tokens, requests stay for ever; with it, they arrive and end.
function instance(batch, alone, prompts, { ttft, rate }) {
  if (plan.output_tokens === null) {
    return { ttl: alone, ttft: prompts.longest_s, users: batch, rate: null, replicas: 1 };
  }
  const { busy_s, step_s } = prompts;
  const needed = (batch * busy_s) / plan.output_tokens;
  let busy = mostBusy(prompts, ttft, needed / alone / (1 + needed * (1 / alone - 1 / step_s)));
  let replicas = 1;
  if (rate !== null) {
    replicas = Math.max(1, Math.ceil((rate * busy_s) / busy));
    busy = (rate * busy_s) / replicas;
  }
  const ttl = 1 / ((1 - busy) / alone + busy / step_s);
  return { ttl, ttft: ttftOf(prompts, busy), users: (busy / busy_s) * plan.output_tokens * ttl, rate: busy / busy_s,
    replicas };
}

function over(has, most) {
  return most !== null && has > most * (1 + ROUNDING) ? Math.log(has / most) : 0;
}

// A configuration with enough replicas. missed: the logarithm of the factor by which it misses each target.
function served(table, index, state) {
  const { configuration: rows } = table;
  const prompts = Object.fromEntries(plan.configuration_rows.map((row) => [row, rows[row][index]]));
  const { point } = prompts;
  const layout = layoutOf(table, point);
  const batch = table.point.batch[point];
  const alone = table.point.ttl_s[point];
  const one = instance(batch, alone, prompts, state);
  const replicas = Math.max(one.replicas, state.users > 1 ? Math.ceil(state.users / one.users) : 1);
  const perGpu = one.users / one.ttl / layout.gpus;
  const found = {
    index, point, layout, batch, replicas, chunk: prompts.chunk, strategy: plan.strategies[layout.strategy],
    gpus: replicas * layout.gpus, users: one.users * replicas, ttl: one.ttl, ttlBeside: prompts.ttl_p95_s,
    ttft: one.ttft, rate: one.rate === null ? null : one.rate * replicas, user: 1 / one.ttl, gpu: perGpu,
    cost: state.price !== null && perGpu > 0 ? (state.price * 1e6) / (3600 * perGpu) : null,
    activations_bytes: prompts.activations_bytes,
  };
  found.missed = {
    ttl: over(found.ttl, state.ttl), ttlBeside: over(found.ttlBeside, state.ttlBeside),
    ttft: over(found.ttft, state.ttft), gpus: over(found.gpus, state.cap),
  };
  found.far = Object.values(found.missed).reduce((sum, far) => sum + far, 0);
  return found;
}

function hasTargets({ ttl, ttlBeside, ttft, users, rate, fewest }) {
  return ttl !== null || ttlBeside !== null || ttft !== null || users > 1 || rate !== null || fewest;
}

// Sort key of configurations that meet all targets, smallest first.
function worth(found, state) {
  if (!hasTargets(state)) return [-found.user * found.gpu, found.ttft];
  return [state.rate !== null || state.fewest ? found.gpus : -found.gpu, found.ttl, found.ttft];
}

function isBefore(first, second) {
  const differs = first.findIndex((number, index) => number !== second[index]);
  return differs >= 0 && first[differs] < second[differs];
}

// Sort key of all configurations: first those that meet all targets, then those that miss them by least.
function order(found, state) {
  return found.far > 0 ? [found.far, found.gpus] : [0, ...worth(found, state)];
}

// The configuration of the same point with the smallest chunk that costs little TTFT and no throughput.
function withShortSteps(best, configurations) {
  const kept = configurations.filter((found) => found.point === best.point && found.gpus <= best.gpus
    && found.gpu >= plan.little_less * best.gpu && found.far <= best.far);
  const quickest = Math.min(...kept.map((found) => found.ttft));
  return kept.filter((found) => found.ttft <= plan.little_more * quickest)
    .reduce((least, found) => (found.chunk < least.chunk ? found : least));
}

function first(configurations, state) {
  const best = configurations.reduce((before, found) =>
    (before === null || isBefore(order(found, state), order(before, state)) ? found : before), null);
  return best === null ? null : withShortSteps(best, configurations);
}

function isAllowed(index, state) {
  return state.table.configuration.chunk[index] >= state.leastChunk;
}

// The best configuration of each strategy, or the closest to the targets; null if none fits in memory.
function bests(state) {
  const found = state.strategies.map(() => []);
  const { layout } = state.table.point;
  state.table.configuration.point.forEach((point, index) => {
    const held = plan.layouts[layout[point]];
    const strategy = state.strategies.indexOf(plan.strategies[held.strategy]);
    const allowed = held.gpus <= state.cap && isAllowed(index, state);
    if (strategy >= 0 && allowed) found[strategy].push(served(state.table, index, state));
  });
  return found.map((configurations) => first(configurations, state));
}

// A point with the chunk size that serves the targets best; its chunk is null if no chunk fits in memory.
function atPoint(state, point) {
  const found = [];
  state.table.configuration.point.forEach((each, index) => {
    if (each === point && isAllowed(index, state)) found.push(served(state.table, index, state));
  });
  if (found.length) return first(found, state);
  const layout = layoutOf(state.table, point);
  const batch = state.table.point.batch[point];
  return {
    point, layout, batch, replicas: 1, chunk: null, strategy: plan.strategies[layout.strategy], gpus: layout.gpus,
    users: batch, ttl: state.table.point.ttl_s[point], ttlBeside: null, ttft: null, rate: null, cost: null,
    activations_bytes: 0, missed: {}, far: 0, ...speeds(state.table, point),
  };
}
