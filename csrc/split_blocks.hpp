// Blocks of GGUF files, split into rows of codes, scales and offsets. No number is changed.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace longhelix::ISA {

// Where the parts of one block go.
struct BlockParts {
    u8 *codes, *high_codes, *scales, *offsets, *superblock_scales, *superblock_offsets;
};

// Vectors of `T` that fill a register, or hold `kMost` bytes where these are fewer.
template <typename T, int kMost>
struct Vector {
    static constexpr int kBytes = std::min(kMost, 4 * kRegisterLanes), kCount = kBytes / static_cast<int>(sizeof(T));
    using Wide [[gnu::vector_size(kBytes)]] = T;
    using Narrow [[gnu::vector_size(kCount)]] = u8;
};

// Steps over `kBytes` bytes at `from` in vectors of T: f gives a vector of them, from which one byte of each T is kept.
template <typename T, int kBytes, typename F>
INLINE void narrowed(const u8* from, u8* to, F f) {
    using Of = Vector<T, kBytes>;
    for (int at = 0; at < kBytes; at += Of::kBytes) {
        auto value = f(load<typename Of::Wide>(from + at), at);
        store(to + at / static_cast<int>(sizeof(T)), __builtin_convertvector(value, typename Of::Narrow));
    }
}

// `kBytes` bytes with codes in their low halves, and as many more in their high halves: both with neighbours in one byte.
template <int kBytes>
INLINE void split_halves(const u8* from, u8* to) {
    narrowed<std::uint16_t, kBytes>(from, to, [](auto pair, int) { return (pair & 15) | (pair >> 4 & 240); });
    narrowed<std::uint16_t, kBytes>(from, to + kBytes / 2, [](auto pair, int) { return (pair >> 4 & 15) | (pair >> 8 & 240); });
}

// Codes that are `kMask` of each byte after a shift: four in a byte.
template <u32 kMask>
INLINE void split_fours(const u8* from, u32 shift, u8* to) {
    narrowed<u32, 32>(from, to, [=](auto four, int) {
        four = four >> shift & kMask * 0x01010101u;
        four = four | four >> 6;
        return (four | four >> 12) & 0xffu;
    });
}

// Scales and offsets of six bits, in twelve bytes. Blocks subtract what formats add.
INLINE void split_sixes(const u8* from, const BlockParts& to) {
    for (int i = 0; i < 4; ++i) {
        u8 scale = from[i], offset = from[i + 4], high = from[i + 8];
        to.scales[i] = scale & 63;
        to.scales[i + 4] = (high & 15) | (scale >> 2 & 48);
        to.offsets[i] = -(offset & 63);
        to.offsets[i + 4] = -((high >> 4) | (offset >> 2 & 48));
    }
}

// The bits of 32 codes as codes of two bits.
INLINE void split_fifth_bits(const u8* from, u8* to) {
    u32 bits;
    std::memcpy(&bits, from, 4);
    std::uint64_t spread = bits;
    spread = (spread | spread << 16) & 0x0000ffff0000ffffu;
    spread = (spread | spread << 8) & 0x00ff00ff00ff00ffu;
    spread = (spread | spread << 4) & 0x0f0f0f0f0f0f0f0fu;
    spread = (spread | spread << 2) & 0x3333333333333333u;
    spread = (spread | spread << 1) & 0x5555555555555555u;
    std::memcpy(to, &spread, 8);
}

// Each kind of block: its bytes, inputs, bits of a code, and bytes of its scales, which are as many as those of its
// offsets. Blocks with superblock scales are superblocks.
struct BlockQ4_0 {
    static constexpr int kBytes = 18, kInputs = 32, kBits = 4, kScaleBytes = 2;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.scales, from, 2);
        split_halves<16>(from + 2, to.codes);
    }
};

