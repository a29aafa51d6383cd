// Attention of a row block over one span of its keys.
//
// The rows of a sequence that share a KV head (its query rows times the heads of the group) are taken in *row blocks*.
// A row block goes over a span in *strips* of 256 tokens: scores of the strip, its maximum, the weights, and their
// product with the values, added to a running state.
#pragma once

#include "kernels.hpp"
#include "lanes.hpp"
#include "nvfp4.hpp"
#include "threads.hpp"
#include "turn.hpp"
#include "weigh.hpp"
#include "work.hpp"

namespace longhelix::ISA {

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

template <typename E>
struct AttendSpan {
    static constexpr int kStep = E::kStep, kPlanes = E::kPlanes;
    static constexpr int kMostRows = kRowTile / kPlanes;
    // Products ask the memory for the next strip while they read this one. Expanded tiles are in the cache.
    static constexpr bool kAhead = !is_expanded<E>;

    const Attention& call;
    int group, key_size, value_size, key_units;  // of a plane
    std::size_t key_bytes, panel_bytes, tile_bytes;

    explicit AttendSpan(const Attention& attention)
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
        std::int64_t from;  // the first token that one of them sees: blocks that end before it are not read
        std::int64_t seen;  // the largest limit
    };

    // Tokens [hidden, seen) that rows see, counted from the first token of a strip or of a tile.
    struct Sight {
        const std::int64_t* hidden;
        const std::int64_t* seen;
    };

    // What a thread works with; rows are padded with zeros to whole row tiles.
    struct Memory {
        u32* q;                     // (rows, planes, key_units)
        RowScale* scales;           // (rows), of q
        float* scores;              // (rows at once, 256)
        u32* weights;               // (rows at once, planes, 256 / kStep)
        float* value_scales;        // (2, 256): of all tokens of a strip, and of those that a row sees
        u8* values;                 // one tile's values, with the tokens after the last one as zeros
        u8* turned;                 // values of a strip made from shared keys
        u8* expanded;               // tiles of a strip whose numbers are not read as they are stored
        State run, span;
    };

    struct Strip {
        const u8* tiles[kStripTiles];
        const u8* values[kStripTiles];
        // What to ask the memory for while a tile's keys, and its values, are read: the next strip, in the order of its
        // addresses, half of it during the keys.
        const u8* ahead_keys[kStripTiles];
        const u8* ahead_values[kStripTiles];
        int num_tiles;
    };

    int padded_rows(int rows) const { return (rows + kRowTile - 1) / kRowTile * kRowTile; }

    Memory memory(int rows) const {
        std::size_t padded = padded_rows(rows), turned = call.pool.shared ? kStripTiles * values_bytes() : 0;
        std::size_t expanded = is_expanded<E> ? kStripTiles * number_bytes() : 0;
        std::size_t strip_bytes = kRowTile * kStripTokens * 4, state_bytes = padded * value_size * 4;
        std::size_t sizes[] = {padded * kPlanes * key_units * 4, padded * sizeof(RowScale), strip_bytes, strip_bytes,
                               2 * kStripTokens * 4, values_bytes(), turned, expanded, padded * 4, padded * 4,
                               state_bytes, padded * 4, padded * 4, state_bytes};
        constexpr int kPieces = sizeof sizes / sizeof *sizes;
        std::size_t bytes = 0;
        for (std::size_t& size : sizes) bytes += size = (size + 63) / 64 * 64;
        u8 *at = static_cast<u8*>(scratch(0, bytes)), *pieces[kPieces];
        for (int i = 0; i < kPieces; ++i) {
            pieces[i] = at;
            at += sizes[i];
        }
        auto floats = [&](int i) { return reinterpret_cast<float*>(pieces[i]); };
        return {reinterpret_cast<u32*>(pieces[0]),
                reinterpret_cast<RowScale*>(pieces[1]),
                floats(2),
                reinterpret_cast<u32*>(pieces[3]),
                floats(4),
                pieces[5],
                pieces[6],
                pieces[7],
                {floats(8), floats(9), floats(10)},
                {floats(11), floats(12), floats(13)}};
    }

