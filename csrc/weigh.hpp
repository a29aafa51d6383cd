// Scores of a row over a strip of 256 tokens to softmax weights, as units that multiply values.
#pragma once

#include "integers.hpp"
#include "softmax_state.hpp"

namespace longhelix::ISA {

constexpr int kStripTokens = 256;
constexpr int kStripTiles = kStripTokens / kLanes;

// Scores of one row to weights relative to the strip's largest, in their place where units are integers, and to units;
// `run` takes the sum of the weights. `value_scales`: of narrow values, by token, which the units have in them; 0 where the
// row sees nothing. Returns what the units' products with values are to be multiplied with, and in `shrink` what the
// running state is.
template <typename E>
INLINE RowScale weigh(float* scores, int num_tiles, const float* value_scales, u32* units, const State& run, int r,
                      float& shrink) {
    f32x16 highest = load<f32x16>(scores);
    for (int t = 1; t < num_tiles; ++t) highest = larger(highest, load<f32x16>(scores + t * kLanes));
    float top = largest(highest), base = run.base[r] > top ? run.base[r] : top;
    // Where nothing is seen, any finite base gives weights of 0.
    float finite_top = top == kMinusInfinity ? 0.0f : top, finite_base = base == kMinusInfinity ? 0.0f : base;
    f32x16 sums[4] = {};  // chains, so that one does not wait for the other
    for (int t = 0; t < num_tiles; ++t) {
        float* at = scores + t * kLanes;
        f32x16 weight = exp2(load<f32x16>(at) - finite_top);
        sums[t % 4] += weight;
        if constexpr (E::kScaled) weight = weight * load<f32x16>(value_scales + t * kLanes);
        if constexpr (E::kWhole) {
            store(at, weight);
        } else {
            E::from_floats(units + t * (kLanes / E::kStep), weight);
        }
    }
    float grown = first(exp2(splat(top - finite_base)));
    shrink = first(exp2(splat(run.base[r] - finite_base)));
    run.sum[r] = run.sum[r] * shrink + total((sums[0] + sums[1]) + (sums[2] + sums[3])) * grown;
    run.base[r] = base;
    RowScale scale{grown, {}};
    if constexpr (E::kWhole) {
        auto weights = [&](int i) { return load<f32x16>(scores + i); };
        scale = E::from_floats(units, kStripTokens / E::kStep, num_tiles * kLanes, weights);
        scale.scale *= grown;
    }
    return scale;
}

}  // namespace longhelix::ISA
