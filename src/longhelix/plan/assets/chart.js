// Line charts on two logarithmic axes, as SVG. No text lies on the lines: the legend is above, the target's name over
// the frame, and the readout of the nearest point below.

const FRAME = { left: 52, right: 14, top: 22, bottom: 40 };
const LEAST_DECADES = 0.7;
const NEAR = 28;
const LETTER = 7;
const SHAPES = {
  circle: (x, y, r) => ["circle", { cx: x, cy: y, r }],
  square: (x, y, r) => ["rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r }],
  diamond: (x, y, r) => ["rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r,
    transform: `rotate(45 ${x} ${y})` }],
  triangle: (x, y, r) => ["path", { d: `M${x - 1.2 * r},${y + r} L${x},${y - 1.2 * r} L${x + 1.2 * r},${y + r}Z` }],
  wedge: (x, y, r) => ["path", { d: `M${x - 1.2 * r},${y - r} L${x},${y + 1.2 * r} L${x + 1.2 * r},${y - r}Z` }],
  cross: (x, y, r) => ["path", { d: `M${x - r},${y - r} L${x + r},${y + r} M${x - r},${y + r} L${x + r},${y - r}` }],
};

function svg(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, setting] of Object.entries(attributes)) made.setAttribute(key, setting);
  made.append(...children);
  return made;
}

// A logarithmic axis from `start` to `end` pixels over all numbers found, wide enough for two ticks.
function logAxis(found, start, end) {
  const logs = found.map(Math.log10);
  let [least, most] = found.length ? [Math.min(...logs), Math.max(...logs)] : [0, 0];
  const margin = Math.max(0.04 * (most - least), (LEAST_DECADES - (most - least)) / 2);
  [least, most] = [least - margin, most + margin];
  const steps = most - least > 3 ? [1] : most - least > 1 ? [1, 2, 5] : [1, 2, 3, 5, 7];
  const ticks = [];
  for (let power = Math.floor(least); power <= most; power += 1) {
    ticks.push(...steps.map((step) => step * 10 ** power).filter((tick) => {
      const log = Math.log10(tick);
      return log >= least && log <= most;
    }));
  }
  return { at: (number) => start + ((Math.log10(number) - least) / (most - least)) * (end - start), ticks };
}

function ticksOf(x, y, { width, height }, [xTitle, yTitle]) {
  const bottom = height - FRAME.bottom;
  return [
    ...x.ticks.flatMap((tick) => [
      svg("line", { class: "grid-line", x1: x.at(tick), x2: x.at(tick), y1: FRAME.top, y2: bottom }),
      svg("text", { x: x.at(tick), y: bottom + 15, "text-anchor": "middle" }, scaled(tick, "").trim()),
    ]),
    ...y.ticks.flatMap((tick) => [
      svg("line", { class: "grid-line", x1: FRAME.left, x2: width - FRAME.right, y1: y.at(tick), y2: y.at(tick) }),
      svg("text", { x: FRAME.left - 6, y: y.at(tick) + 4, "text-anchor": "end" }, scaled(tick, "").trim()),
    ]),
    svg("text", { x: width - FRAME.right, y: height - 6, "text-anchor": "end" }, xTitle),
    svg("text", { x: 4, y: 13 }, yTitle),
  ];
}

// The target as a line with its name over the frame, or as an arrow at the edge if it lies outside.
function targetMark(target, x, { width, height }, yTitle) {
  const [least, most] = [FRAME.left, width - FRAME.right];
  const left = x.at(target.x);
  const inside = left >= least && left <= most;
  const words = inside ? target.words : left < least ? `← ${target.words}` : `${target.words} →`;
  const room = LETTER * yTitle.length;
  const place = Math.min(Math.max(left, room + 4), most);
  const anchor = place > most - LETTER * words.length ? "end" : "start";
  const name = svg("text", { class: "target-name", x: place, y: 13, "text-anchor": anchor }, words);
  const ends = { x1: left, x2: left, y1: FRAME.top - 6, y2: height - FRAME.bottom };
  return inside ? [svg("line", { class: "target", ...ends }), name] : [name];
}

// lines: [{ name, color, shape, dashed, points: [{ x, y, key, words }] }]. Returns where each point lies, by line.
function drawChart(holder, { lines, titles, target, chosen }) {
  const size = { width: Math.max(holder.clientWidth, 200), height: Math.max(holder.clientHeight, 160) };
  const points = lines.flatMap((line) => line.points);
  const x = logAxis(points.map((point) => point.x), FRAME.left, size.width - FRAME.right);
  const y = logAxis(points.map((point) => point.y), size.height - FRAME.bottom, FRAME.top);
  const drawn = lines.map(({ name, color: stroke, shape, dashed, points: members }) => {
    const placed = members.map((point) => ({ ...point, left: x.at(point.x), top: y.at(point.y) }));
    const path = placed.map(({ left, top }, index) => `${index ? "L" : "M"}${left.toFixed(1)},${top.toFixed(1)}`);
    const group = svg("g", { class: "line", style: `--swatch:${stroke}` },
      svg("path", { class: "stroke", d: path.join(" "), ...(dashed ? { "stroke-dasharray": "6 4" } : {}) }),
      ...placed.map(({ left, top }) => {
        const [tag, attributes] = SHAPES[shape](left, top, 3);
        return svg(tag, { class: "mark", ...attributes });
      }));
    group.dataset.name = name;
    return { name, group, placed };
  });
  const rings = chosen && points.length
    ? [svg("circle", { class: "ring", cx: x.at(chosen.x), cy: y.at(chosen.y), r: 9 })] : [];
  const marks = target && points.length ? targetMark(target, x, size, titles[1]) : [];
  holder.replaceChildren(svg("svg", { viewBox: `0 0 ${size.width} ${size.height}`, "aria-hidden": "true" },
    ...(points.length ? ticksOf(x, y, size, titles) : []), ...marks, ...drawn.map(({ group }) => group), ...rings));
  return drawn.map(({ name, placed }) => ({ name, placed }));
}

function legend(holder, lines) {
  holder.replaceChildren(...lines.map(({ name, color: stroke, shape, dashed }) => {
    const [tag, attributes] = SHAPES[shape](12, 6, 3);
    return element("li", { style: `--swatch:${stroke}` }, svg("svg", { width: 24, height: 12, "aria-hidden": "true" },
      svg("path", { class: "stroke", d: "M0,6 L24,6", ...(dashed ? { "stroke-dasharray": "6 4" } : {}) }),
      svg(tag, { class: "mark", ...attributes })), name);
  }));
}

// The point nearest to a position in the chart; null if none is within NEAR pixels.
function pointNear(drawn, left, top) {
  let [nearest, least] = [null, NEAR];
  for (const { name, placed } of drawn) {
    for (const point of placed) {
      const distance = Math.hypot(point.left - left, point.top - top);
      if (distance < least) [nearest, least] = [{ ...point, name }, distance];
    }
  }
  return nearest;
}
