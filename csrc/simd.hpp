// Sixteen float32 lanes, and the element types that kernels read, for whichever instruction set this file is compiled.
//
// Everything here is in the namespace of that instruction set, so that no function compiled for one can be linked in
// place of the same function compiled for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernels.hpp"

#define INLINE [[gnu::always_inline]] static inline

namespace longhelix::ISA {

using f32x16 [[gnu::vector_size(64)]] = float;
using i32x16 [[gnu::vector_size(64)]] = std::int32_t;
using u32x16 [[gnu::vector_size(64)]] = std::uint32_t;
using u8 = std::uint8_t;
using u32 = std::uint32_t;

constexpr int kLanes = 16;
// Rows of a product that are worked on at once: their sums must fit the registers.
#if defined(__AVX512F__)
constexpr int kRowTile = 12;
#else
constexpr int kRowTile = 4;
#endif
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2e = 1.44269504089f;

template <typename V>
INLINE V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <typename V>
INLINE void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

INLINE f32x16 splat(float value) { return f32x16{} + value; }

INLINE i32x16 lane_indices() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Of a number and a NaN, the second.
INLINE f32x16 larger(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

INLINE float largest(f32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)lanes);
#endif
    float value = lanes[0];
    for (int i = 1; i < kLanes; ++i) value = lanes[i] > value ? lanes[i] : value;
    return value;
}

// Halves are added until one lane is left: the same order in both forms.
INLINE float total(f32x16 lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)lanes);
#endif
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

// 2^f on [-1/2, 1/2]: Taylor's series, whose next term is below 2e-8.
INLINE f32x16 exp2_fraction(f32x16 f) {
    f32x16 p = splat(1.5403530e-4f);
    p = multiply_add(p, f, splat(1.3333558e-3f));
    p = multiply_add(p, f, splat(9.6181291e-3f));
    p = multiply_add(p, f, splat(5.5504109e-2f));
    p = multiply_add(p, f, splat(2.4022651e-1f));
    p = multiply_add(p, f, splat(6.9314718e-1f));
    return multiply_add(p, f, splat(1.0f));
}

// 2^x for x <= 0, to 2 units in the last place; exactly 0 for -inf; NaN stays.
INLINE f32x16 exp2(f32x16 x) {
#if defined(__AVX512F__)
    // Scaling by 2^-200 gives 0, and spares -inf, whose difference from itself is not a number.
    __m512 bounded = (__m512)larger(splat(-200.0f), x);
    __m512 whole = _mm512_roundscale_ps(bounded, 0);
    return (f32x16)_mm512_scalef_ps((__m512)exp2_fraction((f32x16)(bounded - whole)), whole);
#else
    f32x16 bounded = larger(splat(-127.0f), x);
    // Adding and taking away 1.5 * 2^23 rounds to an integer, whose low bits are the exponent.
    f32x16 shifted = bounded + 12582912.0f;
    f32x16 f = bounded - (shifted - 12582912.0f);
    i32x16 exponent = ((i32x16)shifted << 23) + (127 << 23);
    return x < -126.0f ? f32x16{} : exp2_fraction(f) * (f32x16)exponent;
#endif
}

