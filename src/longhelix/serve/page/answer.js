// One answer as it comes: its prompt's progress, its text, how long it took.

import { Problem, call, events, sentence } from "./api.js";
import { button, element, write } from "./dom.js";
import { Rendering, copied } from "./markdown.js";
import { digits, plural, time, whole } from "./numbers.js";

/**
 * @typedef {{prompt_tokens: number, completion_tokens: number,
 *   prompt_tokens_details?: {cached_tokens: number} | null}} Usage
 */

export class Answer {
  /**
   * @param {(text: string) => void} announce reads a text out
   * @param {() => void} grown is called where the page became longer
   * @param {() => void} again asks for another answer
   */
  constructor(announce, grown, again) {
    this.grown = grown;
    this.text = "";
    this.reasoning = "";
    this.ended = false;
    /** @type {Usage | null} */
    this.usage = null;
    this.sentMs = this.firstMs = this.lastMs = 0;
    this.body = element("div", { class: "text" });
    this.rendering = new Rendering(this.body, announce);
    this.thought = element("div", { class: "thought" });
    this.summary = element("summary", {}, "Reasoning");
    this.reasons = element("details", { class: "reasoning", hidden: "" }, this.summary, this.thought);
    this.bar = element("progress", { "aria-label": "The prompt" });
    this.barWords = element("span", { class: "quiet" });
    this.progress = element("div", { class: "progress" }, this.bar, this.barWords);
    this.problem = element("p", { class: "problem", role: "alert", hidden: "" });
    this.figures = element("p", { class: "figures quiet" });
    this.copying = button("Copy", () => copied(this.copying, this.text), { class: "plain small" });
    this.again = button("Regenerate", again, { class: "plain small again" });
    this.actions = element("div", { class: "after", hidden: "" }, this.figures, this.copying, this.again);
    this.node = element("article", { class: "turn answer", "aria-label": "Answer" },
      this.progress, this.reasons, this.body, this.problem, this.actions);
    this.frame = 0;
  }

  /**
   * Streams until the end, a stop or a problem, which is shown.
   * @param {object} body
   * @param {AbortSignal} signal
   * @returns {Promise<Problem | null>}
   */
  async run(body, signal) {
    this.sentMs = performance.now();
    write(this.barWords, "Waiting for its turn");
    let problem = null;
    try {
      const response = await call("/v1/chat/completions", { body, signal });
      for await (const { name, data } of events(response)) {
        if (data === "[DONE]") {
          this.ended = true;
          break;
        }
        this.take(name, JSON.parse(data));
      }
      if (!this.ended) throw new Problem("The connection ended before the answer did. Try again.");
    } catch (error) {
      if (!signal.aborted) problem = error instanceof Problem ? error : new Problem(sentence(String(error)));
    }
    this.finish(signal.aborted ? "Stopped. " : "", problem);
    return problem;
  }

  /** @param {string} name @param {any} event */
  take(name, event) {
    if (event.error) throw new Problem(sentence(event.error.message));
    if (name === "progress") {
      this.prefilled(event.prefilled_tokens, event.prompt_tokens);
      return;
    }
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0], piece = choice?.delta?.content, thought = choice?.delta?.reasoning_content;
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (!piece && !thought) return;
    this.lastMs = performance.now();
    if (!this.firstMs) {
      this.firstMs = this.lastMs;
      this.firstTokens = this.usage?.completion_tokens ?? 1;
      this.progress.hidden = true;
    }
    this.reasoning += thought ?? "";
    this.text += piece ?? "";
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  /** @param {number} done @param {number} total */
  prefilled(done, total) {
    const nowMs = performance.now();
    // The first report may have what was cached: the rate is that of what came after it.
    this.begun ??= { done, ms: nowMs };
    this.bar.max = total;
    this.bar.value = done;
    const seconds = (nowMs - this.begun.ms) / 1000, rate = seconds > 0 ? (done - this.begun.done) / seconds : 0;
    const left = rate > 0 && done < total ? `, ${time((total - done) / rate)} left` : "";
    const speed = rate > 0 ? `, ${digits(Math.round(rate))} tokens/s${left}` : "";
    write(this.barWords, `Reading ${whole(done)} of ${whole(total)} tokens${speed}`);
    this.grown();
  }

  draw() {
    this.frame = 0;
    this.rendering.update(this.text);
    this.reasons.hidden = this.reasoning === "";
    write(this.thought, this.reasoning);
    write(this.summary, this.text === "" && this.actions.hidden ? "Reasoning…" : "Reasoning");
    this.grown();
  }

  /** @param {string} before what is said first @param {Problem | null} problem */
  finish(before, problem) {
    cancelAnimationFrame(this.frame);
    this.actions.hidden = false;
    this.draw();
    this.rendering.finish();
    this.progress.hidden = true;
    this.copying.hidden = this.text === "";
    if (problem !== null) {
      write(this.problem, problem.message);
      this.problem.hidden = false;
      write(this.again, "Try again");
    }
    write(this.figures, before + this.measured());
    this.grown();
  }

  /** The answer as a message of the conversation. */
  message() {
    const reasoned = this.reasoning ? { reasoning_content: this.reasoning } : {};
    return { role: "assistant", content: this.text, ...reasoned };
  }

  measured() {
    const said = [];
    if (this.text === "" && this.reasoning === "" && this.ended) said.push("The model ended at once");
    if (this.firstMs) {
      said.push(`${time((this.firstMs - this.sentMs) / 1000)} to the first token`);
      const count = this.usage?.completion_tokens ?? 0, seconds = (this.lastMs - this.firstMs) / 1000;
      const more = count - (this.firstTokens ?? 1);
      if (more > 0 && seconds > 0) said.push(`${digits(more / seconds)} tokens/s`);
    }
    if (this.usage !== null) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      said.push(plural(this.usage.completion_tokens, "token"));
      said.push(`prompt ${whole(this.usage.prompt_tokens)}${cached ? `, ${whole(cached)} of them cached` : ""}`);
    }
    if (this.reason === "length") said.push("cut at max tokens");
    return said.join(" · ");
  }
}
