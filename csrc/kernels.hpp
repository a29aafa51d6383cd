// What the kernels offer to the Python side, and the table of one instruction set's forms of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longhelix {

#if defined(__aarch64__)
using float16 = __fp16;  // GCC 12 has no _Float16 in C++ here
#else
using float16 = _Float16;
#endif

// How numbers lie in memory. From int8 on they are stored with a scale, and but for rows of int8 only in the packed
// arrangement. w8a8: bytes that are multiplied by rows of bytes. Codes of checkpoints, of weights alone: e4m3 and e2m1 are
// floats of 8 and 4 bits, code8 a byte in two's complement, code6 and code4 integers from 0 to 63 and from 0 to 15, and nl4
// one of sixteen integers (`kNl4Values`). e8m0: a scale, a power of two. nvfp4: e2m1 of a pool (nvfp4.hpp).
enum class Number {
    float32, float64, bfloat16, float16, int32, int64, int8, float8, int4, w8a8, e4m3, e2m1, code8, code6, code4, nl4, e8m0, nvfp4
};

inline bool is_code(Number number) {
    return number >= Number::e4m3 && number <= Number::nl4;
}

// A matrix whose rows are contiguous runs of float32, bfloat16 or float16.
struct Rows {
    const void* data;
    Number number;
    std::int64_t stride;  // elements from one row to the next
};

// The packed pool of one layer: k KV heads of P blocks of tiles of 16 tokens. Heads are outermost: memory is read
// fastest in long runs, and blocks that follow each other in a sequence mostly have ids that do. A tile is the keys as
// one panel (lanes are tokens, rows are channels), the values as a panel for every 16 channels (rows are tokens), and
// where the numbers are narrow, a bfloat16 scale for each token's key, then one for each token's value. (nvfp4.hpp has the
// tiles of nvfp4.) `shared`: values
// are the first `value_size` channels of the keys, and are not stored again (MLA, absorbed).
struct Pool {
    std::uint8_t* data;
    Number number;
    int num_kv_heads;
    std::int64_t num_blocks;
    int tiles_per_block;
    int key_size;
    int value_size;
    bool shared;
    bool rounded;  // attention to int8 and int4 may round queries and weights to a byte each, where that is faster
};

struct Attention {
    Rows q;                      // (T, q * key_size)
    Pool pool;
    int num_query_heads;
    int num_sequences;
    const std::int64_t* blocks;      // of all sequences
    const std::int64_t* extents;     // (B, 2): where those of each begin and end in `blocks`
    const std::int64_t* row_starts;  // (B + 1)
    const std::int64_t* firsts;      // (T): the first token that each row sees, or null for token 0
    const std::int64_t* limits;      // (T): the token after the last one that it sees
    float scale;
    float cap;   // scores become cap * tanh(score / cap); or 0 for scores as they are
    void* out;   // (T, q * value_size), of q's number
    float* lse;  // (T, q)
    bool onto;   // `out` and `lse` hold a state over other keys, and become that over both
};

struct Write {
    Rows k;  // (T, k * key_size)
    Rows v;  // (T, k * value_size)
    Pool pool;
    const std::int64_t* slots;  // (T)
    std::int64_t num_rows;
};

// Keys and values of all heads from the latents of one sequence's tiles: MLA, direct. `latents` is shared, with one KV
// head of a latent and a rotated key; `made` has one block, of the tiles that are made, and a KV head for each of the
// up-projection: its channels of the key without rotation, then those of its value. Both pools hold the same kind of
// number, no narrow one; of latents of nvfp4, `made` holds bfloat16.
struct Expansion {
    Rows up;  // (heads * (nope + value), latent)
    Pool latents;
    const std::int64_t* blocks;  // of the sequence
    std::int64_t first_tile;     // of the sequence
    Pool made;
};

// What lies between the QKV product and attention: norms of queries and keys, their rotation, and the write.
struct Rotate {
    Rows qkv;            // (T, (q + 2 k) * C): queries, keys, values
    const void* q_norm;  // (C) of qkv's number: weights of an RMSNorm of each head; or null
    const void* k_norm;
    float norm_eps;
    const float* cos;  // (T, R): channels up to 2 R of a head are rotated
    const float* sin;
    int num_pairs;  // R
    Pool pool;
    int num_query_heads;
    const std::int64_t* slots;  // (T)
    std::int64_t num_rows;
    void* q;  // (T, q * C) of qkv's number
};

