// Rows of a weight as panels, laid out and quantised while they are read.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear.hpp"

namespace longhelix::ISA {

// Sixteen rows of `units` units of 32 bits, a multiple of four: column by column, as a matrix is transposed. All of a
// row's units are read before the next row's: rows are often whole pages apart, where a cache holds few of them.
INLINE void turn_rows(const u8* const (&rows)[kLanes], int units, u8* columns) {
    using Four [[gnu::vector_size(16)]] = u32;
    for (int lane = 0; lane < kLanes; lane += 4) {
        for (int unit = 0; unit < units; unit += 4) {
            Four a = load<Four>(rows[lane] + unit * 4), b = load<Four>(rows[lane + 1] + unit * 4);
            Four c = load<Four>(rows[lane + 2] + unit * 4), d = load<Four>(rows[lane + 3] + unit * 4);
            Four ab[] = {__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7)};
            Four cd[] = {__builtin_shufflevector(c, d, 0, 4, 1, 5), __builtin_shufflevector(c, d, 2, 6, 3, 7)};
            u8* to = columns + unit * 64 + lane * 4;
            for (int i = 0; i < 2; ++i, to += 128) {
                store(to, __builtin_shufflevector(ab[i], cd[i], 0, 1, 4, 5));
                store(to + 64, __builtin_shufflevector(ab[i], cd[i], 2, 3, 6, 7));
            }
        }
    }
}

