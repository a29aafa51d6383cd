// The numbers that kernels read, and the one inner loop of every product.
//
// A *panel* is a matrix of sixteen columns, the lanes; its rows are taken `kStep` at a time as *units* of 32
// bits: one float32, or two bfloat16 for the instructions that multiply pairs. The other factor of a product has units
// of the same kind (`Units`), broadcast to all lanes. Stored elements may be narrower than the units that they become.
//
//   Sum           what products of units are added up in
//   kPlanes       rows of units that stand for one row of factors, one after the other
//   kRowBytes     bytes of one unit row (16 lanes) as stored
//   kRowsAtOnce   unit rows that one load brings, which `operand` gives one by one
//   offset        where the element of (unit row, lane, position in the unit) lies in its panel
#pragma once

#include "simd.hpp"

namespace longhelix::ISA {

struct FloatUnits {
    static constexpr int kStep = 1, kPlanes = 1;
    static constexpr bool kWhole = false;
    using Operand = f32x16;
    using Sum = f32x16;
    INLINE void fma(f32x16& sum, Operand panel, u32 unit) {
        float value;
        std::memcpy(&value, &unit, 4);
        sum = multiply_add(panel, splat(value), sum);
    }
    INLINE void from_floats(u32* units, f32x16 values) { store(units, values); }
};

struct PairUnits {
    static constexpr int kStep = 2, kPlanes = 1;
    static constexpr bool kWhole = false;
    using Sum = f32x16;
#if defined(LONGHELIX_AVX512)
    using Operand = __m512bh;
    INLINE Operand operand(u32x16 raw) { return (__m512bh)raw; }
    INLINE u32x16 raw(Operand pairs) { return (u32x16)pairs; }
    INLINE void fma(f32x16& sum, Operand panel, u32 unit) {
        sum = (f32x16)_mm512_dpbf16_ps((__m512)sum, panel, (__m512bh)_mm512_set1_epi32(static_cast<int>(unit)));
    }
#else
    struct Operand {
        f32x16 even, odd;
    };
    INLINE Operand operand(u32x16 raw) { return {as<f32x16>(raw << 16), as<f32x16>(raw & 0xffff0000u)}; }
    INLINE u32x16 raw(const Operand& pairs) { return as<u32x16>(pairs.even) >> 16 | as<u32x16>(pairs.odd); }
    INLINE void fma(f32x16& sum, const Operand& panel, u32 unit) {
        Operand both = operand(u32x16{} + unit);
        sum = multiply_add(panel.even, both.even, sum);
        sum = multiply_add(panel.odd, both.odd, sum);
    }
#endif
    INLINE void from_floats(u32* units, f32x16 values) { store_bf16(units, values); }
};

struct Float32 : FloatUnits {
    static constexpr int kRowBytes = 64, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE f32x16 load_rows(const u8* from) { return load<f32x16>(from); }
    INLINE Operand operand(f32x16 row, int) { return row; }
    INLINE std::size_t offset(int row, int lane, int) { return row * 64 + lane * 4; }
    INLINE void write(u8* to, float value, int) { std::memcpy(to, &value, 4); }
};

struct Float16 : FloatUnits {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE f32x16 load_rows(const u8* from) { return load_f16(from); }
    INLINE Operand operand(f32x16 row, int) { return row; }
    INLINE std::size_t offset(int row, int lane, int) { return row * 32 + lane * 2; }
    INLINE void write(u8* to, float value, int) {
        float16 half = static_cast<float16>(value);
        std::memcpy(to, &half, 2);
    }
};

struct BFloat16 : PairUnits {
    static constexpr int kRowBytes = 64, kRowsAtOnce = 1;
    static constexpr bool kScaled = false;
    INLINE u32x16 load_rows(const u8* from) { return load<u32x16>(from); }
    INLINE Operand operand(u32x16 row, int) { return PairUnits::operand(row); }
    INLINE std::size_t offset(int row, int lane, int position) { return row * 64 + lane * 4 + position * 2; }
    INLINE void write(u8* to, float value, int) {
        std::uint16_t bits = float_to_bf16(value);
        std::memcpy(to, &bits, 2);
    }
};

// Where the byte of (unit row, lane, position) lies: two rows share 64 bytes such that interleaving low and high bytes
// in 128-bit lanes puts each row in order.
INLINE std::size_t byte_offset(int row, int lane, int position) {
    return row / 2 * 64 + lane / 4 * 16 + row % 2 * 8 + lane % 4 * 2 + position;
}

template <typename V, typename F>
INLINE auto each_register(V lanes, F of_register) {
    if constexpr (is_halves<V>) {
        return halves(each_register(lanes.low, of_register), each_register(lanes.high, of_register));
    } else {
        return of_register(lanes);
    }
}

INLINE Floats signed_number(Words high_bytes) { return __builtin_convertvector((Ints)high_bytes >> 24, Floats); }

using Pairs [[gnu::vector_size(4 * kRegisterLanes)]] = std::uint16_t;

// Two unit rows of bytes, as `byte_offset` has them, as fours: the bytes of a lane side by side.
INLINE Words fours_of(Bytes rows) {
    Pairs pairs = (Pairs)rows;
#if defined(LONGHELIX_AVX512)
    return (Words)__builtin_shufflevector(pairs, pairs, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15, 16, 20, 17, 21, 18,
                                          22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31);
#elif defined(LONGHELIX_AVX2)
    return (Words)__builtin_shufflevector(pairs, pairs, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
#else
    return (Words)__builtin_shufflevector(pairs, pairs, 0, 4, 1, 5, 2, 6, 3, 7);
#endif
}

// Whole numbers that codes stand for, as fours of bytes: what one load of codes brings, 64 bytes each.
template <int N>
struct WholeNumbers {
    u32x16 of[N];
};

// What 64 bytes of codes stand for, as fours of bytes.
template <typename Code>
INLINE u32x16 whole_of(u32x16 codes) {
    return each_register(codes, [](Words bytes) { return fours_of(Code::stored((Bytes)bytes)); });
}

#if defined(LONGHELIX_AVX512)
// Codes of up to 7 bits as bfloat16, low and high bytes apart, for look-ups of bytes. Bit 7 of a code of 8 bits is its sign.
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

// 64 bytes of codes, of which each is the low and the high byte of a bfloat16.
struct Rows2 {
    __m512i low, high;
};

template <typename Code>
INLINE Rows2 decode(u32x16 codes) {
    static constexpr Table kTable = Table::of(Code::value);
    if constexpr (Code::kBits == 4) {
        auto table = [](const u8* from) { return _mm512_broadcast_i32x4(load<__m128i>(from)); };
        return {_mm512_shuffle_epi8(table(kTable.low), (__m512i)codes), _mm512_shuffle_epi8(table(kTable.high), (__m512i)codes)};
    }
    if constexpr (Code::kBits == 6) {
        return {_mm512_permutexvar_epi8((__m512i)codes, load<__m512i>(kTable.low)),
                _mm512_permutexvar_epi8((__m512i)codes, load<__m512i>(kTable.high))};
    }
    __m512i low = _mm512_permutex2var_epi8(load<__m512i>(kTable.low), (__m512i)codes, load<__m512i>(kTable.low + 64));
    __m512i high = _mm512_permutex2var_epi8(load<__m512i>(kTable.high), (__m512i)codes, load<__m512i>(kTable.high + 64));
    return {low, _mm512_ternarylogic_epi32(high, (__m512i)codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8)};
}

template <typename Code>
INLINE PairUnits::Operand row_of(const Rows2& rows, int row) {
    return (__m512bh)(row ? _mm512_unpackhi_epi8(rows.low, rows.high) : _mm512_unpacklo_epi8(rows.low, rows.high));
}
#else
// 64 bytes of codes, as the code's own `stored` gives them for `number`.
struct Rows2 {
    u32x16 codes;
};

template <typename Code>
INLINE Rows2 decode(u32x16 codes) {
    return {each_register(codes, [](Words bytes) { return (Words)Code::stored((Bytes)bytes); })};
}

// The bytes of one unit row at `position`, each in the high byte of its lane.
INLINE Words lane_bytes(Words codes, int row, int position) {
#if defined(LONGHELIX_AVX2)
    int at = row * 8 + position;
    __m128i four = _mm_setr_epi8(-1, -1, -1, at, -1, -1, -1, at + 2, -1, -1, -1, at + 4, -1, -1, -1, at + 6);
    return (Words)_mm256_shuffle_epi8((__m256i)codes, _mm256_broadcastsi128_si256(four));
#else
    // A lane's two bytes are raised to its high half: not by a shift, as few processors shift lanes by different numbers.
    Pairs pairs = (Pairs)codes, none{};
    Words raised = (Words)(row ? __builtin_shufflevector(none, pairs, 4, 12, 5, 13, 6, 14, 7, 15)
                               : __builtin_shufflevector(none, pairs, 0, 8, 1, 9, 2, 10, 3, 11));
    return position ? raised & 0xff000000u : raised << 8;
#endif
}

template <typename Code, typename V>
INLINE auto numbers(V codes, int row, int position) {
    if constexpr (is_halves<V>) {
        return halves(numbers<Code>(codes.low, row, position), numbers<Code>(codes.high, row, position));
    } else {
        return Code::number(lane_bytes(codes, row, position));
    }
}

template <typename Code>
INLINE PairUnits::Operand row_of(const Rows2& rows, int row) {
    return {numbers<Code>(rows.codes, row, 0), numbers<Code>(rows.codes, row, 1)};
}
#endif

// Elements of 8 bits, a sign and the code of a magnitude.
template <typename Code>
struct Byte : PairUnits {
    static constexpr int kRowBytes = 32, kRowsAtOnce = 2;
    static constexpr bool kScaled = true;
    static constexpr float kLargest = Code::kLargest;

    INLINE std::size_t offset(int row, int lane, int position) { return byte_offset(row, lane, position); }
    INLINE Rows2 load_rows(const u8* from) { return decode<Code>(load<u32x16>(from)); }
    INLINE Operand operand(const Rows2& rows, int row) { return row_of<Code>(rows, row); }
    INLINE void write(u8* to, float value, int) {
        u8 sign = value < 0 ? 128 : 0;
        *to = sign | Code::nearest(sign ? -value : value);
    }
};

struct Int8Code {
    static constexpr int kBits = 8;
    static constexpr float value(int code) { return static_cast<float>(code); }
    // Sign and magnitude to two's complement.
    INLINE Bytes stored(Bytes codes) {
        Bytes negative = (Bytes)(codes > 127);
        return ((codes & 127) ^ negative) - negative;
    }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes); }
};

