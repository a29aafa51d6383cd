// The KV blocks of each KVP rank as tiles: those of requests in their colours, then what is kept, promised and free.

import { byId, cleared, colours, element, write } from "./dom.js";
import { plural, range, whole } from "./numbers.js";

/**
 * @typedef {import("./live.js").Server} Server
 * @typedef {import("./live.js").State} State
 * @typedef {{kind: string, end: number}} Span blocks up to `end`, of one kind: a request's colour, or a name below
 * @typedef {{canvas: HTMLCanvasElement, counts: HTMLElement, tiles: {kind: string, before: string, bornMs: number}[],
 *   spans: Span[], total: number}} Pool
 */

export const COLOURS = 8;
const KINDS = ["other", "cached", "promised", "free"];
const HEIGHT = 150, GAP = 2, MOST_TILES = 768, LARGEST = 14, FADE_MS = 350;

/** Colours of requests: each keeps its own as long as it runs. */
export class Palette {
  constructor() {
    /** @type {Map<number, number>} */
    this.taken = new Map();
  }

  /** @param {number[]} running ids */
  update(running) {
    for (const id of this.taken.keys()) if (!running.includes(id)) this.taken.delete(id);
    for (const id of running) if (!this.taken.has(id)) this.taken.set(id, this.free(id));
  }

  /** @param {number} id */
  free(id) {
    const used = new Set(this.taken.values());
    for (let step = 0; step < COLOURS; step += 1) if (!used.has((id + step) % COLOURS)) return (id + step) % COLOURS;
    return id % COLOURS;
  }

  /** @param {number} id */
  of(id) {
    return `request-${this.taken.get(id) ?? 0}`;
  }
}

/** @param {import("./live.js").Blocks} blocks */
function inWords({ total, held, cached, promised }) {
  const counts = `${whole(held)} held · ${whole(cached)} cached · ${whole(total - held - cached - promised)} free`;
  return promised ? `${counts} · ${whole(promised)} promised` : counts;
}

/** @param {import("./live.js").WindowBlocks} window @param {number} rank */
function windowInWords({ window_tokens, chunk_tokens, ranks }, rank) {
  const kind = window_tokens === null ? `Chunks of ${whole(chunk_tokens ?? 0)}` : `Windows of ${whole(window_tokens)}`;
  return `${kind} tokens: ${inWords(ranks[rank])}`;
}

export class Pools {
  /** @param {Palette} palette */
  constructor(palette) {
    this.palette = palette;
    /** @type {Pool[]} */
    this.pools = [];
    this.frame = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.redraw()).observe(byId("pools"));
  }

  /** @param {Server} server */
  begin(server) {
    const { kvp } = server.layout;
    this.blockTokens = server.block_tokens;
    this.pools = Array.from({ length: kvp }, () => ({
      canvas: element("canvas", { role: "img" }), counts: element("p", { class: "counts quiet" }),
      tiles: [], spans: [], total: server.kv_blocks,
    }));
    byId("pools").replaceChildren(...this.pools.map((pool, rank) => {
      const holders = element("ul", { class: "holders", "aria-label": `Ranks of KVP ${rank}` },
        ...Array.from({ length: server.layout.tpa }, (_, tpa) => (
          holder(server.ranks.filter((each) => each.kvp === rank && each.tpa === tpa)))));
      return element("div", { class: "pool" }, element("h4", {}, `KVP ${rank}`), pool.canvas, pool.counts, holders);
    }));
  }

  /** @param {State} state */
  update({ observation }) {
    for (const [rank, pool] of this.pools.entries()) {
      const blocks = observation.ranks[rank];
      pool.total = blocks.total;
      pool.spans = spans(observation, rank, this.palette);
      const counts = inWords(blocks);
      write(pool.counts, [counts, ...observation.windows.map((each) => windowInWords(each, rank))].join("\n"));
      pool.canvas.setAttribute("aria-label", `KVP ${rank}: ${counts} of ${plural(blocks.total, "block")}`);
    }
    this.redraw();
  }

  redraw() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const found = colours([...Array.from({ length: COLOURS }, (_, place) => `request-${place}`), ...KINDS]);
    const nowMs = performance.now();
    let fading = false;
    for (const pool of this.pools) fading = this.drawPool(pool, found, nowMs) || fading;
    if (fading) this.redraw();
  }

  /** @param {Pool} pool @param {Record<string, string>} found @param {number} nowMs */
  drawPool(pool, found, nowMs) {
    const width = pool.canvas.clientWidth;
    if (width === 0 || pool.spans.length === 0) return false;
    const each = blocksPerTile(pool.total), count = Math.ceil(pool.total / each);
    const { pitch, columns } = spread(count, width), edge = pitch - (pitch > 4 ? GAP : 1);
    const area = cleared(pool.canvas, Math.ceil(count / columns) * pitch);
    if (area === null) return false;
    const size = `of ${plural(this.blockTokens ?? 0, "token")}`;
    write(byId("block-size"), each > 1 ? `${size}, ${whole(each)} to a tile` : `${size}, a tile each`);
    let span = 0, fading = false;
    for (let place = 0; place < count; place += 1) {
      const middle = Math.min(pool.total, (place + 0.5) * each);
      while (span < pool.spans.length - 1 && middle > pool.spans[span].end) span += 1;
      const tile = this.tile(pool, place, pool.spans[span].kind, nowMs);
      const share = this.still.matches ? 1 : Math.min(1, (nowMs - tile.bornMs) / FADE_MS);
      fading ||= share < 1;
      const x = (place % columns) * pitch, y = Math.floor(place / columns) * pitch;
      if (share < 1) paint(area.context, tile.before, found, x, y, edge, 1 - share);
      paint(area.context, tile.kind, found, x, y, edge, share);
    }
    return fading;
  }

  /** @param {Pool} pool @param {number} place @param {string} kind @param {number} nowMs */
  tile(pool, place, kind, nowMs) {
    const tile = pool.tiles[place] ??= { kind, before: kind, bornMs: nowMs - FADE_MS };
    if (tile.kind !== kind) Object.assign(tile, { kind, before: tile.kind, bornMs: nowMs });
    return tile;
  }
}

