// The state of a softmax over some of a row's keys (FlashAttention's online softmax, arXiv 2205.14135), and its merge.
#pragma once

#include "exponentials.hpp"

namespace longhelix::ISA {

// A running softmax over keys, per row: base (log2 of the largest weight), the sum of weights, the weighted values.
struct State {
    float* base;
    float* sum;
    float* out;  // (rows, value_size)
};

// Adds state `next` to `state`; both are exact zeros where no key was seen.
INLINE void merge_state(const State& state, const State& next, int rows, int value_size) {
    for (int r = 0; r < rows; ++r) {
        if (next.sum[r] == 0) continue;
        float base = state.base[r] > next.base[r] ? state.base[r] : next.base[r];
        float keep = first(exp2(splat(state.base[r] - base))), add = first(exp2(splat(next.base[r] - base)));
        float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
        const float* more = next.out + static_cast<std::ptrdiff_t>(r) * value_size;
        for (int c = 0; c < value_size; c += kLanes) {
            store(out + c, multiply_add(load<f32x16>(more + c), splat(add), load<f32x16>(out + c) * keep));
        }
        state.sum[r] = state.sum[r] * keep + next.sum[r] * add;
        state.base[r] = base;
    }
}

INLINE void reset_state(const State& state, int rows, int value_size) {
    for (int r = 0; r < rows; ++r) state.base[r] = kMinusInfinity, state.sum[r] = 0.0f;
    std::memset(state.out, 0, sizeof(float) * rows * value_size);
}

INLINE void copy_state(const State& to, const State& from, int rows, int value_size) {
    std::memcpy(to.base, from.base, rows * sizeof(float));
    std::memcpy(to.sum, from.sum, rows * sizeof(float));
    std::memcpy(to.out, from.out, sizeof(float) * rows * value_size);
}

// How many floats a state takes in one run of memory, and the state that lies at such a place.
INLINE std::size_t state_floats(int rows, int value_size) {
    return static_cast<std::size_t>(rows) * value_size + (2 * rows + kLanes - 1) / kLanes * kLanes;
}

INLINE State state_at(float* at, int rows, int value_size) {
    float* base = at + static_cast<std::size_t>(rows) * value_size;
    return {base, base + rows, at};
}

}  // namespace longhelix::ISA
