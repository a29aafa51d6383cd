// What the kernels have done since the process began, counted where it is done: what a test holds against a formula.
#pragma once

#include <atomic>
#include <cstdint>

namespace longhelix {

struct Work {
    std::atomic<std::uint64_t> multiplied{0};  // products with weights, those of padded outputs included
    std::atomic<std::uint64_t> attended{0};    // (row, query head, token) of attention, masked tokens included
};

inline Work done;

}  // namespace longhelix
