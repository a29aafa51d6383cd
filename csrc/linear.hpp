// y = x W^T for packed weights, with what stands around it in a decoder: RMSNorm before, bias, activation, residual after.
//
// Every output is one chain of sums over the inputs in their order, whatever the number of rows or threads: a row's bits
// do not depend on its batch.
#pragma once

#include <algorithm>
#include <atomic>

#include "activations.hpp"
#include "bytes.hpp"
#include "kernels.hpp"
#include "lanes.hpp"
#include "packed_panel.hpp"
#include "runs.hpp"
#include "threads.hpp"
#include "work.hpp"

namespace longhelix::ISA {

constexpr int kScaleBlock = 32;

// row(0), ..., row(count - 1); few of them are done before other threads would begin.
template <typename F>
void each_row(std::int64_t count, F row) {
    if (count <= 4) {
        for (std::int64_t r = 0; r < count; ++r) row(r);
        return;
    }
    on_all_threads([&](int thread) {
        for (std::int64_t r = thread; r < count; r += threads()) row(r);
    });
}

// One row of a product's inputs, normalised where that is asked for.
template <Number kNumber>
struct Inputs {
    const void* data;
    std::int64_t from;
    const void* norm;
    float factor = 1.0f;

    Inputs(const Rows& x, std::int64_t row, std::int64_t depth, const void* norm, float norm_eps)
        : data(x.data), from(row * x.stride), norm(norm) {
        if (!norm) return;
        f32x16 squares{};
        for (std::int64_t c = 0; c < depth; c += kLanes) {
            f32x16 x = load_number(data, from + c, kNumber);
            squares = multiply_add(x, x, squares);
        }
        factor = 1.0f / __builtin_sqrtf(total(squares) / static_cast<float>(depth) + norm_eps);
    }

    // Sixteen from `c` on.
    f32x16 operator()(std::int64_t c) const {
        f32x16 x = load_number(data, from + c, kNumber);
        if (norm) {
            x = x * factor;
            round_to(kNumber, x);
            x = x * load_number(norm, c, kNumber);
            round_to(kNumber, x);
        }
        return x;
    }
};

// Packed weights times rows of bytes: the whole numbers that codes stand for.
struct Rounded : W8A8 {};

// What stands beside a row of bytes for each run of inputs that have one scale in the row and one in the weight.
struct RoundedSide {
    float scale, sum, scaled_sum;  // of the row, and of its bytes
    std::int32_t start;            // what sums of products start with
};

// The runs of a weight's inputs: f(run, its block, its first input, the one after its last).
template <typename F>
INLINE void each_run(const PackedPanel& panel, F f) {
    std::int64_t run = 0;
    for (std::int64_t block = 0; block < panel.num_blocks; ++block) {
        panel.each_run_of(block, [&](std::int64_t first, std::int64_t last) { f(run++, block, first, last); });
    }
}

inline std::int64_t num_runs(const PackedPanel& panel) {
    std::int64_t count = 0;
    each_run(panel, [&](std::int64_t run, std::int64_t, std::int64_t, std::int64_t) { count = run + 1; });
    return count;
}

// Whether panels are of codes.
template <typename E>
constexpr bool has_codes = is_packed<E> || std::is_same_v<E, Rounded>;

// The panel of a packed weight. Weights of other numbers have none.
template <typename E, bool = has_codes<E>>
struct PanelOf {
    explicit PanelOf(const Weight&) {}
};
template <typename E>
struct PanelOf<E, true> : PackedPanel {
    using PackedPanel::PackedPanel;
};

template <typename E>
struct Multiply {
    static constexpr int kStep = E::kStep;
    static constexpr int kBlockUnits = kScaleBlock / kStep;
    static constexpr std::size_t kBlockBytes = kBlockUnits * E::kRowBytes + kLanes * 4;

    static constexpr bool kPacked = is_packed<E>, kRounded = std::is_same_v<E, Rounded>;

    const Linear& call;
    PanelOf<E> panel_of;
    int units;       // unit rows of a panel
    int num_planes;  // that a row becomes, one after the other: their sum is the row
    std::size_t panel_bytes;
    int num_panels;  // of outputs
    int num_sides;   // of a row

