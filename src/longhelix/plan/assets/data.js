// What Python computed: choices in a document, and numbers, a matrix for each of its tables. Nothing is costed here.

const plan = await (await inflated("document")).json();
const numbers = new Float32Array(await (await inflated("numbers")).arrayBuffer());

const rows = [...plan.rows, ...plan.item_rows.flatMap((row) => plan.items.map((item) => `${row} ${item.name}`))];
const rowIndex = Object.fromEntries(rows.map((row, index) => [row, index]));

let nextStart = 0;
for (const table of Object.values(plan.tables)) {
  table.start = nextStart;
  nextStart += table.points * rows.length;
}

function tableOf(context, weightDtype, kvDtype) {
  return plan.tables[`${context} ${weightDtype} ${kvDtype}`];
}

function value(table, row, point) {
  return numbers[table.start + rowIndex[row] * table.points + point];
}

function gpusOf(table, point) {
  return ["dp", "kvp", "tpa", "pp"].reduce((product, degree) => product * value(table, degree, point), 1);
}

// What the frontiers are drawn over: tokens/s for each user, and for each GPU.
function speeds(table, point) {
  const ttl = value(table, "ttl_s", point);
  return { user: 1 / ttl, gpu: value(table, "batch", point) / ttl / gpusOf(table, point) };
}

// Everything about one point, by the names that Python gave.
function configuration(table, point) {
  const found = { gpus: gpusOf(table, point), ...speeds(table, point) };
  for (const row of plan.rows) found[row] = value(table, row, point);
  found.strategy = plan.strategies[found.strategy];
  found.items = plan.items.map((item) => ({
    ...item,
    ...Object.fromEntries(plan.item_rows.map((row) => [row, value(table, `${row} ${item.name}`, point)])),
  }));
  const stage = ["dp", "kvp", "tpa", "tpf", "ep", "ffn_replicas"].map((degree) => found[degree]).join(" ");
  // Stages that are too large to draw have no owners.
  found.ranks = (plan.owners[stage] ?? []).map((owners) =>
    Object.fromEntries(owners.map((owned, index) => [plan.owner_rows[index], owned])));
  return found;
}

// The slider's ends: the fastest and the slowest point of all, and what is asked for between them.
function ttlLimits() {
  let [least, most] = [plan.asked.ttl_s / 2, plan.asked.ttl_s * 2];
  for (const table of Object.values(plan.tables)) {
    for (let point = 0; point < table.points; point += 1) {
      const ttl = value(table, "ttl_s", point);
      [least, most] = [Math.min(least, ttl), Math.max(most, ttl)];
    }
  }
  return [least, most];
}
