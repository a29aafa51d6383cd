// Number types as they lie in memory, and sums over them.
#pragma once

#include <bit>
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

using float16 = _Float16;

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
void sum(const T* const* parts, int size, T* out, std::size_t count) {
    constexpr std::size_t kTile = 64;
    typename Wide<T>::type total[kTile];
    for (std::size_t first = 0; first < count; first += kTile) {
        std::size_t now = count - first < kTile ? count - first : kTile;
        for (std::size_t i = 0; i < now; ++i) total[i] = static_cast<typename Wide<T>::type>(parts[0][first + i]);
        for (int part = 1; part < size; ++part) {
            for (std::size_t i = 0; i < now; ++i) {
                total[i] += static_cast<typename Wide<T>::type>(parts[part][first + i]);
            }
        }
        for (std::size_t i = 0; i < now; ++i) out[first + i] = static_cast<T>(total[i]);
    }
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
