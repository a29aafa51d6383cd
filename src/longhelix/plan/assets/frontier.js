// The plot of frontiers: a line for each strategy, the target, and the configuration that is shown.

const SYMBOLS = {
  tp: "square", dp_ep: "diamond", dp_tp: "triangle-up", tied: "x", helix_exposed: "circle", helix: "circle",
  helix_dp: "triangle-down",
};
const CROWDED = 60;
const LEAST_DECADES = 0.7;

function trace(table, strategy, points) {
  const found = points.map((point) => speeds(table, point));
  const helix = strategy.name.startsWith("helix");
  return {
    type: "scatter",
    mode: "lines+markers",
    name: strategy.title,
    x: found.map((speed) => speed.user),
    y: found.map((speed) => speed.gpu),
    customdata: points,
    text: points.map((point) => `${plural(gpusOf(table, point), "GPU")}, batch ${whole(value(table, "batch", point))}`),
    hovertemplate: "%{x:.3~r} per user, %{y:.3~r} per GPU<br>%{text}<extra>" + strategy.title + "</extra>",
    line: { color: color(strategy.name), width: helix ? 2.5 : 1.5 },
    marker: { symbol: SYMBOLS[strategy.name], size: points.length > CROWDED ? 3 : 6, color: color(strategy.name) },
  };
}

function chosenTrace(chosen) {
  return {
    type: "scatter", mode: "markers", hoverinfo: "skip", showlegend: false, x: [chosen.user], y: [chosen.gpu],
    marker: { symbol: "circle-open", size: 17, color: color("text"), line: { width: 2.5 } },
  };
}

// Logarithms of a range that holds all numbers, wide enough for two ticks.
function rangeOf(numbers) {
  const logs = numbers.map(Math.log10);
  const [least, most] = [Math.min(...logs), Math.max(...logs)];
  const margin = Math.max(0.04 * (most - least), (LEAST_DECADES - (most - least)) / 2);
  return numbers.length ? [least - margin, most + margin] : [0, LEAST_DECADES];
}

function axis(title, numbers) {
  return {
    range: rangeOf(numbers),
    title: { text: title, standoff: 6 }, type: "log", gridcolor: color("line"), zeroline: false, automargin: true,
    minor: { showgrid: true, gridcolor: color("faint") }, dtick: "D2", tickformat: "~s", ticks: "outside",
    tickcolor: color("line"),
  };
}

// The target as a line with its name, or an arrow at the side where it lies outside.
function targetMark(target, [least, most]) {
  const log = Math.log10(1 / target);
  const side = log < least ? -1 : log > most ? 1 : 0;
  const words = { "-1": `← ${time(target)}`, 0: time(target), 1: `${time(target)} →` }[side];
  return {
    shapes: side ? [] : [{
      type: "line", x0: 1 / target, x1: 1 / target, xref: "x", y0: 0, y1: 1, yref: "paper",
      line: { color: color("target"), width: 1.5, dash: "dash" },
    }],
    annotations: [{
      x: Math.min(Math.max(log, least), most), xref: "x", y: 1, yref: "paper", yanchor: "top", showarrow: false,
      xanchor: log > (least + most) / 2 ? "right" : "left", xshift: log > (least + most) / 2 ? -3 : 3,
      text: words, font: { color: color("target") },
    }],
  };
}

function drawFrontier(table, lines, target, chosen) {
  const traces = lines.filter(({ points }) => points.length)
    .map(({ strategy, points }) => trace(table, strategy, points));
  const xaxis = axis("tokens/s per user", traces.flatMap(({ x }) => x));
  const yaxis = axis("tokens/s per GPU", traces.flatMap(({ y }) => y));
  if (chosen) traces.push(chosenTrace(chosen));
  const mark = traces.length ? targetMark(target, xaxis.range) : {};
  const layout = {
    ...plainLayout(),
    legend: { x: 0.015, y: 0.02, xanchor: "left", yanchor: "bottom", bgcolor: color("veil") },
    xaxis, yaxis, ...mark,
  };
  return Plotly.react("frontier", traces, layout, { responsive: true, displayModeBar: false });
}