struct BlockQ4_1 {
    static constexpr int kBytes = 20, kInputs = 32, kBits = 4, kScaleBytes = 2;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.scales, from, 2);
        std::memcpy(to.offsets, from + 2, 2);
        split_halves<16>(from + 4, to.codes);
    }
};

struct BlockQ5_0 {
    static constexpr int kBytes = 22, kInputs = 32, kBits = 6, kScaleBytes = 2;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.scales, from, 2);
        split_fifth_bits(from + 2, to.high_codes);
        split_halves<16>(from + 6, to.codes);
    }
};

struct BlockQ5_1 {
    static constexpr int kBytes = 24, kInputs = 32, kBits = 6, kScaleBytes = 2;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.scales, from, 2);
        std::memcpy(to.offsets, from + 2, 2);
        split_fifth_bits(from + 4, to.high_codes);
        split_halves<16>(from + 8, to.codes);
    }
};

struct BlockQ8_0 {
    static constexpr int kBytes = 34, kInputs = 32, kBits = 8, kScaleBytes = 2;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.scales, from, 2);
        std::memcpy(to.codes, from + 2, 32);
    }
};

struct BlockMxfp4 {
    static constexpr int kBytes = 17, kInputs = 32, kBits = 4, kScaleBytes = 1;
    INLINE void split(const u8* from, const BlockParts& to) {
        *to.scales = *from;
        split_halves<16>(from + 1, to.codes);
    }
};

struct BlockQ2_K {
    static constexpr int kBytes = 84, kInputs = 256, kBits = 4, kScaleBytes = 16;
    INLINE void split(const u8* from, const BlockParts& to) {
        for (int i = 0; i < 16; ++i) to.scales[i] = from[i] & 15, to.offsets[i] = -(from[i] >> 4);
        for (int group = 0; group < 8; ++group) {
            auto shift = static_cast<std::uint16_t>(group % 4 * 2);
            narrowed<std::uint16_t, 32>(from + 16 + group / 4 * 32, to.codes + group * 16, [=](auto pair, int) {
                pair = pair >> shift;
                return (pair & 3) | (pair >> 4 & 48);
            });
        }
        std::memcpy(to.superblock_scales, from + 80, 2);
        std::memcpy(to.superblock_offsets, from + 82, 2);
    }
};

struct BlockQ3_K {
    static constexpr int kBytes = 110, kInputs = 256, kBits = 4, kScaleBytes = 16;
    INLINE void split(const u8* from, const BlockParts& to) {
        for (int group = 0; group < 8; ++group) {
            auto shift = static_cast<std::uint16_t>(group % 4 * 2), bit = static_cast<std::uint16_t>(group);
            narrowed<std::uint16_t, 32>(from + 32 + group / 4 * 32, to.codes + group * 16, [=](auto pair, int at) {
                auto high = load<decltype(pair)>(from + at);
                pair = (pair >> shift & 0x0303) | (high >> bit & 0x0101) << 2;
                return (pair | pair >> 4) & 255;
            });
        }
        const u8 *low = from + 96, *high = from + 104;
        for (int i = 0; i < 16; ++i) {
            to.scales[i] = ((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32;
        }
        std::memcpy(to.superblock_scales, from + 108, 2);
    }
};

struct BlockQ4_K {
    static constexpr int kBytes = 144, kInputs = 256, kBits = 4, kScaleBytes = 8;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.superblock_scales, from, 2);
        std::memcpy(to.superblock_offsets, from + 2, 2);
        split_sixes(from + 4, to);
        for (int at = 0; at < 128; at += 32) split_halves<32>(from + 16 + at, to.codes + at);
    }
};

struct BlockQ5_K {
    static constexpr int kBytes = 176, kInputs = 256, kBits = 6, kScaleBytes = 8;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.superblock_scales, from, 2);
        std::memcpy(to.superblock_offsets, from + 2, 2);
        split_sixes(from + 4, to);
        for (int bit = 0; bit < 8; ++bit) split_fours<1>(from + 16, bit, to.high_codes + bit * 8);
        for (int at = 0; at < 128; at += 32) split_halves<32>(from + 48 + at, to.codes + at);
    }
};

