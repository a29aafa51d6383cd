// Sixteen float32 lanes and what is done with them, for whichever instruction set this file is compiled.
//
// Everything here is in the namespace of that instruction set, so that no function compiled for one can be linked in
// place of the same function compiled for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// All that a form uses; a compiler that was told less takes a narrower one.
#if defined(__AVX512F__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define LONGHELIX_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LONGHELIX_AVX2
#endif

#if defined(LONGHELIX_AVX512) || defined(LONGHELIX_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.hpp"

#define INLINE [[gnu::always_inline]] static inline

namespace longhelix::ISA {

using u8 = std::uint8_t;
using u32 = std::uint32_t;

constexpr int kLanes = 16;
#if defined(LONGHELIX_AVX512)
constexpr int kRegisterLanes = 16, kRegisters = 32;
#elif defined(LONGHELIX_AVX2)
constexpr int kRegisterLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kRegisterLanes = 4, kRegisters = 32;
#else
constexpr int kRegisterLanes = 4, kRegisters = 16;
#endif
// Rows of a product that are worked on at once: their sums must fit the registers.
constexpr int kRowTile = kRegisterLanes == 16 ? 12 : 4;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2e = 1.44269504089f;

// One register, by what it holds.
using Floats [[gnu::vector_size(4 * kRegisterLanes)]] = float;
using Ints [[gnu::vector_size(4 * kRegisterLanes)]] = std::int32_t;
using Words [[gnu::vector_size(4 * kRegisterLanes)]] = std::uint32_t;
using Bytes [[gnu::vector_size(4 * kRegisterLanes)]] = u8;
using Shorts [[gnu::vector_size(2 * kRegisterLanes)]] = std::uint16_t;

// Compilers keep a vector that is wider than a register in memory. Where registers are narrower, sixteen lanes are
// halves; and these are, where a register has four.
template <typename Half>
struct Halves {
    Half low, high;
};

template <typename V>
constexpr bool is_halves = false;
template <typename Half>
constexpr bool is_halves<Halves<Half>> = true;

template <typename Register>
using Sixteen = std::conditional_t<kRegisterLanes == 16, Register,
                                   std::conditional_t<kRegisterLanes == 8, Halves<Register>, Halves<Halves<Register>>>>;

using f32x16 = Sixteen<Floats>;
using i32x16 = Sixteen<Ints>;
using u32x16 = Sixteen<Words>;

template <typename Half>
INLINE Halves<Half> halves(Half low, Half high) {
    return {low, high};
}

#define LANEWISE(op)                                                        \
    template <typename Half>                                                \
    INLINE auto operator op(Halves<Half> a, Halves<Half> b) {               \
        return halves(a.low op b.low, a.high op b.high);                    \
    }                                                                       \
    template <typename Half, typename Scalar>                               \
        requires std::is_arithmetic_v<Scalar>                               \
    INLINE auto operator op(Halves<Half> a, Scalar b) {                     \
        return halves(a.low op b, a.high op b);                             \
    }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
LANEWISE(&)
LANEWISE(|)
LANEWISE(<<)
LANEWISE(>>)
LANEWISE(<)
LANEWISE(>)
LANEWISE(!=)
#undef LANEWISE

template <typename Half>
INLINE Halves<Half> operator-(Halves<Half> a) {
    return {-a.low, -a.high};
}

template <typename Half>
INLINE Halves<Half>& operator+=(Halves<Half>& a, Halves<Half> b) {
    return a = a + b;
}

// Where a comparison holds, lanes of `a`, else of `b`.
template <typename Mask, typename V>
INLINE V choose(Mask holds, V a, V b) {
    if constexpr (is_halves<V>) {
        return {choose(holds.low, a.low, b.low), choose(holds.high, a.high, b.high)};
    } else {
        return holds ? a : b;
    }
}

// Whether a comparison holds in any lane.
template <typename Mask>
INLINE bool holds_anywhere(Mask mask) {
    if constexpr (is_halves<Mask>) {
        return holds_anywhere(mask.low | mask.high);
    } else {
        int found = 0;
        for (int i = 0; i < kRegisterLanes; ++i) found |= static_cast<int>(mask[i]);
        return found != 0;
    }
}

// The same bits as another type.
template <typename To, typename From>
INLINE To as(From from) {
    if constexpr (is_halves<To>) {
        return {as<decltype(To::low)>(from.low), as<decltype(To::high)>(from.high)};
    } else {
        return (To)from;
    }
}

template <typename V>
INLINE V load(const void* from) {
    if constexpr (is_halves<V>) {
        using Half = decltype(V::low);
        return {load<Half>(from), load<Half>(static_cast<const u8*>(from) + sizeof(Half))};
    } else {
        V value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
}

template <typename V>
INLINE void store(void* to, V value) {
    if constexpr (is_halves<V>) {
        store(to, value.low);
        store(static_cast<u8*>(to) + sizeof value.low, value.high);
    } else {
        std::memcpy(to, &value, sizeof value);
    }
}

INLINE f32x16 splat(float value) { return f32x16{} + value; }

INLINE i32x16 lane_indices() {
    static constexpr std::int32_t kIndices[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32x16>(kIndices);
}

// A comparison that holds in lane i where bit i is set.
INLINE auto lanes_of(std::uint16_t bits) {
    static constexpr std::int32_t kBits[kLanes] = {1,      2,      4,      8,      1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                                   1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    return (load<i32x16>(kBits) & static_cast<std::int32_t>(bits)) != 0;
}

template <typename V>
INLINE auto first(V lanes) {
    if constexpr (is_halves<V>) {
        return first(lanes.low);
    } else {
        return lanes[0];
    }
}

// Of a number and a NaN, the second.
template <typename V>
INLINE V larger(V a, V b) {
#if defined(LONGHELIX_AVX512)
    if constexpr (std::is_same_v<V, i32x16>) {
        return (V)_mm512_max_epi32((__m512i)a, (__m512i)b);
    } else {
        return (V)_mm512_max_ps((__m512)a, (__m512)b);
    }
#else
    return choose(a > b, a, b);
#endif
}

template <typename V>
INLINE auto largest(V lanes) {
#if defined(LONGHELIX_AVX512)
    if constexpr (std::is_same_v<V, i32x16>) {
        return _mm512_reduce_max_epi32((__m512i)lanes);
    } else {
        return _mm512_reduce_max_ps((__m512)lanes);
    }
#else
    if constexpr (is_halves<V>) {
        return largest(larger(lanes.low, lanes.high));
    } else {
        auto value = lanes[0];
        for (int i = 1; i < kRegisterLanes; ++i) value = lanes[i] > value ? lanes[i] : value;
        return value;
    }
#endif
}

// Bit i: lane i is larger than this.
template <typename V>
INLINE u32 lanes_above(V lanes, float least) {
    if constexpr (is_halves<V>) {
        constexpr int kHalf = sizeof lanes.low / sizeof(float);
        return lanes_above(lanes.low, least) | lanes_above(lanes.high, least) << kHalf;
    } else {
#if defined(LONGHELIX_AVX512)
        return _mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(least), _CMP_GT_OQ);
#elif defined(LONGHELIX_AVX2)
        return _mm256_movemask_ps(_mm256_cmp_ps((__m256)lanes, _mm256_set1_ps(least), _CMP_GT_OQ));
#else
        u32 bits = 0;
        for (int i = 0; i < kRegisterLanes; ++i) bits |= static_cast<u32>(lanes[i] > least) << i;
        return bits;
#endif
    }
}

// Halves are added until one lane is left: the same order for every instruction set.
template <typename V>
INLINE float total(V lanes) {
#if defined(LONGHELIX_AVX512)
    return _mm512_reduce_add_ps((__m512)lanes);
#else
    if constexpr (is_halves<V>) {
        return total(lanes.low + lanes.high);
    } else {
        for (int width = kRegisterLanes / 2; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        }
        return lanes[0];
    }
#endif
}

template <typename V>
INLINE V multiply_add(V a, V b, V c) {
    if constexpr (is_halves<V>) {
        return {multiply_add(a.low, b.low, c.low), multiply_add(a.high, b.high, c.high)};
    } else {
#if defined(LONGHELIX_AVX512)
        return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(LONGHELIX_AVX2)
        return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
        return a * b + c;
#endif
    }
}

// a * b, rounded whatever follows: a compiler would fuse a sum with it where the processor can.
template <typename V>
INLINE V product(V a, V b) {
    if constexpr (is_halves<V>) {
        return {product(a.low, b.low), product(a.high, b.high)};
    } else {
        V rounded = a * b;
#if defined(LONGHELIX_AVX512)
        asm("" : "+v"(rounded));
#elif defined(__x86_64__)
        asm("" : "+x"(rounded));
#elif defined(__aarch64__)
        asm("" : "+w"(rounded));
#else
        rounded = __builtin_assoc_barrier(rounded);  // which GCC 12 takes apart
#endif
        return rounded;
    }
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

// Sixteen numbers of 16 bits to lanes, and back: `Register` has a register's form of it.
template <typename V, typename Register>
INLINE V widen(const void* from, Register of_register) {
    if constexpr (is_halves<V>) {
        using Half = decltype(V::low);
        return {widen<Half>(from, of_register), widen<Half>(static_cast<const u8*>(from) + sizeof(Half) / 2, of_register)};
    } else {
        return of_register(load<Shorts>(from));
    }
}

template <typename V, typename Register>
INLINE void narrow(void* to, V lanes, Register of_register) {
    if constexpr (is_halves<V>) {
        narrow(to, lanes.low, of_register);
        narrow(static_cast<u8*>(to) + sizeof lanes.low / 2, lanes.high, of_register);
    } else {
        store(to, of_register(lanes));
    }
}

// As bfloat16, to nearest even, in order; NaN stays.
INLINE void store_bf16(void* to, f32x16 value) {
    narrow(to, value, [](Floats lanes) {
#if defined(LONGHELIX_AVX512)
        return (Shorts)_mm512_cvtneps_pbh((__m512)lanes);
#else
        Words wide = (Words)lanes;
        // Rounding would carry some NaNs over into zeros.
        Words rounded = choose(lanes == lanes, wide + 0x7fff + ((wide >> 16) & 1), wide | 0x400000);
        return __builtin_convertvector(rounded >> 16, Shorts);
#endif
    });
}

// Sixteen numbers of 16 bits, each in the low bits of its lane.
INLINE u32x16 load_shorts(const void* from) {
    return widen<u32x16>(from, [](Shorts bits) { return __builtin_convertvector(bits, Words); });
}

INLINE f32x16 load_bf16(const void* from) { return as<f32x16>(load_shorts(from) << 16); }

INLINE f32x16 load_f16(const void* from) {
    return widen<f32x16>(from, [](Shorts bits) {
#if defined(LONGHELIX_AVX512)
        return (Floats)_mm512_cvtph_ps((__m256i)bits);
#elif defined(LONGHELIX_AVX2)
        return (Floats)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
        return (Floats)vcvt_f32_f16((float16x4_t)bits);
#else
        // float32 has the same fields at other places, and exponents larger by 112; those that say infinity or NaN stand apart.
        Words wide = __builtin_convertvector(bits, Words);
        Words magnitude = (Words)((Floats)((wide & 0x7fffu) << 13) * 0x1p112f);
        magnitude = choose((wide & 0x7c00u) == 0x7c00u, magnitude | 0x7f800000u, magnitude);
        return (Floats)(magnitude | (wide & 0x8000u) << 16);
#endif
    });
}

INLINE void store_f16(void* to, f32x16 value) {
    narrow(to, value, [](Floats lanes) {
#if defined(LONGHELIX_AVX512)
        return (Shorts)_mm512_cvtps_ph((__m512)lanes, _MM_FROUND_TO_NEAREST_INT);
#elif defined(LONGHELIX_AVX2)
        return (Shorts)_mm256_cvtps_ph((__m256)lanes, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
        return (Shorts)vcvt_f16_f32((float32x4_t)lanes);
#else
        // To nearest, ties to even. What is added to the smallest leaves their last bit in the lowest place.
        Words wide = (Words)lanes & 0x7fffffffu;
        Words rounded = (wide + 0xfffu + ((wide >> 13) & 1u) - (112u << 23)) >> 13;
        Words smallest = (Words)((Floats)wide + 0.5f) - 0x3f000000u;
        Words beyond = choose((Ints)wide > 0x7f800000, (wide >> 13 & 0x3ffu) | 0x7e00u, Words{} + 0x7c00u);
        Words half = choose((Ints)wide < 0x38800000, smallest, rounded);
        half = choose((Ints)wide < 0x47800000, half, beyond);
        return __builtin_convertvector(half | ((Words)lanes >> 16 & 0x8000u), Shorts);
#endif
    });
}

}  // namespace longhelix::ISA
