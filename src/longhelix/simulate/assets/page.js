// Compares runs: a table with one column per run, and plots with one line per run.

const found = await (await inflated("document")).json();
const COLORS = ["helix", "tp", "dp_ep", "tied", "dp_tp", "kind-projections", "kind-other"];
const DASHES = ["solid", "dash", "dot"];

function at(id) {
  return document.getElementById(id);
}

function looks(index) {
  const dash = DASHES[Math.floor(index / COLORS.length) % DASHES.length];
  return { color: color(COLORS[index % COLORS.length]), width: 1.8, dash };
}

function line(run, index, x, y, more) {
  return { type: "scatter", mode: "lines", name: run.name, x, y, line: looks(index), ...more };
}

function axis(title, more) {
  return {
    title: { text: title, standoff: 6 }, gridcolor: color("line"), zeroline: false, automargin: true, ...more,
  };
}

function plot(id, traces, xaxis, yaxis) {
  const legend = { orientation: "h", y: -0.3, bgcolor: color("veil") };
  const layout = { ...plainLayout(), showlegend: found.runs.length > 1, legend, xaxis, yaxis };
  return Plotly.react(id, traces, layout, { responsive: true, displayModeBar: false });
}

function drawDistribution(id) {
  const traces = found.runs.map((run, index) =>
    line(run, index, run[id].map(([seconds]) => seconds), run[id].map(([, share]) => share)));
  return plot(id, traces, axis("seconds", { type: "log", tickformat: "~s" }), axis("% of all", { range: [0, 100] }));
}

function drawOverTime(name, title) {
  const traces = found.runs.map((run, index) =>
    line(run, index, run.timeline.time_s, run.timeline[name], { line: { ...looks(index), shape: "hv" } }));
  return plot(name, traces, axis("seconds"), axis(title, { rangemode: "tozero", tickformat: "~s" }));
}

function drawCapacity() {
  const runs = found.runs.filter((run) => run.trials.length);
  at("capacity-section").hidden = !runs.length;
  const traces = runs.map((run, index) => line(
    run, index, run.trials.map(([rate]) => rate), run.trials.map(([, share]) => 100 * share),
    { mode: "lines+markers" }));
  if (runs.length) plot("capacity", traces, axis("requests per second", { type: "log" }), axis("% within SLO"));
}

function drawTable() {
  const names = found.runs.map((run) => element("th", { scope: "col" }, run.name));
  document.querySelector("#runs thead").replaceChildren(element("tr", {}, element("th", { scope: "col" }), ...names));
  document.querySelector("#runs tbody").replaceChildren(...found.rows.map(([name, cells]) =>
    element("tr", {}, element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, cell)))));
}

function draw() {
  ["ttft", "tbt"].forEach(drawDistribution);
  drawOverTime("kv_tokens", "tokens");
  drawOverTime("kvp_mean", "ranks, mean");
  drawOverTime("running", "requests");
  drawOverTime("waiting", "requests");
  drawCapacity();
}

at("title").textContent = found.title;
document.title = `${found.title}: longhelix simulate`;
at("about").textContent = found.about;
at("note").textContent = found.note;
drawTable();
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