    std::size_t values_bytes() const { return panel_bytes * (value_size / kLanes); }

    const u8* tile(const RowBlock& block, std::int64_t index) const {
        const Pool& pool = call.pool;
        std::int64_t id = block.blocks[index / pool.tiles_per_block];
        std::int64_t number = tile_number(pool, block.head, id, index % pool.tiles_per_block);
        return pool.data + static_cast<std::size_t>(number) * tile_bytes;
    }

    // numbers(c), for every sixteenth channel of a query, to units.
    template <typename F>
    RowScale to_units(u32* to, F numbers) const {
        if constexpr (E::kWhole) {
            return E::from_floats(to, key_units, key_size, numbers);
        } else {
            for (int c = 0; c < key_size; c += kLanes) E::from_floats(to + c / kStep, numbers(c));
            return {};
        }
    }

    void gather_queries(const RowBlock& block, const Memory& memory) const {
        for (int r = 0; r < padded_rows(block.num_rows); ++r) {
            u32* to = memory.q + static_cast<std::ptrdiff_t>(r) * kPlanes * key_units;
            if (r >= block.num_rows) {
                std::memset(to, 0, kPlanes * key_units * 4);
                memory.scales[r] = {};
                continue;
            }
            std::int64_t from = (block.first_row + r / group) * call.q.stride +
                                static_cast<std::int64_t>(block.head * group + r % group) * key_size;
            auto numbers = [&](int c) { return load_number(call.q.data, from + c, call.q.number); };
            if constexpr (rotates_keys<E>) {
                // Scores have not been written yet: they have room for 1,024 numbers.
                float* query = memory.scores;
                for (int c = 0; c < key_size; c += kLanes) store(query + c, numbers(c));
                if (!call.pool.shared) rotate_channels(query, key_size);
                memory.scales[r] = to_units(to, [&](int c) { return load<f32x16>(query + c); });
            } else {
                memory.scales[r] = to_units(to, numbers);
            }
        }
    }

    std::int64_t first_token(std::int64_t row) const { return call.firsts ? call.firsts[row] : 0; }

    // Of a row that sees nothing it is 0.
    std::int64_t limit(std::int64_t row) const { return first_token(row) < call.limits[row] ? call.limits[row] : 0; }

