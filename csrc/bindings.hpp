// What the files that make the Python module share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "calls.hpp"

namespace nb = nanobind;

namespace longhelix {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void bind_sampling(nb::module_& module);

}  // namespace longhelix