/** Ranks of all stages that have the same heads of these blocks. @param {import("./live.js").Rank[]} ranks */
function holder(ranks) {
  const names = `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.map((each) => each.rank).join(", ")}`;
  return element("li", {}, names, element("span", { class: "quiet" }, ` KV ${range(ranks[0].kv_heads, "head")}`));
}

/**
 * What a KVP rank's blocks are, one kind after the other. Requests that share blocks have fewer together than each by
 * itself.
 * @param {import("./live.js").Observation} observation @param {number} rank @param {Palette} palette
 * @returns {Span[]}
 */
function spans(observation, rank, palette) {
  const blocks = observation.ranks[rank];
  const own = observation.running.map((request) => request.kv_blocks_per_rank[rank]);
  const sum = own.reduce((all, count) => all + count, 0);
  const scale = sum > blocks.held ? blocks.held / sum : 1;
  let end = 0;
  const found = observation.running.map((request, place) => {
    end += own[place] * scale;
    return { kind: palette.of(request.id), end };
  });
  for (const [kind, to] of /** @type {[string, number][]} */ ([
    ["other", blocks.held], ["cached", blocks.held + blocks.cached],
    ["promised", blocks.held + blocks.cached + blocks.promised], ["free", blocks.total],
  ])) found.push({ kind, end: to });
  return found;
}

/**
 * The largest tiles that are not too high together; whole eights of them in a row.
 * @param {number} count @param {number} width in CSS pixels
 */
function spread(count, width) {
  for (let pitch = LARGEST; ; pitch -= 1) {
    const most = Math.max(1, Math.floor((width + GAP) / pitch)), columns = most >= 16 ? most - (most % 8) : most;
    if (pitch === 3 || Math.ceil(count / columns) * pitch <= HEIGHT) return { pitch, columns };
  }
}

/** @param {number} total */
function blocksPerTile(total) {
  let each = 1;
  for (const more of [2, 2.5, 2, 2, 2.5, 2, 2, 2.5, 2, 2, 2.5, 2]) {
    if (total / each <= MOST_TILES) break;
    each *= more;
  }
  return each;
}

/**
 * @param {CanvasRenderingContext2D} context @param {string} kind @param {Record<string, string>} found
 * @param {number} x @param {number} y @param {number} edge @param {number} share
 */
function paint(context, kind, found, x, y, edge, share) {
  context.globalAlpha = share;
  context.fillStyle = context.strokeStyle = found[kind];
  const inset = kind === "cached" ? edge * 0.22 : kind === "promised" ? 0.5 : 0;
  context.beginPath();
  const size = edge - 2 * inset, radius = kind === "promised" ? 1 : Math.min(2, edge / 4);
  context.roundRect(x + inset, y + inset, size, size, radius);
  if (kind === "promised") context.stroke();
  else context.fill();
  context.globalAlpha = 1;
}
