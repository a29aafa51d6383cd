// Paged partial attention: one form for decode rows and for prefill chunks.
//
// The rows of a sequence that share a KV head (its query rows times the heads of the group) are taken in *row blocks*.
// A row block goes over the keys in *parts* of 256 tokens: scores of the part, its maximum, the weights, and their
// product with the values, added to a running state (FlashAttention's online softmax, arXiv 2205.14135). Parts are
// grouped into *spans*, whose states are merged in order: a span is what a thread can take by itself. Both lie at
// absolute positions, and every sum has one order, so a row's bits depend on nothing but its own keys: not on its
// batch, not on its chunk, not on the number of threads.
#pragma once

#include <atomic>

#include "kernels.hpp"
#include "simd.hpp"
#include "threads.hpp"
#include "turn.hpp"
#include "work.hpp"

namespace longhelix::ISA {

constexpr int kPartTokens = 256;
constexpr int kPartTiles = kPartTokens / kLanes;
constexpr int kBlockRows = 96;  // rows of a row block that read a part while it is in the cache
constexpr float kLn2 = 0.69314718056f;
constexpr float kLog2e = 1.44269504089f;

// First token of a span: spans widen with the position, so that a long row has enough of them and not too many.
INLINE std::int64_t span_start(std::int64_t span) {
    if (span <= 32) return span * 512;
    if (span <= 32 + 56) return 16384 + (span - 32) * 2048;
    return 131072 + (span - 88) * 8192;
}

INLINE std::int64_t num_spans(std::int64_t tokens) {
    if (tokens <= 16384) return (tokens + 511) / 512;
    if (tokens <= 131072) return 32 + (tokens - 16384 + 2047) / 2048;
    return 88 + (tokens - 131072 + 8191) / 8192;
}

INLINE f32x16 load_number(const void* data, std::int64_t index, Number number) {
    const u8* bytes = static_cast<const u8*>(data);
    if (number == Number::float32) return load<f32x16>(bytes + index * 4);
    return number == Number::bfloat16 ? load_bf16(bytes + index * 2) : load_f16(bytes + index * 2);
}

INLINE void store_number(void* data, std::int64_t index, Number number, f32x16 value) {
    u8* bytes = static_cast<u8*>(data);
    if (number == Number::float32) {
        store(bytes + index * 4, value);
    } else if (number == Number::bfloat16) {
        store_bf16(bytes + index * 2, value);
    } else {
        float16 narrow[kLanes];
        for (int i = 0; i < kLanes; ++i) narrow[i] = static_cast<float16>(value[i]);
        std::memcpy(bytes + index * 2, narrow, sizeof narrow);
    }
}

INLINE void round_to(Number number, f32x16& value) {
    if (number == Number::float32) return;
    std::uint16_t narrow[kLanes];
    store_number(narrow, 0, number, value);
    value = load_number(narrow, 0, number);
}

// A running softmax over keys, per row: base (log2 of the largest weight), the sum of weights, the weighted values.
struct State {
    float* base;
    float* sum;
    float* out;  // (rows, value_size)
};

// Adds state `next` to `state`; both are exact zeros where no key was seen.
INLINE void merge_state(const State& state, const State& next, int rows, int value_size) {
    for (int r = 0; r < rows; ++r) {
        if (next.sum[r] == 0) continue;
        float base = state.base[r] > next.base[r] ? state.base[r] : next.base[r];
        float keep = exp2(splat(state.base[r] - base))[0], add = exp2(splat(next.base[r] - base))[0];
        float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
        const float* more = next.out + static_cast<std::ptrdiff_t>(r) * value_size;
        for (int c = 0; c < value_size; c += kLanes) {
            store(out + c, multiply_add(load<f32x16>(more + c), splat(add), load<f32x16>(out + c) * keep));
        }
        state.sum[r] = state.sum[r] * keep + next.sum[r] * add;
        state.base[r] = base;
    }
}

template <typename E>
struct Attend {
    static constexpr int kStep = E::kStep;

    const Attention& call;
    int group, key_size, value_size, key_units;
    std::size_t key_bytes, panel_bytes, tile_bytes;

