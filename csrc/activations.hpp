// What an FFN does between its products, of sixteen lanes.
#pragma once

#include "exponentials.hpp"
#include "kernels.hpp"

namespace longhelix::ISA {

// 1 / (1 + e^-x); e^-|x| cannot overflow.
INLINE f32x16 sigmoid(f32x16 x) {
    auto negative = x < 0.0f;
    f32x16 small = exp2(choose(negative, x, -x) * kLog2e);
    return choose(negative, small, splat(1.0f)) / (small + 1.0f);
}

INLINE f32x16 erf(f32x16 x) {
    float lanes[kLanes];
    store(lanes, x);
    for (float& lane : lanes) lane = __builtin_erff(lane);
    return load<f32x16>(lanes);
}

// The function of the gate, or of the only product where there is no gate. It keeps NaN.
INLINE f32x16 activate(Function function, f32x16 x) {
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;  // of gpt-oss
    switch (function) {
        case Function::none:
            return x;
        case Function::silu:
            return x * sigmoid(x);
        case Function::gelu:
            return x * 0.5f * (erf(x * 0.70710678f) + 1.0f);
        case Function::gelu_tanh:
            // (1 + tanh(z)) / 2 is the sigmoid of 2 z; here z = sqrt(2 / pi) (x + 0.044715 x^3).
            return x * sigmoid((x + x * x * x * 0.044715f) * 1.5957691f);
        case Function::relu_squared: {
            f32x16 positive = choose(x < 0.0f, f32x16{}, x);
            return positive * positive;
        }
        case Function::clamped_swiglu: {
            f32x16 limited = choose(x > kLimit, splat(kLimit), x);
            return limited * sigmoid(limited * kAlpha);
        }
    }
    return x;
}

// What the gate weighs.
INLINE f32x16 gated_input(Function function, f32x16 up) {
    if (function != Function::clamped_swiglu) return up;
    constexpr float kLimit = 7.0f;
    f32x16 limited = choose(up > kLimit, splat(kLimit), choose(up < -kLimit, splat(-kLimit), up));
    return limited + 1.0f;
}

}  // namespace longhelix::ISA