// A weight of `depth` inputs: a panel for every 16 outputs (lanes are outputs, rows are inputs). Narrow numbers come in
// scale blocks of 32 inputs: the block's rows of the panel, then 16 float16 scales and 16 float16 offsets, one for each
// output; weight = scale * stored + offset. Those of w8a8 are bytes in fours of inputs, a four for each output in turn,
// then 16 float32 scales for the whole depth. The last panel is padded.
//
// Codes of checkpoints come in scale blocks of `block` inputs, of which the first may begin before the first input: the
// block's rows of the panel, 16 scales, and 16 zero points of a byte or 16 offsets where there are any; and at the end of
// the panel 16 float32 scales of outputs, where there are any. Before the blocks of each superblock, where there are such,
// are 16 float16 scales of it, and where blocks have offsets, 16 float16 offsets of it.
// weight = scale of the output * scale of the superblock * scale * (value of the code - zero point)
//          + offset of the superblock * offset.
struct Weight {
    const std::uint8_t* data;
    Number number;
    std::int64_t depth;
    Number scale = Number::float32;
    std::int64_t block = 1;
    std::int64_t lead = 0;  // inputs of the first block or superblock that another rank has, as `depth` a multiple of 16
    bool zeros = false;
    bool output_scales = false;
    bool offsets = false;
    float zero = 0.0f;            // the zero point of all blocks, where these have none
    std::int64_t superblock = 0;  // inputs of a superblock, or 0
    bool rounds_inputs = false;   // rows become bytes as of w8a8; no weight of e4m3
};

// What an FFN does between its products. compute/kernels/reference.py has the functions.
enum class Function { none, silu, gelu, gelu_tanh, relu_squared, clamped_swiglu };

struct Activation {
    Function function;
    bool gated;  // there are twice as many panels, and the function of the first half weighs the second
};

struct Linear {
    Rows x;  // (T, depth); of int8 with `scales`, where the weight is w8a8
    std::int64_t num_rows;
    const void* norm;  // (depth) of x's number: weights of an RMSNorm before the product; or null
    float norm_eps;
    Weight weight;
    const void* bias;  // (outputs, or twice as many with a gate) of x's number, beside int8 of `out_number`; or null
    Activation activation;
    Rows residual;  // (T, outputs) to add; or null data
    void* out;      // (T, outputs) of `out_number`
    Number out_number;
    std::int64_t outputs;
    const float* scales = nullptr;  // (T, blocks) of x's rows, of 64 inputs each: number = scale * stored
};

// Rows, normalised where that is asked for, rounded to bytes: number = scale * stored, in scale blocks of 64 inputs.
struct Rounding {
    Rows x;  // (T, depth)
    std::int64_t num_rows;
    std::int64_t depth;
    const void* norm;  // as of `Linear`
    float norm_eps;
    std::int8_t* bytes;  // (T, depth)
    float* scales;       // (T, blocks)
};

// Which experts rows take, and with what weights; compute/kernels/experts.py has the rules. Shared experts are one more
// expert with the number `num_experts`, which every row takes last.
struct Route {
    const float* logits;  // (T, num_experts), with one more of a shared gate
    std::int64_t num_rows;
    const float* bias;  // (num_experts), or null
    int num_experts;
    int per_token;  // Y, without the shared one
    int num_groups;
    int groups_per_token;
    bool sigmoid;
    bool normalised;
    float scale;
    bool shared;
    bool shared_gate;
    float* weights;         // (T, Y), with one more of the shared one
    std::int64_t* experts;  // as `weights`
};

// FFNs by expert, each with columns of its own: as many as `down` has inputs, which may be none. All weights hold the
// same number.
struct ExpertSet {
    std::vector<Weight> gate_up;
    std::vector<Weight> down;
    std::vector<int> index_of;  // by an expert's number: where it is among the weights, or -1

    ExpertSet(const std::vector<int>& ids, std::vector<Weight> gate_up, std::vector<Weight> down);
};

// residual + the sum of the FFNs that each row takes, weighted.
struct Experts {
    Rows x;  // (T, hidden); of int8 with `scales`, where the weights are w8a8
    std::int64_t num_rows;
    std::int64_t hidden;
    const void* norm;  // (hidden) of x's number: weights of an RMSNorm before the FFNs
    float norm_eps;
    const ExpertSet* set;
    const float* weights;         // (T, Y)
    const std::int64_t* experts;  // (T, Y): numbers of experts, of which some may not be in the set
    int per_row;                  // Y
    Activation activation;        // between the products of each FFN
    Rows residual;                // (T, hidden) of `number`; or null data
    void* out;                    // (T, hidden) of `number`
    Number number;                // of x, but beside int8
    std::int64_t* rows_of;        // by place in the set: rows that took the expert are added
    const float* scales;          // as of `Linear`; or null
};

// cos and sin of position * frequency, times a factor.
struct Angles {
    const std::int64_t* positions;  // (T)
    std::int64_t num_rows;          // T
    const double* frequencies;      // (num_pairs) of each row
    std::int64_t stride;            // from those of one row to those of the next; 0 where all rows have the same
    std::int64_t num_pairs;
    double factor;
    float* cos;  // (T, num_pairs), as sin
    float* sin;
};

// The repetition penalty of rows of logits, in place.
struct Penalty {
    float* logits;
    std::int64_t stride;  // from one row to the next
    std::int64_t num_rows;
    std::int64_t num_logits;
    const std::int64_t* seen;  // (S): where a bit for each logit says whether it is penalised, in words of 512; or 0
    const float* penalties;    // (S)
};