// OCP 8-bit floating point, e4m3: bias 7, no infinities, code 127 is NaN.
struct Float8Code {
    static constexpr int kBits = 8;
    static constexpr float kLargest = 448.0f;
    static constexpr float value(int code) {
        if (code == 127) return __builtin_nanf("");
        int exponent = code >> 3;
        float value = static_cast<float>(exponent ? 8 + (code & 7) : code);
        for (int i = exponent ? exponent : 1; i < 10; ++i) value /= 2;
        for (int i = exponent; i > 10; --i) value *= 2;
        return value;
    }
    INLINE Bytes stored(Bytes codes) { return codes; }
    // Exponent and mantissa where float32 has them, whose exponents are larger by 120: the smallest codes are subnormal
    // on the way. No pool holds code 127, the NaN.
    INLINE Floats number(Words high_bytes) {
        return (Floats)((Words)((Ints)high_bytes >> 4) & 0x87ffffffu) * 0x1p120f;
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

struct Int4Code {
    static constexpr int kBits = 4;
    static constexpr float value(int code) { return static_cast<float>(code - 8); }
    INLINE Bytes stored(Bytes codes) { return codes - 8; }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes); }
};

// Elements of 4 bits, -8 to 7. The low nibbles of 64 bytes are two unit rows, the high nibbles the next two.
struct Int4 : PairUnits {
    static constexpr int kRowBytes = 16, kRowsAtOnce = 4;
    static constexpr bool kScaled = true;

