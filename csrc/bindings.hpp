// What the files that make the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>

#include "calls.hpp"
#include "kernels.hpp"

namespace nb = nanobind;

namespace longhelix {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

inline bool is_row_number(Number number) {
    return number == Number::float32 || number == Number::bfloat16 || number == Number::float16;
}

// Kernels would take the bytes of any other number for those of one that they know.
inline Rows rows_at(Address data, Number number, std::int64_t stride) {
    if (!is_row_number(number)) {
        throw std::invalid_argument("native kernels take rows of float32, bfloat16 or float16");
    }
    return {at<const void>(data), number, stride};
}

inline void check_weight_number(Number number) {
    if (is_code(number) || number == Number::int8 || number == Number::int4 || number == Number::w8a8 || is_row_number(number)) return;
    throw std::invalid_argument("a weight does not hold numbers of this type");
}

void bind_loading(nb::module_& module);
void bind_rows(nb::module_& module);
void bind_sampling(nb::module_& module);

}  // namespace longhelix
