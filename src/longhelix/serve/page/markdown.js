// A little Markdown as nodes: paragraphs, headings, lists, code, bold. Everything else is text.

import { button, copy, element } from "./dom.js";

/**
 * @typedef {{kind: "paragraph" | "heading" | "code" | "bullets" | "numbers", lines: string[], start?: number,
 *   language?: string}} Block
 */

const FENCE = /^\s*```/, HEADING = /^#{1,6}\s+/, BULLET = /^\s*[-*+]\s+/, NUMBER = /^\s*(\d{1,9})[.)]\s+/;

/** @param {string} text @returns {Block[]} */
export function blocks(text) {
  /** @type {Block[]} */
  const found = [];
  /** @type {Block | null} */
  let open = null;
  const begin = (/** @type {Block} */ block) => {
    found.push(block);
    open = block;
  };
  for (const line of text.split("\n")) {
    if (open?.kind === "code") {
      if (FENCE.test(line)) open = null;
      else open.lines.push(line);
      continue;
    }
    const number = NUMBER.exec(line);
    if (FENCE.test(line)) begin({ kind: "code", lines: [], language: line.replace(FENCE, "").trim() });
    else if (line.trim() === "") {
      if (open?.kind === "paragraph") open = null;
    } else if (HEADING.test(line)) {
      begin({ kind: "heading", lines: [line.replace(HEADING, "")] });
      open = null;
    } else if (BULLET.test(line) || number !== null) {
      const kind = number === null ? "bullets" : "numbers";
      if (open?.kind !== kind) begin({ kind, lines: [], start: number === null ? 1 : Number(number[1]) });
      /** @type {any} */ (open).lines.push(line.replace(number === null ? BULLET : NUMBER, ""));
    } else if (open?.kind === "paragraph") open.lines.push(line);
    else if (open !== null && /^\s/.test(line)) open.lines[open.lines.length - 1] += ` ${line.trim()}`;
    else begin({ kind: "paragraph", lines: [line] });
  }
  return found;
}

/** @param {Block} block @returns {HTMLElement} */
function node(block) {
  switch (block.kind) {
    case "code": {
      const text = block.lines.join("\n");
      const copying = button("Copy", () => copied(copying, text), { class: "plain small" });
      return element("div", { class: "code" },
        element("div", { class: "over" }, element("span", { class: "quiet" }, block.language ?? ""), copying),
        element("pre", { tabindex: "0" }, element("code", {}, text)));
    }
    case "bullets":
    case "numbers": {
      const items = block.lines.map((line) => element("li", {}, ...inline(line)));
      const start = String(block.start ?? 1);
      return block.kind === "bullets" ? element("ul", {}, ...items) : element("ol", { start }, ...items);
    }
    case "heading":
      return element("h4", {}, ...inline(block.lines[0]));
    default:
      return element("p", {}, ...inline(block.lines.join("\n")));
  }
}

/** @param {string} text @returns {(Node | string)[]} */
function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return element("code", {}, part.slice(1, -1));
    const isBold = part.length > 4 && part.startsWith("**") && part.endsWith("**");
    return isBold ? element("strong", {}, ...inline(part.slice(2, -2))) : part;
  });
}

/** Copies, and says so on the button for a moment. @param {HTMLElement} pressed @param {string} text */
export async function copied(pressed, text) {
  const before = pressed.textContent ?? "";
  try {
    await copy(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "Not copied";
  }
  setTimeout(() => { pressed.textContent = before; }, 1200);
}

/** Text that grows, as nodes: blocks that have ended stay as they are. */
export class Rendering {
  /** @param {HTMLElement} place @param {(text: string) => void} ended is told each block that has ended */
  constructor(place, ended) {
    this.place = place;
    this.ended = ended;
    /** @type {string[]} */
    this.sources = [];
    this.told = 0;
  }

  /** @param {string} text */
  update(text) {
    const now = blocks(text), sources = now.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.place.childNodes.length > same) this.place.lastChild?.remove();
    this.place.append(...now.slice(same).map(node));
    this.sources = sources;
    this.tell(now.length - 1);
  }

  finish() {
    this.tell(this.sources.length);
  }

  /** @param {number} count */
  tell(count) {
    while (this.told < count) {
      this.ended(this.place.childNodes[this.told]?.textContent ?? "");
      this.told += 1;
    }
  }
}
