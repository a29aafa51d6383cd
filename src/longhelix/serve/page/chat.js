// The conversation: questions with their documents, answers, and what is asked with them.

import { Problem } from "./api.js";
import { Answer } from "./answer.js";
import { Documents, prompt } from "./documents.js";
import { byId, element, write } from "./dom.js";
import { bytes } from "./numbers.js";

/**
 * @typedef {{content: string, node: HTMLElement, answer: Answer | null}} Turn
 * content: of the question, with its documents
 */

const NEAR_END = 80; // pixels within which the page follows an answer

export class Chat {
  /**
   * @param {string} client by which the engine knows this page
   * @param {() => void} wantsKey
   */
  constructor(client, wantsKey) {
    this.client = client;
    this.wantsKey = wantsKey;
    this.model = "";
    /** @type {Turn[]} */
    this.turns = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.atEnd = true;
    this.question = byId("question");
    this.conversation = byId("conversation");
    this.documents = new Documents((words) => this.tell(words));
    this.listen();
    this.show();
  }

  listen() {
    byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    });
    this.question.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send();
    });
    this.question.addEventListener("input", () => this.fit());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    this.conversation.addEventListener("scroll", () => {
      const { scrollHeight, clientHeight, scrollTop } = this.conversation;
      this.atEnd = scrollHeight - clientHeight - scrollTop < NEAR_END;
    });
    byId("clear").addEventListener("click", () => this.clear());
    byId("sampling").addEventListener("input", () => this.show());
    for (const suggestion of byId("suggestions").querySelectorAll("button")) {
      suggestion.addEventListener("click", () => {
        this.question.value = suggestion.textContent;
        this.fit();
        this.question.focus();
      });
    }
  }

  /** @param {string} words nothing: there is nothing to say */
  tell(words) {
    const note = byId("composer-note");
    write(note, words);
    note.hidden = words === "";
  }

  send() {
    const question = this.question.value.trim();
    if (question === "") {
      this.tell(`Write a question ${this.documents.attached.length ? "about what is attached" : "first"}.`);
      this.question.focus();
      return;
    }
    const sampling = this.sampling();
    if (sampling === null) return;
    this.tell("");
    const documents = this.documents.take();
    const node = element("article", { class: "turn question", "aria-label": "Question" },
      ...(documents.length ? [sent(documents)] : []), element("p", {}, question));
    byId("turns").append(node);
    this.turns.push({ content: prompt(documents, question), node, answer: null });
    this.question.value = "";
    this.fit();
    this.ask(sampling);
  }

  /** @param {object} sampling */
  async ask(sampling) {
    const turn = this.turns[this.turns.length - 1];
    turn.answer?.node.remove();
    const announcer = byId("announcer");
    const answer = new Answer(
      (text) => announcer.append(element("p", {}, text)), () => this.follow(), () => this.regenerate(),
    );
    turn.answer = answer;
    announcer.replaceChildren();
    byId("turns").append(answer.node);
    const running = new AbortController();
    this.running = running;
    this.show();
    this.atEnd = true;
    this.follow();
    const options = { include_usage: true, continuous_usage_stats: true, include_progress: true };
    const body = {
      model: this.model || null, messages: this.messages(), client: this.client, stream: true, stream_options: options,
      ...sampling,
    };
    const problem = await answer.run(body, running.signal);
    if (this.running !== running) return; // cleared, and asked anew
    this.running = null;
    this.show();
    if (problem instanceof Problem && problem.status === 401) this.wantsKey();
  }

  /** Questions that have no answer are left out, but for the last one. */
  messages() {
    return this.turns.flatMap(({ content, answer }, place) => {
      if (place === this.turns.length - 1) return [{ role: "user", content }];
      if (!answer?.text) return [];
      return [{ role: "user", content }, answer.message()];
    });
  }

  regenerate() {
    const sampling = this.sampling();
    if (!this.running && this.turns.length && sampling !== null) {
      this.question.focus();
      this.ask(sampling);
    }
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.running = null;
    this.turns = [];
    byId("turns").replaceChildren();
    byId("announcer").replaceChildren();
    this.tell("");
    this.show();
    this.question.focus();
  }

  /** What the fields say; null where one of them is wrong, which is said. @returns {object | null} */
  sampling() {
    /** @type {Record<string, number>} */
    const found = {};
    for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
      const field = byId(id);
      if (!field.checkValidity()) {
        byId("sampling").open = true;
        this.tell(`${field.parentElement.firstChild.textContent.trim()}: ${field.validationMessage}`);
        field.focus();
        return null;
      }
      if (field.value !== "") found[name] = Number(field.value);
    }
    return found;
  }

  show() {
    byId("welcome").hidden = this.turns.length > 0;
    byId("clear").hidden = this.turns.length === 0;
    byId("turns").dataset.running = String(this.running !== null);
    const send = byId("send");
    write(send, this.running ? "Stop" : "Send");
    send.classList.toggle("stop", this.running !== null);
    const value = (/** @type {string} */ id) => byId(id).value;
    const said = [value("temperature") ? `temperature ${value("temperature")}` : "the model's temperature"];
    said.push(value("max-tokens") ? `${value("max-tokens")} tokens` : "all that fit");
    if (value("seed")) said.push(`seed ${value("seed")}`);
    write(/** @type {HTMLElement} */ (byId("sampling").querySelector("summary")), said.join(" · "));
    this.follow();
  }

  /** Keeps the end of the conversation in sight, unless somebody reads further up. */
  follow() {
    if (this.atEnd) this.conversation.scrollTop = this.conversation.scrollHeight;
  }

  /** The question's field is as high as its text. */
  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight, innerHeight * 0.35)}px`;
  }
}

/** @param {import("./documents.js").Attached[]} documents */
function sent(documents) {
  return element("ul", { class: "sent" }, ...documents.map((each) => element("li", {},
    element("span", { class: "name" }, each.name), element("span", { class: "quiet" }, ` ${bytes(each.size)}`))));
}
