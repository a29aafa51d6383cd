// Keys and queries times a Hadamard matrix (QuaRot, arXiv 2404.00456), before keys are rounded to four bits.
#pragma once

#include "simd.hpp"

namespace longhelix::ISA {

// Whether keys of a pool of these numbers are stored rotated, unless they are values as well.
template <typename E>
constexpr bool rotates_keys = false;

// The matrix acts on each run of as many channels as the largest power of two that divides `size`. It spreads what one
// channel has over its run; scores stay the same.
INLINE void rotate_channels(float* values, int size) {
    int run = size & -size;
    float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(run)));
    for (int half = 1; half < run; half *= 2) {
        for (int first = 0; first < size; first += 2 * half) {
            float *low = values + first, *high = low + half;
            for (int i = 0; i < half; ++i) {
                float sum = low[i] + high[i], difference = low[i] - high[i];
                low[i] = sum, high[i] = difference;
            }
        }
    }
    for (int c = 0; c < size; ++c) values[c] *= factor;
}

}  // namespace longhelix::ISA