// bfloat16 in the high halves of lanes, to nearest even; NaN stays. The instruction that narrows takes the smallest
// numbers for zeros.
INLINE u32x16 rounded_to_bf16(f32x16 value) {
    u32x16 bits = as<u32x16>(value);
    return choose(value != value, bits | 0x400000u, bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

// The numbers of a scale block for each lane, as E stores them, with float16 scales and offsets.
template <typename E>
struct Quantised {
    static constexpr int kSteps = std::is_same_v<E, Int8> ? 127 : 15;

    u32x16 codes[kScaleBlock];
    std::uint16_t sides[2 * kLanes];

    explicit Quantised(const float (&columns)[kScaleBlock][kLanes]) {
        f32x16 least = column(columns, 0), most = least, strange{};
        for (int i = 0; i < kScaleBlock; ++i) {
            f32x16 values = column(columns, i);
            least = choose(values < least, values, least);
            most = choose(values > most, values, most);
            strange = choose(values != values, values, strange);
        }
        constexpr bool kSigned = std::is_same_v<E, Int8>;
        f32x16 spread = kSigned ? without_sign(choose(-least > most, least, most)) : most - least;
        store_f16(sides, choose(strange != strange, strange, spread / static_cast<float>(kSteps)));
        f32x16 scale = load_f16(sides);
        store_f16(sides + kLanes, kSigned ? splat(0.0f) : least + scale * 8.0f);
        f32x16 divisor = choose(scale > 1e-12f, scale, splat(1e-12f));
        f32x16 first = splat(kSigned ? -127.0f : 0.0f), last = splat(kSigned ? 127.0f : 15.0f);
        for (int i = 0; i < kScaleBlock; ++i) {
            f32x16 values = column(columns, i);
            f32x16 quotients = (kSigned ? values : values - least) / divisor;
            quotients = choose(quotients > first, quotients, first);  // NaN, too
            quotients = choose(quotients < last, quotients, last);
            // What is added leaves no bits below the whole numbers, and these in the lowest ones.
            i32x16 numbers = as<i32x16>(quotients + 0x1.8p23f) - 0x4b400000;
            codes[i] = as<u32x16>(kSigned ? magnitude_and_sign(numbers) : numbers);
        }
    }

    INLINE f32x16 column(const float (&columns)[kScaleBlock][kLanes], int i) { return load<f32x16>(columns[i]); }
    INLINE f32x16 without_sign(f32x16 values) { return as<f32x16>(as<u32x16>(values) & 0x7fffffffu); }
    INLINE i32x16 magnitude_and_sign(i32x16 numbers) { return choose(numbers < 0, -numbers + 128, numbers); }

    // A unit row: its two numbers of each lane, in 16 bits.
    u32x16 pairs(int row) const { return codes[2 * row] | codes[2 * row + 1] << 8; }

    // Two unit rows, as `byte_offset` has them.
    static void store_rows(u8* to, u32x16 even, u32x16 odd) {
        std::uint16_t both[2][kLanes];
        narrow(both[0], even, shorts), narrow(both[1], odd, shorts);
        for (int lane = 0; lane < kLanes; lane += 4, to += 16) {
            std::memcpy(to, both[0] + lane, 8);
            std::memcpy(to + 8, both[1] + lane, 8);
        }
    }

    static Shorts shorts(Words lanes) { return __builtin_convertvector(lanes, Shorts); }

    void store_block(u8* to) const {
        for (int row = 0; row < kScaleBlock / 2; row += E::kRowsAtOnce, to += 64) {
            if constexpr (E::kRowsAtOnce == 2) {
                store_rows(to, pairs(row), pairs(row + 1));
            } else {
                store_rows(to, pairs(row) | pairs(row + 2) << 4, pairs(row + 1) | pairs(row + 3) << 4);
            }
        }
        std::memcpy(to, sides, sizeof sides);
    }
};

// f(panel) for each panel that has one of `num_rows` outputs from `first` on. Every thread takes panels that follow each
// other: so two of them seldom ask for one new page of memory.
template <typename F>
void each_panel(std::int64_t first, std::int64_t num_rows, F f) {
    if (num_rows == 0) return;
    std::int64_t begin = first / kLanes, count = (first + num_rows + kLanes - 1) / kLanes - begin;
    on_all_threads([&](int thread) {
        std::int64_t stop = begin + count * (thread + 1) / threads();
        for (std::int64_t panel = begin + count * thread / threads(); panel < stop; ++panel) f(panel);
    });
}

template <typename E>
struct PackRows {
    static constexpr int kInputs = 32;  // of a row that are read at a time
    static constexpr std::size_t kInputBytes = E::kRowBytes / E::kStep;
    static constexpr Number kNumber = std::is_same_v<E, Float32>    ? Number::float32
                                      : std::is_same_v<E, BFloat16> ? Number::bfloat16
                                                                    : Number::int4;  // which no rows have

    const Packing& call;
    std::size_t panel_bytes;
    std::int64_t row_bytes;

    explicit PackRows(const Packing& packing)
        : call(packing),
          panel_bytes(packing.depth * kInputBytes + (E::kScaled ? packing.depth / kScaleBlock * kLanes * 4
                                                     : E::kWhole ? kLanes * 4
                                                                 : 0)),
          row_bytes(packing.rows.stride * (packing.rows.number == Number::float32 ? 4 : 2)) {}

    void run() const {
        each_panel(call.first, call.num_rows, [&](std::int64_t panel) { pack(panel); });
    }

  private:
    // Those of a panel that rows fill, and the row that fills the first of them.
    struct Lanes {
        int first, stop;
        const u8* row;
    };

    // Of whole rows, where each has one.
    struct Scales {
        float inverse[kLanes], scale[kLanes];
    };

    Scales scales_of(const Lanes& lanes) const {
        Scales scales{};
        for (int lane = lanes.first; lane < lanes.stop; ++lane) {
            const u8* row = lanes.row + (lane - lanes.first) * row_bytes;
            i32x16 highest{};
            for (std::int64_t input = 0; input < call.depth; input += kLanes) {
                highest = larger(highest, magnitude_bits(load_number(row, input, call.rows.number)));
            }
            ByteScale of_row = ByteScale::of(__builtin_bit_cast(float, largest(highest)));
            scales.inverse[lane] = of_row.inverse, scales.scale[lane] = of_row.scale;
        }
        return scales;
    }

    void pack(std::int64_t panel) const {
        std::int64_t before = call.first - panel * kLanes;
        Lanes lanes{static_cast<int>(std::max<std::int64_t>(before, 0)),
                    static_cast<int>(std::min<std::int64_t>(before + call.num_rows, kLanes)),
                    static_cast<const u8*>(call.rows.data) + std::max<std::int64_t>(-before, 0) * row_bytes};
        u8* to = call.panels + panel * panel_bytes;
        Scales scales{};
        if constexpr (E::kWhole) {
            scales = scales_of(lanes);
            u8* side = to + call.depth * kInputBytes;
            std::memcpy(side + lanes.first * 4, scales.scale + lanes.first, (lanes.stop - lanes.first) * 4);
        }
        for (std::int64_t input = 0; input < call.depth; input += kInputs) {
            int inputs = static_cast<int>(std::min<std::int64_t>(kInputs, call.depth - input));
            if (lanes.first == 0 && lanes.stop == kLanes) {
                pack_block(lanes, scales, input, inputs, to);
            } else {
                alignas(64) u8 block[kInputs * kInputBytes + kLanes * 4];
                pack_block(lanes, scales, input, inputs, block);
                for (int lane = lanes.first; lane < lanes.stop; ++lane) copy_lane(block, lane, inputs, to);
            }
            to += inputs * kInputBytes + (E::kScaled ? kLanes * 4 : 0);
        }
    }

    void pack_block(const Lanes& lanes, const Scales& scales, std::int64_t input, int inputs, u8* to) const {
        const u8* places[kLanes];
        alignas(64) float staged[kLanes][kInputs];
        bool as_they_are = call.rows.number == kNumber || call.rows.number == Number::float32;
        for (int lane = 0; lane < kLanes; ++lane) {
            places[lane] = reinterpret_cast<const u8*>(staged[lane]);
            if (lane < lanes.first || lane >= lanes.stop) {
                std::memset(staged[lane], 0, sizeof staged[lane]);
                continue;
            }
            const u8* row = lanes.row + (lane - lanes.first) * row_bytes;
            if (as_they_are) {
                places[lane] = row + input * (call.rows.number == Number::float32 ? 4 : 2);
            } else {
                for (int i = 0; i < inputs; i += kLanes) {
                    store(staged[lane] + i, load_number(row, input + i, call.rows.number));
                }
            }
        }
        if (call.rows.number == kNumber) return turn_rows(places, inputs / E::kStep, to);
        alignas(64) float columns[kInputs][kLanes];
        turn_rows(places, inputs, reinterpret_cast<u8*>(columns));
        store_columns(columns, scales, inputs, to);
    }

    static void store_columns(const float (&columns)[kInputs][kLanes], const Scales& scales, int inputs, u8* to) {
        if constexpr (E::kScaled) {
            Quantised<E>(columns).store_block(to);
        } else if constexpr (E::kWhole) {
            f32x16 inverse = load<f32x16>(scales.inverse);
            for (int i = 0; i < inputs; i += 4, to += 64) {
                u32x16 four{};
                for (int byte = 0; byte < 4; ++byte) {
                    i32x16 whole = bytes_by(load<f32x16>(columns[i + byte]), inverse);
                    four = four | (as<u32x16>(whole) & 0xffu) << 8 * byte;
                }
                store(to, four);
            }
        } else {
            for (int i = 0; i < inputs; i += E::kStep, to += E::kRowBytes) {
                f32x16 values = load<f32x16>(columns[i]);
                if constexpr (E::kStep == 2) {
                    store(to, rounded_to_bf16(values) >> 16 | rounded_to_bf16(load<f32x16>(columns[i + 1])));
                } else if constexpr (std::is_same_v<E, Float16>) {
                    store_f16(to, values);
                } else {
                    store(to, values);
                }
            }
        }
    }

    static void copy_lane(const u8* block, int lane, int inputs, u8* to) {
        constexpr int kBytes = E::kScaled || E::kWhole ? 1 : E::kRowBytes / kLanes / E::kStep;
        for (int i = 0; i < inputs; ++i) {
            std::size_t at = E::offset(i / E::kStep, lane, i % E::kStep);
            std::memcpy(to + at, block + at, kBytes);
        }
        for (int side = 0; E::kScaled && side < 2; ++side) {
            std::size_t at = inputs * kInputBytes + (side * kLanes + lane) * 2;
            std::memcpy(to + at, block + at, 2);
        }
    }
};

}  // namespace longhelix::ISA