    struct Rows4 {
        Rows2 low, high;
    };

    INLINE std::size_t offset(int row, int lane, int position) {
        return row / 4 * 64 + byte_offset(row % 2, lane, position);
    }
    INLINE Rows4 load_rows(const u8* from) {
        u32x16 codes = load<u32x16>(from);
        return {decode<Int4Code>(codes & 0x0f0f0f0fu), decode<Int4Code>((codes >> 4) & 0x0f0f0f0fu)};
    }
    INLINE Operand operand(const Rows4& rows, int row) { return row_of<Int4Code>(row < 2 ? rows.low : rows.high, row % 2); }
};

// Codes of checkpoints, whose scales are those of `Weight`. kShift: what is added to each number that a code stands for.
// kFactor: what then gives the number. kPackedBits: bits of a code as rows have it.
template <typename E>
constexpr bool is_packed = false;

// OCP 8-bit floating point.
struct E4M3 : Float8 {
    static constexpr bool kScaled = false;
    static constexpr float kShift = 0.0f, kFactor = 1.0f;
    static constexpr int kPackedBits = 8;
    template <typename V>
    INLINE V stored_bytes(V codes) {
        return codes;
    }
};

// Bytes in two's complement: each number and a half, so that signs and magnitudes have the same range.
struct HalvesCode {
    static constexpr int kBits = 8;
    static constexpr float value(int code) { return static_cast<float>(code) + 0.5f; }
    // The whole numbers.
    INLINE Bytes stored(Bytes codes) { return codes ^ ((Bytes)(codes > 127) & 127); }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes) + 0.5f; }
};

