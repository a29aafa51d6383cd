// Where the time of a step goes: one bar, and a table of its cost items.

const LEAST_SHARE = 0.01;

function shownItems(items, total) {
  const shown = items.filter((item) => item.seconds >= LEAST_SHARE * total);
  const rest = items.filter((item) => item.seconds > 0 && item.seconds < LEAST_SHARE * total);
  if (rest.length > 1) {
    const sum = { name: plural(rest.length, "item") + " under 1%", kind: "other" };
    for (const row of plan.item_rows) sum[row] = rest.reduce((total, item) => total + item[row], 0);
    return [...shown, sum];
  }
  return [...shown, ...rest];
}

function itemRow(item, total, longest) {
  const bar = element("div", { class: "length", style: `width:${(100 * item.seconds) / longest}%` });
  bar.style.background = `var(--kind-${item.kind})`;
  return element("tr", {},
    element("th", { scope: "row" }, item.name),
    element("td", { "data-label": "Time" }, time(item.seconds)),
    element("td", { class: "lengths", title: `${digits((100 * item.seconds) / total)}% of the step` }, bar),
    element("td", { "data-label": "FLOPs" }, scaled(item.flops, "")),
    element("td", { "data-label": "Memory" }, scaled(item.hbm_bytes, "B")),
    element("td", { "data-label": "Sent" }, scaled(item.net_bytes, "B")));
}

function drawStep(costs, total) {
  const items = shownItems(costs, total);
  const longest = Math.max(...items.map((item) => item.seconds));
  const what = plan.accepted_tokens === 1 ? "One decode step"
    : `One token's share of a decode step with ${digits(plan.accepted_tokens)} tokens`;
  document.getElementById("step-title").textContent = `${what} on one GPU: ${time(total)}`;
  document.querySelector("#items tbody").replaceChildren(...items.map((item) => itemRow(item, total, longest)));
  const kinds = new Map();
  for (const item of costs) kinds.set(item.kind, (kinds.get(item.kind) ?? 0) + item.seconds);
  const shown = [...kinds].filter(([, seconds]) => seconds > 0);
  const words = shown.map(([kind, seconds]) => `${kind} ${digits((100 * seconds) / total, 2)}%`);
  const bar = document.getElementById("bar");
  bar.replaceChildren(...shown.map(([kind, seconds]) =>
    element("div", { style: `flex-grow:${seconds / total};background:var(--kind-${kind})` })));
  bar.setAttribute("aria-label", words.join(", "));
  document.getElementById("kinds").replaceChildren(...shown.map(([kind], index) =>
    element("li", { style: `--swatch:var(--kind-${kind})` }, words[index])));
}
