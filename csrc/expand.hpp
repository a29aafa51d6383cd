// Keys and values of all heads, made from the latents of a packed pool (MLA in its direct form, arXiv 2405.04434,
// section 2.1): a matrix product whose packed factor is the cache as it lies. A tile's latents are a panel of sixteen
// tokens; the rows that multiply it are those of the up-projection, one for each channel of a head's key and value. What
// comes out is a key's tile; values are turned.
#pragma once

#include <atomic>

#include "kernels.hpp"
#include "lanes.hpp"
#include "nvfp4.hpp"
#include "threads.hpp"
#include "turn.hpp"
#include "work.hpp"

namespace longhelix::ISA {

template <typename E>
struct Expand {
    static constexpr int kStep = E::kStep;
    // What stays in the second cache: so many tiles, and rows of the up-projection; of these, two tiles in the first.
    static constexpr int kGroupTiles = 8, kGroupRows = 24 * kRowTile;

    const Expansion& call;
    int latent_units, nope_size, value_size, head_rows;
    int num_rows;  // of the up-projection, all heads
    std::size_t latent_bytes, rope_bytes, key_bytes, latent_tile_bytes, made_tile_bytes;

    explicit Expand(const Expansion& expansion)
        : call(expansion),
          latent_units(expansion.latents.value_size / kStep),
          nope_size(expansion.made.key_size - (expansion.latents.key_size - expansion.latents.value_size)),
          value_size(expansion.made.value_size),
          head_rows(nope_size + value_size),
          num_rows(expansion.made.num_kv_heads * head_rows),
          latent_bytes(static_cast<std::size_t>(latent_units) * E::kRowBytes),
          rope_bytes(byte_of(expansion.latents.key_size) - latent_bytes),
          key_bytes(byte_of(expansion.made.key_size)),
          latent_tile_bytes(tile_bytes(expansion.latents)),
          made_tile_bytes(tile_bytes(expansion.made)) {}

    // Where a channel of a tile of keys begins.
    static std::size_t byte_of(int channel) { return static_cast<std::size_t>(channel / kStep) * E::kRowBytes; }

    const u8* stored_latent(std::int64_t tile) const {
        const Pool& pool = call.latents;
        std::int64_t number = tile_number(pool, 0, call.blocks[tile / pool.tiles_per_block], tile % pool.tiles_per_block);
        return pool.data + static_cast<std::size_t>(number) * latent_tile_bytes;
    }

    // Latents of the tiles that a thread makes, as numbers that products read.
    struct Group {
        const u8* latents[kGroupTiles];
        std::int64_t first;

        const u8* latent(std::int64_t tile) const { return latents[tile - first]; }
    };

    Group group_of(std::int64_t first, std::int64_t last) const {
        Group group{{}, first};
        std::size_t bytes = byte_of(call.latents.key_size);
        u8* expanded = is_expanded<E> ? static_cast<u8*>(scratch(2, kGroupTiles * bytes)) : nullptr;
        for (std::int64_t tile = first; tile < last; ++tile) {
            const u8*& latent = group.latents[tile - first];
            latent = stored_latent(call.first_tile + tile);
            if constexpr (is_expanded<E>) {
                u8* to = expanded + (tile - first) * bytes;
                expand_tile(latent, call.latents.key_size, 0, true, to);
                latent = to;
            }
        }
        return group;
    }

    u8* made(std::int64_t tile, int head) const {
        return call.made.data + static_cast<std::size_t>(tile_number(call.made, head, 0, tile)) * made_tile_bytes;
    }

    template <typename U>
    U* unit_rows(U* up, int row) const {
        return up + static_cast<std::ptrdiff_t>(row) * latent_units;
    }

    void prepare(std::int64_t row, u32* to) const {
        for (int c = 0; c < call.latents.value_size; c += kLanes) {
            E::from_floats(to + c / kStep, load_number(call.up.data, row * call.up.stride + c, call.up.number));
        }
    }

