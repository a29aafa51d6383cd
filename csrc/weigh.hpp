// Scores of a row over a strip of 256 tokens to softmax weights, as units that multiply values.
#pragma once

#include "integers.hpp"
#include "softmax_state.hpp"

namespace longhelix::ISA {

constexpr int kStripTokens = 256;
constexpr int kStripTiles = kStripTokens / kLanes;

// The scales of the values of a strip, where numbers are narrow: scale * of.
struct ValueScales {
    alignas(64) float of[kStripTokens];
    float scale = 1.0f;

    // Such that the largest of the first `count` is `most`; NaN if one of them is NaN.
    void divide(int count, float most) {
        // Numbers that are not negative are ordered as their bits are, and NaN is above all.
        i32x16 highest{};
        for (int i = 0; i < count; i += kLanes) highest = larger(highest, load<i32x16>(of + i));
        float largest = __builtin_bit_cast(float, ISA::largest(highest));
        Reciprocal reciprocal = reciprocal_of(largest, most);
        for (int i = 0; i < count; i += kLanes) store(of + i, load<f32x16>(of + i) * reciprocal.inverse);
        scale = reciprocal.scale;
    }
};

// Scores of one row, times `scale`, to weights relative to the strip's largest, and to units; `run` takes the sum of the
// weights. Returns what the units' products with values are to be multiplied with,
// and in `shrink` what the running state is.
template <typename E>
INLINE RowScale weigh(const float* scores, int num_tiles, float scale, const ValueScales& values, u32* units,
                      const State& run, int r, float& shrink) {
    f32x16 highest = load<f32x16>(scores);
    for (int t = 1; t < num_tiles; ++t) highest = larger(highest, load<f32x16>(scores + t * kLanes));
    float score = largest(highest), top = score * scale, base = run.base[r] > top ? run.base[r] : top;
    // Where nothing is seen, any finite base gives weights of 0.
    float finite_score = score == kMinusInfinity ? 0.0f : score, finite_base = base == kMinusInfinity ? 0.0f : base;
    f32x16 sums[4] = {};  // chains, so that one does not wait for the other
    auto weight = [&](int t) {
        f32x16 below = load<f32x16>(scores + t * kLanes) - finite_score;
        f32x16 weight = exp2(E::kWhole ? below * scale : below);
        sums[t % 4] += weight;
        return E::kScaled ? weight * load<f32x16>(values.of + t * kLanes) : weight;
    };
    RowScale result{};
    if constexpr (E::kWhole) {
        auto weights = [&](int i) { return weight(i / kLanes); };
        result = E::store_all(units, kStripTokens / E::kStep, num_tiles * kLanes, weights);
    } else {
        for (int t = 0; t < num_tiles; ++t) E::from_floats(units + t * (kLanes / E::kStep), weight(t));
    }
    float grown = first(exp2(splat(top - finite_base)));
    shrink = first(exp2(splat(run.base[r] - finite_base)));
    run.sum[r] = run.sum[r] * shrink + total((sums[0] + sums[1]) + (sums[2] + sums[3])) * grown;
    run.base[r] = base;
    result.scale = E::kWhole ? grown * values.scale : grown;
    return result;
}

}  // namespace longhelix::ISA
