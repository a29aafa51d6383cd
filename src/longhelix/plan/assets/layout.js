// What each GPU owns: two grids of the GPUs of one stage, for attention and for the FFN, and one GPU in words.

const MOST_COLUMNS = 16;

// Columns of a grid that is nearly square, in whole groups of TPA ranks if these are short enough.
function columnsOf(count, row) {
  const unit = row <= MOST_COLUMNS ? row : 1;
  const square = Math.ceil(Math.sqrt(count));
  for (let columns = square; columns <= 1.5 * square; columns += 1) {
    if (count % columns === 0 && columns % unit === 0) return columns;
  }
  return unit * Math.max(1, Math.round(square / unit));
}

function shade(outer, outers, inner, inners) {
  const hue = 250 + (290 * outer) / Math.max(outers, 2);
  const depth = inners > 1 ? inner / (inners - 1) : 0.3;
  return `oklch(${color("cell-light")} ${0.07 + 0.08 * depth} ${hue} / ${0.55 + 0.45 * depth})`;
}

function cell(rank, outer, outers, outerName, inner, inners, innerName) {
  const label = (outers > 1 ? outerName + outer : "") + (inners > 1 ? innerName + inner : "") || String(rank);
  const made = element("div", { "data-rank": rank, style: `background:${shade(outer, outers, inner, inners)}` }, label);
  made.addEventListener("mouseenter", () => showGpu(rank));
  return made;
}

function drawGrid(id, columns, cells) {
  const grid = document.getElementById(id);
  grid.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
  grid.classList.toggle("dense", columns >= 8);
  grid.classList.toggle("tiny", columns > 16);
  grid.replaceChildren(...cells);
}

function sequenceOf(layout, rank) {
  const [groups, kvp] = groupsOf(layout.chosen);
  const requests = groups > 1 ? `one request in ${whole(groups)}` : "every request";
  if (kvp === 1) return `all ${tokens(layout.context)} tokens of ${requests}`;
  const first = rank.kvp_rank % kvp;
  const share = `${whole(layout.context / kvp)} of ${tokens(layout.context)} tokens`
    + (groups > 1 ? ` of ${requests}` : "");
  return layout.chosen.ffn_replicas > 1
    ? `span ${first} of ${kvp}: ${share}`
    : `blocks ${first}, ${first + kvp}, … of 16 tokens: ${share}`;
}

function ffnOf(layout, rank) {
  const { tpf, ffn_replicas: copies } = layout.chosen;
  const columns = tpf === 1 ? "all columns" : `column shard ${rank.tpf_rank} of ${tpf}`;
  const experts = plan.num_experts > 1 ? `${range(rank.experts, "expert")}, ` : "";
  return experts + columns + (copies > 1 ? `, in one of ${copies} copies` : "");
}

let drawn = null;

function showGpu(number) {
  const rank = drawn.chosen.ranks[number];
  if (rank === undefined) {
    document.getElementById("gpu").replaceChildren(element("dd", {}, "A stage with this many GPUs is not drawn."));
    return;
  }
  drawn.shown = number;
  const [groups, kvp] = groupsOf(drawn.chosen);
  const held = plan.latent ? "the latent" : range(rank.kv_heads, "KV head");
  const entries = [
    ...(groups > 1 && kvp > 1
      ? [["Group", `${Math.floor(rank.kvp_rank / kvp)} of ${groups}, KVP rank ${rank.kvp_rank % kvp} of ${kvp}`]] : []),
    ["KV", `${held}, ${sequenceOf(drawn, rank)}`],
    ["Attention", range(rank.query_heads, "query head")],
    ...(kvp > 1 && drawn.chosen.ffn_replicas === 1
      ? [["After exchange", `${range(rank.merged_query_heads, "query head")}, whole`]] : []),
    ["FFN", ffnOf(drawn, rank)],
  ];
  document.getElementById("gpu").replaceChildren(
    element("dt", { class: "name" }, "GPU"), element("dd", { class: "name" }, String(number)),
    ...entries.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, words)]));
  for (const made of document.querySelectorAll(".grid > div")) {
    made.classList.toggle("current", Number(made.dataset.rank) === number);
  }
}

function moveGpu(event) {
  const columns = getComputedStyle(event.currentTarget).gridTemplateColumns.split(" ").length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (!step) return;
  event.preventDefault();
  if (drawn.shown + step in drawn.chosen.ranks) showGpu(drawn.shown + step);
}

for (const grid of document.querySelectorAll(".grid")) grid.addEventListener("keydown", moveGpu);

function drawLayout({ layout }, context) {
  const { tpa, tpf, ep, pp, ffn_replicas: copies } = layout;
  const ranks = ranksOf(layout);
  const [groups, kvp] = groupsOf(layout);
  const [count, outer] = [groups * kvp, kvp > 1 || groups === 1 ? "K" : "D"];
  drawn = { chosen: { ...layout, ranks }, context, shown: 0 };
  const stages = pp > 1 ? `: one of ${pp} stages, ${Math.ceil(plan.num_layers / pp)} of ${plan.num_layers} layers` : "";
  document.getElementById("layout-title").textContent = `${plural(count * tpa, "GPU")} in two roles${stages}`;
  document.getElementById("attention-caption").textContent = `Attention: ${attentionWords(layout)}`;
  document.getElementById("ffn-caption").textContent =
    `FFN: TPF ${tpf} × EP ${ep}` + (copies > 1 ? `, ${copies} copies` : "");
  const columns = columnsOf(count * tpa, tpa);
  drawGrid("attention-grid", columns, ranks.map((rank, number) =>
    cell(number, rank.kvp_rank, count, outer, rank.tpa_rank, tpa, "T")));
  drawGrid("ffn-grid", columns, ranks.map((rank, number) =>
    cell(number, rank.ep_rank, ep, "E", rank.tpf_rank, tpf, "F")));
  showGpu(0);
}
