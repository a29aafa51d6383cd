// The connection to /live: it comes back by itself, and rests while nobody looks at the page.

import { Problem, call, events, sentence } from "./api.js";

/**
 * @typedef {{rank: number, stage: number, kvp: number, tpa: number, tpf: number, ep: number, layers: [number, number],
 *   kv_heads: [number, number]}} Rank
 * @typedef {{model: string, version: string, max_model_len: number, block_tokens: number, kv_blocks: number,
 *   layout: Record<string, number>, ranks: Rank[], placement: string, policy: string, kv_dtype: string,
 *   weight_dtype: string}} Server
 * @typedef {{id: number, client: string, prompt_tokens: number, prefilled_tokens: number, new_tokens: number,
 *   cached_tokens: number, preemptions: number, placement: string, kv_blocks_per_rank: number[]}} Running
 * @typedef {{total: number, held: number, cached: number, promised: number}} Blocks
 * @typedef {{window_tokens: number | null, chunk_tokens: number | null, ranks: Blocks[]}} WindowBlocks
 * @typedef {{running: Running[], num_waiting: number, block_tokens: number, ranks: Blocks[],
 *   windows: WindowBlocks[]}} Observation
 * @typedef {{id: number, microbatch: number, decode_rows: number, chunks: {request_id: number, num_tokens: number}[],
 *   parts: number, predicted_s: number | null, taken_s: number, exposed_s: number | null,
 *   exchanged_bytes: number}} Step
 * @typedef {{count: number, p50: number, p95: number}} Times
 * @typedef {{is_draining: boolean, observation: Observation, steps: Step[], missed_steps: number, new_tokens: number,
 *   ttft_s: Times | null, tbt_s: Times | null}} State
 */

const FIRST_WAIT_S = 1, LONGEST_WAIT_S = 15;

export class Live {
  /**
   * @param {{server: (server: Server) => void, state: (state: State) => void,
   *   status: (state: "connecting" | "on" | "off" | "refused", words: string) => void}} heard
   */
  constructor(heard) {
    this.heard = heard;
    /** @type {AbortController | null} */
    this.open = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.connect()));
  }

  rest() {
    clearTimeout(this.timer);
    this.open?.abort();
    this.open = null;
  }

  /** At once, whatever it waits for. */
  async connect() {
    this.rest();
    const opened = new AbortController();
    this.open = opened;
    this.waitS ??= FIRST_WAIT_S;
    let words = "The server has gone.";
    try {
      const response = await call("/live", { signal: opened.signal });
      for await (const { name, data } of events(response)) {
        const event = JSON.parse(data);
        if (name === "server") {
          this.heard.status("on", "Connected");
          this.heard.server(event);
        } else if (name === "state") {
          this.waitS = FIRST_WAIT_S; // not before: an engine that starts again has none
          this.heard.state(event);
        } else if (name === "error") words = sentence(event.error.message);
      }
    } catch (error) {
      if (opened.signal.aborted) return;
      if (error instanceof Problem && error.status === 401) {
        this.heard.status("refused", error.message);
        return;
      }
      words = error instanceof Problem ? error.message : "The server has gone.";
    }
    if (opened.signal.aborted) return;
    this.heard.status("off", words);
    this.timer = setTimeout(() => this.connect(), this.waitS * 1000);
    this.waitS = Math.min(LONGEST_WAIT_S, this.waitS * 2);
  }
}