    explicit Multiply(const Linear& linear)
        : call(linear),
          panel_of(linear.weight),
          units(static_cast<int>(linear.weight.depth / kStep)),
          num_planes(planes_of(linear.x.number)),
          panel_bytes(bytes_of_panel()),
          num_panels(static_cast<int>((linear.outputs + kLanes - 1) / kLanes)),
          num_sides(static_cast<int>(sides_of(linear.weight))) {}

    std::size_t bytes_of_panel() const {
        if constexpr (has_codes<E>) {
            return panel_of.bytes;
        } else if constexpr (E::kScaled) {
            return call.weight.depth / kScaleBlock * kBlockBytes;
        } else {
            return static_cast<std::size_t>(units) * E::kRowBytes + (E::kWhole ? kLanes * 4 : 0);
        }
    }

    // Three numbers of bfloat16 add up to one of float32, and two to one of float16.
    static int planes_of(Number number) {
        return !kPacked || number == Number::bfloat16 ? 1 : number == Number::float32 ? 3 : 2;
    }

    int row_units() const { return units * num_planes; }

    static constexpr std::size_t kLongRun = 4096;
    static constexpr int kPanelsAtOnce = 2;  // stay in the cache while all rows pass
    static constexpr int kPanelsToTake = 4;  // that a thread takes
    static constexpr std::int64_t kManyRows = 64;
    static constexpr std::int64_t kOpenRows = 48;  // from here on, codes of packed weights are read once for all rows
    static constexpr int kMostRows = (E::kScaled || has_codes<E>) && kRowTile > 6 ? 6 : kRowTile;

    // What stands beside a row's units: the sums of its scale blocks, or their scales.
    using Side = std::conditional_t<kRounded, RoundedSide, std::conditional_t<E::kWhole, RowScale, float>>;
    static std::int64_t sides_of(const Weight& weight) {
        if constexpr (kPacked) {
            return needs_sums<E>(weight) ? PackedPanel(weight).num_blocks : 0;
        }
        if constexpr (kRounded) return num_runs(PackedPanel(weight));
        return E::kScaled ? weight.depth / kScaleBlock : E::kWhole ? num_row_blocks(weight.depth) : 0;
    }

    // One row of x as units, normalised.
    void prepare(std::int64_t row, u32* to, Side* sides) const {
        if constexpr (E::kWhole && !kRounded) {
            if (call.x.number == Number::int8) return take(row, to, sides);
        }
        with_number(call.x.number, [&]<Number kNumber>() { prepare<kNumber>(row, to, sides); });
    }

    template <Number kNumber>
    void prepare(std::int64_t row, u32* to, Side* sides) const {
        std::int64_t depth = call.weight.depth;
        if constexpr (std::is_same_v<E, BFloat16> && kNumber == Number::bfloat16) {
            // Units are such a row's own bits.
            if (!call.norm) {
                const u8* from = static_cast<const u8*>(call.x.data) + row * call.x.stride * 2;
                std::memcpy(to, from, static_cast<std::size_t>(depth) * 2);
                return;
            }
        }
        Inputs<kNumber> inputs(call.x, row, depth, call.norm, call.norm_eps);
        if constexpr (kPacked) {
            for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
                f32x16 sum{};
                for (std::int64_t c = panel_of.start(block); c < panel_of.stop(block); c += kLanes) {
                    f32x16 x = inputs(c);
                    sum = sum + x;
                    for (int plane = 0; plane < num_planes; ++plane) {
                        f32x16 rounded = x;
                        round_to(Number::bfloat16, rounded);
                        E::from_floats(to + plane * units + c / kStep, rounded);
                        x = x - rounded;
                    }
                }
                if (num_sides) sides[block] = total(sum);
            }
        } else if constexpr (kRounded) {
            prepare_rounded(depth, inputs, to, sides);
        } else if constexpr (E::kWhole) {
            for (std::int64_t first = 0; first < depth; first += kRowBlock, ++sides) {
                i32x16 sum{};
                float scale = round_to_bytes(first, depth, inputs, [&](std::int64_t c, i32x16 whole) {
                    E::put(to, c, whole);
                    sum = sum + whole;
                });
                *sides = {scale, {E::start(sum)}};
            }
        } else {
            for (std::int64_t c = 0; c < depth; c += kLanes) {
                f32x16 x = inputs(c);
                E::from_floats(to + c / kStep, x);
                if constexpr (E::kScaled) {
                    round_to(Number::bfloat16, x);
                    float& sum = sides[c / kScaleBlock];
                    sum = (c % kScaleBlock ? sum : 0.0f) + total(x);
                }
            }
        }
    }