    explicit Attend(const Attention& attention)
        : call(attention),
          group(attention.num_query_heads / attention.pool.num_kv_heads),
          key_size(attention.pool.key_size),
          value_size(attention.pool.value_size),
          key_units(key_size / kStep),
          key_bytes(static_cast<std::size_t>(key_units) * E::kRowBytes),
          panel_bytes(kLanes / kStep * E::kRowBytes),
          tile_bytes(longhelix::tile_bytes(attention.pool)) {}

    // Rows [first, first + count) of the sequence, all of one KV head's group.
    struct RowBlock {
        const std::int64_t* blocks;  // of the sequence
        int head;
        std::int64_t first_row;
        int num_rows;  // query rows times the heads of the group
        std::int64_t seen;  // the largest limit
    };

    // What a thread works with; rows are padded with zeros to whole row tiles.
    struct Memory {
        u32* q;          // (rows, key_units)
        float* scores;   // (kRowTile, 256)
        u32* weights;    // (kRowTile, 256 / kStep)
        u8* values;      // one tile's values, with the tokens after the last one as zeros
        u8* turned;      // values of a part made from shared keys
        State run, span;
    };

    int padded_rows(int rows) const { return (rows + kRowTile - 1) / kRowTile * kRowTile; }

    Memory memory(int rows) const {
        auto room = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
        std::size_t padded = padded_rows(rows), turned = call.pool.shared ? kPartTiles * values_bytes() : 0;
        std::size_t sizes[] = {room(padded * key_units * 4), room(kRowTile * kPartTokens * 4), room(kRowTile * kPartTokens * 4),
                               room(values_bytes()),         room(turned),               room(padded * 4),
                               room(padded * 4),             room(padded * value_size * 4),
                               room(padded * 4),             room(padded * 4),           room(padded * value_size * 4)};
        std::size_t bytes = 0;
        for (std::size_t size : sizes) bytes += size;
        u8* at = static_cast<u8*>(scratch(0, bytes));
        void* pieces[11];
        for (int i = 0; i < 11; ++i) {
            pieces[i] = at;
            at += sizes[i];
        }
        auto floats = [&](int i) { return static_cast<float*>(pieces[i]); };
        return {static_cast<u32*>(pieces[0]), floats(1),
                static_cast<u32*>(pieces[2]), static_cast<u8*>(pieces[3]),
                static_cast<u8*>(pieces[4]),  {floats(5), floats(6), floats(7)},
                {floats(8), floats(9), floats(10)}};
    }

    std::size_t values_bytes() const { return panel_bytes * (value_size / kLanes); }

    const u8* tile(const RowBlock& block, std::int64_t index) const {
        const Pool& pool = call.pool;
        std::int64_t id = block.blocks[index / pool.tiles_per_block];
        std::int64_t number = tile_number(pool, block.head, id, index % pool.tiles_per_block);
        return pool.data + static_cast<std::size_t>(number) * tile_bytes;
    }

    // Queries as units, times scale * log2(e) where that costs no accuracy: scores are then powers of 2.
    void gather_queries(const RowBlock& block, u32* q) const {
        for (int r = 0; r < padded_rows(block.num_rows); ++r) {
            u32* to = q + static_cast<std::ptrdiff_t>(r) * key_units;
            if (r >= block.num_rows) {
                std::memset(to, 0, key_units * 4);
                continue;
            }
            std::int64_t from = (block.first_row + r / group) * call.q.stride +
                                static_cast<std::int64_t>(block.head * group + r % group) * key_size;
            for (int c = 0; c < key_size; c += kLanes) {
                E::from_floats(to + c / kStep, load_number(call.q.data, from + c, call.q.number));
            }
        }
    }

    std::int64_t limit(const RowBlock& block, int r) const {
        return r < block.num_rows ? call.limits[block.first_row + r / group] : 0;
    }