struct BlockQ6_K {
    static constexpr int kBytes = 210, kInputs = 256, kBits = 6, kScaleBytes = 16;
    INLINE void split(const u8* from, const BlockParts& to) {
        for (int at = 0; at < 128; at += 64) split_halves<64>(from + at, to.codes + at);
        for (int group = 0; group < 8; ++group) {
            split_fours<3>(from + 128 + group / 4 * 32, group % 4 * 2, to.high_codes + group * 8);
        }
        std::memcpy(to.scales, from + 192, 16);
        std::memcpy(to.superblock_scales, from + 208, 2);
    }
};

struct BlockIq4_xs {
    static constexpr int kBytes = 136, kInputs = 256, kBits = 4, kScaleBytes = 8;
    INLINE void split(const u8* from, const BlockParts& to) {
        std::memcpy(to.superblock_scales, from, 2);
        const u8 *high = from + 2, *low = from + 4;
        for (int i = 0; i < 8; ++i) {
            to.scales[i] = ((low[i / 2] >> i % 2 * 4 & 15) | (high[i / 4] >> i % 4 * 2 & 3) << 4) - 32;
        }
        for (int at = 0; at < 128; at += 16) split_halves<16>(from + 8 + at, to.codes + at);
    }
};

struct SplitBlocks {
    const BlockSplit& call;

    explicit SplitBlocks(const BlockSplit& split) : call(split) {}

    void run() const {
        switch (call.kind) {
            case BlockKind::q4_0:
            case BlockKind::iq4_nl: return rows<BlockQ4_0>();
            case BlockKind::q4_1: return rows<BlockQ4_1>();
            case BlockKind::q5_0: return rows<BlockQ5_0>();
            case BlockKind::q5_1: return rows<BlockQ5_1>();
            case BlockKind::q8_0: return rows<BlockQ8_0>();
            case BlockKind::q2_k: return rows<BlockQ2_K>();
            case BlockKind::q3_k: return rows<BlockQ3_K>();
            case BlockKind::q4_k: return rows<BlockQ4_K>();
            case BlockKind::q5_k: return rows<BlockQ5_K>();
            case BlockKind::q6_k: return rows<BlockQ6_K>();
            case BlockKind::iq4_xs: return rows<BlockIq4_xs>();
            case BlockKind::mxfp4: return rows<BlockMxfp4>();
        }
    }

  private:
    // Every thread takes rows that follow each other: their scales share lines of memory.
    template <typename Kind>
    void rows() const {
        on_all_threads([&](int thread) {
            std::int64_t stop = call.num_rows * (thread + 1) / threads();
            for (std::int64_t row = call.num_rows * thread / threads(); row < stop; ++row) split_row<Kind>(row);
        });
    }

    template <typename Kind>
    void split_row(std::int64_t row) const {
        constexpr int kCodeBytes = Kind::kBits == 8 ? Kind::kInputs : Kind::kInputs / 2;
        const u8* from = call.blocks + row * call.stride;
        u8* codes = call.codes + row * call.code_stride;
        for (std::int64_t block = 0; block < call.blocks_per_row; ++block, from += Kind::kBytes) {
            std::int64_t sides = row * call.scale_stride + block * Kind::kScaleBytes;
            std::int64_t superblock = row * call.superblock_stride + block * 2;
            Kind::split(from, {codes + block * kCodeBytes,
                               codes + call.blocks_per_row * kCodeBytes + block * (Kind::kInputs / 4),
                               call.scales + sides,
                               call.offsets ? call.offsets + sides : nullptr,
                               call.superblock_scales ? call.superblock_scales + superblock : nullptr,
                               call.superblock_offsets ? call.superblock_offsets + superblock : nullptr});
        }
    }
};

}  // namespace longhelix::ISA
