// Where a step's time goes: one bar, and the parts as a table.

const LEAST_SHARE = 0.01;

function shownParts(parts, total) {
  const shown = parts.filter((part) => part.seconds >= LEAST_SHARE * total);
  const rest = parts.filter((part) => part.seconds > 0 && part.seconds < LEAST_SHARE * total);
  if (rest.length > 1) {
    const sum = { name: plural(rest.length, "part") + " under 1%", kind: "other" };
    for (const row of plan.part_rows) sum[row] = rest.reduce((total, part) => total + part[row], 0);
    return [...shown, sum];
  }
  return [...shown, ...rest];
}

function partRow(part, total, longest) {
  const bar = element("div", { class: "length", style: `width:${(100 * part.seconds) / longest}%` });
  bar.style.background = `var(--kind-${part.kind})`;
  return element("tr", {},
    element("th", { scope: "row" }, part.name),
    element("td", {}, time(part.seconds)),
    element("td", { class: "lengths", title: `${digits((100 * part.seconds) / total)}% of the step` }, bar),
    element("td", {}, scaled(part.flops, "")),
    element("td", {}, scaled(part.hbm_bytes, "B")),
    element("td", {}, scaled(part.net_bytes, "B")));
}

function drawStep(chosen) {
  const total = chosen.ttl_s;
  const parts = shownParts(chosen.parts, total);
  const longest = Math.max(...parts.map((part) => part.seconds));
  document.getElementById("step-title").textContent = `One step on one GPU: ${time(total)}`;
  document.querySelector("#parts tbody").replaceChildren(...parts.map((part) => partRow(part, total, longest)));
  const kinds = new Map();
  for (const part of chosen.parts) kinds.set(part.kind, (kinds.get(part.kind) ?? 0) + part.seconds);
  const shown = [...kinds].filter(([, seconds]) => seconds > 0);
  const words = shown.map(([kind, seconds]) => `${kind} ${digits((100 * seconds) / total, 2)}%`);
  const bar = document.getElementById("bar");
  bar.replaceChildren(...shown.map(([kind, seconds]) =>
    element("div", { style: `flex-grow:${seconds / total};background:var(--kind-${kind})` })));
  bar.setAttribute("aria-label", words.join(", "));
  document.getElementById("kinds").replaceChildren(...shown.map(([kind], index) =>
    element("li", { style: `--swatch:var(--kind-${kind})` }, words[index])));
}
