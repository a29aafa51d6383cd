// Panels of packed weights: where codes, scales, zero points and offsets lie, and what they become.
#pragma once

#include <algorithm>

#include "bytes.hpp"
#include "kernels.hpp"
#include "lanes.hpp"
#include "scales.hpp"

namespace longhelix::ISA {

// The places of codes, scales, zero points and offsets in a panel of a packed weight.
struct PackedPanel {
    std::int64_t depth, block;
    std::size_t input_bytes;          // of the codes of an input
    std::int64_t lead;                // inputs of the first block that another rank has
    std::int64_t blocks, first;       // of a whole superblock, and those of the first superblock that another rank has
    std::int64_t num_blocks;
    std::size_t side_bytes;           // of a block, after its codes
    std::size_t superblock_bytes;     // of a superblock, before its blocks
    std::size_t bytes;

    explicit PackedPanel(const Weight& weight)
        : depth(weight.depth),
          block(weight.block),
          input_bytes(code_bytes(weight.number)),
          lead(weight.lead % block),
          blocks(std::max<std::int64_t>(weight.superblock / block, 1)),
          first(weight.superblock ? weight.lead / block : 0),
          num_blocks((lead + depth + block - 1) / block),
          side_bytes(kLanes * (scale_bytes(weight.scale) * (weight.offsets ? 2 : 1) + (weight.zeros ? 1 : 0))),
          superblock_bytes(weight.superblock ? kLanes * 2 * (weight.offsets ? 2 : 1) : 0),
          bytes(static_cast<std::size_t>(depth) * input_bytes + num_blocks * side_bytes + num_superblocks() * superblock_bytes +
                (weight.output_scales ? kLanes * 4 : 0)) {}

    // Of sixteen outputs.
    static std::size_t code_bytes(Number number) {
        if (number == Number::code6) return 12;
        return number == Number::e4m3 || number == Number::code8 ? 16 : 8;
    }

    std::int64_t num_superblocks() const { return superblock_bytes ? (first + num_blocks + blocks - 1) / blocks : 0; }

    // The first input of a block, and the one after its last.
    std::int64_t start(std::int64_t number) const { return std::max<std::int64_t>(number * block - lead, 0); }
    std::int64_t stop(std::int64_t number) const { return std::min<std::int64_t>((number + 1) * block - lead, depth); }

    // Of a block's codes and what follows them.
    std::size_t block_bytes(std::int64_t number) const {
        return (stop(number) - start(number)) * input_bytes + side_bytes;
    }

    // Whether a block is the first one of a superblock here.
    bool begins_superblock(std::int64_t number) const {
        return superblock_bytes && (number == 0 || (first + number) % blocks == 0);
    }

    // Bytes of blocks' sides, and of superblocks, that lie before a block's codes.
    std::size_t bytes_before(std::int64_t number) const {
        return number * side_bytes + (superblock_bytes ? ((first + number) / blocks + 1) * superblock_bytes : 0);
    }

    // Where a block's codes begin.
    std::size_t offset(std::int64_t number) const { return start(number) * input_bytes + bytes_before(number); }

    // The runs of a block's inputs that have one scale in a row of bytes: f(first input, the one after the last).
    template <typename F>
    [[gnu::always_inline]] void each_run_of(std::int64_t number, F f) const {
        for (std::int64_t first = start(number), last; first < stop(number); first = last) {
            last = std::min(block_stop(first / kRowBlock * kRowBlock, depth), stop(number));
            f(first, last);
        }
    }

    // The block that has an input.
    std::int64_t block_of(std::int64_t input) const { return (input + lead) / block; }
};

// Whether products need the sums of rows' scale blocks.
template <typename E>
bool needs_sums(const Weight& weight) {
    return E::kShift + weight.zero != 0.0f || weight.zeros || weight.offsets;
}

// What a block adds to an output: scale * (sum of products + shift * sum of inputs), or, in formats with offsets,
// scale * sum of products + shift * sum of inputs. A block of zeros is nothing but zeros so.
struct BlockScale {
    f32x16 scale, shift;
};

// Reads the blocks of V panels, one after the other.
template <typename E, int V>
class BlockReader {
  public:
    const u8* at[V];  // the codes of the block

    BlockReader(const PackedPanel& panel, const Weight& weight, const u8* const (&panels)[V])
        : panel_(panel), weight_(weight), next_(panel.blocks - panel.first), summed_(needs_sums<E>(weight)) {
        for (int v = 0; v < V; ++v) at[v] = panels[v];
    }

    // Before the codes of a block.
    [[gnu::always_inline]] void begin() {
        if (!panel_.superblock_bytes || left_-- > 0) return;
        left_ = next_ - 1, next_ = panel_.blocks;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            scales_[v] = load_f16(at[v]);
            if (weight_.offsets) offsets_[v] = load_f16(at[v] + kLanes * 2);
            at[v] += panel_.superblock_bytes;
        }
    }

