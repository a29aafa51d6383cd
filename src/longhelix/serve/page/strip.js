// What steps took, beside what was predicted.

import { byId, cleared, colours, element, write } from "./dom.js";
import { bytes, digits, plural, time, whole } from "./numbers.js";

/** @typedef {import("./live.js").Step} Step */

const HEIGHT = 128, MOST = 120, LEFT = 46, FLOOR = 4;
const COLOURS = ["prefill", "decode", "predicted", "grid", "quiet"];

export class Strip {
  constructor() {
    /** @type {Step[]} */
    this.steps = [];
    this.canvas = /** @type {HTMLCanvasElement} */ (/** @type {unknown} */ (byId("strip")));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  begin() {
    this.steps = [];
    this.tell();
    this.draw();
  }

  /** @param {Step[]} steps @param {number} stages */
  update(steps, stages) {
    if (steps.length === 0) return;
    this.stages = stages;
    this.steps = [...this.steps, ...steps].slice(-MOST);
    this.tell();
    this.draw();
  }

  tell() {
    const last = this.steps[this.steps.length - 1];
    if (last === undefined) {
      write(byId("steps-ratio"), "");
      byId("step").replaceChildren();
      this.canvas.setAttribute("aria-label", "No step yet");
      return;
    }
    const ratios = this.steps.flatMap((step) => (step.predicted_s ? [step.taken_s / step.predicted_s] : []));
    ratios.sort((a, b) => a - b);
    const median = ratios.length ? ratios[Math.floor(ratios.length / 2)] : null;
    const words = median === null ? "nothing predicted" : `measured ${median.toFixed(2)} × predicted`;
    write(byId("steps-ratio"), words);
    this.canvas.setAttribute("aria-label", `The last ${plural(this.steps.length, "step")}: ${words}, in the middle`);
    byId("step").replaceChildren(...described(last, this.stages ?? 1).map(([name, words]) => (
      element("div", {}, element("dt", {}, name), element("dd", {}, words)))));
  }

  draw() {
    const area = cleared(this.canvas, HEIGHT);
    if (area === null) return;
    const { context, width } = area, found = colours(COLOURS);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const times = this.steps.flatMap((step) => [step.taken_s, step.predicted_s ?? 0]).filter((took) => took > 0);
    const least = times.length ? Math.min(...times) : 1e-2, most = times.length ? Math.max(...times) : 1e-1;
    // Decades, with room below the least and above the most.
    const low = Math.floor(Math.log10(least) - 0.15), high = Math.max(low + 1, Math.log10(most) + 0.12);
    const room = HEIGHT - FLOOR - 8;
    const y = (/** @type {number} */ took) => HEIGHT - FLOOR - ((Math.log10(took) - low) / (high - low)) * room;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let decade = low; decade <= high; decade += 1) {
      context.fillStyle = found.grid;
      context.fillRect(LEFT, Math.round(y(10 ** decade)), width - LEFT, 1);
      context.fillStyle = found.quiet;
      context.fillText(time(10 ** decade), LEFT - 8, Math.max(7, Math.min(HEIGHT - 7, y(10 ** decade))));
    }
    const pitch = (width - LEFT) / MOST, bar = Math.max(1, pitch * 0.66), base = y(10 ** low);
    for (const [place, step] of this.steps.entries()) {
      const x = width - (this.steps.length - place) * pitch;
      if (step.taken_s > 0) {
        context.fillStyle = step.chunks.length ? found.prefill : found.decode;
        context.beginPath();
        context.roundRect(x, y(step.taken_s), bar, Math.max(1, base - y(step.taken_s)), [bar / 3, bar / 3, 0, 0]);
        context.fill();
      }
      if (step.predicted_s) {
        context.fillStyle = found.predicted;
        context.fillRect(x - pitch * 0.17, y(step.predicted_s) - 1, pitch, 2);
      }
    }
  }
}

/** @param {Step} step @param {number} stages @returns {[string, string][]} */
function described(step, stages) {
  /** @type {[string, string][]} */
  const found = [["Step", whole(step.id)]];
  const predicted = step.predicted_s === null ? "" : `, predicted ${time(step.predicted_s)}`;
  found.push(["Took", `${time(step.taken_s)}${predicted}`]);
  const tokens = step.chunks.reduce((all, chunk) => all + chunk.num_tokens, 0);
  found.push(["Prompt tokens", tokens ? `${whole(tokens)} of ${plural(step.chunks.length, "request")}` : "none"]);
  found.push(["Decode rows", step.decode_rows ? whole(step.decode_rows) : "none"]);
  found.push(["Exchange", step.parts > 1 ? `${step.parts} parts, overlapped` : step.parts === 1 ? "one part" : "none"]);
  if (step.exchanged_bytes) found.push(["Sent", bytes(step.exchanged_bytes)]);
  if (step.exposed_s !== null) found.push(["Waited", step.exposed_s ? time(step.exposed_s) : "never"]);
  if (stages > 1) found.push(["Microbatch", `${step.microbatch + 1} of ${digits(stages)}`]);
  return found;
}
