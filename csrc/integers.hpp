// Integers of 8 and 4 bits as the pool holds them: bytes, or nibbles, in fours of neighbouring channels (keys) or tokens
// (values), a four for each lane. AVX-512 multiplies fours of bytes as they lie; other sets spread them to floats.
//
// There, rows that multiply such panels become integers, too: of 15 bits for the largest number of a row, which are a
// byte of a first plane times 128, and a byte of a second. That rounds by 1 / 32,512 of the row's largest number, where
// bfloat16 rounds by up to 1 / 256 of each. Or they are bytes of one plane, 1 / 254 of the largest: half the products.
#pragma once

#include "elements.hpp"
#include "hadamard.hpp"

namespace longhelix::ISA {

#if defined(LONGHELIX_AVX512)
// What is stored is read as bytes without a sign, too large by kOffset; so sums start with what that adds taken away.
template <int kOffset, int kNumPlanes>
struct FourUnits {
    static constexpr int kStep = 4, kPlanes = kNumPlanes;
    static constexpr bool kWhole = true, kScaled = true;
    static constexpr float kLargestUnit = kPlanes == 2 ? 127 * 128 : 127;
    using Operand = __m512i;
    using Sum = i32x16;

    INLINE void fma(i32x16& sum, Operand panel, u32 unit) {
        sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, panel, _mm512_set1_epi32(static_cast<int>(unit)));
    }

    // What sums of all planes stand for.
    INLINE f32x16 value(const i32x16* planes) {
        __m512 first = _mm512_cvtepi32_ps((__m512i)planes[0]);
        if constexpr (kPlanes == 1) return (f32x16)first;
        return (f32x16)_mm512_fmadd_ps(first, _mm512_set1_ps(128.0f), _mm512_cvtepi32_ps((__m512i)planes[kPlanes - 1]));
    }

    // numbers(i), for every sixteenth i below `count`: planes that lie `stride` units apart. Of numbers below 2^-112 nothing
    // is left, since no float32 makes integers of them; an infinity or a NaN makes all of them NaN.
    template <typename F>
    INLINE RowScale from_floats(u32* units, std::ptrdiff_t stride, int count, F numbers) {
        i32x16 highest{};  // magnitudes are ordered as their bits are, and NaN is above all
        for (int i = 0; i < count; i += kLanes) highest = larger(highest, as<i32x16>(numbers(i)) & 0x7fffffff);
        float most = __builtin_bit_cast(float, largest(highest));
        bool finite = most < __builtin_inff(), any = most >= 0x1p-112f;
        float inverse = finite && any ? kLargestUnit / most : 0.0f;
        auto whole = [&](int i) { return _mm512_cvtps_epi32((__m512)(numbers(i) * inverse)); };
        u8* planes[2] = {reinterpret_cast<u8*>(units), reinterpret_cast<u8*>(units + (kPlanes - 1) * stride)};
        int i = 0;
        for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
            __m512i low = whole(i), high = whole(i + kLanes);
            store_two(planes[0] + i, planes[1] + i, low, high);
        }
        if (i < count) {
            u8 bytes[2][2 * kLanes];
            store_two(bytes[0], bytes[1], whole(i), __m512i{});
            for (int p = 0; p < kPlanes; ++p) std::memcpy(planes[p] + i, bytes[p], kLanes);
        }
        RowScale row{finite ? most / kLargestUnit : __builtin_nanf(""), {}};
        for (int p = 0; p < kPlanes; ++p) row.starts[p] = -kOffset * sum_of(planes[p], count);
        return row;
    }

    // Thirty-two integers.
    INLINE void store_two(u8* first, u8* second, __m512i low, __m512i high) {
        if constexpr (kPlanes == 1) {
            store(first, _mm512_cvtepi32_epi8(low));
            store(first + kLanes, _mm512_cvtepi32_epi8(high));
        } else {
            // The second byte of each is made its first plane, sign and seven bits; the seven bits below are the other.
            auto parted = [](__m512i whole) {
                return _mm512_ternarylogic_epi32(_mm512_slli_epi32(whole, 1), whole, _mm512_set1_epi32(0x7f), 0xd8);
            };
            __m512i bytes = _mm512_permutex2var_epi8(parted(low), load<__m512i>(kPlaneBytes.at), parted(high));
            store(first, _mm512_castsi512_si256(bytes));
            store(second, _mm256_and_si256(_mm512_extracti64x4_epi64(bytes, 1), _mm256_set1_epi8(0x7f)));
        }
    }

    struct ByteOrder {
        alignas(64) u8 at[64];

        constexpr ByteOrder() : at{} {
            for (int i = 0; i < 32; ++i) at[i] = static_cast<u8>(4 * i + 1), at[32 + i] = static_cast<u8>(4 * i);
        }
    };
    static constexpr ByteOrder kPlaneBytes{};

    INLINE std::int32_t sum_of(const u8* bytes, int count) {
        __m512i sum{};
        for (int i = 0; i < count; i += 64) {
            __mmask64 there = count - i < 64 ? (__mmask64{1} << (count - i)) - 1 : ~__mmask64{0};
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(there, bytes + i));
        }
        return _mm512_reduce_add_epi32(sum);
    }
};