    // What follows a block's codes in panel v.
    [[gnu::always_inline]] BlockScale scale(int v) const {
        std::size_t bytes = kLanes * scale_bytes(weight_.scale);
        BlockScale block{load_scales(at[v], weight_.scale, E::kFactor), {}};
        if (weight_.superblock) block.scale = block.scale * scales_[v];
        if (!summed_) return block;
        block.shift = splat(-E::kShift - weight_.zero);
        if (weight_.zeros) block.shift = block.shift - to_floats(load_bytes<i32x16>(at[v] + bytes));
        if (weight_.offsets) {
            f32x16 offset = load_scales(at[v] + bytes, weight_.scale, 1.0f);
            if (weight_.superblock) offset = offset * offsets_[v];
            block.shift = multiply_add(block.scale, block.shift, offset);
        }
        return block;
    }

    [[gnu::always_inline]] void skip(std::size_t bytes) {
        for (int v = 0; v < V; ++v) at[v] += bytes;
    }

  private:
    const PackedPanel& panel_;
    const Weight& weight_;
    std::int64_t next_, left_ = 0;  // blocks of the next superblock, and those of this one that are left
    bool summed_;
    f32x16 scales_[V], offsets_[V];  // of the superblocks
};

// A panel whose codes are read once, for many rows: F's rows, and after them each block's scale and shift.
template <typename F>
struct OpenPanel {
    static constexpr std::size_t kInputBytes = F::kRowBytes / F::kStep;

    u8* data;
    std::int64_t depth;

    static std::size_t bytes(const PackedPanel& panel) { return panel.depth * kInputBytes + panel.num_blocks * 2 * 64; }

    u8* codes(std::int64_t input) const { return data + input * kInputBytes; }
    u8* scales(std::int64_t block) const { return data + depth * kInputBytes + block * 2 * 64; }

    BlockScale scale(std::int64_t block) const {
        return {load<f32x16>(scales(block)), load<f32x16>(scales(block) + 64)};
    }

    // From a panel of E, of whose codes put(from, to) writes what one load brings.
    template <typename E, typename Put>
    void fill(const PackedPanel& panel, const Weight& weight, const u8* from, Put put) const {
        constexpr std::int64_t kInputs = E::kRowsAtOnce * E::kStep;
        BlockReader<E, 1> reader(panel, weight, {from});
        for (std::int64_t block = 0; block < panel.num_blocks; ++block) {
            reader.begin();
            std::int64_t first = panel.start(block), count = panel.stop(block) - first;
            for (std::int64_t c = 0; c < count; c += kInputs) put(reader.at[0] + c * panel.input_bytes, codes(first + c));
            reader.skip(count * panel.input_bytes);
            BlockScale scale = reader.scale(0);
            store(scales(block), scale.scale), store(scales(block) + 64, scale.shift);
            reader.skip(panel.side_bytes);
        }
    }
};

// Codes as pairs of bfloat16, which are exact.
template <typename E>
void open_pairs(const PackedPanel& panel, const Weight& weight, const u8* from, const OpenPanel<BFloat16>& to) {
    to.fill<E>(panel, weight, from, [](const u8* codes, u8* pairs) {
        auto rows = E::load_rows(codes);
#pragma GCC unroll 8
        for (int i = 0; i < E::kRowsAtOnce; ++i) store(pairs + i * 64, E::raw(E::operand(rows, i)));
    });
}

// The same codes as whole numbers: bytes in two's complement.
template <typename E>
struct WholeOf : E {
    static constexpr float kShift = std::is_same_v<E, Code8> ? 0.0f : E::kShift;
};

// Codes as fours of bytes.
template <typename E>
void open_fours(const PackedPanel& panel, const Weight& weight, const u8* from, const OpenPanel<W8A8>& to) {
    to.fill<WholeOf<E>>(panel, weight, from, [](const u8* codes, u8* fours) {
        auto whole = E::load_whole(codes);
#pragma GCC unroll 4
        for (u32x16 each : whole.of) store(fours, each), fours += 64;
    });
}

// What W8A8 reads, from codes as panels have them.
template <typename E>
struct Fours : W8A8 {
    static constexpr int kRowBytes = E::kRowBytes * W8A8::kStep / E::kStep;
    static constexpr int kRowsAtOnce = E::kRowsAtOnce * E::kStep / W8A8::kStep;

    INLINE auto load_rows(const u8* from) { return E::load_whole(from); }
    template <int N>
    INLINE Operand operand(const WholeNumbers<N>& whole, int row) {
        return W8A8::operand(W8A8::rows_of(whole.of[row / W8A8::kRowsAtOnce]), row % W8A8::kRowsAtOnce);
    }
};

// f<Code>() for the codes of a number. Those of e4m3 are no whole numbers.
template <typename F>
INLINE auto with_code(Number number, F f) {
    switch (number) {
        case Number::code8: return f.template operator()<Code8>();
        case Number::code6: return f.template operator()<Code6>();
        case Number::code4: return f.template operator()<Code4>();
        case Number::nl4: return f.template operator()<Nl4>();
        default: return f.template operator()<E2M1>();
    }
}

inline bool needs_sums_of_fours(const Weight& weight) {
    return with_code(weight.number, [&]<typename Code>() { return needs_sums<WholeOf<Code>>(weight); });
}

inline void open_fours(const PackedPanel& panel, const Weight& weight, const u8* from, const OpenPanel<W8A8>& to) {
    with_code(weight.number, [&]<typename Code>() { open_fours<Code>(panel, weight, from, to); });
}

}  // namespace longhelix::ISA