// Of rows of logits, after their repetition penalty: the `count` largest, of equal ones the first, and the sum of
// exp((logit - largest) / temperature) over all. A NaN among the logits comes first, whatever else there is.
struct Candidates {
    const float* logits;
    std::int64_t stride;  // from one row to the next
    std::int64_t num_rows;
    std::int64_t num_logits;
    const std::int64_t* seen;          // (S), as above
    const float* penalties;            // (S)
    const float* inverse_temperatures; // (S); of 0 no sum is made
    int count;
    float* values;      // (S, count), and -inf where there are fewer logits
    std::int64_t* ids;  // (S, count), from 0, and -1
    double* sums;       // (S)
};

// A draw from rows of logits, after their repetition penalty: of what top-k, then top-p, then min-p leave, likeliest
// first, the token at `numbers` of their weight. -1 where the order in which doubles are added would decide, or no
// token has a probability.
struct Draws {
    const float* logits;
    std::int64_t stride;  // from one row to the next
    std::int64_t num_rows;
    std::int64_t num_logits;
    const float* temperatures;  // (S), as all that follow; of 0: -1
    const std::int64_t* top_k;  // at least as many as there are logits: no filter
    const double* top_p;        // 1: no filter
    const double* min_p;        // 0: no filter
    const double* numbers;      // in [0, 1)
    std::int64_t* tokens;
};

// Kinds of blocks of numbers in GGUF files (llama.cpp, ggml-common.h).
enum class BlockKind { q4_0, q4_1, q8_0, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4 };

// Rows of blocks of a kind up to q8_0, as float32.
struct Blocks {
    const void* from;
    std::int64_t stride_bytes;  // from one row to the next
    std::int64_t num_rows;
    std::int64_t blocks_per_row;
    BlockKind kind;
    float* to;
};

// Rows of blocks, split into rows of a packed weight. Those that its format does not have are null.
struct BlockSplit {
    const std::uint8_t* blocks;
    std::int64_t stride;  // bytes from one row to the next, as the following
    std::int64_t num_rows;
    std::int64_t blocks_per_row;
    BlockKind kind;
    std::uint8_t* codes;  // as of `CodePacking`
    std::int64_t code_stride;
    std::uint8_t* scales;
    std::uint8_t* offsets;
    std::int64_t scale_stride;  // as that of offsets
    std::uint8_t* superblock_scales;
    std::uint8_t* superblock_offsets;
    std::int64_t superblock_stride;
};

// Rows of a weight, laid out in its panels as the outputs `first` and those after it. Lanes of other outputs stay as they
// are.
struct Packing {
    Rows rows;  // (num_rows, depth)
    std::int64_t num_rows;
    std::int64_t first;
    std::uint8_t* panels;
    Number number;
    std::int64_t depth;
};

// Rows of codes and their scales, laid out in panels as the outputs `first` and those after it.
struct CodePacking {
    const std::uint8_t* codes;  // of a row: a byte for each input, or one for two inputs, the first in its low half. Those
                                // of code6 are the low four bits of all inputs, then the high two, four in a byte
    std::int64_t code_stride;   // bytes from one row to the next, as the following
    const std::uint8_t* scales;
    std::int64_t scale_stride;
    const std::uint8_t* zeros;  // zero points or offsets, or null
    std::int64_t zero_stride;
    const std::uint8_t* superblock_scales;  // or null, as the following
    std::int64_t superblock_scale_stride;
    const std::uint8_t* superblock_offsets;
    std::int64_t superblock_offset_stride;
    const float* output_scales;
    std::int64_t num_rows;
    std::int64_t first;
    Weight weight;
    std::uint8_t* panels;
};

struct Kernels {
    const char* name;
    bool (*attend)(const Attention&);  // false: a limit is beyond the extent of its sequence
    void (*expand)(const Expansion&);
    void (*write)(const Write&);
    void (*rotate)(const Rotate&);
    void (*linear)(const Linear&);
    void (*round)(const Rounding&);
    void (*route)(const Route&);
    void (*experts)(const Experts&);
    void (*angles)(const Angles&);
    void (*penalise)(const Penalty&);
    void (*candidates)(const Candidates&);
    void (*draw)(const Draws&);
    void (*dequantise)(const Blocks&);
    void (*split_blocks)(const BlockSplit&);
    void (*pack)(const Packing&);
    void (*pack_codes)(const CodePacking&);
    double (*read)(const void* data, std::size_t bytes);  // sums all bytes: what reading memory costs
};

// The forms that this processor runs, and the fastest of them, which is the last.
std::vector<const Kernels*> usable_kernels();
const Kernels& kernels();

std::size_t tile_bytes(const Pool& pool);

// Which tile of the pool holds token `16 * tile` of a block.
inline std::int64_t tile_number(const Pool& pool, int head, std::int64_t block, std::int64_t tile) {
    return (head * pool.num_blocks + block) * pool.tiles_per_block + tile;
}

}  // namespace longhelix
