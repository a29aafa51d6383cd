// Tiles of nvfp4: what is stored, and the bfloat16 numbers that it stands for. Keys that are no values are stored rotated.
//
// A vector is one token's key or value. number = e2m1 code * e4m3 scale of sixteen channels * power of two of the vector.
// Such a product has six significant bits, so bfloat16 holds it exactly. Kernels expand the tiles that they read to tiles of
// bfloat16, in the cache, and compute with these.
//
// A tile holds the codes of the keys, those of the values, then the scales of the keys and those of the values. A byte holds
// two codes of one token, of channels c (low) and c + 8 of a scale block. Scales are sixteen e4m3 for each block, one for
// each token, then sixteen e8m0.
#pragma once

#include "hadamard.hpp"
#include "scales.hpp"

namespace longhelix::ISA {

// Where the parts of vectors with `size` channels lie in a tile.
INLINE std::size_t nvfp4_code_bytes(int size) { return static_cast<std::size_t>(size) * 8; }
INLINE std::size_t nvfp4_scale_bytes(int size) { return static_cast<std::size_t>(size) + kLanes; }

// Where the byte of channel c < 8 of a block lies in the 128 bytes of its keys.
INLINE std::size_t nvfp4_key_offset(int channel, int token) { return byte_offset(channel / 2, token, channel % 2); }

// The same for values. Sixteen bytes of eight lanes would fill half a unit row, so tokens t and t + 4 share a row.
INLINE std::size_t nvfp4_value_offset(int channel, int token) {
    return byte_offset(token / 8 * 2 + token % 4 / 2, token % 8 / 4 * 8 + channel, token % 2);
}

// What the codes of a block are multiplied by for each of sixteen tokens. Codes are read as twice their numbers.
INLINE f32x16 nvfp4_scales(const u8* scales, int block, int num_blocks) {
    f32x16 of_vectors = load_scales(scales + num_blocks * kLanes, Number::e8m0, 0.5f);
    return load_scales(scales + block * kLanes, Number::e4m3, 1.0f) * of_vectors;
}

// A unit row times a scale for each lane: of its first numbers `even`, of its second ones `odd`. No bits are lost.
INLINE u32x16 scaled_pairs(PairUnits::Operand row, f32x16 even, f32x16 odd) {
#if defined(LONGHELIX_AVX512)
    u32x16 raw = (u32x16)row;
    f32x16 first = as<f32x16>(raw << 16) * even, second = as<f32x16>(raw & 0xffff0000u) * odd;
#else
    f32x16 first = row.even * even, second = row.odd * odd;
#endif
    return as<u32x16>(first) >> 16 | as<u32x16>(second);
}

// Keys of a tile as bfloat16.
INLINE void expand_keys(const u8* codes, const u8* scales, int size, u8* to) {
    for (int block = 0; block < size / kLanes; ++block, codes += 128, to += 512) {
        f32x16 scale = nvfp4_scales(scales, block, size / kLanes);
        for (int half = 0; half < 2; ++half) {
            auto rows = E2M1::load_rows(codes + half * 64);
            for (int i = 0; i < 4; ++i) {
                int row = i / 2 * 4 + half * 2 + i % 2;
                store(to + row * 64, scaled_pairs(E2M1::operand(rows, i), scale, scale));
            }
        }
    }
}

// The first eight lanes of `a`, then those of `b`; and the last ones.
INLINE u32x16 first_eights(u32x16 a, u32x16 b) {
#if defined(LONGHELIX_AVX512)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
#else
    return halves(a.low, b.low);
#endif
}

INLINE u32x16 last_eights(u32x16 a, u32x16 b) {
#if defined(LONGHELIX_AVX512)
    return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    return halves(a.high, b.high);
#endif
}

// Values of a tile as bfloat16.
INLINE void expand_values(const u8* codes, const u8* scales, int size, u8* to) {
    for (int block = 0; block < size / kLanes; ++block, codes += 128, to += 512) {
        float of_tokens[kLanes];
        store(of_tokens, nvfp4_scales(scales, block, size / kLanes));
        for (int half = 0; half < 2; ++half) {
            auto rows = E2M1::load_rows(codes + half * 64);
            for (int i = 0; i < 2; ++i) {
                int pair = half * 4 + i;  // and the second eight lanes hold the tokens of pair + 2
                const float* scale = of_tokens + 2 * pair;
                auto first = lane_indices() < 8;
                f32x16 even = choose(first, splat(scale[0]), splat(scale[4]));
                f32x16 odd = choose(first, splat(scale[1]), splat(scale[5]));
                u32x16 low = scaled_pairs(E2M1::operand(rows, i), even, odd);
                u32x16 high = scaled_pairs(E2M1::operand(rows, i + 2), even, odd);
                store(to + pair * 64, first_eights(low, high));
                store(to + (pair + 2) * 64, last_eights(low, high));
            }
        }
    }
}

// What kernels compute with: the expanded tile.
struct Nvfp4 : BFloat16 {};

template <typename E>
constexpr bool is_expanded = false;
template <>
constexpr bool is_expanded<Nvfp4> = true;
template <>
constexpr bool rotates_keys<Nvfp4> = true;

// A tile with all of its keys and values. `shared`: there are no values.
INLINE void expand_tile(const u8* tile, int key_size, int value_size, bool shared, u8* to) {
    std::size_t value_bytes = shared ? 0 : nvfp4_code_bytes(value_size);
    const u8* scales = tile + nvfp4_code_bytes(key_size) + value_bytes;
    expand_keys(tile, scales, key_size, to);
    if (shared) return;
    expand_values(tile + nvfp4_code_bytes(key_size), scales + nvfp4_scale_bytes(key_size), value_size,
                  to + static_cast<std::size_t>(key_size) * 32);
}

// The codes of the nearest numbers, of two the smaller one. Magnitudes above 6 become 6.
INLINE i32x16 e2m1_codes(f32x16 numbers) {
    i32x16 codes = choose(numbers < 0.0f, i32x16{} + 8, i32x16{});
    f32x16 magnitudes = as<f32x16>(as<i32x16>(numbers) & 0x7fffffff);
    for (float bound : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
        codes += choose(magnitudes > bound, i32x16{} + 1, i32x16{});
    }
    return codes;
}

INLINE f32x16 e2m1_numbers(i32x16 codes) {
    i32x16 magnitudes = codes & 7;
    // From 1 on, two bits of exponent and one of mantissa where float32 has them.
    f32x16 value = choose(magnitudes > 1, as<f32x16>((magnitudes << 22) + (126 << 23)), to_floats(magnitudes) * 0.5f);
    return as<f32x16>(as<i32x16>(value) | (codes & 8) << 28);
}

// The power of two of a vector, as e8m0: the scale of the largest number is in [128, 256), so that scales of blocks whose
// numbers are up to 2^13 times smaller have all of their bits. 255, which is NaN, if a number is infinite or NaN. No number
// that is not 0 is below the normal numbers of bfloat16: vectors that small are zeros.
INLINE int nvfp4_exponent(const float* values, int size) {
    i32x16 highest{};
    for (int c = 0; c < size; c += kLanes) highest = larger(highest, magnitude_bits(load<f32x16>(values + c)));
    std::int32_t bits = largest(highest);
    if (bits >= 0x7f800000) return 255;
    int exponent = (__builtin_bit_cast(std::int32_t, __builtin_bit_cast(float, bits) / 6.0f) >> 23) - 7;
    return exponent < 11 ? 11 : exponent;
}

struct Nvfp4Block {
    u8 scale;
    i32x16 codes;
};

// Sixteen channels of a vector, over its power of two. The largest number becomes 6, or 4 where that has smaller errors
// ("four over six", arXiv 2512.02010): between 4 and 6 there is no number.
INLINE Nvfp4Block nvfp4_block(f32x16 numbers) {
    float most = __builtin_bit_cast(float, largest(magnitude_bits(numbers)));
    Nvfp4Block best{};
    float least = __builtin_inff();
    for (float top : {6.0f, 4.0f}) {
        Nvfp4Block block{Float8Code::nearest(most / top), {}};
        f32x16 differences = numbers;  // a scale of 0 leaves zeros
        if (block.scale) {
            f32x16 scale = splat(Float8Code::value(block.scale));
            block.codes = e2m1_codes(numbers / scale);
            differences = product(e2m1_numbers(block.codes), scale) - numbers;
        }
        float error = total(product(differences, differences));
        if (error < least) best = block, least = error;
    }
    return best;
}

}  // namespace longhelix::ISA
