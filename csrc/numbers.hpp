// Number types as they lie in memory, and sums over them.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "kernels.hpp"

namespace longhelix {

struct bfloat16 {
    std::uint16_t bits;
    using Wide = float;
    operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
    bfloat16() = default;
    explicit bfloat16(float value) {
        std::uint32_t wide = std::bit_cast<std::uint32_t>(value);
        // To nearest, ties to even; a NaN must not be rounded into an infinity.
        std::uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
        bits = static_cast<std::uint16_t>(value != value ? (wide >> 16) | 0x40 : rounded);
    }
};

template <typename T>
struct Wide {
    using type = T;
};
template <>
struct Wide<bfloat16> {
    using type = float;
};
template <>
struct Wide<float16> {
    using type = float;
};

// Sum of `size` arrays in their order, rounded once. `out` may be one of the arrays.
template <typename T>
void sum(const T* const* terms, int size, T* out, std::size_t count) {
    constexpr std::size_t kTile = 64;
    typename Wide<T>::type total[kTile];
    for (std::size_t first = 0; first < count; first += kTile) {
        std::size_t now = count - first < kTile ? count - first : kTile;
        for (std::size_t i = 0; i < now; ++i) total[i] = static_cast<typename Wide<T>::type>(terms[0][first + i]);
        for (int term = 1; term < size; ++term) {
            for (std::size_t i = 0; i < now; ++i) {
                total[i] += static_cast<typename Wide<T>::type>(terms[term][first + i]);
            }
        }
        for (std::size_t i = 0; i < now; ++i) out[first + i] = static_cast<T>(total[i]);
    }
}

// out = a + b, rounded once.
template <typename T>
void add(const T* a, const T* b, T* out, std::size_t count) {
    using W = typename Wide<T>::type;
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<W>(a[i]) + static_cast<W>(b[i]));
}

// Merges the states of one head, in their order: weights exp(lse - max), summed in float32. A state that saw nothing
// has weight 0, whatever it holds; without any the result is 0. `states` are N runs of `size` numbers.
constexpr std::size_t kLongestHead = 512;

template <typename T>
void merge(const T* const* states, const float* lse, int count, T* merged, std::size_t size) {
    float most = -INFINITY, total = 0.0f;
    for (int i = 0; i < count; ++i) most = lse[i] > most ? lse[i] : most;
    float sum[kLongestHead] = {};
    for (int i = 0; i < count; ++i) {
        if (lse[i] == -INFINITY) continue;
        float weight = std::exp(lse[i] - most);
        total += weight;
        for (std::size_t c = 0; c < size; ++c) sum[c] += weight * static_cast<float>(states[i][c]);
    }
    float factor = total > 0.0f ? total : 1.0f;
    for (std::size_t c = 0; c < size; ++c) merged[c] = static_cast<T>(sum[c] / factor);
}

template <typename F>
void dispatch(Number number, F f) {
    switch (number) {
        case Number::float32: return f(float{});
        case Number::float64: return f(double{});
        case Number::bfloat16: return f(bfloat16{});
        case Number::float16: return f(float16{});
        case Number::int32: return f(std::int32_t{});
        case Number::int64: return f(std::int64_t{});
        default: break;
    }
    throw std::invalid_argument("there are no sums of this type of number");
}

}  // namespace longhelix