    // Scores of R rows and V tiles, masked by each row's limit (relative to the first tile's first token).
    template <int R, int V, bool Ahead>
    void score(const u32* q, const u8* const (&tiles)[V], const u8* const (&ahead)[2], const std::int64_t* seen,
               float* scores) const {
        f32x16 sums[R][V] = {};
        accumulate<E, R, V, Ahead>(sums, q, key_units, tiles, key_units, ahead);
        float scale = call.scale * kLog2e;
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            f32x16 factor = splat(scale);
            if constexpr (E::kScaled) factor = factor * load_bf16(tiles[v] + scales_offset());
            i32x16 lanes = lane_indices() + v * kLanes;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                f32x16 score = sums[r][v] * factor;
                int visible = seen[r] < kPartTokens ? static_cast<int>(seen[r]) : kPartTokens;
                if (visible < (v + 1) * kLanes) score = lanes < visible ? score : splat(kMinusInfinity);
                store(scores + r * kPartTokens + v * kLanes, score);
            }
        }
    }

    std::size_t scales_offset() const { return key_bytes + (call.pool.shared ? 0 : values_bytes()); }

    // Scores to weights, in place of the running base; returns how the running state must shrink.
    void weigh(const u8* const* tiles, int num_tiles, int rows, const std::int64_t* seen, const State& run, float* scores,
               u32* weights, float* shrink) const {
        for (int r = 0; r < rows; ++r) {
            float* row = scores + r * kPartTokens;
            f32x16 highest = load<f32x16>(row);
            for (int t = 1; t < num_tiles; ++t) highest = larger(highest, load<f32x16>(row + t * kLanes));
            float top = largest(highest), base = run.base[r] > top ? run.base[r] : top;
            // Where nothing was seen yet, any finite base gives weights of 0.
            float finite = base == kMinusInfinity ? 0.0f : base;
            f32x16 sums[4] = {};  // chains, so that one does not wait for the other
            for (int t = 0; t < num_tiles; ++t) {
                f32x16 weight = exp2(load<f32x16>(row + t * kLanes) - finite);
                sums[t % 4] += weight;
                if constexpr (E::kScaled) {
                    f32x16 scaled = weight * load_bf16(tiles[t] + scales_offset() + value_scales_offset());
                    // The scale of a token that was never written may be anything.
                    weight = lane_indices() + t * kLanes < clamp(seen[r]) ? scaled : f32x16{};
                }
                E::from_floats(weights + r * (kPartTokens / kStep) + t * (kLanes / kStep), weight);
            }
            shrink[r] = exp2(splat(run.base[r] - finite))[0];
            run.sum[r] = run.sum[r] * shrink[r] + total((sums[0] + sums[1]) + (sums[2] + sums[3]));
            run.base[r] = base;
        }
    }

    INLINE int clamp(std::int64_t seen) { return seen < kPartTokens ? static_cast<int>(seen) : kPartTokens; }

    std::size_t value_scales_offset() const { return call.pool.shared ? 0 : kLanes * 2; }

    // Adds weights times values to the state: R rows, V * 16 channels from `channel` on.
    template <int R, int V, bool Ahead>
    void add_values(const u8* const* values, const u8* const* next, int num_tiles, int channel, const u32* weights,
                    const float* shrink, float* out) const {
        f32x16 sums[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) {
                sums[r][v] = load<f32x16>(out + static_cast<std::ptrdiff_t>(r) * value_size + channel + v * kLanes) * shrink[r];
            }
        }
        std::size_t first = channel / kLanes * panel_bytes;
        for (int t = 0; t < num_tiles; ++t) {
            const u8* panels[V];
            for (int v = 0; v < V; ++v) panels[v] = values[t] + first + v * panel_bytes;
            const u8* ahead[2] = {next[t] + first, next[t] + first + V * panel_bytes / 2};
            accumulate<E, R, V, Ahead>(sums, weights + t * (kLanes / kStep), kPartTokens / kStep, panels, kLanes / kStep,
                                       ahead);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) {
                store(out + static_cast<std::ptrdiff_t>(r) * value_size + channel + v * kLanes, sums[r][v]);
            }
        }
    }

    struct Part {
        const u8* tiles[kPartTiles];
        const u8* values[kPartTiles];
        // What to ask the memory for while a tile's keys, and its values, are read: the next part, in the order of its
        // addresses, half of it during the keys.
        const u8* ahead_keys[kPartTiles];
        const u8* ahead_values[kPartTiles];
        int num_tiles;
    };

    // R rows from `row` of the block over one part.
    template <int R, bool Ahead>
    void attend_rows(const RowBlock& block, const Part& part, std::int64_t start, int row, const Memory& memory) const {
        // As many chains of sums as hide the latency of one, and no more than there are registers.
        constexpr int kTiles = kRowTile < 12 ? 1 : R <= 4 ? 4 : 2;
        constexpr int kPanels = kRowTile < 12 ? 1 : R <= 6 ? 4 : 2;
        std::int64_t seen[R], most = 0;
        for (int r = 0; r < R; ++r) {
            seen[r] = limit(block, row + r) - start;
            if (seen[r] < 0) seen[r] = 0;
            if (seen[r] > most) most = seen[r];
        }
        if (most == 0) return;
        int num_tiles = (clamp(most) + kLanes - 1) / kLanes;
        const u32* q = memory.q + static_cast<std::ptrdiff_t>(row) * key_units;
        int t = 0;
        std::int64_t left[R];
        auto rest = [&] {
            for (int r = 0; r < R; ++r) left[r] = seen[r] > t * kLanes ? seen[r] - t * kLanes : 0;
            return left;
        };
        auto score_tiles = [&]<int V>() {
            const u8* tiles[V];
            for (int v = 0; v < V; ++v) tiles[v] = part.tiles[t + v];
            const u8* middle = V > 1 ? part.ahead_keys[t + V / 2] : part.ahead_keys[t] + tile_bytes / 4;
            const u8* ahead[2] = {part.ahead_keys[t], middle};
            score<R, V, Ahead>(q, tiles, ahead, rest(), memory.scores + t * kLanes);
        };
        for (; t + kTiles <= num_tiles; t += kTiles) score_tiles.template operator()<kTiles>();
        if constexpr (kTiles > 1) {
            for (; t < num_tiles; ++t) score_tiles.template operator()<1>();
        }
        State run{memory.run.base + row, memory.run.sum + row,
                  memory.run.out + static_cast<std::ptrdiff_t>(row) * value_size};
        float shrink[R];
        weigh(part.tiles, num_tiles, R, seen, run, memory.scores, memory.weights, shrink);
        int channel = 0;
        for (; channel + kPanels * kLanes <= value_size; channel += kPanels * kLanes) {
            add_values<R, kPanels, Ahead>(part.values, part.ahead_values, num_tiles, channel, memory.weights, shrink, run.out);
        }
        for (; channel < value_size; channel += kLanes) {
            add_values<R, 1, Ahead>(part.values, part.ahead_values, num_tiles, channel, memory.weights, shrink, run.out);
        }
    }

    void attend_part(const RowBlock& block, std::int64_t start, std::int64_t stop, const Memory& memory) const {
        Part part;
        std::int64_t first = start / kLanes, last = (block.seen + kLanes - 1) / kLanes - 1;
        part.num_tiles = static_cast<int>((stop - start + kLanes - 1) / kLanes);
        for (int t = 0; t < part.num_tiles; ++t) {
            part.tiles[t] = tile(block, first + t);
            part.values[t] = part.tiles[t] + key_bytes;
            if (call.pool.shared) {
                u8* turned = memory.turned + t * values_bytes();
                turn(part.tiles[t], turned);
                part.values[t] = turned;
            }
        }
        std::size_t half = tile_bytes / 2;
        for (int t = 0; t < part.num_tiles; ++t) {
            std::int64_t next = first + kPartTiles + t / 2;
            part.ahead_keys[t] = (next <= last ? tile(block, next) : part.tiles[t]) + t % 2 * half;
            next += kPartTiles / 2;
            part.ahead_values[t] = (next <= last ? tile(block, next) : part.tiles[t]) + t % 2 * half;
        }
        if (stop == block.seen && stop % kLanes) {
            // Tokens after the last one may hold anything, and 0 * NaN is NaN.
            u8* values = memory.values;
            int t = part.num_tiles - 1;
            std::memcpy(values, part.values[t], values_bytes());
            clear(values, static_cast<int>(stop % kLanes));
            part.values[t] = values;
        }
        int rows = block.num_rows, row = 0;
        if constexpr (kRowTile == 12) {
            // Whoever comes first asks for the next part; for the others this one is in the cache.
            if (rows > 12 && rows <= 16) {
                attend_rows<8, true>(block, part, start, 0, memory);
                return attend_rows<8, false>(block, part, start, 8, memory);
            }
            if (rows > 8) {
                attend_rows<12, true>(block, part, start, 0, memory);
                for (row = 12; rows - row > 8; row += 12) attend_rows<12, false>(block, part, start, row, memory);
                if (rows <= row) return;
            }
            if (rows - row > 6) return attend_rows<8, true>(block, part, start, row, memory);
            if (rows - row > 4) return attend_rows<6, true>(block, part, start, row, memory);
            if (rows - row == 3) return attend_rows<3, true>(block, part, start, row, memory);
        }
        for (; rows - row > 2; row += 4) attend_rows<4, true>(block, part, start, row, memory);
        if (rows - row == 2) return attend_rows<2, true>(block, part, start, row, memory);
        if (rows - row == 1) return attend_rows<1, true>(block, part, start, row, memory);
    }

    // Zeros in place of the values of tokens from `token` on.
    void clear(u8* values, int token) const {
        for (int channel = 0; channel < value_size; ++channel) {
            u8* panel = values + channel / kLanes * panel_bytes;
            for (int t = token; t < kLanes; ++t) {
                E::write(panel + E::offset(t / kStep, channel % kLanes, t % kStep), 0.0f, t / kStep);
            }
        }
    }

    // Values of a tile from its keys.
    void turn(const u8* keys, u8* values) const {
        for (std::size_t panel = 0; panel < values_bytes(); panel += panel_bytes) turn_panel<E>(keys + panel, values + panel);
    }

    void reset(const State& state, int rows) const {
        for (int r = 0; r < rows; ++r) state.base[r] = kMinusInfinity, state.sum[r] = 0.0f;
        std::memset(state.out, 0, sizeof(float) * rows * value_size);
    }

    // The state of one span, in memory.run.
    void attend_span(const RowBlock& block, std::int64_t span, const Memory& memory) const {
        reset(memory.run, padded_rows(block.num_rows));
        std::int64_t stop = span_start(span + 1) < block.seen ? span_start(span + 1) : block.seen;
        done.attended.fetch_add(block.num_rows * (stop - span_start(span)), std::memory_order_relaxed);
        for (std::int64_t start = span_start(span); start < stop; start += kPartTokens) {
            attend_part(block, start, start + kPartTokens < stop ? start + kPartTokens : stop, memory);
        }
    }

    // The state that the results hold, as it was before the call.
    void load_held(const RowBlock& block, const State& state) const {
        for (int r = 0; r < block.num_rows; ++r) {
            std::int64_t row = block.first_row + r / group, head = block.head * group + r % group;
            std::int64_t at = row * call.num_query_heads + head;
            float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
            for (int c = 0; c < value_size; c += kLanes) {
                store(out + c, load_number(call.out, at * value_size + c, call.q.number));
            }
            state.base[r] = call.lse[at] * kLog2e;
            state.sum[r] = call.lse[at] == kMinusInfinity ? 0.0f : 1.0f;
        }
    }

    void finish(const RowBlock& block, const Memory& memory) const {
        const State& state = memory.span;
        if (call.onto) {
            load_held(block, memory.run);
            merge_state(state, memory.run, block.num_rows, value_size);
        }
        for (int r = 0; r < block.num_rows; ++r) {
            std::int64_t row = block.first_row + r / group, head = block.head * group + r % group;
            float factor = state.sum[r] == 0 ? 0.0f : 1.0f / state.sum[r];
            std::int64_t to = (row * call.num_query_heads + head) * value_size;
            const float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
            for (int c = 0; c < value_size; c += kLanes) {
                store_number(call.out, to + c, call.q.number, load<f32x16>(out + c) * factor);
            }
            call.lse[row * call.num_query_heads + head] =
                state.sum[r] == 0 ? kMinusInfinity : (state.base[r] + __builtin_log2f(state.sum[r])) * kLn2;
        }
    }

    // A row block, whole or one of its spans; a block's spans are merged by whoever finishes last.
    struct Item {
        RowBlock block;
        std::int64_t span;      // -1: all of them
        std::size_t state;      // where this block's first span's state lies, in floats
        int* left;              // how many of the block's spans are not done
    };

    struct alignas(64) Queue {
        std::size_t next, stop;
    };

    bool run() const {
        int rows_per_block = group < kBlockRows ? kBlockRows / group : 1;
        int most_rows = 0;
        std::size_t num_items = 0, num_blocks = 0, num_floats = 0;
        Item* items = nullptr;
        int* counters = nullptr;
        // The same walk twice: to count, and to write down.
        for (int pass = 0; pass < 2; ++pass) {
            if (pass) {
                items = static_cast<Item*>(scratch(1, num_items * sizeof(Item) + 64));
                counters = static_cast<int*>(scratch(2, num_blocks * sizeof(int) + 64));
                num_items = num_blocks = num_floats = 0;
            }
            for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
                std::int64_t begin = call.row_starts[sequence], end = call.row_starts[sequence + 1];
                const std::int64_t* extent = call.extents + 2 * sequence;
                const std::int64_t* blocks = call.blocks + extent[0];
                std::int64_t most = (extent[1] - extent[0]) * call.pool.tiles_per_block * kLanes;
                std::int64_t row_blocks = (end - begin + rows_per_block - 1) / rows_per_block * call.pool.num_kv_heads;
                bool split = row_blocks < 4 * threads();
                for (std::int64_t first = begin; first < end; first += rows_per_block) {
                    std::int64_t count = end - first < rows_per_block ? end - first : rows_per_block, seen = 0;
                    for (std::int64_t row = first; row < first + count; ++row) {
                        if (call.limits[row] > seen) seen = call.limits[row];
                    }
                    if (seen > most) return false;
                    int rows = static_cast<int>(count) * group;
                    if (rows > most_rows) most_rows = rows;
                    for (int head = 0; head < call.pool.num_kv_heads; ++head) {
                        RowBlock block{blocks, head, first, rows, seen};
                        std::int64_t spans = num_spans(seen);
                        if (!split || spans <= 1) {
                            if (pass) items[num_items] = {block, -1, 0, nullptr};
                            ++num_items;
                            continue;
                        }
                        if (pass) counters[num_blocks] = static_cast<int>(spans);
                        for (std::int64_t span = 0; span < spans; ++span) {
                            if (pass) items[num_items] = {block, span, num_floats, counters + num_blocks};
                            ++num_items;
                        }
                        ++num_blocks;
                        num_floats += spans * state_floats(rows);
                    }
                }
            }
        }
        float* states = static_cast<float*>(scratch(3, num_floats * sizeof(float) + 64));
        // Every thread has a run of items, which lie one after the other in memory, and helps others when it is done.
        int count = threads();
        Queue* queues = static_cast<Queue*>(scratch(4, count * sizeof(Queue)));
        for (int t = 0; t < count; ++t) queues[t] = {num_items * t / count, num_items * (t + 1) / count};
        on_all_threads([&](int thread) {
            Memory memory = this->memory(most_rows);
            for (int other = 0; other < count; ++other) {
                Queue& queue = queues[(thread + other) % count];
                for (;;) {
                    std::size_t taken = std::atomic_ref(queue.next).fetch_add(1, std::memory_order_relaxed);
                    if (taken >= queue.stop) break;
                    work(items[taken], states, memory);
                }
            }
        });
        return true;
    }

    std::size_t state_floats(int rows) const {
        return static_cast<std::size_t>(rows) * value_size + (2 * rows + kLanes - 1) / kLanes * kLanes;
    }

    State state_at(float* at, int rows) const {
        return {at + static_cast<std::size_t>(rows) * value_size, at + static_cast<std::size_t>(rows) * value_size + rows, at};
    }

    void copy_state(const State& to, const State& from, int rows) const {
        std::memcpy(to.base, from.base, rows * sizeof(float));
        std::memcpy(to.sum, from.sum, rows * sizeof(float));
        std::memcpy(to.out, from.out, sizeof(float) * rows * value_size);
    }

    void work(const Item& item, float* states, const Memory& memory) const {
        const RowBlock& block = item.block;
        int rows = block.num_rows;
        gather_queries(block, memory.q);
        if (item.span < 0) {
            reset(memory.span, rows);
            for (std::int64_t span = 0; span < num_spans(block.seen); ++span) {
                attend_span(block, span, memory);
                merge_state(memory.span, memory.run, rows, value_size);
            }
            return finish(block, memory);
        }
        attend_span(block, item.span, memory);
        float* first = states + item.state;
        copy_state(state_at(first + item.span * state_floats(rows), rows), memory.run, rows);
        if (std::atomic_ref(*item.left).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        reset(memory.span, rows);
        for (std::int64_t span = 0; span < num_spans(block.seen); ++span) {
            merge_state(memory.span, state_at(first + span * state_floats(rows), rows), rows, value_size);
        }
        finish(block, memory);
    }
};

}  // namespace longhelix::ISA
