// Sixteen numbers of a row, in memory of any number that rows may have.
#pragma once

#include "simd.hpp"

namespace longhelix::ISA {

INLINE f32x16 load_number(const void* data, std::int64_t index, Number number) {
    const u8* bytes = static_cast<const u8*>(data);
    if (number == Number::float32) return load<f32x16>(bytes + index * 4);
    return number == Number::bfloat16 ? load_bf16(bytes + index * 2) : load_f16(bytes + index * 2);
}

INLINE void store_number(void* data, std::int64_t index, Number number, f32x16 value) {
    u8* bytes = static_cast<u8*>(data);
    if (number == Number::float32) {
        store(bytes + index * 4, value);
    } else if (number == Number::bfloat16) {
        store_bf16(bytes + index * 2, value);
    } else {
        store_f16(bytes + index * 2, value);
    }
}

// f.template operator()<N>() with the number as a constant: what a loop over a row would decide again at each step.
template <typename F>
INLINE void with_number(Number number, F f) {
    if (number == Number::float32) {
        f.template operator()<Number::float32>();
    } else if (number == Number::bfloat16) {
        f.template operator()<Number::bfloat16>();
    } else {
        f.template operator()<Number::float16>();
    }
}

INLINE void round_to(Number number, f32x16& value) {
    if (number == Number::float32) return;
    std::uint16_t narrow[kLanes];
    store_number(narrow, 0, number, value);
    value = load_number(narrow, 0, number);
}

}  // namespace longhelix::ISA