    // Scores of R rows and V tiles, masked where a row sees nothing (relative to the first tile's first token). They are
    // powers of 2: log2(e) is part of the scale.
    template <int R, int V, bool Ahead>
    void score(const u32* q, const RowScale* scales, const u8* const (&tiles)[V], const u8* const (&ahead)[2],
               const Sight& sight, float* scores) const {
        auto sums = Sums<E, R, V>::from(scales);
        accumulate<E, R * kPlanes, V, Ahead>(sums.of, q, key_units, tiles, key_units, ahead);
        float scale = call.scale * kLog2e;
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            f32x16 factor = splat(scale);
            if constexpr (E::kScaled) factor = factor * load_bf16(tiles[v] + number_bytes());
            i32x16 lanes = lane_indices() + v * kLanes;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                f32x16 score = sums.value(r, v) * (E::kWhole ? factor * scales[r].scale : factor);
                if (call.cap != 0) score = capped(score);
                int visible = clamp(sight.seen[r]), hidden = clamp(sight.hidden[r]);
                if (visible < (v + 1) * kLanes) score = choose(lanes < visible, score, splat(kMinusInfinity));
                if (hidden > v * kLanes) score = choose(lanes < hidden, splat(kMinusInfinity), score);
                store(scores + r * kStripTokens + v * kLanes, score);
            }
        }
    }

    // cap * tanh(score / cap) of powers of 2; e^-|2 x| cannot overflow.
    f32x16 capped(f32x16 score) const {
        float cap = call.cap * kLog2e;
        auto negative = score < 0.0f;
        f32x16 small = exp2(choose(negative, score, -score) * (2.0f / call.cap));
        f32x16 size = (splat(1.0f) - small) / (small + 1.0f) * cap;
        return choose(negative, -size, size);
    }

    // Of a tile's keys and values as products read them. Its scales follow, where it has any.
    std::size_t number_bytes() const { return key_bytes + (call.pool.shared ? 0 : values_bytes()); }

    INLINE int clamp(std::int64_t tokens) { return tokens < kStripTokens ? static_cast<int>(tokens) : kStripTokens; }

    std::size_t value_scales_offset() const { return call.pool.shared ? 0 : kLanes * 2; }

    // Of a strip's tokens [hidden, seen); 0 for the others.
    void gather_value_scales(const u8* const* tiles, int num_tiles, int hidden, int seen, float* scales) const {
        for (int t = 0; t < num_tiles; ++t) {
            f32x16 scale = load_bf16(tiles[t] + number_bytes() + value_scales_offset());
            // The scale of a token that was never written may be anything.
            i32x16 token = lane_indices() + t * kLanes;
            store(scales + t * kLanes, choose(token < hidden, f32x16{}, choose(token < seen, scale, f32x16{})));
        }
    }

    // Scores of R rows of a strip to weights, as units.
    template <int R>
    void weigh_rows(const Strip& strip, const Sight& sight, int num_tiles, const State& run, const Memory& memory,
                    RowScale* scales, float* shrink) const {
        for (int r = 0; r < R; ++r) {
            float* scores = memory.scores + r * kStripTokens;
            u32* units = memory.weights + r * kPlanes * (kStripTokens / kStep);
            int hidden = clamp(sight.hidden[r]), seen = clamp(sight.seen[r]);
            bool all = hidden == 0 && seen == kStripTokens;
            float* value_scales = memory.value_scales + (all ? 0 : kStripTokens);
            if (E::kScaled && !all) gather_value_scales(strip.tiles, num_tiles, hidden, seen, value_scales);
            scales[r] = weigh<E>(scores, num_tiles, value_scales, units, run, r, shrink[r]);
        }
    }

    // Adds weights times values to the state: R rows, V * 16 channels from `channel` on.
    template <int R, int V, bool Ahead>
    void add_values(const u8* const* values, const u8* const* next, int num_tiles, int channel, const u32* weights,
                    const RowScale* scales, const float* shrink, float* out) const {
        auto sums = Sums<E, R, V>::from(scales);
        std::size_t first = channel / kLanes * panel_bytes;
        for (int t = 0; t < num_tiles; ++t) {
            const u8* panels[V];
            for (int v = 0; v < V; ++v) panels[v] = values[t] + first + v * panel_bytes;
            const u8* ahead[2] = {next[t] + first, next[t] + first + V * panel_bytes / 2};
            accumulate<E, R * kPlanes, V, Ahead>(sums.of, weights + t * (kLanes / kStep), kStripTokens / kStep, panels,
                                                 kLanes / kStep, ahead);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) {
                float* to = out + static_cast<std::ptrdiff_t>(r) * value_size + channel + v * kLanes;
                store(to, multiply_add(sums.value(r, v), splat(scales[r].scale), load<f32x16>(to) * shrink[r]));
            }
        }
    }

    // R rows from `row` of the block over one strip.
    template <int R, bool Ahead>
    void attend_rows(const RowBlock& block, const Strip& strip, std::int64_t start, int row, const Memory& memory) const {
        // As many chains of sums as hide the latency of one, and no more than there are registers.
        constexpr int kRows = R * kPlanes;
        constexpr int kTiles = kRowTile < 12 ? 1 : kRows <= (E::kWhole ? 6 : 4) ? 4 : 2;
        constexpr int kPanels = kRowTile < 12 ? 1 : kRows <= 6 ? 4 : 2;
        std::int64_t hidden[R] = {}, seen[R] = {}, most = 0;
        for (int r = 0; r < R && row + r < block.num_rows; ++r) {
            std::int64_t of_row = block.first_row + (row + r) / group, first = first_token(of_row);
            if (limit(of_row) <= start) continue;
            seen[r] = limit(of_row) - start;
            hidden[r] = first > start ? first - start : 0;
            if (seen[r] > most) most = seen[r];
        }
        if (most == 0) return;
        int num_tiles = (clamp(most) + kLanes - 1) / kLanes;
        const u32* q = memory.q + static_cast<std::ptrdiff_t>(row) * kPlanes * key_units;
        int t = 0;
        std::int64_t not_yet[R], left[R];
        auto rest = [&] {
            for (int r = 0; r < R; ++r) {
                not_yet[r] = hidden[r] > t * kLanes ? hidden[r] - t * kLanes : 0;
                left[r] = seen[r] > t * kLanes ? seen[r] - t * kLanes : 0;
            }
            return Sight{not_yet, left};
        };
        auto score_tiles = [&]<int V>() {
            const u8* tiles[V];
            for (int v = 0; v < V; ++v) tiles[v] = strip.tiles[t + v];
            const u8* middle = V > 1 ? strip.ahead_keys[t + V / 2] : strip.ahead_keys[t] + tile_bytes / 4;
            const u8* ahead[2] = {strip.ahead_keys[t], middle};
            score<R, V, Ahead>(q, memory.scales + row, tiles, ahead, rest(), memory.scores + t * kLanes);
        };
        for (; t + kTiles <= num_tiles; t += kTiles) score_tiles.template operator()<kTiles>();
        if constexpr (kTiles > 1) {
            for (; t < num_tiles; ++t) score_tiles.template operator()<1>();
        }
        State run{memory.run.base + row, memory.run.sum + row,
                  memory.run.out + static_cast<std::ptrdiff_t>(row) * value_size};
        float shrink[R];
        RowScale scales[R];
        weigh_rows<R>(strip, {hidden, seen}, num_tiles, run, memory, scales, shrink);
        int channel = 0;
        for (; channel + kPanels * kLanes <= value_size; channel += kPanels * kLanes) {
            add_values<R, kPanels, Ahead>(strip.values, strip.ahead_values, num_tiles, channel, memory.weights, scales,
                                          shrink, run.out);
        }
        for (; channel < value_size; channel += kLanes) {
            add_values<R, 1, Ahead>(strip.values, strip.ahead_values, num_tiles, channel, memory.weights, scales, shrink,
                                          run.out);
        }
    }

    // A tile of the strip as numbers that products read.
    const u8* expanded(const u8* stored, int t, const Memory& memory) const {
        u8* to = memory.expanded + t * number_bytes();
        expand_tile(stored, key_size, value_size, call.pool.shared, to);
        return to;
    }

    void attend_strip(const RowBlock& block, std::int64_t start, std::int64_t stop, const Memory& memory) const {
        Strip strip;
        std::int64_t first = start / kLanes, last = (block.seen + kLanes - 1) / kLanes - 1;
        strip.num_tiles = static_cast<int>((stop - start + kLanes - 1) / kLanes);
        // Tiles below the first token that is seen are not read. Their weights are 0, and any values do.
        int unread = block.from > start ? static_cast<int>(block.from / kLanes - first) : 0;
        for (int t = 0; t < strip.num_tiles; ++t) {
            strip.tiles[t] = tile(block, first + (t < unread ? unread : t));
            if constexpr (is_expanded<E>) strip.tiles[t] = expanded(strip.tiles[t], t, memory);
            strip.values[t] = strip.tiles[t] + key_bytes;
            if (call.pool.shared) {
                u8* turned = memory.turned + t * values_bytes();
                turn(strip.tiles[t], turned);
                strip.values[t] = turned;
            }
        }
        if constexpr (E::kScaled) {
            bool whole = stop - start == kStripTokens;
            if (whole) gather_value_scales(strip.tiles, kStripTiles, 0, kStripTokens, memory.value_scales);
        }
        std::size_t half = tile_bytes / 2;
        for (int t = 0; t < strip.num_tiles; ++t) {
            std::int64_t next = first + kStripTiles + t / 2;
            strip.ahead_keys[t] = (next <= last ? tile(block, next) : strip.tiles[t]) + t % 2 * half;
            next += kStripTiles / 2;
            strip.ahead_values[t] = (next <= last ? tile(block, next) : strip.tiles[t]) + t % 2 * half;
            if constexpr (E::kScaled) {
                next = first + kStripTiles + t;
                if (next <= last) __builtin_prefetch(tile(block, next) + number_bytes(), 0, 3);
            }
            if constexpr (is_expanded<E>) {
                next = first + kStripTiles + t;
                for (std::size_t i = 0; next <= last && i < tile_bytes; i += 64) {
                    __builtin_prefetch(tile(block, next) + i, 0, 2);
                }
            }
        }
        if (stop == block.seen && stop % kLanes) {
            // Tokens after the last one may hold anything, and 0 * NaN is NaN.
            u8* values = memory.values;
            int t = strip.num_tiles - 1;
            std::memcpy(values, strip.values[t], values_bytes());
            clear(values, static_cast<int>(stop % kLanes));
            strip.values[t] = values;
        }
        for (int t = 0; t < unread; ++t) strip.values[t] = strip.values[unread];
        int rows = block.num_rows, row = 0;
        if constexpr (kMostRows == 6) {
            auto sixes = [&] { return rows - row > 8 || rows - row == 5 || rows - row == 6; };
            for (; sixes(); row += 6) attend_rows<6, kAhead>(block, strip, start, row, memory);
            if (rows - row == 3) return attend_rows<3, kAhead>(block, strip, start, row, memory);
        }
        if constexpr (kMostRows == 12) {
            // Whoever comes first asks for the next strip; for the others this one is in the cache.
            if (rows > 12 && rows <= 16) {
                attend_rows<8, kAhead>(block, strip, start, 0, memory);
                return attend_rows<8, false>(block, strip, start, 8, memory);
            }
            if (rows > 8) {
                attend_rows<12, kAhead>(block, strip, start, 0, memory);
                for (row = 12; rows - row > 8; row += 12) attend_rows<12, false>(block, strip, start, row, memory);
                if (rows <= row) return;
            }
            if (rows - row > 6) return attend_rows<8, kAhead>(block, strip, start, row, memory);
            if (rows - row > 4) return attend_rows<6, kAhead>(block, strip, start, row, memory);
            if (rows - row == 3) return attend_rows<3, kAhead>(block, strip, start, row, memory);
        }
        for (; rows - row > 2; row += 4) attend_rows<4, kAhead>(block, strip, start, row, memory);
        if (rows - row == 2) return attend_rows<2, kAhead>(block, strip, start, row, memory);
        if (rows - row == 1) return attend_rows<1, kAhead>(block, strip, start, row, memory);
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

    // The state of one span, in memory.run.
    void attend(const RowBlock& block, std::int64_t span, const Memory& memory) const {
        reset_state(memory.run, padded_rows(block.num_rows), value_size);
        std::int64_t stop = span_start(span + 1) < block.seen ? span_start(span + 1) : block.seen;
        std::int64_t begin = block.from / kStripTokens * kStripTokens;
        if (begin < span_start(span)) begin = span_start(span);
        done.attended.fetch_add(block.num_rows * (stop - begin), std::memory_order_relaxed);
        for (std::int64_t start = begin; start < stop; start += kStripTokens) {
            attend_strip(block, start, start + kStripTokens < stop ? start + kStripTokens : stop, memory);
        }
    }
};

}  // namespace longhelix::ISA
