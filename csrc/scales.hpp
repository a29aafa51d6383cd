// Scales of scale blocks in packed weights.
#pragma once

#include "bytes.hpp"
#include "lanes.hpp"

namespace longhelix::ISA {

INLINE std::size_t scale_bytes(Number number) {
    if (number == Number::float32) return 4;
    return number == Number::bfloat16 || number == Number::float16 ? 2 : 1;  // float8, exponents and integers
}

// Sixteen scales of scale blocks, times a power of two.
INLINE f32x16 load_scales(const u8* from, Number number, float factor) {
    switch (number) {
        case Number::e4m3: {
            // Exponent and mantissa where float32 has them. Its own subnormal numbers would cost a processor hundreds of
            // cycles, so those of the code are made from whole numbers.
            i32x16 codes = load_bytes<i32x16>(from), magnitudes = codes & 0x7f;
            f32x16 normal = as<f32x16>((magnitudes << 20) + (120 << 23));
            f32x16 value = choose(magnitudes > 7, normal, to_floats(magnitudes) * 0x1p-9f);
            return as<f32x16>(as<i32x16>(value * factor) | (codes & static_cast<std::int32_t>(0x80000000)));
        }
        case Number::e8m0: {
            u32x16 exponents = as<u32x16>(load_bytes<i32x16>(from)) & 0xffu;
            // The smallest is half the smallest normal number.
            return as<f32x16>(choose(exponents > 0u, exponents << 23, u32x16{} + 0x400000u)) * factor;
        }
        case Number::int8: return to_floats(load_bytes<i32x16>(from)) * factor;
        default: return load_number(from, 0, number) * factor;
    }
}

}  // namespace longhelix::ISA
