// Blocks of narrow numbers, as GGUF files hold them, to float32.
#pragma once

#include "linear.hpp"

namespace longhelix::ISA {

struct Dequantise {
    const Blocks& call;

    static constexpr int kBlock = 32;  // numbers

    explicit Dequantise(const Blocks& blocks) : call(blocks) {}

    void run() const {
        switch (call.kind) {
            case BlockKind::q4_0: return rows<18>(q4_0);
            case BlockKind::q4_1: return rows<20>(q4_1);
            case BlockKind::q8_0: return rows<34>(q8_0);
            default: return;  // `bind_loading` refuses other kinds
        }
    }

  private:
    template <int kBytes, typename F>
    void rows(F of_block) const {
        each_row(call.num_rows, [&](std::int64_t row) {
            const u8* from = static_cast<const u8*>(call.from) + row * call.stride_bytes;
            float* to = call.to + row * call.blocks_per_row * kBlock;
            for (std::int64_t i = 0; i < call.blocks_per_row; ++i) of_block(from + i * kBytes, to + i * kBlock);
        });
    }

    static float scale(const u8* from) {
        float16 value;
        std::memcpy(&value, from, sizeof value);
        return static_cast<float>(value);
    }

    static void q4_0(const u8* block, float* to) {
        float factor = scale(block);
        halves(block + 2, to, [=](int number) { return factor * static_cast<float>(number - 8); });
    }

    // A sum that is rounded once: the product has at most 15 bits.
    static void q4_1(const u8* block, float* to) {
        float factor = scale(block), shift = scale(block + 2);
        halves(block + 4, to, [=](int number) { return factor * static_cast<float>(number) + shift; });
    }

    static void q8_0(const u8* block, float* to) {
        float factor = scale(block);
        const auto* numbers = reinterpret_cast<const std::int8_t*>(block + 2);
        for (int i = 0; i < kBlock; ++i) to[i] = factor * static_cast<float>(numbers[i]);
    }

    // The low halves of sixteen bytes, then the high ones.
    template <typename F>
    static void halves(const u8* pairs, float* to, F value) {
        for (int i = 0; i < kBlock / 2; ++i) {
            to[i] = value(pairs[i] & 15);
            to[i + kBlock / 2] = value(pairs[i] >> 4);
        }
    }
};

}  // namespace longhelix::ISA
