// Text files that go before the next question.

import { button, byId, element } from "./dom.js";
import { bytes, plural } from "./numbers.js";

/** @typedef {{name: string, size: number, text: string}} Attached */

const MOST_BYTES = 256e6;
const CHARACTERS_OF_TOKEN = 4; // about so many, in English

export class Documents {
  /** @param {(words: string) => void} tell */
  constructor(tell) {
    this.tell = tell;
    /** @type {Attached[]} */
    this.attached = [];
    this.list = byId("documents");
    const files = byId("files");
    files.addEventListener("change", () => {
      this.add([...files.files]);
      files.value = "";
    });
    this.acceptDrops();
  }

  acceptDrops() {
    const veil = byId("drop");
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      veil.hidden = false;
    });
    addEventListener("dragleave", (event) => {
      if (event.relatedTarget === null) veil.hidden = true;
    });
    addEventListener("drop", (event) => {
      veil.hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...(event.dataTransfer?.files ?? [])]);
    });
  }

  /** @param {File[]} files */
  async add(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.attached.push({ name: file.name, size: file.size, text: await read(file) });
      } catch (error) {
        refused.push(error instanceof Error ? error.message : String(error));
      }
    }
    this.tell(refused.join(" "));
    this.show();
    byId("question").focus();
  }

  show() {
    this.list.hidden = this.attached.length === 0;
    this.list.replaceChildren(...this.attached.map((each) => element("li", {},
      element("span", { class: "name" }, each.name),
      element("span", { class: "quiet" }, ` ${bytes(each.size)}, about ${plural(tokens(each), "token")}`),
      button("×", () => this.remove(each), { class: "plain", "aria-label": `Remove ${each.name}` }),
    )));
  }

  /** @param {Attached} which */
  remove(which) {
    this.attached = this.attached.filter((each) => each !== which);
    this.show();
    byId("question").focus();
  }

  /** Those that are attached, which then are not any more. */
  take() {
    const taken = this.attached;
    this.attached = [];
    this.show();
    return taken;
  }
}

/** About how many. @param {Attached} document */
function tokens(document) {
  const count = document.text.length / CHARACTERS_OF_TOKEN;
  return Math.max(1, count < 1000 ? Math.ceil(count) : Math.round(count / 100) * 100);
}

/** @param {File} file @returns {Promise<string>} */
async function read(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}: attach files of at most ${bytes(MOST_BYTES)}.`);
  }
  if (file.size === 0) throw new Error(`${file.name} is empty, or a folder: attach text files.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not text in UTF-8: attach plain text.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not plain text: attach text files.`);
  return text;
}

/**
 * What the model reads: documents first.
 * @param {Attached[]} documents
 * @param {string} question
 */
export function prompt(documents, question) {
  return [...documents.map((each) => `Document "${each.name}":\n\n${each.text}`), question].join("\n\n");
}
