// Panels of keys as panels of values: the same elements, lanes and rows exchanged.
#pragma once

#include <type_traits>

#include "elements.hpp"

namespace longhelix::ISA {

// Sixteen tokens by sixteen channels of 16 bits, from pairs of channels to pairs of tokens: eight registers whose
// 64-bit elements (two tokens by two channels) change places as a matrix does, and are turned themselves.
INLINE void turn_pairs(const u8* from, u8* to) {
    using u64x8 [[gnu::vector_size(64)]] = std::uint64_t;
    u64x8 a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        u64x8 x = load<u64x8>(from + i * 64);
        a[i] = (x & 0xffff00000000ffffu) | (x >> 16 & 0xffff0000u) | (x << 16 & 0xffff00000000u);
    }
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            a[i + j] = __builtin_shufflevector(b[i + j], b[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + j + 2] = __builtin_shufflevector(b[i + j], b[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; ++i) {
        store(to + i * 64, __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (i + 4) * 64, __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

// Sixteen channels of sixteen tokens, as keys and as values.
template <typename E>
INLINE void turn_panel(const u8* from, u8* to) {
    if constexpr (std::is_base_of_v<BFloat16, E>) {
        turn_pairs(from, to);
    } else if constexpr (E::kRowsAtOnce == 1) {
        constexpr int kBytes = E::kRowBytes / kLanes / E::kStep;
        for (int channel = 0; channel < kLanes; ++channel) {
            for (int token = 0; token < kLanes; ++token) {
                std::memcpy(to + E::offset(token / E::kStep, channel, token % E::kStep),
                            from + E::offset(channel / E::kStep, token, channel % E::kStep), kBytes);
            }
        }
    }
}

}  // namespace longhelix::ISA