    // A unit row: kStep channels of sixteen tokens.
    void put(u8* to, const f32x16* channels) const {
        if constexpr (kStep == 1) {
            store_number(to, 0, call.latents.number, channels[0]);
        } else {
            std::uint16_t even[kLanes], odd[kLanes];
            store_bf16(even, channels[0]);
            store_bf16(odd, channels[1]);
            store(to, load_shorts(even) | load_shorts(odd) << 16);
        }
    }

    // kRowTile rows of the up-projection from `row` on, times V tiles. Values are left as keys are, in their place.
    template <int V>
    void multiply(const Group& group, const u32* up, int row, std::int64_t tile) const {
        const u8 *panels[V], *none[2] = {};
        for (int v = 0; v < V; ++v) panels[v] = group.latent(tile + v);
        f32x16 sums[kRowTile][V] = {};
        accumulate<E, kRowTile, V, false>(sums, unit_rows(up, row), latent_units, panels, latent_units, none);
        for (int r = 0; r < kRowTile && row + r < num_rows; r += kStep) {
            int head = (row + r) / head_rows, channel = (row + r) % head_rows;
            std::size_t place = channel < nope_size ? byte_of(channel) : key_bytes + byte_of(channel - nope_size);
            for (int v = 0; v < V; ++v) {
                f32x16 channels[kStep];
                for (int i = 0; i < kStep; ++i) channels[i] = sums[r + i][v];
                put(made(tile + v, head) + place, channels);
            }
        }
    }

    // A group's rows from `row` on, times tiles [group.first, last).
    void multiply_group(const Group& group, const u32* up, int row, std::int64_t last) const {
        int stop = row + kGroupRows < num_rows ? row + kGroupRows : num_rows;
        std::int64_t tile = group.first;
        for (; tile + 2 <= last; tile += 2) {
            for (int r = row; r < stop; r += kRowTile) multiply<2>(group, up, r, tile);
        }
        for (int r = row; r < stop && tile < last; r += kRowTile) multiply<1>(group, up, r, tile);
    }

    // The rotated key, which all heads share, and the values.
    void complete(const Group& group, std::int64_t tile) const {
        constexpr std::size_t kPanelBytes = kLanes / kStep * E::kRowBytes;
        const u8* rotated = group.latent(tile) + latent_bytes;
        for (int head = 0; head < call.made.num_kv_heads; ++head) {
            u8* to = made(tile, head);
            std::memcpy(to + byte_of(nope_size), rotated, rope_bytes);
            for (u8* panel = to + key_bytes; panel < to + key_bytes + byte_of(value_size); panel += kPanelBytes) {
                u8 raw[kPanelBytes];
                std::memcpy(raw, panel, kPanelBytes);
                turn_panel<E>(raw, panel);
            }
        }
    }

    void run() const {
        std::int64_t tiles = call.made.tiles_per_block;
        int padded = (num_rows + kRowTile - 1) / kRowTile * kRowTile;
        std::size_t row_bytes = static_cast<std::size_t>(latent_units) * 4;
        u32* up = static_cast<u32*>(scratch(1, padded * row_bytes));
        std::memset(unit_rows(up, num_rows), 0, (padded - num_rows) * row_bytes);
        on_all_threads([&](int thread) {
            for (int row = thread; row < num_rows; row += threads()) prepare(row, unit_rows(up, row));
        });
        std::int64_t next = 0;
        on_all_threads([&](int) {
            for (;;) {
                std::int64_t first = std::atomic_ref(next).fetch_add(kGroupTiles, std::memory_order_relaxed);
                if (first >= tiles) return;
                std::int64_t last = first + kGroupTiles < tiles ? first + kGroupTiles : tiles;
                Group group = group_of(first, last);
                for (int row = 0; row < num_rows; row += kGroupRows) multiply_group(group, up, row, last);
                done.multiplied.fetch_add((last - first) * kLanes * num_rows * call.latents.value_size,
                                          std::memory_order_relaxed);
                for (std::int64_t tile = first; tile < last; ++tile) complete(group, tile);
            }
        });
    }
};

}  // namespace longhelix::ISA
