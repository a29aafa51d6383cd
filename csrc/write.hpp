// Writing keys and values into the packed pool, quantised where its numbers are narrow.
#pragma once

#include <algorithm>

#include "kernels.hpp"
#include "lanes.hpp"
#include "nvfp4.hpp"
#include "threads.hpp"

namespace longhelix::ISA {

// The tile of a token.
INLINE u8* tile_of(const Pool& pool, std::int64_t slot, int head, std::size_t tile_bytes) {
    std::int64_t tiles = slot / kLanes;  // of one head, over all blocks
    std::int64_t number = tile_number(pool, head, tiles / pool.tiles_per_block, tiles % pool.tiles_per_block);
    return pool.data + static_cast<std::size_t>(number) * tile_bytes;
}

// Where one token's keys and values go, and how.
template <typename E>
struct TileWriter {
    Pool pool;
    std::size_t key_bytes, panel_bytes, values_bytes, tile_bytes;

    explicit TileWriter(const Pool& pool)
        : pool(pool),
          key_bytes(static_cast<std::size_t>(pool.key_size / E::kStep) * E::kRowBytes),
          panel_bytes(kLanes / E::kStep * E::kRowBytes),
          values_bytes(pool.shared ? 0 : panel_bytes * (pool.value_size / kLanes)),
          tile_bytes(longhelix::tile_bytes(pool)) {}

    u8* tile(std::int64_t slot, int head) const { return tile_of(pool, slot, head, tile_bytes); }

    // Both change `values` where numbers are narrow.
    void write_key(std::int64_t slot, int head, float* values) const {
        if constexpr (rotates_keys<E>) {
            if (!pool.shared) rotate_channels(values, pool.key_size);
        }
        u8* keys = tile(slot, head);
        int token = static_cast<int>(slot % kLanes);
        if constexpr (E::kScaled) shrink(values, pool.key_size, keys + key_bytes + values_bytes + token * 2);
        for (int c = 0; c < pool.key_size; ++c) {
            E::write(keys + E::offset(c / E::kStep, token, c % E::kStep), values[c], c / E::kStep);
        }
    }

    void write_value(std::int64_t slot, int head, float* values) const {
        u8* panels = tile(slot, head) + key_bytes;
        int token = static_cast<int>(slot % kLanes);
        if constexpr (E::kScaled) shrink(values, pool.value_size, panels + values_bytes + kLanes * 2 + token * 2);
        for (int c = 0; c < pool.value_size; ++c) {
            E::write(panels + c / kLanes * panel_bytes + E::offset(token / E::kStep, c % kLanes, token % E::kStep),
                     values[c], token / E::kStep);
        }
    }

    // Divides `values` by a scale that makes them fit, and stores the scale. Narrow numbers cannot hold inf or NaN, so a scale
    // of NaN stands for either.
    static void shrink(float* values, int size, u8* scale) {
        float zero = 0.0f;
        for (int c = 0; c < size; ++c) zero += values[c] * 0.0f;
        std::uint16_t bits = zero != 0.0f ? 0x7fc0 : scale_of(values, size);
        std::memcpy(scale, &bits, 2);
        // The inverse of a scale below the normal numbers may be infinite: vectors that small are zeros.
        float inverse = zero == 0.0f && bits ? 1.0f / bf16_to_float(bits) : 0.0f;
        for (int c = 0; c < size; ++c) values[c] = inverse ? values[c] * inverse : 0.0f;
    }

    // 0 if it would be below the normal numbers.
    static std::uint16_t scale_of(const float* values, int size) {
        if constexpr (requires { E::scale_of(values, size); }) {
            return E::scale_of(values, size);
        } else {
            float most = 0.0f;
            for (int c = 0; c < size; ++c) most = __builtin_fabsf(values[c]) > most ? __builtin_fabsf(values[c]) : most;
            // Rounded up, so that nothing is cut off.
            u32 bits = __builtin_bit_cast(u32, most / E::kLargest) + 0xffff;
            auto scale = static_cast<std::uint16_t>(bits >> 16);
            return bf16_to_float(scale) < 0x1p-126f ? 0 : scale;
        }
    }
};

template <>
struct TileWriter<Nvfp4> {
    Pool pool;
    std::size_t values_at, key_scales_at, value_scales_at, tile_bytes;

    explicit TileWriter(const Pool& pool)
        : pool(pool),
          values_at(nvfp4_code_bytes(pool.key_size)),
          key_scales_at(values_at + (pool.shared ? 0 : nvfp4_code_bytes(pool.value_size))),
          value_scales_at(key_scales_at + nvfp4_scale_bytes(pool.key_size)),
          tile_bytes(longhelix::tile_bytes(pool)) {}

    // Changes `values`.
    void write_key(std::int64_t slot, int head, float* values) const {
        if (!pool.shared) rotate_channels(values, pool.key_size);
        u8* tile = tile_of(pool, slot, head, tile_bytes);
        write(values, pool.key_size, tile, tile + key_scales_at, static_cast<int>(slot % kLanes), nvfp4_key_offset);
    }

    void write_value(std::int64_t slot, int head, const float* values) const {
        u8* tile = tile_of(pool, slot, head, tile_bytes);
        write(values, pool.value_size, tile + values_at, tile + value_scales_at, static_cast<int>(slot % kLanes),
              nvfp4_value_offset);
    }