INLINE float bf16_to_float(std::uint16_t bits) {
    u32 wide = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

INLINE std::uint16_t float_to_bf16(float value) {
    u32 wide;
    std::memcpy(&wide, &value, 4);
    if (value != value) return static_cast<std::uint16_t>((wide >> 16) | 0x40);
    return static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// Sixteen lanes as bfloat16, to nearest even, in order; values are finite.
INLINE void store_bf16(void* to, f32x16 value) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(static_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
    u32x16 wide = (u32x16)value;
    wide = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    using u16x16 [[gnu::vector_size(32)]] = std::uint16_t;
    store(to, __builtin_convertvector(wide, u16x16));
#endif
}

INLINE f32x16 load_bf16(const void* from) {
    using u16x16 [[gnu::vector_size(32)]] = std::uint16_t;
    return (f32x16)(__builtin_convertvector(load<u16x16>(from), u32x16) << 16);
}

INLINE f32x16 load_f16(const void* from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(load<__m256i>(from));
#else
    f32x16 lanes;
    const float16* values = static_cast<const float16*>(from);
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(values[i]);
    return lanes;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Elements. A *panel* is a matrix of sixteen columns, the lanes; its rows are taken `kStep` at a time as *units* of 32
// bits: one float32, or two bfloat16 for the instructions that multiply pairs. The other factor of a product has units
// of the same kind (`Units`), broadcast to all lanes. Stored elements may be narrower than the units that they become.
//
//   kRowBytes     bytes of one unit row (16 lanes) as stored
//   kRowsAtOnce   unit rows that one load decodes
//   offset        where the element of (unit row, lane, position in the unit) lies in its panel
// ---------------------------------------------------------------------------------------------------------------------

struct FloatUnits {
    static constexpr int kStep = 1;
    using Operand = f32x16;
    INLINE void fma(f32x16& sum, Operand panel, u32 unit) {
        float value;
        std::memcpy(&value, &unit, 4);
        sum = multiply_add(panel, splat(value), sum);
    }
    INLINE void from_floats(u32* units, f32x16 values) { store(units, values); }
};

struct PairUnits {
    static constexpr int kStep = 2;
#if defined(__AVX512BF16__)
    using Operand = __m512bh;
    INLINE Operand operand(u32x16 raw) { return (__m512bh)raw; }
    INLINE void fma(f32x16& sum, Operand panel, u32 unit) {
        sum = (f32x16)_mm512_dpbf16_ps((__m512)sum, panel, (__m512bh)_mm512_set1_epi32(static_cast<int>(unit)));
    }
#else
    struct Operand {
        f32x16 even, odd;
    };
    INLINE Operand operand(u32x16 raw) { return {(f32x16)(raw << 16), (f32x16)(raw & 0xffff0000u)}; }
    INLINE void fma(f32x16& sum, const Operand& panel, u32 unit) {
        sum = multiply_add(panel.even, splat(bf16_to_float(static_cast<std::uint16_t>(unit))), sum);
        sum = multiply_add(panel.odd, splat(bf16_to_float(static_cast<std::uint16_t>(unit >> 16))), sum);
    }
#endif
    INLINE void from_floats(u32* units, f32x16 values) { store_bf16(units, values); }
};

struct Float32 : FloatUnits {
    static constexpr int kRowBytes = 64, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE void load_rows(const u8* from, Operand (&rows)[1]) { rows[0] = load<f32x16>(from); }
    INLINE std::size_t offset(int row, int lane, int) { return row * 64 + lane * 4; }
    INLINE void write(u8* to, float value, int) { std::memcpy(to, &value, 4); }
};

struct Float16 : FloatUnits {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE void load_rows(const u8* from, Operand (&rows)[1]) { rows[0] = load_f16(from); }
    INLINE std::size_t offset(int row, int lane, int) { return row * 32 + lane * 2; }
    INLINE void write(u8* to, float value, int) {
        float16 narrow = static_cast<float16>(value);
        std::memcpy(to, &narrow, 2);
    }
};

struct BFloat16 : PairUnits {
    static constexpr int kRowBytes = 64, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE void load_rows(const u8* from, Operand (&rows)[1]) { rows[0] = operand(load<u32x16>(from)); }
    INLINE std::size_t offset(int row, int lane, int position) { return row * 64 + lane * 4 + position * 2; }
    INLINE void write(u8* to, float value, int) {
        std::uint16_t bits = float_to_bf16(value);
        std::memcpy(to, &bits, 2);
    }
};

// Codes of up to 7 bits as bfloat16, low and high bytes apart, for look-ups of bytes. Bit 7 of a code is its sign.
struct Table {
    alignas(64) u8 low[128];
    alignas(64) u8 high[128];

    template <typename Value>
    static constexpr Table of(Value value) {
        Table table{};
        for (int code = 0; code < 128; ++code) {
            u32 bits = __builtin_bit_cast(u32, static_cast<float>(value(code))) >> 16;
            table.low[code] = static_cast<u8>(bits);
            table.high[code] = static_cast<u8>(bits >> 8);
        }
        return table;
    }
};

// Where the byte of (unit row, lane, position) lies: two rows share 64 bytes such that interleaving low and high bytes
// in 128-bit lanes puts each row in order.
INLINE std::size_t byte_offset(int row, int lane, int position) {
    return row / 2 * 64 + lane / 4 * 16 + row % 2 * 8 + lane % 4 * 2 + position;
}

// 64 bytes of codes as two unit rows.
INLINE void look_up(const Table& table, u32x16 codes, PairUnits::Operand (&rows)[2]) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    __m512i low = _mm512_permutex2var_epi8(load<__m512i>(table.low), (__m512i)codes, load<__m512i>(table.low + 64));
    __m512i high = _mm512_permutex2var_epi8(load<__m512i>(table.high), (__m512i)codes, load<__m512i>(table.high + 64));
    high = _mm512_ternarylogic_epi32(high, (__m512i)codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    rows[0] = (__m512bh)_mm512_unpacklo_epi8(low, high);
    rows[1] = (__m512bh)_mm512_unpackhi_epi8(low, high);
#else
    u8 bytes[64];
    store(bytes, codes);
    auto wide = [&](u8 code) -> u32 { return table.low[code & 127] | (table.high[code & 127] | (code & 128)) << 8; };
    for (int row = 0; row < 2; ++row) {
        u32x16 raw;
        for (int lane = 0; lane < kLanes; ++lane) {
            raw[lane] = wide(bytes[byte_offset(row, lane, 0)]) | wide(bytes[byte_offset(row, lane, 1)]) << 16;
        }
        rows[row] = PairUnits::operand(raw);
    }
#endif
}

// Elements of 8 bits, a sign and the code of a magnitude.
template <typename Code>
struct Byte : PairUnits {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 2;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = Code::kLargest;
    static constexpr Table kTable = Table::of(Code::magnitude);

    INLINE std::size_t offset(int row, int lane, int position) { return byte_offset(row, lane, position); }
    INLINE void load_rows(const u8* from, Operand (&rows)[2]) { look_up(kTable, load<u32x16>(from), rows); }
    INLINE void write(u8* to, float value, int) {
        u8 sign = value < 0 ? 128 : 0;
        *to = sign | Code::nearest(sign ? -value : value);
    }
};

struct Int8Code {
    static constexpr float kLargest = 127.0f;
    static constexpr float magnitude(int code) { return static_cast<float>(code); }
    INLINE u8 nearest(float value) {
        float rounded = __builtin_rintf(value);
        return static_cast<u8>(rounded > 127.0f ? 127.0f : rounded);
    }
};

// OCP 8-bit floating point, e4m3: bias 7, no infinities, code 127 is NaN.
struct Float8Code {
    static constexpr float kLargest = 448.0f;
    static constexpr float magnitude(int code) {
        if (code == 127) return __builtin_nanf("");
        int exponent = code >> 3;
        float value = static_cast<float>(exponent ? 8 + (code & 7) : code);
        for (int i = exponent ? exponent : 1; i < 10; ++i) value /= 2;
        for (int i = exponent; i > 10; --i) value *= 2;
        return value;
    }
    INLINE u8 nearest(float value) {
        if (value < 0.015625f) return static_cast<u8>(__builtin_rintf(value * 512.0f));
        u32 bits;
        std::memcpy(&bits, &value, 4);
        // Adding half of what is dropped, less one where the kept bits are even, rounds to nearest even.
        u32 code = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
        return static_cast<u8>(code > 126 ? 126 : code);
    }
};

using Int8 = Byte<Int8Code>;
using Float8 = Byte<Float8Code>;

// Elements of 4 bits, -8 to 7. The low nibbles of 64 bytes are two unit rows, the high nibbles the next two.
struct Int4 : PairUnits {
    static constexpr int kRowBytes = 16, kRowsAtOnce = 4;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = 7.0f;
    static constexpr Table kTable = Table::of([](int code) { return code - 8; });

    INLINE std::size_t offset(int row, int lane, int position) {
        return row / 4 * 64 + byte_offset(row % 2, lane, position);
    }
    INLINE void load_rows(const u8* from, Operand (&rows)[4]) {
        u32x16 codes = load<u32x16>(from);
        Operand low[2], high[2];
        look_up(kTable, codes & 0x0f0f0f0fu, low);
        look_up(kTable, (codes >> 4) & 0x0f0f0f0fu, high);
        rows[0] = low[0], rows[1] = low[1], rows[2] = high[0], rows[3] = high[1];
    }
    INLINE void write(u8* to, float value, int row) {
        float rounded = __builtin_rintf(value) + 8.0f;
        u8 code = static_cast<u8>(rounded < 0.0f ? 0.0f : rounded > 15.0f ? 15.0f : rounded);
        *to = row % 4 >= 2 ? static_cast<u8>((*to & 0x0f) | code << 4) : static_cast<u8>((*to & 0xf0) | code);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The one inner loop of every product: R rows of units times V panels.
// ---------------------------------------------------------------------------------------------------------------------

// sums[r][v] += rows r of `units` (`stride` apart) times panel v, over `depth` unit rows. While it reads the panels it
// asks the memory for what will be read next, as many lines: `ahead[0]` and what follows in the first half of the rows,
// `ahead[1]` in the second. One line after the other: the memory answers 8 streams side by side a quarter slower.
template <typename E, int R, int V, bool Ahead>
INLINE void accumulate(f32x16 (&sums)[R][V], const u32* units, std::ptrdiff_t stride, const u8* const (&panels)[V],
                       int depth, const u8* const (&ahead)[2]) {
    const u8* next = ahead[0];
    for (int row = 0; row < depth; row += E::kRowsAtOnce) {
        if (Ahead && row == depth / 2) next = ahead[1];
        typename E::Operand operands[V][E::kRowsAtOnce];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            E::load_rows(panels[v] + row * E::kRowBytes, operands[v]);
            if constexpr (Ahead) __builtin_prefetch(next + v * (E::kRowsAtOnce * E::kRowBytes), 0, 3);
        }
        if constexpr (Ahead) next += V * E::kRowsAtOnce * E::kRowBytes;
#pragma GCC unroll 4
        for (int i = 0; i < E::kRowsAtOnce; ++i) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                u32 unit = units[r * stride + row + i];
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) E::fma(sums[r][v], operands[v][i], unit);
            }
        }
    }
}

}  // namespace longhelix::ISA