struct Code8 : Byte<HalvesCode> {
    static constexpr bool kScaled = false;
    static constexpr float kShift = 0.5f, kFactor = 1.0f;
    static constexpr int kPackedBits = 8;
    template <typename V>
    INLINE V stored_bytes(V codes) {
        return codes ^ ((codes >> 7) & 0x01010101u) * 127u;
    }
    INLINE WholeNumbers<1> load_whole(const u8* from) { return {{whole_of<HalvesCode>(load<u32x16>(from))}}; }
};

// Codes of 4 bits: the low nibbles of 64 bytes are two unit rows, the high nibbles the next two.
template <typename Code>
struct Nibble : Int4 {
    static constexpr bool kScaled = false;
    static constexpr int kPackedBits = 4;
    INLINE Rows4 load_rows(const u8* from) {
        u32x16 codes = load<u32x16>(from);
        return {decode<Code>(codes & 0x0f0f0f0fu), decode<Code>((codes >> 4) & 0x0f0f0f0fu)};
    }
    INLINE Operand operand(const Rows4& rows, int row) { return row_of<Code>(row < 2 ? rows.low : rows.high, row % 2); }
    INLINE WholeNumbers<2> load_whole(const u8* from) {
        u32x16 codes = load<u32x16>(from);
        return {{whole_of<Code>(codes & 0x0f0f0f0fu), whole_of<Code>((codes >> 4) & 0x0f0f0f0fu)}};
    }
};

// The byte of a table at each code of four bits.
INLINE Bytes look_up(const std::int8_t (&table)[16], Bytes codes) {
#if defined(LONGHELIX_AVX512)
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)(codes & 15));
#elif defined(LONGHELIX_AVX2)
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)(codes & 15));
#else
    Bytes values;
    for (std::size_t i = 0; i < sizeof values; ++i) values[i] = static_cast<u8>(table[codes[i] & 15]);
    return values;
#endif
}

// Twice the number, which is whole.
constexpr std::int8_t kE2M1Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct E2M1Code {
    static constexpr int kBits = 4;
    static constexpr float value(int code) { return code == 8 ? -0.0f : kE2M1Values[code & 15]; }
    INLINE Bytes stored(Bytes codes) { return look_up(kE2M1Values, codes); }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes); }
};

struct E2M1 : Nibble<E2M1Code> {
    static constexpr float kShift = 0.0f, kFactor = 0.5f;
};

// From 0 to 15, less 8.
struct Code4 : Nibble<Int4Code> {
    static constexpr float kShift = -8.0f, kFactor = 1.0f;
};

// What codes of nl4 stand for: IQ4_NL of llama.cpp (kvalues_iq4nl in ggml-common.h).
constexpr std::int8_t kNl4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Nl4Code {
    static constexpr int kBits = 4;
    static constexpr float value(int code) { return kNl4Values[code & 15]; }
    INLINE Bytes stored(Bytes codes) { return look_up(kNl4Values, codes); }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes); }
};

struct Nl4 : Nibble<Nl4Code> {
    static constexpr float kShift = 0.0f, kFactor = 1.0f;
};

struct Int6Code {
    static constexpr int kBits = 6;
    static constexpr float value(int code) { return static_cast<float>(code - 32); }
    INLINE Bytes stored(Bytes codes) { return codes - 32; }
    INLINE Floats number(Words high_bytes) { return signed_number(high_bytes); }
};

// From 0 to 63, less 32. The low four bits of eight unit rows are as nibbles are; then come 64 bytes, of which each has the
// high two bits of four codes: those of the first two unit rows are lowest.
struct Code6 : PairUnits {
    static constexpr int kRowBytes = 24, kRowsAtOnce = 8;
    static constexpr bool kScaled = false;
    static constexpr float kShift = -32.0f, kFactor = 1.0f;
    static constexpr int kPackedBits = 6;
    static constexpr int kInputsAtOnce = kRowsAtOnce * kStep;
    static constexpr std::size_t kHighBytes = 128;  // where the high bits begin

    struct Rows8 {
        u32x16 low[2], high;
    };