    template <typename Offset>
    static void write(const float* values, int size, u8* codes, u8* scales, int token, Offset offset) {
        int exponent = nvfp4_exponent(values, size);
        scales[size + token] = static_cast<u8>(exponent);
        f32x16 inverse = splat(__builtin_bit_cast(float, exponent < 255 ? (254 - exponent) << 23 : 0));
        for (int c = 0; c < size; c += kLanes, codes += 128, scales += kLanes) {
            Nvfp4Block block = exponent < 255 ? nvfp4_block(load<f32x16>(values + c) * inverse) : Nvfp4Block{};
            std::int32_t of_channels[kLanes];
            store(of_channels, block.codes);
            scales[token] = block.scale;
            for (int i = 0; i < 8; ++i) {
                codes[offset(i, token)] = static_cast<u8>(of_channels[i] | of_channels[i + 8] << 4);
            }
        }
    }
};

// Rows over threads. Tokens of a tile stay on one thread, since narrow numbers of two tokens share bytes.
template <typename F>
void on_rows(std::int64_t num_rows, const std::int64_t* slots, F row) {
    int count = num_rows < 16 ? 1 : threads();
    auto own = [&](int thread) {
        for (std::int64_t r = 0; r < num_rows; ++r) {
            std::int64_t tile = slots[r] >= 0 ? slots[r] / kLanes : r;
            if (tile % count == thread) row(r);
        }
    };
    if (count == 1) return own(0);
    on_all_threads(own);
}

INLINE void widen(const Rows& rows, std::int64_t row, std::int64_t first, int size, float* to) {
    for (int c = 0; c < size; c += kLanes) {
        store(to + c, load_number(rows.data, row * rows.stride + first + c, rows.number));
    }
}

template <typename E>
struct WriteRows {
    const Write& call;
    TileWriter<E> writer;

    explicit WriteRows(const Write& write) : call(write), writer(write.pool) {}

    void run() const {
        const Pool& pool = call.pool;
        on_rows(call.num_rows, call.slots, [&](std::int64_t row) {
            if (call.slots[row] < 0) return;
            float* values = static_cast<float*>(scratch(0, sizeof(float) * (pool.key_size + pool.value_size)));
            for (int head = 0; head < pool.num_kv_heads; ++head) {
                widen(call.k, row, static_cast<std::int64_t>(head) * pool.key_size, pool.key_size, values);
                writer.write_key(call.slots[row], head, values);
                if (pool.shared) continue;
                widen(call.v, row, static_cast<std::int64_t>(head) * pool.value_size, pool.value_size, values);
                writer.write_value(call.slots[row], head, values);
            }
        });
    }
};

template <typename E>
struct RotateRows {
    const Rotate& call;
    TileWriter<E> writer;
    int size;  // channels of a head

    explicit RotateRows(const Rotate& rotate) : call(rotate), writer(rotate.pool), size(rotate.pool.key_size) {}

    void round_all(float* values) const {
        for (int c = 0; c < size; c += kLanes) {
            f32x16 lanes = load<f32x16>(values + c);
            round_to(call.qkv.number, lanes);
            store(values + c, lanes);
        }
    }

    // One head in place: norm, then channel r is rotated with channel R + r; each rounded as if stored.
    void rotate(const float* cos, const float* sin, const void* norm, float* head) const {
        if (norm) {
            f32x16 squares{};
            for (int c = 0; c < size; c += kLanes) {
                f32x16 x = load<f32x16>(head + c);
                squares = multiply_add(x, x, squares);
            }
            float factor = 1.0f / __builtin_sqrtf(total(squares) / static_cast<float>(size) + call.norm_eps);
            for (int c = 0; c < size; c += kLanes) {
                f32x16 x = load<f32x16>(head + c) * factor;
                round_to(call.qkv.number, x);
                store(head + c, x * load_number(norm, c, call.qkv.number));
            }
            round_all(head);
        }
        int pairs = call.num_pairs;
        for (int r = 0; r < pairs; ++r) {
            float first = head[r], second = head[pairs + r];
            head[r] = first * cos[r] - second * sin[r];
            head[pairs + r] = second * cos[r] + first * sin[r];
        }
        round_all(head);
    }

    void run() const {
        int queries = call.num_query_heads, keys = call.pool.num_kv_heads;
        on_rows(call.num_rows, call.slots, [&](std::int64_t row) {
            float* head = static_cast<float*>(scratch(0, sizeof(float) * size));
            const float *cos = call.cos + row * call.num_pairs, *sin = call.sin + row * call.num_pairs;
            for (int h = 0; h < queries; ++h) {
                widen(call.qkv, row, static_cast<std::int64_t>(h) * size, size, head);
                rotate(cos, sin, call.q_norm, head);
                for (int c = 0; c < size; c += kLanes) {
                    store_number(call.q, (row * queries + h) * size + c, call.qkv.number, load<f32x16>(head + c));
                }
            }
            if (call.slots[row] < 0) return;
            for (int h = 0; h < keys; ++h) {
                widen(call.qkv, row, static_cast<std::int64_t>(queries + h) * size, size, head);
                rotate(cos, sin, call.k_norm, head);
                writer.write_key(call.slots[row], h, head);
                widen(call.qkv, row, static_cast<std::int64_t>(queries + keys + h) * size, size, head);
                writer.write_value(call.slots[row], h, head);
            }
        });
    }
};

}  // namespace longhelix::ISA
