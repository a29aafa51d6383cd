// Data that Python computed: `plan`, a JSON document, and `numbers`, two matrices for each table of the document.

const plan = await (await inflated("document")).json();
const numbers = new Float32Array(await (await inflated("numbers")).arrayBuffer());

const pointRows = [
  ...plan.point_rows, ...plan.item_rows.flatMap((row) => plan.items.map((item) => `${row} ${item.name}`)),
];

// The rows of the matrix that starts at `start`, by name.
function rowsAt(start, names, columns) {
  return Object.fromEntries(names.map((name, row) =>
    [name, numbers.subarray(start + row * columns, start + (row + 1) * columns)]));
}

let nextStart = 0;
for (const table of plan.tables) {
  table.point = rowsAt(nextStart, pointRows, table.points);
  nextStart += pointRows.length * table.points;
  table.configuration = rowsAt(nextStart, plan.configuration_rows, table.configurations);
  nextStart += plan.configuration_rows.length * table.configurations;
}

function tableOf(length, dtypes) {
  return plan.tables[dtypes * plan.lengths.length + length];
}

function layoutOf(table, point) {
  return plan.layouts[table.point.layout[point]];
}

// The axes of the frontiers, decode only: tokens/s per user and tokens/s per GPU.
function speeds(table, point) {
  const ttl = table.point.ttl_s[point];
  return { user: 1 / ttl, gpu: table.point.batch[point] / ttl / layoutOf(table, point).gpus };
}

function itemsOf(table, point) {
  return plan.items.map((item) => ({
    ...item,
    ...Object.fromEntries(plan.item_rows.map((row) => [row, table.point[`${row} ${item.name}`][point]])),
  }));
}

// What each rank of a stage owns, by the names that Python gave; empty for a stage that is too large to draw.
function ranksOf(layout) {
  return (plan.owners[layout.stage] ?? []).map((owners) =>
    Object.fromEntries(owners.map((owned, index) => [plan.owner_rows[index], owned])));
}

// The number of groups with their own requests, and the KVP ranks per group.
function groupsOf({ dp = 1, kvp, placement }) {
  return placement === "local" ? [kvp, 1] : [dp, kvp];
}

function attentionWords(layout) {
  const [groups, kvp] = groupsOf(layout);
  return (groups > 1 ? `DP ${groups} × ` : "") + (kvp > 1 || groups === 1 ? `KVP ${kvp} × ` : "")
    + `TPA ${layout.tpa}`;
}

function weightWords(weights, experts) {
  return experts && experts !== weights ? `${weights} (experts ${experts})` : weights;
}

function layoutWords(layout) {
  const { tpf, ep, pp, ffn_replicas: copies } = layout;
  return [attentionWords(layout), `TPF ${tpf}${ep > 1 ? ` × EP ${ep}` : ""}${copies > 1 ? ` × ${copies} copies` : ""}`,
    ...(pp > 1 ? [`PP ${pp}`] : [])].join(", ");
}