    INLINE Rows8 load_rows(const u8* from) {
        return {{load<u32x16>(from), load<u32x16>(from + 64)}, load<u32x16>(from + kHighBytes)};
    }
    // Codes of the unit rows 2 * pair and 2 * pair + 1.
    INLINE u32x16 codes_of(const Rows8& rows, int pair) {
        u32x16 low = rows.low[pair / 2], high = rows.high;
        low = (pair % 2 == 0 ? low : low >> 4) & 0x0f0f0f0fu;
        switch (pair) {
            case 0: high = high << 4; break;
            case 1: high = high << 2; break;
            case 2: break;
            default: high = high >> 2;
        }
        return low | (high & 0x30303030u);
    }
    INLINE Operand operand(const Rows8& rows, int row) {
        return row_of<Int6Code>(decode<Int6Code>(codes_of(rows, row / 2)), row % 2);
    }
    INLINE WholeNumbers<4> load_whole(const u8* from) {
        Rows8 rows = load_rows(from);
        return {{whole_of<Int6Code>(codes_of(rows, 0)), whole_of<Int6Code>(codes_of(rows, 1)),
                 whole_of<Int6Code>(codes_of(rows, 2)), whole_of<Int6Code>(codes_of(rows, 3))}};
    }
};

template <>
constexpr bool is_packed<E4M3> = true;
template <>
constexpr bool is_packed<Code8> = true;
template <>
constexpr bool is_packed<E2M1> = true;
template <>
constexpr bool is_packed<Code4> = true;
template <>
constexpr bool is_packed<Nl4> = true;
template <>
constexpr bool is_packed<Code6> = true;

// sums[r][v] += rows r of `units` (`stride` apart) times panel v, over `depth` unit rows. While it reads the panels it
// asks the memory for what will be read next, as many lines: `ahead[0]` and what follows in the first half of the rows,
// `ahead[1]` in the second. One line after the other: the memory answers 8 streams side by side a quarter slower.
template <typename E, int R, int V, bool Ahead>
INLINE void accumulate(typename E::Sum (&sums)[R][V], const u32* units, std::ptrdiff_t stride, const u8* const (&panels)[V],
                       int depth, const u8* const (&ahead)[2]) {
    if constexpr (V > 1 && R * V * kLanes / kRegisterLanes > kRegisters * 3 / 4) {
        // Too many sums for the registers: a panel after the other.
        for (int v = 0; v < V; ++v) {
            typename E::Sum own[R][1];
            const u8* panel[1] = {panels[v]};
            for (int r = 0; r < R; ++r) own[r][0] = sums[r][v];
            accumulate<E, R, 1, Ahead>(own, units, stride, panel, depth, ahead);
            for (int r = 0; r < R; ++r) sums[r][v] = own[r][0];
        }
        return;
    }
    const u8* next = ahead[0];
    for (int row = 0; row < depth; row += E::kRowsAtOnce) {
        if (Ahead && row == depth / 2) next = ahead[1];
        decltype(E::load_rows(next)) loaded[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            loaded[v] = E::load_rows(panels[v] + row * E::kRowBytes);
            if constexpr (Ahead) __builtin_prefetch(next + v * (E::kRowsAtOnce * E::kRowBytes), 0, 2);
        }
        if constexpr (Ahead) next += V * E::kRowsAtOnce * E::kRowBytes;
#pragma GCC unroll 8
        for (int i = 0; i < E::kRowsAtOnce; ++i) {
            typename E::Operand operands[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) operands[v] = E::operand(loaded[v], i);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                u32 unit = units[r * stride + row + i];
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) E::fma(sums[r][v], operands[v], unit);
            }
        }
    }
}

// What stands beside a row that became units of two planes: number = scale * (128 * first + second), and what the sums of
// each plane start with.
struct RowScale {
    float scale;
    std::int32_t starts[2];
};

// Products of R rows with V panels. Rows of one plane have no scales.
template <typename E, int R, int V>
struct Sums {
    typename E::Sum of[R * E::kPlanes][V];

    INLINE Sums from(const RowScale* rows) {
        Sums sums;
#pragma GCC unroll 16
        for (int r = 0; r < R * E::kPlanes; ++r) {
            typename E::Sum start{};
            if constexpr (E::kWhole) start = start + rows[r / E::kPlanes].starts[r % E::kPlanes];
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) sums.of[r][v] = start;
        }
        return sums;
    }

    // Without its row's scale.
    f32x16 value(int r, int v) const {
        if constexpr (E::kWhole) {
            typename E::Sum planes[E::kPlanes];
            for (int i = 0; i < E::kPlanes; ++i) planes[i] = of[r * E::kPlanes + i][v];
            return E::value(planes);
        } else {
            return of[r][v];
        }
    }
};

}  // namespace longhelix::ISA
