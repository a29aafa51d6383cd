// Powers of two of sixteen lanes.
#pragma once

#include "simd.hpp"

namespace longhelix::ISA {

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

// 2^x for -126 <= x <= 0, to 1e-7 of it: for sums of many. The polynomials have the least largest error of degree 5.
INLINE f32x16 exp2_summand(f32x16 x) {
#if defined(LONGHELIX_AVX512)
    constexpr int kDown = 9;
    f32x16 f = (f32x16)_mm512_reduce_ps((__m512)x, kDown);  // what is above the next integer below
    f32x16 p = splat(1.8775767e-3f);
    p = multiply_add(p, f, splat(8.9893401e-3f));
    p = multiply_add(p, f, splat(5.5826318e-2f));
    p = multiply_add(p, f, splat(2.4015362e-1f));
    p = multiply_add(p, f, splat(6.9315307e-1f));
    p = multiply_add(p, f, splat(9.9999993e-1f));
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    // Adding and taking away 1.5 * 2^23 rounds to an integer, whose low bits are added to the exponent.
    f32x16 shifted = x + 12582912.0f;
    f32x16 f = x - (shifted - 12582912.0f);
    f32x16 p = splat(1.3276472e-3f);
    p = multiply_add(p, f, splat(9.6755413e-3f));
    p = multiply_add(p, f, splat(5.5507133e-2f));
    p = multiply_add(p, f, splat(2.4022120e-1f));
    p = multiply_add(p, f, splat(6.9314697e-1f));
    p = multiply_add(p, f, splat(1.00000007f));
    return as<f32x16>(as<i32x16>(p) + (as<i32x16>(shifted) << 23));
#endif
}

// 2^x for x <= 0, to 2 units in the last place; exactly 0 for -inf; NaN stays.
INLINE f32x16 exp2(f32x16 x) {
#if defined(LONGHELIX_AVX512)
    // Scaling by 2^-200 gives 0, and spares -inf, whose difference from itself is not a number.
    __m512 bounded = (__m512)larger(splat(-200.0f), x);
    __m512 whole = _mm512_roundscale_ps(bounded, 0);
    return (f32x16)_mm512_scalef_ps((__m512)exp2_fraction((f32x16)(bounded - whole)), whole);
#else
    f32x16 bounded = larger(splat(-200.0f), x);
    // What is below the normal numbers is raised by 2^100, and lowered at the end; from 2^-150 on nothing is left.
    auto tiny = bounded < -126.0f;
    f32x16 raised = choose(tiny, bounded + 100.0f, bounded);
    // Adding and taking away 1.5 * 2^23 rounds to an integer, whose low bits are the exponent.
    f32x16 shifted = raised + 12582912.0f;
    f32x16 f = raised - (shifted - 12582912.0f);
    i32x16 exponent = (as<i32x16>(shifted) << 23) + (127 << 23);
    f32x16 value = exp2_fraction(f) * as<f32x16>(exponent);
    // A product below the normal numbers costs some processors a hundred cycles, even in a lane that is thrown away.
    f32x16 lowered = choose(bounded < -150.0f, f32x16{}, splat(0x1p-100f));
    return value * choose(tiny, lowered, splat(1.0f));
#endif
}

}  // namespace longhelix::ISA
