// Rows of bytes, a scale for each scale block of inputs, times weights of bytes, a scale for each output (W8A8).
//
// A few inputs of a row may be far larger than the others: what these lose stays within their block. Sums of integers are
// exact in any order, and float32 holds those of a block.
#pragma once

#include "integers.hpp"
#include "lanes.hpp"

namespace longhelix::ISA {

constexpr float kLargestByte = 127.0f;

using Int8s [[gnu::vector_size(kRegisterLanes)]] = std::int8_t;

// Sixteen whole numbers as bytes, and back.
template <typename V>
INLINE void store_bytes(void* to, V whole) {
    if constexpr (is_halves<V>) {
        store_bytes(to, whole.low);
        store_bytes(static_cast<u8*>(to) + sizeof whole.low / 4, whole.high);
    } else {
        store(to, __builtin_convertvector(whole, Int8s));
    }
}

template <typename V>
INLINE V load_bytes(const void* from) {
    if constexpr (is_halves<V>) {
        using Half = decltype(V::low);
        return {load_bytes<Half>(from), load_bytes<Half>(static_cast<const u8*>(from) + sizeof(Half) / 4)};
    } else {
        // GCC 12 widens bytes in two steps, in halves of registers.
#if defined(LONGHELIX_AVX512)
        return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(LONGHELIX_AVX2)
        return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
#else
        return __builtin_convertvector(load<Int8s>(from), Ints);
#endif
    }
}

// The nearest whole numbers, ties to even. What is added leaves no bits below the whole numbers, and these in the lowest
// ones.
INLINE i32x16 nearest_whole(f32x16 values) { return as<i32x16>(values + 0x1.8p23f) - 0x4b400000; }

// What numbers with this largest magnitude are multiplied by to become bytes, and the bytes to become numbers. Of those
// below 2^-112 nothing is left, and of an infinity or a NaN no number.
struct ByteScale {
    float inverse, scale;

    INLINE ByteScale of(float most) {
        bool finite = most < __builtin_inff();
        float scale = finite ? most / kLargestByte : __builtin_nanf("");
        return {finite && most >= 0x1p-112f ? kLargestByte / most : 0.0f, scale};
    }
};

// What numbers become that are multiplied by `inverse`; by 0, nothing.
INLINE i32x16 bytes_by(f32x16 numbers, f32x16 inverse) {
    return choose(inverse > 0.0f, nearest_whole(product(numbers, inverse)), i32x16{});
}

// Ordered as magnitudes are, NaN above all.
INLINE i32x16 magnitude_bits(f32x16 numbers) { return as<i32x16>(numbers) & 0x7fffffff; }

// Inputs of a row's scale block.
constexpr std::int64_t kRowBlock = 64;

INLINE std::int64_t num_row_blocks(std::int64_t depth) { return (depth + kRowBlock - 1) / kRowBlock; }
INLINE std::int64_t block_stop(std::int64_t first, std::int64_t depth) {
    return first + kRowBlock < depth ? first + kRowBlock : depth;
}

// put(c, sixteen whole numbers) for every sixteenth c of the block of inputs(c) that begins at `first`; returns its scale.
template <typename F, typename Put>
INLINE float round_to_bytes(std::int64_t first, std::int64_t depth, const F& inputs, Put put) {
    f32x16 numbers[kRowBlock / kLanes];
    i32x16 highest{};
    int count = 0;
    for (std::int64_t c = first; c < block_stop(first, depth); c += kLanes) {
        f32x16 sixteen = inputs(c);
        highest = larger(highest, magnitude_bits(sixteen));
        numbers[count++] = sixteen;
    }
    ByteScale block = ByteScale::of(__builtin_bit_cast(float, largest(highest)));
    for (int i = 0; i < count; ++i) put(first + i * kLanes, bytes_by(numbers[i], splat(block.inverse)));
    return block.scale;
}

#if defined(LONGHELIX_AVX512)
// Weights are fours of neighbouring inputs, a four for each output.
struct W8A8 : Int8Units<1> {
    static constexpr bool kScaled = false;

    // Sixteen inputs of a row, from `input` on.
    INLINE void put(u32* units, std::int64_t input, i32x16 whole) {
        store_bytes(reinterpret_cast<u8*>(units) + input, whole);
    }
    // What sums start with, where a block adds up to `total`.
    INLINE std::int32_t start(i32x16 total) { return start_of(_mm512_reduce_add_epi32((__m512i)total)); }
    INLINE std::int32_t start_of(std::int32_t total) { return -128 * total; }
    INLINE std::size_t offset(int row, int lane, int position) { return four_offset(row * kStep + position, lane); }
};
#else
using SignedPairs [[gnu::vector_size(4 * kRegisterLanes)]] = std::int16_t;

// sum + the two products of 16 bits in each lane.
template <typename V, typename Pairs>
INLINE V add_products(V sum, Pairs pairs, Words unit) {
    if constexpr (is_halves<V>) {
        return {add_products(sum.low, pairs.low, unit), add_products(sum.high, pairs.high, unit)};
    } else {
#if defined(LONGHELIX_AVX2)
        sum += (Ints)_mm256_madd_epi16((__m256i)pairs, (__m256i)unit);
        // Row by row: the products of later rows would be kept in memory until their sums' turn comes.
        asm volatile("" : "+x"(sum));
        return sum;
#elif defined(__SSE2__)
        return sum + (Ints)_mm_madd_epi16((__m128i)pairs, (__m128i)unit);
#else
        return sum + ((Ints)(pairs << 16) >> 16) * ((Ints)(unit << 16) >> 16) + ((Ints)pairs >> 16) * ((Ints)unit >> 16);
#endif
    }
}

// A four of bytes is two units: its first and third number in 16 bits each, then the others.
struct W8A8 {
    static constexpr int kStep = 2, kPlanes = 1, kRowBytes = 32, kRowsAtOnce = 2;
    static constexpr bool kWhole = true, kScaled = false;
    using Operand = u32x16;
    using Sum = i32x16;

    INLINE u32x16 load_rows(const u8* from) { return load<u32x16>(from); }
    INLINE u32x16 rows_of(u32x16 fours) { return fours; }
    INLINE Operand operand(u32x16 fours, int row) {
        return each_register(fours, [&](Words lanes) {
            SignedPairs pairs = (SignedPairs)lanes;
            return (Words)((row ? pairs : pairs << 8) >> 8);
        });
    }
    INLINE void fma(i32x16& sum, Operand panel, u32 unit) { sum = add_products(sum, panel, Words{} + unit); }

    INLINE void put(u32* units, std::int64_t input, i32x16 whole) {
        std::int32_t numbers[kLanes];
        store(numbers, whole);
        units += input / kStep;
        for (int i = 0; i < kLanes; i += 4, units += 2) {
            units[0] = (numbers[i] & 0xffff) | static_cast<u32>(numbers[i + 2]) << 16;
            units[1] = (numbers[i + 1] & 0xffff) | static_cast<u32>(numbers[i + 3]) << 16;
        }
    }
    INLINE std::int32_t start(i32x16) { return 0; }
    INLINE std::int32_t start_of(std::int32_t) { return 0; }
    INLINE std::size_t offset(int row, int lane, int position) { return four_offset(row * kStep + position, lane); }
};
#endif

template <typename V>
INLINE auto to_floats(V whole) {
    if constexpr (is_halves<V>) {
        return halves(to_floats(whole.low), to_floats(whole.high));
    } else {
        return __builtin_convertvector(whole, Floats);
    }
}

}  // namespace longhelix::ISA