template <int kNumPlanes>
struct Int8Units : FourUnits<128, kNumPlanes> {
    static constexpr int kRowBytes = 64, kRowsAtOnce = 1;
    INLINE __m512i load_rows(const u8* from) { return rows_of(load<u32x16>(from)); }
    INLINE __m512i rows_of(u32x16 fours) {
        return _mm512_xor_si512((__m512i)fours, _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    INLINE __m512i operand(__m512i row, int) { return row; }
};

template <int kNumPlanes>
struct Int4Units : FourUnits<8, kNumPlanes> {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 2;
    struct Rows {
        __m512i low, high;
    };
    INLINE Rows load_rows(const u8* from) {
        __m512i codes = load<__m512i>(from), nibble = _mm512_set1_epi8(15);
        return {_mm512_and_si512(codes, nibble), _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble)};
    }
    INLINE __m512i operand(const Rows& rows, int row) { return row ? rows.high : rows.low; }
};
#else
// The two bytes of a unit row in each lane's four, as floats.
INLINE PairUnits::Operand pair_of(u32x16 fours, int row) {
    auto number = [](Words high) { return signed_number(high); };
    auto byte = [&](int at) { return each_register(fours << (24 - 8 * at), number); };
    return {byte(2 * row), byte(2 * row + 1)};
}

template <int>
struct Int8Units : PairUnits {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 2;
    static constexpr bool kScaled = true;
    INLINE u32x16 load_rows(const u8* from) { return load<u32x16>(from); }
    INLINE Operand operand(u32x16 fours, int row) { return pair_of(fours, row); }
};

template <int>
struct Int4Units : PairUnits {
    static constexpr int kRowBytes = 16, kRowsAtOnce = 4;
    static constexpr bool kScaled = true;
    struct Rows {
        u32x16 low, high;
    };
    INLINE Rows load_rows(const u8* from) {
        u32x16 codes = load<u32x16>(from);
        return {signed_bytes(codes & 0x0f0f0f0fu), signed_bytes((codes >> 4) & 0x0f0f0f0fu)};
    }
    INLINE u32x16 signed_bytes(u32x16 codes) {
        return each_register(codes, [](Words four) { return (Words)((Bytes)four - 8); });
    }
    INLINE Operand operand(const Rows& rows, int row) { return pair_of(row < 2 ? rows.low : rows.high, row % 2); }
};
#endif

// Where the byte of number `number` of a lane lies in its panel.
INLINE std::size_t four_offset(int number, int lane) { return number / 4 * 64 + lane * 4 + number % 4; }

template <int kNumPlanes>
struct PoolInt8 : Int8Units<kNumPlanes> {
    using Int8Units<kNumPlanes>::kStep;
    static constexpr float kLargest = 127.0f;

    INLINE std::size_t offset(int row, int lane, int position) { return four_offset(row * kStep + position, lane); }
    INLINE void write(u8* to, float value, int) {
        float rounded = __builtin_rintf(value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value);
        *to = static_cast<u8>(static_cast<std::int8_t>(rounded));
    }
};

// Of -8 to 7, stored too large by 8: the low nibbles of 64 bytes are fours, and the high nibbles the next fours.
template <int kNumPlanes>
struct PoolInt4 : Int4Units<kNumPlanes> {
    using Int4Units<kNumPlanes>::kStep;

    INLINE std::size_t offset(int row, int lane, int position) {
        int number = row * kStep + position;
        return four_offset(number / 8 * 4 + number % 4, lane);
    }
    // The bfloat16 scale of a vector. The number of the largest magnitude becomes -8, so that all sixteen codes are used,
    // or -8.5 or -9, whose remainder is cut off: whichever has the smallest squared error. So a scale has a sign. It is 0 if
    // it would be below the normal numbers.
    INLINE std::uint16_t scale_of(const float* values, int size) {
        float most = 0.0f, least_error = __builtin_inff();
        for (int c = 0; c < size; ++c) most = __builtin_fabsf(values[c]) > __builtin_fabsf(most) ? values[c] : most;
        std::uint16_t best = usable_scale(most / -8.0f);
        for (float code : {-8.0f, -8.5f, -9.0f}) {
            std::uint16_t scale = usable_scale(most / code);
            float error = scale ? squared_error(values, size, bf16_to_float(scale)) : __builtin_inff();
            if (error < least_error) best = scale, least_error = error;
        }
        return best;
    }
    INLINE std::uint16_t usable_scale(float scale) { return __builtin_fabsf(scale) < 0x1p-126f ? 0 : float_to_bf16(scale); }
    INLINE float squared_error(const float* values, int size, float scale) {
        f32x16 factor = splat(scale), inverse = splat(1.0f / scale), sum{};
        for (int c = 0; c < size; c += kLanes) {
            f32x16 numbers = load<f32x16>(values + c);
            // What is added leaves no bits below the whole numbers.
            f32x16 codes = (product(numbers, inverse) + 0x1.8p23f) - 0x1.8p23f;
            codes = larger(choose(codes < 7.0f, codes, splat(7.0f)), splat(-8.0f));
            f32x16 differences = product(codes, factor) - numbers;
            sum += product(differences, differences);
        }
        return total(sum);
    }
    INLINE void write(u8* to, float value, int row) {
        float rounded = __builtin_rintf(value) + 8.0f;
        u8 code = static_cast<u8>(rounded < 0.0f ? 0.0f : rounded > 15.0f ? 15.0f : rounded);
        *to = row * kStep % 8 >= 4 ? static_cast<u8>((*to & 0x0f) | code << 4) : static_cast<u8>((*to & 0xf0) | code);
    }
};

template <int kNumPlanes>
constexpr bool rotates_keys<PoolInt4<kNumPlanes>> = true;

}  // namespace longhelix::ISA