    template <typename F>
    void prepare_rounded(std::int64_t depth, const F& inputs, u32* to, RoundedSide* sides) const {
        std::int32_t sums[kRowBlock / kLanes];  // of sixteen inputs each
        float scale = 0.0f;
        std::int64_t known = 0;  // inputs that are rounded
        each_run(panel_of, [&](std::int64_t run, std::int64_t, std::int64_t first, std::int64_t last) {
            if (first == known) {
                scale = round_to_bytes(first, depth, inputs, [&](std::int64_t c, i32x16 whole) {
                    E::put(to, c, whole);
                    sums[c % kRowBlock / kLanes] = static_cast<std::int32_t>(total(to_floats(whole)));
                });
                known = block_stop(first, depth);
            }
            std::int32_t sum = 0;
            for (std::int64_t c = first; c < last; c += kLanes) sum += sums[c % kRowBlock / kLanes];
            sides[run] = {scale, static_cast<float>(sum), scale * static_cast<float>(sum), E::start_of(sum)};
        });
    }

    // One row of bytes as units.
    void take(std::int64_t row, u32* to, RowScale* sides) const {
        const u8* bytes = static_cast<const u8*>(call.x.data) + row * call.x.stride;
        const float* scales = call.scales + row * num_sides;
        for (std::int64_t first = 0; first < call.weight.depth; first += kRowBlock) {
            i32x16 sum{};
            for (std::int64_t c = first; c < block_stop(first, call.weight.depth); c += kLanes) {
                i32x16 whole = load_bytes<i32x16>(bytes + c);
                E::put(to, c, whole);
                sum = sum + whole;
            }
            *sides++ = {*scales++, {E::start(sum)}};
        }
    }

    // A block that is read later. One row takes narrow weights from memory a third faster so; with bfloat16, whose
    // panels are longer runs, the processor's own guesses are better.
    static void ask_for(const u8* block, std::size_t bytes) {
        if (bytes > kLongRun) return;
        for (std::size_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(block + byte, 0, 3);
    }

    // How far away the panel lies that is read after one of V.
    std::size_t panels_ahead(int panels) const { return call.activation.gated ? panels / 2 : panels; }

    // sums[r][v] = rows r of x times panels v; `ahead` are two halves of the panels that are read next.
    template <int R, int V, bool Ahead>
    void multiply(const u32* x, const Side* sides, const u8* const (&panels)[V], const u8* const (&ahead)[2],
                  f32x16 (&sums)[R][V]) const {
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) sums[r][v] = f32x16{};
        }
        if constexpr (kRounded) {
            static_assert(R == 1);  // for more rows, panels are opened
            multiply_rounded<R, V>(x, sides, panels, sums);
        } else if constexpr (kPacked) {
            multiply_packed<R, V>(x, sides, panels, sums);
        } else if constexpr (E::kWhole) {
            constexpr int kUnits = kRowBlock / kStep;
            for (int block = 0; block < num_sides; ++block) {
                int first = block * kUnits, count = units - first < kUnits ? units - first : kUnits;
                add_block<R, V, Ahead>(x + first, sides + block, panels, first, count, ahead[0], sums);
            }
            for (int v = 0; v < V; ++v) {
                f32x16 scale = load<f32x16>(panels[v] + static_cast<std::size_t>(units) * E::kRowBytes);
                for (int r = 0; r < R; ++r) sums[r][v] = product(sums[r][v], scale);
            }
        } else if constexpr (!E::kScaled) {
            accumulate<E, R, V, Ahead>(sums, x, units, panels, units, ahead);
        } else {
            for (int block = 0; block < num_sides; ++block) {
                f32x16 of_block[R][V] = {};
                const u8* at[V];
                for (int v = 0; v < V; ++v) {
                    at[v] = panels[v] + block * kBlockBytes;
                    if constexpr (R == 1) ask_for(at[v] + panels_ahead(V) * panel_bytes, kBlockBytes);
                }
                accumulate<E, R, V, false>(of_block, x + block * kBlockUnits, units, at, kBlockUnits, ahead);
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) {
                    const u8* scales = at[v] + kBlockUnits * E::kRowBytes;
                    f32x16 scale = load_f16(scales), offset = load_f16(scales + kLanes * 2);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        sums[r][v] = multiply_add(scale, of_block[r][v], sums[r][v]);
                        sums[r][v] = multiply_add(offset, splat(sides[r * num_sides + block]), sums[r][v]);
                    }
                }
            }
        }
    }

    template <int R, int V>
    void multiply_packed(const u32* x, const float* sides, const u8* const (&panels)[V], f32x16 (&sums)[R][V]) const {
        // Compilers unroll loops over short blocks if they know their length.
        switch (call.weight.block) {
            case 16: multiply_blocks<R, V, 16>(x, sides, panels, sums); break;
            case 32: multiply_blocks<R, V, 32>(x, sides, panels, sums); break;
            default: multiply_blocks<R, V, 0>(x, sides, panels, sums);
        }
        if (!call.weight.output_scales) return;
        for (int v = 0; v < V; ++v) scale_outputs(panels[v], v, sums);
    }

    template <int R, int V>
    void scale_outputs(const u8* panel, int v, f32x16 (&sums)[R][V]) const {
        f32x16 scale = load<f32x16>(panel + panel_bytes - kLanes * 4);
        for (int r = 0; r < R; ++r) sums[r][v] = sums[r][v] * scale;
    }

    // kBlock: inputs of whole scale blocks, or 0 for any number.
    template <int R, int V, int kBlock>
    void multiply_blocks(const u32* x, const float* sides, const u8* const (&panels)[V], f32x16 (&sums)[R][V]) const {
        BlockReader<E, V> reader(panel_of, call.weight, panels);
        for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
            std::int64_t first = panel_of.start(block), count = panel_of.stop(block) - first;
            reader.begin();
            if constexpr (R == 1) {
                for (int v = 0; v < V; ++v) ask_for(reader.at[v] + panels_ahead(V) * panel_bytes, panel_of.block_bytes(block));
            }
            f32x16 of_block[R][V] = {};
            add_codes<E, R, V, kBlock>(x + first / kStep, reader.at, count, of_block);
            reader.skip(count * panel_of.input_bytes);
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) add_block<R, V>(reader.scale(v), sides + block, v, of_block, sums);
            reader.skip(panel_of.side_bytes);
        }
    }

    // As `multiply_open`, of panels that are not open: one row reads the codes as they lie.
    template <int R, int V>
    void multiply_rounded(const u32* x, const RoundedSide* sides, const u8* const (&panels)[V], f32x16 (&sums)[R][V]) const {
        with_code(call.weight.number, [&]<typename Code>() {
            switch (call.weight.block) {
                case 16: multiply_codes<Code, R, V, 16>(x, sides, panels, sums); break;
                case 32: multiply_codes<Code, R, V, 32>(x, sides, panels, sums); break;
                default: multiply_codes<Code, R, V, 0>(x, sides, panels, sums);
            }
        });
        if (!call.weight.output_scales) return;
        for (int v = 0; v < V; ++v) scale_outputs(panels[v], v, sums);
    }

    template <typename Code, int R, int V, int kBlock>
    void multiply_codes(const u32* x, const RoundedSide* sides, const u8* const (&panels)[V], f32x16 (&sums)[R][V]) const {
        BlockReader<WholeOf<Code>, V> reader(panel_of, call.weight, panels);
        std::int64_t run = 0;
        for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
            std::int64_t start = panel_of.start(block), stop = panel_of.stop(block);
            reader.begin();
            for (int v = 0; v < V; ++v) ask_for(reader.at[v] + panels_ahead(V) * panel_bytes, panel_of.block_bytes(block));
            const u8* codes[V];
            for (int v = 0; v < V; ++v) codes[v] = reader.at[v];
            reader.skip((stop - start) * panel_of.input_bytes);
            panel_of.each_run_of(block, [&](std::int64_t first, std::int64_t last) __attribute__((always_inline)) {
                const u8* at[V];
                for (int v = 0; v < V; ++v) at[v] = codes[v] + (first - start) * panel_of.input_bytes;
                add_run<Fours<Code>, R, V, kBlock>(
                    x + first / kStep, sides + run++, at, last - first,
                    [&](int v) __attribute__((always_inline)) { return reader.scale(v); }, sums);
            });
            reader.skip(panel_of.side_bytes);
        }
    }

    using Open = OpenPanel<std::conditional_t<kRounded, W8A8, BFloat16>>;

    // As `multiply`, of open panels.
    template <int R, int V>
    void multiply_open(const u32* x, const Side* sides, const Open (&panels)[V], f32x16 (&sums)[R][V]) const {
        switch (call.weight.block) {
            case 16: multiply_open_blocks<R, V, 16>(x, sides, panels, sums); break;
            case 32: multiply_open_blocks<R, V, 32>(x, sides, panels, sums); break;
            default: multiply_open_blocks<R, V, 0>(x, sides, panels, sums);
        }
    }

    template <int R, int V, int kBlock>
    void multiply_open_blocks(const u32* x, const Side* sides, const Open (&panels)[V], f32x16 (&sums)[R][V]) const {
        auto add = [&](std::int64_t run, std::int64_t block, std::int64_t first, std::int64_t last) {
            const u8* at[V];
            for (int v = 0; v < V; ++v) at[v] = panels[v].codes(first);
            if constexpr (kRounded) {
                add_run<W8A8, R, V, kBlock>(
                    x + first / kStep, sides + run, at, last - first, [&](int v) { return panels[v].scale(block); }, sums);
            } else {
                f32x16 of_block[R][V] = {};
                add_codes<BFloat16, R, V, kBlock>(x + first / kStep, at, last - first, of_block);
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) add_block<R, V>(panels[v].scale(block), sides + block, v, of_block, sums);
            }
        };
        if constexpr (kRounded) {
            each_run(panel_of, add);
        } else {
            for (std::int64_t block = 0; block < panel_of.num_blocks; ++block) {
                add(block, block, panel_of.start(block), panel_of.stop(block));
            }
        }
    }

    // sums[r][v] += the products of a run of inputs, added in integers. F: how panels have the whole numbers of codes.
    // scale_of(v): of the run's block.
    template <typename F, int R, int V, int kBlock, typename ScaleOf>
    [[gnu::always_inline]] void add_run(const u32* x, const RoundedSide* sides, const u8* const (&at)[V], std::int64_t count,
                                        ScaleOf scale_of, f32x16 (&sums)[R][V]) const {
        const u8* none[2] = {};
        i32x16 whole[R][V];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) whole[r][v] = i32x16{} + sides[r * num_sides].start;
        }
        if (kBlock && count == kBlock) {
            accumulate<F, R, V, false>(whole, x, units, at, kBlock / kStep, none);
        } else {
            accumulate<F, R, V, false>(whole, x, units, at, static_cast<int>(count / kStep), none);
        }
        bool shifted = needs_sums_of_fours(call.weight);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            BlockScale scale = scale_of(v);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const RoundedSide& side = sides[r * num_sides];
                f32x16 sum = to_floats(whole[r][v]);
                if (call.weight.offsets) {
                    sums[r][v] = multiply_add(scale.shift, splat(side.scaled_sum), sums[r][v]);
                } else if (shifted) {
                    sum = multiply_add(scale.shift, splat(side.sum), sum);
                }
                sums[r][v] = multiply_add(scale.scale * side.scale, sum, sums[r][v]);
            }
        }
    }

    // of_block[r][v] += rows r times `count` codes of panels v, as F has them. kBlock: how many whole blocks have, if known.
    template <typename F, int R, int V, int kBlock>
    [[gnu::always_inline]] void add_codes(const u32* x, const u8* const (&at)[V], std::int64_t count,
                                          f32x16 (&of_block)[R][V]) const {
        const u8* none[2] = {};
        auto add = [&](int rows) {
            accumulate<F, R, V, false>(of_block, x, row_units(), at, rows, none);
            for (int plane = 1; plane < num_planes; ++plane) {
                accumulate<F, R, V, false>(of_block, x + plane * units, row_units(), at, rows, none);
            }
        };
        if (kBlock && count == kBlock) return add(kBlock / kStep);
        add(static_cast<int>(count / kStep));
    }

    // sums[r][v] += of_block[r][v], scaled, for a panel v.
    template <int R, int V>
    [[gnu::always_inline]] void add_block(const BlockScale& block, const float* sides, int v, const f32x16 (&of_block)[R][V],
                                          f32x16 (&sums)[R][V]) const {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            f32x16 side = num_sides ? splat(sides[r * num_sides]) : f32x16{}, sum = of_block[r][v];
            if (call.weight.offsets) {
                sums[r][v] = multiply_add(block.shift, side, sums[r][v]);
            } else if (num_sides) {
                sum = multiply_add(block.shift, side, sum);
            }
            sums[r][v] = multiply_add(block.scale, sum, sums[r][v]);
        }
    }

    // The products of `count` units from `first` on, added in integers, to `sums`. The same operations everywhere, none of
    // them fused: rows and weights give the same bits on every instruction set.
    template <int R, int V, bool Ahead>
    void add_block(const u32* x, const RowScale* sides, const u8* const (&panels)[V], int first, int count,
                   const u8* ahead, f32x16 (&sums)[R][V]) const {
        const u8* at[V];
        for (int v = 0; v < V; ++v) at[v] = panels[v] + static_cast<std::size_t>(first) * E::kRowBytes;
        ahead += static_cast<std::size_t>(first) * V * E::kRowBytes;
        const u8* halves[2] = {ahead, ahead + static_cast<std::size_t>(count / 2) * V * E::kRowBytes};
        i32x16 whole[R][V];
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < V; ++v) whole[r][v] = i32x16{} + sides[r * num_sides].starts[0];
        }
        accumulate<E, R, V, Ahead>(whole, x, units, at, count, halves);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            f32x16 scale = splat(sides[r * num_sides].scale);
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) sums[r][v] = sums[r][v] + product(to_floats(whole[r][v]), scale);
        }
    }

    // Up to sixteen numbers from `index` on: no more than the `left` that are there.
    static f32x16 load_some(const void* data, Number number, std::int64_t index, std::int64_t left) {
        if (left >= kLanes) return load_number(data, index, number);
        std::size_t bytes = number == Number::float32 ? 4 : 2;
        float lanes[kLanes] = {};
        std::memcpy(lanes, static_cast<const u8*>(data) + index * bytes, left * bytes);
        return load_number(lanes, 0, number);
    }

    void put(std::int64_t row, int panel, f32x16 value) const {
        std::int64_t column = static_cast<std::int64_t>(panel) * kLanes, left = call.outputs - column;
        if (call.residual.data) {
            // The product is rounded before it is added, as separate operations would.
            round_to(call.out_number, value);
            value += load_some(call.residual.data, call.residual.number, row * call.residual.stride + column, left);
        }
        std::int64_t to = row * call.outputs + column;
        if (left >= kLanes) return store_number(call.out, to, call.out_number, value);
        std::size_t bytes = call.out_number == Number::float32 ? 4 : 2;
        float lanes[kLanes];
        store_number(lanes, 0, call.out_number, value);
        std::memcpy(static_cast<u8*>(call.out) + to * bytes, lanes, left * bytes);
    }

    // `half`: 1 for the second half of the outputs, with a gate.
    f32x16 biased(f32x16 value, int half, int panel) const {
        if (!call.bias) return value;
        Number number = call.x.number == Number::int8 ? call.out_number : call.x.number;
        std::int64_t column = static_cast<std::int64_t>(panel) * kLanes;
        return value + load_some(call.bias, number, half * call.outputs + column, call.outputs - column);
    }

    // Where panel v of those that are read for panels of outputs from `panel` on begins.
    const u8* panel_at(int panel, int v) const {
        int number = call.activation.gated ? panel + v / 2 + v % 2 * num_panels : panel + v;
        return call.weight.data + static_cast<std::size_t>(number) * panel_bytes;
    }

    // Rows [row, row + R) that exist, times panels [panel, panel + V) of outputs.
    template <int R, int V, bool Ahead>
    void tile(const u32* x, const Side* sides, std::int64_t row, int panel) const {
        constexpr int kReads = V;
        const u8* panels[kReads];
        for (int v = 0; v < V; ++v) panels[v] = panel_at(panel, v);
        const u8* ahead[2] = {panels[0] + V * panel_bytes, panels[0] + V * panel_bytes + V * panel_bytes / 2};
        f32x16 sums[R][V];
        multiply<R, V, Ahead>(x, sides, panels, ahead, sums);
        finish<R, V>(row, panel, sums);
    }

    template <int R, int V>
    void finish(std::int64_t row, int panel, const f32x16 (&sums)[R][V]) const {
        for (int r = 0; r < R && row + r < call.num_rows; ++r) {
            if (!call.activation.gated) {
                for (int v = 0; v < V; ++v) put(row + r, panel + v, activated(biased(sums[r][v], 0, panel + v)));
                continue;
            }
            if constexpr (V % 2 == 0) {
                for (int v = 0; v < V; v += 2) {
                    f32x16 gate = biased(sums[r][v], 0, panel + v / 2), up = biased(sums[r][v + 1], 1, panel + v / 2);
                    put(row + r, panel + v / 2, gated(gate, up));
                }
            }
        }
    }

    // Every step is rounded, as separate operations would.
    f32x16 activated(f32x16 value) const {
        if (call.activation.function == Function::none) return value;
        round_to(call.out_number, value);
        return activate(call.activation.function, value);
    }

    f32x16 gated(f32x16 gate, f32x16 up) const {
        round_to(call.out_number, up);
        f32x16 value = activated(gate), input = gated_input(call.activation.function, up);
        round_to(call.out_number, value);
        round_to(call.out_number, input);
        return value * input;
    }

    template <int R, bool Ahead>
    void rows(const u32* x, const Side* sides, std::int64_t row, int first, int last) const {
        // A tile reads V panels; with a gate, V / 2 of gates and V / 2 of ups.
        constexpr int V = kRowTile == 12 && R <= 4 && !E::kScaled ? 4 : 2;
        int each = call.activation.gated ? V / 2 : V, panel = first;
        for (; panel + each <= last; panel += each) tile<R, V, Ahead>(x, sides, row, panel);
        for (; panel < last; ++panel) {
            if (call.activation.gated) {
                tile<R, 2, Ahead>(x, sides, row, panel);
            } else {
                tile<R, 1, Ahead>(x, sides, row, panel);
            }
        }
    }

    void run() const {
        if (call.num_rows == 0) return;
        std::int64_t padded = (call.num_rows + kMostRows - 1) / kMostRows * kMostRows;
        std::size_t unit_bytes = static_cast<std::size_t>(padded) * row_units() * 4;
        u8* memory = static_cast<u8*>(scratch(1, unit_bytes + static_cast<std::size_t>(padded * num_sides) * sizeof(Side) + 64));
        u32* x = reinterpret_cast<u32*>(memory);
        Side* sides = reinterpret_cast<Side*>(memory + unit_bytes);
        auto prepare_row = [&](std::int64_t row) { prepare(row, x + row * row_units(), sides + row * num_sides); };
        std::memset(x + call.num_rows * row_units(), 0,
                    static_cast<std::size_t>(padded - call.num_rows) * row_units() * 4);
        std::fill_n(sides + call.num_rows * num_sides, (padded - call.num_rows) * num_sides, Side{});
        each_row(call.num_rows, prepare_row);
        // Many rows and few panels: threads that take little at a time wait little for each other at the end.
        bool little = call.num_rows >= kManyRows && num_panels < 8 * kPanelsToTake * threads();
        int each = little ? kPanelsAtOnce : kPanelsToTake;
        Runs runs((num_panels + each - 1) / each);
        on_all_threads([&](int thread) {
            runs.take(thread, [&](std::int64_t item) {
                int first = static_cast<int>(item) * each, stop = first + each;
                all_rows(x, sides, first, stop < num_panels ? stop : num_panels);
            });
        });
    }

    // All rows times panels [first, stop) of outputs; rows are padded to a multiple of kMostRows.
    void all_rows(const u32* x, const Side* sides, int first, int stop) const {
        done.multiplied.fetch_add(call.num_rows * (stop - first) * (call.activation.gated ? 2 : 1) * kLanes * call.weight.depth,
                                  std::memory_order_relaxed);
        if constexpr (kRounded) {
            if (call.num_rows == 1) return rows<1, false>(x, sides, 0, first, stop);
        }
        if constexpr (has_codes<E>) {
            if (kRounded || call.num_rows >= kOpenRows) {
                int each = call.activation.gated ? 1 : 2;
                for (; first + each <= stop; first += each) open_rows<2>(x, sides, first);
                if (first < stop) open_rows<1>(x, sides, first);
                return;
            }
        }
        if constexpr (!kRounded) rows_of_panels(x, sides, first, stop);
    }

    void rows_of_panels(const u32* x, const Side* sides, int first, int stop) const {
        if (call.num_rows <= kMostRows) return some_rows(x, sides, 0, first, stop);
        for (int panel = first; panel < stop; panel += kPanelsAtOnce) {
            int last = panel + kPanelsAtOnce < stop ? panel + kPanelsAtOnce : stop;
            for (std::int64_t row = 0; row < call.num_rows; row += kMostRows) {
                some_rows(x + row * row_units(), sides + row * num_sides, row, panel, last);
            }
        }
    }

    // All rows times V panels, whose codes are read once.
    template <int V>
    void open_rows(const u32* x, const Side* sides, int panel) const {
        std::size_t bytes = Open::bytes(panel_of);
        u8* memory = static_cast<u8*>(scratch(8, V * bytes));
        Open panels[V];
        for (int v = 0; v < V; ++v) {
            panels[v] = {memory + v * bytes, call.weight.depth};
            if constexpr (kRounded) {
                open_fours(panel_of, call.weight, panel_at(panel, v), panels[v]);
            } else {
                open_pairs<E>(panel_of, call.weight, panel_at(panel, v), panels[v]);
            }
        }
        std::int64_t row = 0;
        for (; row + kMostRows <= call.num_rows; row += kMostRows) open_tile<kMostRows, V>(x, sides, row, panel, panels);
        std::int64_t left = call.num_rows - row;
        if (left > 2) return open_tile<kMostRows, V>(x, sides, row, panel, panels);
        if (left == 2) open_tile<2, V>(x, sides, row, panel, panels);
        if (left == 1) open_tile<1, V>(x, sides, row, panel, panels);
    }

    template <int R, int V>
    void open_tile(const u32* x, const Side* sides, std::int64_t row, int panel, const Open (&panels)[V]) const {
        f32x16 sums[R][V] = {};
        multiply_open<R, V>(x + row * row_units(), sides + row * num_sides, panels, sums);
        if (call.weight.output_scales) {
            for (int v = 0; v < V; ++v) scale_outputs(panel_at(panel, v), v, sums);
        }
        finish<R, V>(row, panel, sums);
    }

    // Whoever comes first asks for the next panels, where these are short: for other rows they are in the cache. Of long
    // panels, and with one row or two, which wait for nothing but memory, the processor's own guesses are better.
    void some_rows(const u32* x, const Side* sides, std::int64_t row, int first, int last) const {
        constexpr std::size_t kShort = 32 << 10;
        if (row == 0 && !call.activation.gated && panel_bytes <= kShort) return some_rows<true>(x, sides, row, first, last);
        some_rows<false>(x, sides, row, first, last);
    }

    template <bool Ahead>
    void some_rows(const u32* x, const Side* sides, std::int64_t row, int first, int last) const {
        std::int64_t left = call.num_rows - row;
        if (left == 1) return rows<1, false>(x, sides, row, first, last);
        if (left == 2) return rows<2, false>(x, sides, row, first, last);
        if (left <= 4 || kMostRows == 4) return rows<4, Ahead>(x, sides, row, first, last);
        if constexpr (kMostRows == 6) return rows<6, Ahead>(x, sides, row, first, last);
        if constexpr (kMostRows == 12) {
            if (left <= 8) return rows<8, Ahead>(x, sides, row, first, last);
            return rows<12, Ahead>(x, sides, row, first, last);
        }
    }
};

struct RoundRows {
    const Rounding& call;

    explicit RoundRows(const Rounding& rounding) : call(rounding) {}

    void run() const {
        each_row(call.num_rows, [&](std::int64_t row) {
            with_number(call.x.number, [&]<Number kNumber>() {
                Inputs<kNumber> inputs(call.x, row, call.depth, call.norm, call.norm_eps);
                std::int8_t* bytes = call.bytes + row * call.depth;
                float* scales = call.scales + row * num_row_blocks(call.depth);
                for (std::int64_t first = 0; first < call.depth; first += kRowBlock) {
                    *scales++ = round_to_bytes(first, call.depth, inputs, [&](std::int64_t c, i32x16 whole) {
                        store_bytes(bytes + c, whole);
                    });
                }
            });
        });
    }
};

}  // namespace longhelix::ISA
