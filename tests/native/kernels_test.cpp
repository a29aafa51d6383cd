// Every kernel, for every instruction set that this processor has, over random shapes against plain loops in double.
// `make sanitize` runs it under sanitizers. tests/unit checks the same kernels' numbers more closely.
#include <algorithm>
#include <numeric>
#include <thread>

#include "../../csrc/threads.hpp"
#include "testing.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// A small OpenMP runtime in place of torch's, which the thread sanitizer cannot see into. It gives one thread fewer
// than it was asked for, as a runtime may.
thread_local int own_number = 0;
int team_size = 1;

extern "C" int omp_get_thread_num() { return own_number; }
extern "C" int omp_get_num_threads() { return team_size; }
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned) {
    team_size = static_cast<int>(count) - 1;
    std::vector<std::thread> others;
    for (int number = 1; number < team_size; ++number) {
        others.emplace_back([=] {
            own_number = number;
            body(data);
        });
    }
    body(data);
    for (std::thread& other : others) other.join();
}

namespace longhelix {

namespace {

constexpr int kCases = 30;  // of each kernel and instruction set
constexpr int kLanes = 16, kScaleBlock = 32;

// Runs `call` on one thread and on several; their results must be the same.
template <typename Call>
auto on_threads(Call call) {
    set_threads(1);
    auto result = call();
    set_threads(4);
    check(call() == result, "bits depend on the threads");
    return result;
}

// How far from what it should be a result of `number` may be, relative to its terms, with factors stored as `stored`.
double rounding(Number number, Number stored) {
    bool exact = stored == Number::float32 || stored == Number::float16 || is_code(stored);
    bool wide = number == Number::float32 && exact;
    return wide ? 3e-5 : 0x1p-6;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention, writes and rotation.
// ---------------------------------------------------------------------------------------------------------------------

// Whether attention to numbers of this kind multiplies integers.
bool multiplies_integers(const Kernels& kernels, Number stored) {
    return std::string(kernels.name) == "avx512" && (stored == Number::int8 || stored == Number::int4);
}

// Sequences whose tokens lie in the blocks of a pool, in any order.
struct Cache {
    Pool pool{};
    std::vector<std::int64_t> tokens, first_row;    // of each sequence
    std::vector<std::vector<std::int64_t>> blocks;  // of each sequence
    std::vector<std::int64_t> slots;                // of all tokens, a row each; the first few rows belong elsewhere

    std::int64_t num_rows() const { return static_cast<std::int64_t>(slots.size()); }

    // A pool of which only the tiles that hold these tokens may be touched.
    Bytes memory() const {
        std::int64_t tiles = pool.num_blocks * pool.tiles_per_block;  // of a head
        auto bytes = static_cast<std::int64_t>(tile_bytes(pool));
        std::vector<bool> used(tiles);
        for (std::int64_t slot : slots) {
            if (slot >= 0) used[slot / kLanes] = true;
        }
        Bytes memory(pool.num_kv_heads * tiles * bytes);
        for (std::int64_t tile = 0; tile < pool.num_kv_heads * tiles; ++tile) {
            if (!used[tile % tiles]) memory.forbid(tile * bytes, bytes);
        }
        return memory;
    }
    Pool over(const Bytes& memory) const {
        Pool with = pool;
        with.data = memory.data.get();
        return with;
    }
};

Cache make_cache(Random& random, bool rotated) {
    Cache cache;
    Pool& pool = cache.pool;
    pool.number = random.of(
        {Number::float32, Number::bfloat16, Number::float16, Number::int8, Number::float8, Number::int4});
    pool.num_kv_heads = 1 + random.below(3);
    pool.key_size = kLanes * (1 + random.below(6));
    pool.value_size = rotated ? pool.key_size : kLanes * (1 + random.below(6));
    pool.shared = !rotated && pool.number <= Number::float16 && random.one_in(3);
    pool.rounded = random.one_in(2);
    if (pool.shared) pool.value_size = std::min(pool.value_size, pool.key_size);
    pool.tiles_per_block = random.of({1, 1, 2, 8});
    std::int64_t block_tokens = pool.tiles_per_block * kLanes;
    cache.slots.assign(random.below(4), -1);
    for (int sequence = random.below(4); sequence >= 0; --sequence) {
        // About the sizes of a tile, of a strip (256), of a span (512), of several.
        int tokens = random.of({0, 1, 16, 17, random.below(64), 250 + random.below(20), 505 + random.below(20), 1300});
        cache.tokens.push_back(tokens);
        cache.blocks.emplace_back((tokens + block_tokens - 1) / block_tokens);
        pool.num_blocks += static_cast<std::int64_t>(cache.blocks.back().size());
    }
    pool.num_blocks += 1 + random.below(3);
    std::vector<std::int64_t> ids(pool.num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random.engine);
    for (std::size_t sequence = 0; sequence < cache.blocks.size(); ++sequence) {
        auto& blocks = cache.blocks[sequence];
        for (std::int64_t& id : blocks) id = ids.back(), ids.pop_back();
        cache.first_row.push_back(cache.num_rows());
        for (std::int64_t token = 0; token < cache.tokens[sequence]; ++token) {
            cache.slots.push_back(blocks[token / block_tokens] * block_tokens + token % block_tokens);
        }
    }
    cache.slots.shrink_to_fit();
    return cache;
}

// Vectors that every kind of pool holds exactly: small whole numbers, times a power of two, beside one number that is
// the largest of the pool's kind; some of zeros alone.
Matrix make_vectors(Random& random, const Cache& cache, Number number, std::int64_t rows, int size) {
    Matrix vectors(number, rows, cache.pool.num_kv_heads * size, random.of({0, 16}));
    Number stored = cache.pool.number;
    int largest = stored == Number::int8 ? 127 : stored == Number::float8 ? 448 : stored == Number::int4 ? 8 : 7;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t first = 0; first < vectors.columns; first += size) {
            double step = random.of({0.0, 0.0625, 0.125, 0.25});
            for (int c = 0; c < size; ++c) vectors.set(row, first + c, step * (random.below(15) - 7));
            vectors.set(row, first + random.below(size), random.of({step, -step}) * largest);
        }
    }
    return vectors;
}

// Vectors of `size` channels times a Hadamard matrix, as keys of int4 are before they are stored. It is its own inverse.
void rotate_vectors(Matrix& vectors, int size) {
    int run = size & -size;
    for (std::int64_t row = 0; row < vectors.rows; ++row) {
        for (std::int64_t first = 0; first < vectors.columns; first += run) {
            auto given = vectors.get_run(row, first, run);
            for (int i = 0; i < run; ++i) {
                double sum = 0;
                for (int j = 0; j < run; ++j) sum += __builtin_parity(i & j) ? -given[j] : given[j];
                vectors.set(row, first + i, sum / std::sqrt(run));
            }
        }
    }
}

void test_attend(const Kernels& kernels, Random& random) {
    Cache cache = make_cache(random, false);
    const Pool& pool = cache.pool;
    // Of float32, vectors times the matrix are exact to a few units, whatever their size.
    bool rotated = pool.number == Number::int4;
    Number number = rotated ? Number::float32 : random.number();
    Number query_number = rotated ? Number::float32 : random.number();
    Matrix keys = make_vectors(random, cache, number, cache.num_rows(), pool.key_size);
    if (rotated) rotate_vectors(keys, pool.key_size);
    Matrix values = make_vectors(random, cache, number, pool.shared ? 0 : cache.num_rows(), pool.value_size);

    std::int64_t num_sequences = static_cast<std::int64_t>(cache.tokens.size());
    std::vector<std::int64_t> row_starts(num_sequences + 1), firsts, limits, sequence_of;
    bool has_windows = random.one_in(2);
    for (std::int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        int tokens = static_cast<int>(cache.tokens[sequence]);
        for (int rows = random.of({0, 1, 1, 2, 3, 9, random.below(40)}); rows > 0; --rows) {
            limits.push_back(rows == 1 || random.one_in(3) ? tokens : random.below(tokens + 1));
            firsts.push_back(random.below(static_cast<int>(limits.back()) + 1));
            sequence_of.push_back(sequence);
        }
        row_starts[sequence + 1] = static_cast<std::int64_t>(limits.size());
    }
    firsts.shrink_to_fit(), limits.shrink_to_fit();
    std::int64_t rows = row_starts.back();
    std::vector<std::int64_t> blocks, extents(2 * num_sequences), order(num_sequences);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random.engine);
    for (std::int64_t sequence : order) {
        blocks.resize(blocks.size() + random.below(3), INT64_C(1) << 40);  // no block has this id
        extents[2 * sequence] = static_cast<std::int64_t>(blocks.size());
        blocks.insert(blocks.end(), cache.blocks[sequence].begin(), cache.blocks[sequence].end());
        extents[2 * sequence + 1] = static_cast<std::int64_t>(blocks.size());
    }
    blocks.shrink_to_fit();
    int group = random.of({1, 2, 3, 5, 7, 8, 9, 12, 16, 100}), heads = group * pool.num_kv_heads;
    Matrix q(query_number, rows, heads * pool.key_size, random.of({0, 16}));
    q.fill(random, 0.5, 2);
    if (rotated) rotate_vectors(q, pool.key_size);
    Matrix out(query_number, rows, heads * pool.value_size), lse(Number::float32, rows, heads);
    float scale = random.of({1.0f, 4.0f, 16.0f}) / 256.0f, cap = random.of({0.0f, 0.0f, 0.5f, 20.0f});
    bool attended = true;
    auto attend = [&] {
        Bytes memory = cache.memory();
        Pool pool = cache.over(memory);
        out.bytes.reset(), lse.bytes.reset();
        kernels.write({keys.as_rows(), values.as_rows(), pool, cache.slots.data(), cache.num_rows()});
        attended = kernels.attend({q.as_rows(), pool, heads, static_cast<int>(num_sequences), blocks.data(),
                                   extents.data(), row_starts.data(), has_windows ? firsts.data() : nullptr,
                                   limits.data(), scale, cap, out.data(), lse.floats(), false});
        return std::pair(out.bytes.copy(), lse.bytes.copy());
    };
    on_threads(attend);
    check(attended, "a limit within the blocks is refused");

    for (int sample = 0; sample < 10 && rows; ++sample) {
        int row = random.below(static_cast<int>(rows)), head = random.below(heads), kv_head = head / group;
        std::int64_t limit = limits[row], first = cache.first_row[sequence_of[row]];
        const Matrix& v = pool.shared ? keys : values;
        std::int64_t value_column = kv_head * (pool.shared ? pool.key_size : pool.value_size);
        auto query = q.get_run(row, head * pool.key_size, pool.key_size);
        std::vector<double> sums(pool.value_size);
        double total = 0, largest = 0;
        for (std::int64_t token = has_windows ? firsts[row] : 0; token < limit; ++token) {
            auto key = keys.get_run(first + token, kv_head * pool.key_size, pool.key_size);
            double score = scale * std::inner_product(key.begin(), key.end(), query.begin(), 0.0);
            double weight = std::exp(cap ? cap * std::tanh(score / cap) : score);
            total += weight;
            for (int c = 0; c < pool.value_size; ++c) {
                double value = v.get(first + token, value_column + c);
                sums[c] += weight * value;
                largest = std::max(largest, std::abs(value));
            }
        }
        bool rounded = pool.rounded && multiplies_integers(kernels, pool.number);
        check_near(lse.get(row, head), std::log(total), rounded ? 0.1 : 1e-4, "an LSE");
        double tolerance = (rounded ? 0.1 : rounding(query_number, pool.number)) * largest;
        for (int c = 0; c < pool.value_size; ++c) {
            double expected = total ? sums[c] / total : 0.0;
            check_near(out.get(row, head * pool.value_size + c), expected, tolerance, "an output");
        }
    }
    if (!rows) return;
    int row = random.below(static_cast<int>(rows));
    auto held = static_cast<std::int64_t>(cache.blocks[sequence_of[row]].size());
    limits[row] = held * pool.tiles_per_block * kLanes + 1;
    on_threads(attend);
    check(!attended, "a limit beyond the blocks is not refused");
}

// Vectors at the ends of what narrow numbers hold, each alone in its block. What is read back of them is exact, and 0
// where the scale would be below the normal numbers.
void test_write(const Kernels& kernels, Random& random) {
    constexpr int kVectors = 8;
    Number stored = random.of({Number::int8, Number::float8, Number::int4});
    int size = kLanes * (1 + random.below(3));
    int largest = stored == Number::int8 ? 127 : stored == Number::float8 ? 448 : stored == Number::int4 ? 8 : 7;
    Pool pool{nullptr, stored, 1, kVectors, 1, size, size, false, false};
    Bytes memory(kVectors * tile_bytes(pool));
    pool.data = memory.data.get();
    Matrix vectors(Number::float32, kVectors, size), expected(Number::float32, kVectors, size);
    Matrix q(Number::float32, kVectors, size), out(Number::float32, kVectors, size), lse(Number::float32, kVectors, 1);
    q.fill(random, 0, 1);
    std::vector<std::int64_t> slots, blocks, extents, row_starts{0}, limits(kVectors, 1);
    for (int vector = 0; vector < kVectors; ++vector) {
        double scale = random.of({0x1p-149, 0x1p-133, 0x1p-127, 0x1p-126, 0x1p-20, 1.0, 0x1p100});
        // The smallest numbers of fp8, below its own normal ones.
        double step = stored == Number::float8 && scale >= 0x1p-20 && random.one_in(2) ? 0x1p-9 : 1.0;
        for (int c = 0; c < size; ++c) vectors.set(vector, c, scale * step * (random.below(15) - 7));
        vectors.set(vector, random.below(size), scale * random.of({largest, -largest}));
        // Integers of weights and scales are made where float32 can say what they are divided by.
        double least = multiplies_integers(kernels, stored) ? 0x1p-112 : 0x1p-126;
        for (int c = 0; c < size; ++c) expected.set(vector, c, scale < least ? 0 : vectors.get(vector, c));
        slots.push_back(vector * kLanes), blocks.push_back(vector), row_starts.push_back(vector + 1);
        extents.push_back(vector), extents.push_back(vector + 1);
    }
    on_threads([&] {
        kernels.write({vectors.as_rows(), vectors.as_rows(), pool, slots.data(), kVectors});
        kernels.attend({q.as_rows(), pool, 1, kVectors, blocks.data(), extents.data(), row_starts.data(), nullptr,
                        limits.data(), 1.0f, 0.0f, out.data(), lse.floats(), false});
        return out.bytes.copy();
    });
    for (int vector = 0; vector < kVectors; ++vector) {
        for (int c = 0; c < size; ++c) {
            // An integer's scale is two roundings, and times that integer a third.
            double tolerance = multiplies_integers(kernels, stored) ? 3 * 0x1p-24 * std::abs(expected.get(vector, c)) : 0;
            check_near(out.get(vector, c), expected.get(vector, c), tolerance, "a number that was stored");
        }
    }
}

void test_expand(const Kernels& kernels, Random& random) {
    Number stored = random.number();
    int rope = kLanes * random.below(3), latent = kLanes * (1 + random.below(6)), heads = 1 + random.below(4);
    int nope = kLanes * (1 + random.below(3)), value = kLanes * (1 + random.below(3)), channels = nope + value;
    Cache cache;
    std::int64_t tiles = 1 + random.below(20), before = random.below(4);
    Pool& pool = cache.pool = {nullptr, stored, 1, before + tiles + 1, 1, latent + rope, latent, true, false};
    std::vector<std::int64_t> blocks(before + tiles);
    std::iota(blocks.begin(), blocks.end(), 1);
    std::shuffle(blocks.begin(), blocks.end(), random.engine);
    for (std::int64_t token = before * kLanes; token < (before + tiles) * kLanes; ++token) {
        cache.slots.push_back(blocks[token / kLanes] * kLanes + token % kLanes);
    }
    cache.slots.shrink_to_fit();
    Number number = random.number();
    Matrix tokens = make_vectors(random, cache, number, cache.num_rows(), pool.key_size);
    Matrix up(number, heads * channels, latent, random.of({0, 16}));
    up.fill(random, 0.25, 7);
    // What is made, one row of (head, token) after the other, and the same written as keys and values.
    Pool made{nullptr, stored, heads, 1, static_cast<int>(tiles), nope + rope, value, false, false};
    auto bytes = static_cast<std::int64_t>(tile_bytes(made)) * heads * tiles;
    Matrix keys(Number::float32, cache.num_rows(), heads * made.key_size);
    Matrix values(Number::float32, cache.num_rows(), heads * value);
    std::vector<std::int64_t> slots(cache.slots.size());
    std::iota(slots.begin(), slots.end(), 0);
    for (std::int64_t row = 0; row < cache.num_rows(); ++row) {
        auto token = tokens.get_run(row, 0, pool.key_size);
        for (int channel = 0; channel < heads * channels; ++channel) {
            auto weights = up.get_run(channel, 0, latent);
            double sum = std::inner_product(weights.begin(), weights.end(), token.begin(), 0.0);
            int head = channel / channels, c = channel % channels;
            if (c < nope) keys.set(row, head * made.key_size + c, sum);
            if (c >= nope) values.set(row, head * value + c - nope, sum);
        }
        for (int i = 0; i < heads * rope; ++i) {
            keys.set(row, i / rope * made.key_size + nope + i % rope, token[latent + i % rope]);
        }
    }
    Bytes expected(bytes);
    made.data = expected.data.get();
    kernels.write({keys.as_rows(), values.as_rows(), made, slots.data(), cache.num_rows()});
    on_threads([&] {
        Bytes memory = cache.memory(), expanded(bytes);
        Pool latents = cache.over(memory);
        kernels.write({tokens.as_rows(), tokens.as_rows(), latents, cache.slots.data(), cache.num_rows()});
        Pool into = made;
        into.data = expanded.data.get();
        kernels.expand({up.as_rows(), latents, blocks.data(), before, into});
        check(expanded.copy() == expected.copy(), "keys and values are not those of the latents");
        return expanded.copy();
    });
}

void test_rotate(const Kernels& kernels, Random& random) {
    Cache cache = make_cache(random, true);
    int size = cache.pool.key_size, keys = cache.pool.num_kv_heads, queries = keys * random.of({1, 2, 3});
    std::int64_t rows = cache.num_rows();
    Number number = random.number();
    Matrix qkv(number, rows, (queries + 2 * keys) * size, random.of({0, 16})), norm(number, 1, size);
    Matrix q(number, rows, queries * size), values(number, rows, keys * size);
    int pairs = random.of({size / 2, size / 2, size / 4, 1, 0});
    Matrix cos(Number::float32, rows, pairs), sin(Number::float32, rows, pairs);
    qkv.fill(random, 0.25, 9), norm.fill(random, 0.125, 12);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int c = 0; c < keys * size; ++c) {
            // Keys are the first queries once more: both must come out the same.
            qkv.set(row, queries * size + c, qkv.get(row, c));
            values.set(row, c, qkv.get(row, (queries + keys) * size + c));
        }
        for (int c = 0; c < pairs; ++c) cos.set(row, c, std::cos(row + c)), sin.set(row, c, std::sin(row + c));
    }
    const void* weights = random.one_in(2) ? norm.data() : nullptr;
    on_threads([&] {
        Bytes memory = cache.memory(), expected = cache.memory();
        q.bytes.reset();
        kernels.rotate({qkv.as_rows(), weights, weights, 1e-3f, cos.floats(), sin.floats(), pairs, cache.over(memory),
                        queries, cache.slots.data(), rows, q.data()});
        kernels.write({q.as_rows(), values.as_rows(), cache.over(expected), cache.slots.data(), rows});
        memory.allow_all(), expected.allow_all();
        check(memory.copy() == expected.copy(), "keys and values are not what a write makes of them");
        return q.bytes.copy();
    });
    for (int sample = 0; sample < 10 && rows; ++sample) {
        int row = random.below(static_cast<int>(rows)), head = random.below(queries);
        auto x = qkv.get_run(row, head * size, size);
        double squares = std::inner_product(x.begin(), x.end(), x.begin(), 0.0), largest = 0;
        for (int c = 0; c < size; ++c) {
            if (weights) x[c] *= norm.get(0, c) / std::sqrt(squares / size + 1e-3);
            largest = std::max(largest, std::abs(x[c]));
        }
        double tolerance = rounding(number, Number::float32) * largest;
        for (int c = 0; c < pairs; ++c) {
            double cosine = cos.get(row, c), sine = sin.get(row, c);
            double first = x[c] * cosine - x[c + pairs] * sine, second = x[c + pairs] * cosine + x[c] * sine;
            check_near(q.get(row, head * size + c), first, tolerance, "a first half");
            check_near(q.get(row, head * size + pairs + c), second, tolerance, "a second half");
        }
        for (int c = 2 * pairs; c < size; ++c) {
            check_near(q.get(row, head * size + c), x[c], tolerance, "a channel that is not rotated");
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products.
// ---------------------------------------------------------------------------------------------------------------------

constexpr double kWeight = 0.375;

// A packed weight all of whose numbers are kWeight: where each lies is for tests/unit to check. Of float16 where there
// are scales; these and their offsets are 1 / 16, the stored numbers between them 5.
Matrix make_weight(Number number, std::int64_t panels, std::int64_t depth) {
    if (number == Number::w8a8) {  // bytes of 3, and scales of 1 / 8
        std::int64_t panel_numbers = depth * kLanes / 4 + kLanes;
        Matrix data(Number::float32, 1, panels * panel_numbers);
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            std::memset(data.floats() + panel * panel_numbers, 3, depth * kLanes);
            std::fill_n(data.floats() + panel * panel_numbers + depth * kLanes / 4, kLanes, 0.125f);
        }
        return data;
    }
    bool scaled = number == Number::int8 || number == Number::int4;
    std::int64_t code_bytes = kScaleBlock * kLanes / (number == Number::int8 ? 1 : 2);
    std::int64_t block_bytes = code_bytes + 4 * kLanes;
    std::int64_t panel_numbers = scaled ? depth / kScaleBlock * block_bytes / 2 : depth * kLanes;
    Matrix data(scaled ? Number::float16 : number, 1, panels * panel_numbers);
    for (std::int64_t i = 0; i < data.columns; ++i) data.set(0, i, scaled ? 0.0625 : kWeight);
    for (std::int64_t at = 0; at < data.columns * 2 && scaled; ++at) {
        if (at % block_bytes < code_bytes) data.bytes.data[at] = number == Number::int8 ? 5 : 0xdd;
    }
    return data;
}

// A weight of codes all of whose numbers are kWeight, packed from rows that end where their last byte does: 3 / 8, times 2
// and a scale of outputs of 1 / 2 where there are such.
struct Codes {
    Bytes panels;
    Weight weight;
};

// What the weights of all experts have in common. A block of 0 inputs has all of them.
struct CodeFormat {
    Number number, scale;
    std::int64_t block;
    bool zeros, offsets, output_scales, rounds_inputs;
    std::int64_t superblock;

    CodeFormat(Random& random, Number number)
        : number(number),
          scale(number == Number::e2m1   ? random.of({Number::e4m3, Number::e8m0})
                : number == Number::e4m3 ? random.of({Number::float32, Number::e8m0})
                                         : random.number()),
          block(random.of<std::int64_t>({16, 32, 128, 0})),
          zeros(number == Number::code4 && random.one_in(2)),
          offsets(!zeros && is_integer() && random.one_in(2)),
          output_scales(random.one_in(2)),
          rounds_inputs(number != Number::e4m3 && random.one_in(2)),
          superblock(0) {
        bool has_superblocks = !zeros && (number == Number::nl4 || is_integer()) && random.one_in(2);
        if (!has_superblocks) return;
        superblock = 256, scale = Number::int8, output_scales = false;
        if (block == 0 || block == 128) block = 32;
    }

    bool is_integer() const { return number == Number::code4 || number == Number::code6; }

    // The code of every weight, in each part of the byte that it fills. Of code6: of the lower parts.
    int code() const {
        switch (number) {
            case Number::e4m3: return 0x44;
            case Number::e2m1: return 0x55;
            case Number::code8: return 3;
            case Number::nl4: return 0x88;  // 1
            case Number::code6: return offsets ? 0x22 : 0x33;
            default: return zeros ? 0x77 : offsets ? 0x22 : 0xbb;
        }
    }

    float zero() const {
        if (number == Number::code6) return 32.0f;
        return number == Number::code4 && !zeros && !offsets ? 8.0f : 0.0f;
    }
};

// first_lanes: inputs before the weight's own, in sixteens.
Codes make_codes(const Kernels& kernels, Random& random, const CodeFormat& format, std::int64_t outputs, std::int64_t depth,
                 int first_lanes = 0) {
    Number number = format.number, scale = format.scale;
    bool zeros = format.zeros, offsets = format.offsets, output_scales = format.output_scales;
    std::int64_t block = format.block ? format.block : depth ? depth : 16, superblock = format.superblock;
    std::int64_t lead = format.block ? first_lanes * kLanes % (superblock ? superblock : block) : 0;
    std::int64_t blocks = (lead % block + depth + block - 1) / block, panels = (outputs + kLanes - 1) / kLanes;
    std::int64_t superblocks = superblock ? (lead + depth + superblock - 1) / superblock : 0;
    bool nibbles = number == Number::e2m1 || number == Number::code4 || number == Number::nl4, six = number == Number::code6;
    std::int64_t code_bytes = six ? depth / 4 * 3 : nibbles ? depth / 2 : depth;
    std::int64_t scale_bytes = scale == Number::float32 ? 4
                               : scale == Number::bfloat16 || scale == Number::float16 ? 2
                                                                                        : 1;
    std::int64_t side_bytes = zeros ? 1 : offsets ? scale_bytes : 0;
    Bytes codes(outputs * code_bytes), scales(outputs * blocks * scale_bytes), sides(outputs * blocks * side_bytes);
    Bytes of_superblocks(outputs * superblocks * 2);
    Matrix of_outputs(Number::float32, output_scales ? 1 : 0, outputs);
    std::fill_n(codes.data.get(), codes.size, format.code());
    for (std::int64_t row = 0; six && row < outputs; ++row) {
        std::fill_n(codes.data.get() + row * code_bytes + depth / 2, depth / 4, 0xaa);
    }
    std::fill_n(of_outputs.floats(), output_scales ? outputs : 0, 0.5f);
    float factor = (output_scales ? 2.0f : 1.0f) * (number == Number::nl4 ? 0.375f : 0.125f);
    auto fill = [](Bytes& bytes, Number number, float value) {
        dispatch(number, [&]<typename T>(T) {
            T stored = static_cast<T>(value);
            for (std::size_t at = 0; at < bytes.size; at += sizeof stored) std::memcpy(bytes.data.get() + at, &stored, sizeof stored);
        });
    };
    switch (scale) {
        case Number::e4m3: std::fill_n(scales.data.get(), scales.size, output_scales ? 0x28 : 0x20); break;
        case Number::e8m0: std::fill_n(scales.data.get(), scales.size, output_scales ? 125 : 124); break;
        case Number::int8: std::fill_n(scales.data.get(), scales.size, 1); break;
        default: fill(scales, scale, factor);
    }
    if (offsets && scale != Number::int8) fill(sides, scale, 0.125f * (output_scales ? 2.0f : 1.0f));
    if (zeros || scale == Number::int8) std::fill_n(sides.data.get(), sides.size, zeros ? 4 : 1);
    fill(of_superblocks, Number::float16, factor);
    std::int64_t panel_bytes = kLanes * (code_bytes + blocks * (scale_bytes + side_bytes) + output_scales * 4 +
                                         superblocks * 2 * (offsets ? 2 : 1));
    Bytes memory(panels * panel_bytes);
    if (memory.size) std::memset(memory.data.get(), 0, memory.size);
    Weight weight{memory.data.get(), number, depth, scale, block, lead, zeros, output_scales, offsets, format.zero(), superblock,
                  format.rounds_inputs};
    std::int64_t first = outputs ? random.below(static_cast<int>(outputs)) : 0;
    for (auto [begin, stop] : {std::pair{std::int64_t{0}, first}, std::pair{first, outputs}}) {
        const std::uint8_t* superblock_rows = superblock ? of_superblocks.data.get() + begin * superblocks * 2 : nullptr;
        kernels.pack_codes({codes.data.get() + begin * code_bytes, code_bytes,
                            scales.data.get() + begin * blocks * scale_bytes, blocks * scale_bytes,
                            side_bytes ? sides.data.get() + begin * blocks * side_bytes : nullptr, blocks * side_bytes,
                            superblock_rows, superblocks * 2, offsets ? superblock_rows : nullptr, superblocks * 2,
                            output_scales ? of_outputs.floats() + begin : nullptr, stop - begin, begin, weight,
                            memory.data.get()});
    }
    return {std::move(memory), weight};
}

// A third of all products have no activation.
Activation random_activation(Random& random) {
    if (random.one_in(3)) return {};
    Function function = random.of({Function::silu, Function::silu, Function::gelu, Function::gelu_tanh,
                                   Function::relu_squared, Function::clamped_swiglu});
    return {function, function == Function::clamped_swiglu || random.one_in(2)};
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activated(Function function, double x) {
    switch (function) {
        case Function::silu:
            return x * sigmoid(x);
        case Function::gelu:
            return x * std::erfc(-x * std::sqrt(0.5)) / 2;
        case Function::gelu_tanh:
            return x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2;
        case Function::relu_squared:
            return x < 0 ? 0 : x * x;
        case Function::clamped_swiglu:
            return std::min(x, 7.0) * sigmoid(1.702 * std::min(x, 7.0));
        default:
            return x;
    }
}

double gated_input(Function function, double up) {
    return function == Function::clamped_swiglu ? std::clamp(up, -7.0, 7.0) + 1 : up;
}

void test_linear(const Kernels& kernels, Random& random) {
    Number stored = random.of({Number::float32, Number::bfloat16, Number::float16, Number::int8, Number::int4,
                               Number::w8a8, Number::w8a8, Number::e4m3, Number::e2m1, Number::code8, Number::code6,
                               Number::code4, Number::nl4});
    std::int64_t depth = 32 * (1 + random.below(7)), outputs = 1 + random.below(100);
    if (stored != Number::int8 && stored != Number::int4 && random.one_in(2)) depth += kLanes;
    std::int64_t rows = random.of({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 40, 50});
    Activation activation = random_activation(random);
    bool has_norm = random.one_in(2), has_bias = random.one_in(2);
    bool has_residual = random.one_in(2);
    std::int64_t halves = activation.gated ? 2 : 1, panels = (outputs + kLanes - 1) / kLanes;
    Number number = random.number(), out_number = random.one_in(3) ? Number::float32 : number;
    Matrix numbers = make_weight(is_code(stored) ? Number::float32 : stored, halves * panels, depth);
    CodeFormat format(random, is_code(stored) ? stored : Number::e4m3);
    Codes codes = make_codes(kernels, random, format, halves * panels * kLanes, depth, random.below(20));
    Weight weight = is_code(stored) ? codes.weight : Weight{numbers.bytes.data.get(), stored, depth};
    Matrix x(number, rows, depth, random.of({0, 16})), norm(number, 1, depth), bias(number, 1, halves * outputs);
    Matrix residual(out_number, rows, outputs, random.of({0, 16})), out(out_number, rows, outputs);
    x.fill(random, 0.25, 7), norm.fill(random, 0.125, 12), bias.fill(random, 0.25, 7), residual.fill(random, 0.25, 7);
    // All ones: a NaN that rounding to fewer bits would carry over into a zero.
    std::int64_t broken = rows && random.one_in(2) ? random.below(static_cast<int>(rows)) : -1;
    if (broken >= 0) x.set(broken, random.below(static_cast<int>(depth)), std::bit_cast<double>(~0ULL));
    on_threads([&] {
        out.bytes.reset();
        Rows added = has_residual ? residual.as_rows() : Rows{nullptr, out_number, 0};
        kernels.linear({x.as_rows(), rows, has_norm ? norm.data() : nullptr, 1e-3f,
                        weight, has_bias ? bias.data() : nullptr, activation, added,
                        out.data(), out_number, outputs});
        return out.bytes.copy();
    });
    Number rounded = is_code(stored) && format.rounds_inputs ? Number::w8a8 : stored;
    double tolerance = std::max(rounding(number, rounded), rounding(out_number, rounded));
    for (int sample = 0; sample < 30 && rows; ++sample) {
        int row = random.below(static_cast<int>(rows)), output = random.below(static_cast<int>(outputs));
        if (row == broken) {
            check(std::isnan(out.get(row, output)), "a product of what is no number is one");
            continue;
        }
        auto input = x.get_run(row, 0, depth);
        double squares = std::inner_product(input.begin(), input.end(), input.begin(), 0.0);
        for (std::int64_t c = 0; c < depth && has_norm; ++c) {
            input[c] *= norm.get(0, c) / std::sqrt(squares / depth + 1e-3);
        }
        double sums[2], sizes[2];  // of each half, and what their rounding is relative to
        for (int half = 0; half < halves; ++half) {
            sums[half] = has_bias ? bias.get(0, half * outputs + output) : 0.0;
            sizes[half] = 1.0 + std::abs(sums[half]);
            for (double term : input) sums[half] += kWeight * term, sizes[half] += std::abs(kWeight * term);
        }
        double value = activated(activation.function, sums[0]), size = sizes[0];
        if (activation.function == Function::relu_squared) size *= 2 * size;
        if (activation.gated) value *= gated_input(activation.function, sums[1]), size *= 2 * (sizes[1] + 1);
        if (has_residual) value += residual.get(row, output), size += std::abs(residual.get(row, output));
        check_near(out.get(row, output), value, tolerance * size, "a product");
    }
}

// Rows as bytes, which a product then takes as they are.
void test_round(const Kernels& kernels, Random& random) {
    constexpr std::int64_t kBlock = 64;
    std::int64_t depth = kLanes * (1 + random.below(20)), blocks = (depth + kBlock - 1) / kBlock, outputs = 1 + random.below(40);
    std::int64_t rows = random.of({0, 1, 2, 5, 13, 40});
    Number number = random.number();
    bool has_norm = random.one_in(2);
    Matrix x(number, rows, depth, random.of({0, 16})), norm(number, 1, depth), scales(Number::float32, rows, blocks);
    x.fill(random, 0.25, 7), norm.fill(random, 0.125, 12);
    Bytes bytes(rows * depth);
    auto* stored = reinterpret_cast<std::int8_t*>(bytes.data.get());
    on_threads([&] {
        bytes.reset(), scales.bytes.reset();
        kernels.round({x.as_rows(), rows, depth, has_norm ? norm.data() : nullptr, 1e-3f, stored, scales.floats()});
        return std::pair(bytes.copy(), scales.bytes.copy());
    });
    for (std::int64_t row = 0; row < rows && !has_norm; ++row) {
        for (std::int64_t c = 0; c < depth; ++c) {
            double step = scales.get(row, c / kBlock);
            check_near(step * stored[row * depth + c], x.get(row, c), 0.501 * step, "a byte");
        }
    }
    Matrix weight = make_weight(Number::w8a8, (outputs + kLanes - 1) / kLanes, depth);
    Matrix out(number, rows, outputs), same(number, rows, outputs);
    Weight packed{weight.bytes.data.get(), Number::w8a8, depth};
    Rows none{nullptr, number, 0};
    kernels.linear({x.as_rows(), rows, has_norm ? norm.data() : nullptr, 1e-3f, packed, nullptr, {}, none, out.data(),
                    number, outputs});
    kernels.linear({{stored, Number::int8, depth}, rows, nullptr, 0.0f, packed, nullptr, {}, none, same.data(), number,
                    outputs, scales.floats()});
    check(out.bytes.copy() == same.bytes.copy(), "rows of bytes give other products");
}

// ---------------------------------------------------------------------------------------------------------------------
// Experts.
// ---------------------------------------------------------------------------------------------------------------------

// The best `count` places of `values`, best first; of equal ones the first.
std::vector<int> best_of(const std::vector<double>& values, int count) {
    std::vector<int> places(values.size());
    std::iota(places.begin(), places.end(), 0);
    std::stable_sort(places.begin(), places.end(), [&](int a, int b) { return values[a] > values[b]; });
    places.resize(count);
    return places;
}

void test_route(const Kernels& kernels, Random& random) {
    int groups = random.of({1, 1, 2, 3, 4}), size = 1 + random.below(40), taken_groups = 1 + random.below(groups);
    int experts = groups * size, per_token = 1 + random.below(std::min(taken_groups * size, 12));
    bool sigmoid = random.one_in(2), normalised = random.one_in(2), has_bias = random.one_in(2);
    bool shared = random.one_in(2), gate = shared && random.one_in(2);
    std::int64_t rows = random.of({0, 1, 3, 20});
    float scale = random.one_in(2) ? 1.0f : 2.5f;
    Matrix logits(Number::float32, rows, experts + gate), bias(Number::float32, 1, experts);
    Matrix weights(Number::float32, rows, per_token + shared), taken(Number::int64, rows, per_token + shared);
    logits.fill(random, 0.25, 12), bias.fill(random, 0.3, 2);  // many are equal
    // Some scores lie on both sides of the smallest normal number, at -87.3.
    for (std::int64_t row = 0; row < rows && sigmoid; row += 2) {
        for (int e = 0; e < experts + gate; ++e) logits.set(row, e, logits.get(row, e) - 87);
    }
    on_threads([&] {
        weights.bytes.reset(), taken.bytes.reset();
        kernels.route({logits.floats(), rows, has_bias ? bias.floats() : nullptr, experts, per_token, groups,
                       taken_groups, sigmoid, normalised, scale, shared, gate, weights.floats(),
                       static_cast<std::int64_t*>(taken.data())});
        return std::pair(weights.bytes.copy(), taken.bytes.copy());
    });
    for (std::int64_t row = 0; row < rows; ++row) {
        auto scores = logits.get_run(row, 0, experts);
        for (double& score : scores) score = sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score);
        double total = sigmoid ? 1 : std::accumulate(scores.begin(), scores.end(), 0.0);
        for (double& score : scores) score /= total;
        auto choice = scores;
        for (int e = 0; e < experts && has_bias; ++e) choice[e] += bias.get(0, e);
        std::vector<double> of_group(groups);
        for (int group = 0; group < groups; ++group) {
            std::vector<double> members(choice.begin() + group * size, choice.begin() + (group + 1) * size);
            for (int e : best_of(members, sigmoid ? std::min(size, 2) : 1)) of_group[group] += members[e];
        }
        auto left = best_of(of_group, taken_groups);
        for (int e = 0; e < experts; ++e) {
            if (std::find(left.begin(), left.end(), e / size) == left.end()) choice[e] = -INFINITY;
        }
        auto wanted = best_of(choice, per_token);
        double sum = 0;
        for (int e : wanted) sum += scores[e];
        for (int y = 0; y < per_token; ++y) {
            check(taken.get(row, y) == wanted[y], "another expert is taken");
            double weight = scores[wanted[y]] / (normalised ? sum : 1) * scale;
            check_near(weights.get(row, y), weight, 1e-5 * weight, "a weight");
        }
        if (!shared) continue;
        check(taken.get(row, per_token) == experts, "the shared expert is not the last");
        double weight = gate ? 1 / (1 + std::exp(-logits.get(row, experts))) : 1;
        check_near(weights.get(row, per_token), weight, 1e-5, "the weight of the shared expert");
    }
}

void test_experts(const Kernels& kernels, Random& random) {
    Number stored = random.of({Number::float32, Number::bfloat16, Number::float16, Number::int8, Number::int4,
                               Number::w8a8, Number::e4m3, Number::e2m1, Number::code8, Number::code6,
                               Number::code4, Number::nl4});
    Number number = random.number();
    std::int64_t hidden = 32 * (1 + random.below(4)), rows = random.of({0, 1, 2, 5, 40, 600});
    int per_row = 1 + random.below(3), count = random.below(5);
    Activation activation = random_activation(random);
    std::vector<int> ids(count);  // every second number from a first one on is here
    std::vector<Matrix> memory;
    std::vector<Codes> codes;
    CodeFormat format(random, is_code(stored) ? stored : Number::e4m3);
    int first_lanes = random.below(20);
    std::vector<Weight> gate_up, down;
    for (int place = 0; place < count; ++place) {
        ids[place] = 1 + 2 * place;
        std::int64_t columns = 32 * random.below(4);
        if (is_code(stored)) {
            codes.push_back(make_codes(kernels, random, format, (activation.gated ? 2 : 1) * columns, hidden));
            gate_up.push_back(codes.back().weight);
            codes.push_back(make_codes(kernels, random, format, hidden, columns, first_lanes));
            down.push_back(codes.back().weight);
            continue;
        }
        memory.push_back(make_weight(stored, (activation.gated ? 2 : 1) * columns / kLanes, hidden));
        gate_up.push_back({memory.back().bytes.data.get(), stored, hidden});
        memory.push_back(make_weight(stored, hidden / kLanes, columns));
        down.push_back({memory.back().bytes.data.get(), stored, columns});
    }
    ExpertSet set(ids, gate_up, down);
    Matrix x(number, rows, hidden, random.of({0, 16})), norm(number, 1, hidden), out(number, rows, hidden);
    Matrix residual(number, rows, hidden, random.of({0, 16})), weights(Number::float32, rows, per_row);
    Matrix taken(Number::int64, rows, per_row), rows_of(Number::int64, 1, count);
    bool has_norm = random.one_in(2), has_residual = random.one_in(2);
    x.fill(random, 0.25, 7), norm.fill(random, 0.125, 12), residual.fill(random, 0.25, 7);
    weights.fill(random, 0.25, 8);
    std::vector<std::int64_t> wanted(count);
    auto place_of = [count](std::int64_t expert) {
        bool here = expert > 0 && expert % 2 && expert / 2 < count;
        return here ? static_cast<int>(expert / 2) : -1;
    };
    for (std::int64_t row = 0; row < rows; ++row) {
        int first = random.below(9);
        for (int y = 0; y < per_row; ++y) {
            std::int64_t expert = (first + 2 * y + y % 2) % 10;
            if (random.one_in(6)) expert = random.of<std::int64_t>({-1, -(1LL << 40), 1LL << 40});  // that none has
            taken.set(row, y, expert);
            if (place_of(expert) >= 0) ++wanted[place_of(expert)];
        }
    }
    on_threads([&] {
        out.bytes.reset();
        for (int place = 0; place < count; ++place) rows_of.set(0, place, 0);
        kernels.experts({x.as_rows(), rows, hidden, has_norm ? norm.data() : nullptr, 1e-3f, &set, weights.floats(),
                         static_cast<const std::int64_t*>(taken.data()), per_row, activation,
                         has_residual ? residual.as_rows() : Rows{nullptr, number, 0}, out.data(), number,
                         static_cast<std::int64_t*>(rows_of.data()), nullptr});
        return std::pair(out.bytes.copy(), rows_of.bytes.copy());
    });
    for (int place = 0; place < count; ++place) check(rows_of.get(0, place) == wanted[place], "rows are miscounted");
    if (stored == Number::w8a8) {  // which takes rows as bytes, too
        Bytes bytes(rows * hidden);
        auto* rounded = reinterpret_cast<std::int8_t*>(bytes.data.get());
        Matrix scales(Number::float32, rows, (hidden + 63) / 64), same(number, rows, hidden);
        kernels.round({x.as_rows(), rows, hidden, has_norm ? norm.data() : nullptr, 1e-3f, rounded, scales.floats()});
        on_threads([&] {
            same.bytes.reset();
            kernels.experts({{rounded, Number::int8, hidden}, rows, hidden, nullptr, 0.0f, &set, weights.floats(),
                             static_cast<const std::int64_t*>(taken.data()), per_row, activation,
                             has_residual ? residual.as_rows() : Rows{nullptr, number, 0}, same.data(), number,
                             static_cast<std::int64_t*>(rows_of.data()), scales.floats()});
            return same.bytes.copy();
        });
        check(out.bytes.copy() == same.bytes.copy(), "rows of bytes give other sums of experts");
    }
    double tolerance = 2 * rounding(number, is_code(stored) && format.rounds_inputs ? Number::w8a8 : stored);
    for (std::int64_t row = 0; row < rows; row += 1 + random.below(20)) {
        auto input = x.get_run(row, 0, hidden);
        double squares = std::inner_product(input.begin(), input.end(), input.begin(), 0.0);
        double sum = 0, size = 1;
        for (std::int64_t c = 0; c < hidden; ++c) {
            double term = has_norm ? input[c] * norm.get(0, c) / std::sqrt(squares / hidden + 1e-3) : input[c];
            sum += kWeight * term, size += std::abs(kWeight * term);
        }
        int output = random.below(static_cast<int>(hidden));
        double value = has_residual ? residual.get(row, output) : 0, bound = std::abs(value);
        for (int y = 0; y < per_row; ++y) {
            int place = place_of(static_cast<std::int64_t>(taken.get(row, y)));
            if (place < 0) continue;
            double factor = weights.get(row, y) * kWeight * static_cast<double>(down[place].depth);
            double inner = activated(activation.function, sum);
            value += factor * (activation.gated ? inner * gated_input(activation.function, sum) : inner);
            bool squared = activation.function == Function::relu_squared;
            bound += std::abs(factor) * 2 * size * (size + 1) * (squared ? size : 1);
        }
        check_near(out.get(row, output), value, tolerance * bound, "a sum of experts");
    }
}

// Ids of a row, the largest logit first, of equal ones the lowest id.
std::vector<int> sorted_ids(const Matrix& logits, std::int64_t row) {
    std::vector<int> ids(logits.columns);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return logits.get(row, a) > logits.get(row, b); });
    return ids;
}

void test_angles(const Kernels& kernels, Random& random) {
    std::int64_t rows = random.of({0, 1, 33, 70}), pairs = random.of({1, 7, 8, 32, 64});
    std::int64_t stride = random.one_in(2) ? pairs : 0;
    double factor = random.of({1.0, 1.25});
    Matrix positions(Number::int64, 1, rows), frequencies(Number::float64, stride ? rows : 1, pairs);
    Matrix cos(Number::float32, rows, pairs), sin(Number::float32, rows, pairs);
    for (std::int64_t row = 0; row < rows; ++row) {
        static_cast<std::int64_t*>(positions.data())[row] = random.of({0, 1, 999, 16'000'000, 2'000'000'000});
    }
    for (std::int64_t row = 0; row < frequencies.rows; ++row) {
        for (int i = 0; i < pairs; ++i) {
            static_cast<double*>(frequencies.data())[row * pairs + i] = std::pow(1e4, -random.below(1000) * 1e-3);
        }
    }
    on_threads([&] {
        cos.bytes.reset(), sin.bytes.reset();
        kernels.angles({static_cast<std::int64_t*>(positions.data()), rows, static_cast<double*>(frequencies.data()),
                        stride, pairs, factor, cos.floats(), sin.floats()});
        return std::tuple(cos.bytes.copy(), sin.bytes.copy());
    });
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int i = 0; i < pairs; ++i) {
            double angle = static_cast<double>(static_cast<std::int64_t*>(positions.data())[row]) *
                           static_cast<double*>(frequencies.data())[row * stride + i];
            check_near(cos.get(row, i), factor * std::cos(angle), 1e-7, "a cosine");
            check_near(sin.get(row, i), factor * std::sin(angle), 1e-7, "a sine");
        }
    }
}

void test_candidates(const Kernels& kernels, Random& random) {
    int size = random.of({0, 1, 16, 255, 511, 512, 513, 3000}), count = random.of({1, 3, 64, 400});
    std::int64_t rows = random.of({0, 1, 4}), words = (size + 511) / 512 * 16;
    Matrix logits(Number::float32, rows, size, 3), seen(Number::int32, rows, words);
    Matrix penalties(Number::float32, 1, rows), inverse(Number::float32, 1, rows), marks(Number::int64, 1, rows);
    Matrix values(Number::float32, rows, count), ids(Number::int64, rows, count);
    std::vector<double> sums(rows);
    logits.fill(random, 0.25, 30);
    for (std::int64_t row = 0; row < rows; row += 2) {  // far from 0
        for (int i = 0; i < size; ++i) logits.set(row, i, logits.get(row, i) + 200);
    }
    for (std::int64_t row = 0; row < rows; ++row) {
        penalties.set(0, row, random.of({0.5, 2.0}));
        inverse.set(0, row, random.of({0.0, 0.5, 1.0, 4.0, 32.0, 0x1p30, 0x1p99}));
        for (std::int64_t word = 0; word < words; ++word) seen.set(row, word, random.one_in(2) ? random.below(1 << 20) : 0);
        void* of_row = static_cast<std::int32_t*>(seen.data()) + row * words;
        marks.set(0, row, 0);
        if (random.one_in(2)) static_cast<std::int64_t*>(marks.data())[row] = reinterpret_cast<std::int64_t>(of_row);
    }
    on_threads([&] {
        values.bytes.reset(), ids.bytes.reset();
        kernels.candidates({logits.floats(), logits.stride, rows, size, static_cast<std::int64_t*>(marks.data()),
                            penalties.floats(), inverse.floats(), count, values.floats(),
                            static_cast<std::int64_t*>(ids.data()), sums.data()});
        return std::tuple(values.bytes.copy(), ids.bytes.copy(), sums);
    });
    Matrix changed(Number::float32, rows, size, 5);
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int i = 0; i < size; ++i) changed.set(row, i, logits.get(row, i));
    }
    kernels.penalise({changed.floats(), changed.stride, rows, size, static_cast<std::int64_t*>(marks.data()),
                      penalties.floats()});
    for (std::int64_t row = 0; row < rows; ++row) {
        double penalty = penalties.get(0, row), sum = 0;
        for (int i = 0; i < size; ++i) {
            auto word = static_cast<std::uint32_t>(seen.get(row, i / 32));
            double x = logits.get(row, i);
            if (marks.get(0, row) != 0 && (word >> i % 32 & 1)) logits.set(row, i, x > 0 ? x / penalty : x * penalty);
            check(changed.get(row, i) == logits.get(row, i), "a penalised logit");
        }
        auto expected = sorted_ids(logits, row);
        for (int i = 0; i < count; ++i) {
            check(ids.get(row, i) == (i < size ? expected[i] : -1), "another token is a candidate");
            check(values.get(row, i) == (i < size ? logits.get(row, expected[i]) : -INFINITY), "a candidate's logit");
        }
        for (int i = 0; i < size; ++i) {
            sum += std::exp((logits.get(row, i) - logits.get(row, expected[0])) * inverse.get(0, row));
        }
        if (inverse.get(0, row) == 0) sum = 0;
        check_near(sums[row], sum, 1e-6 * sum, "the sum of weights");
    }
}

void test_draw(const Kernels& kernels, Random& random) {
    int size = random.of({1, 2, 16, 300, 5000});
    std::int64_t rows = random.of({0, 1, 4});
    Matrix logits(Number::float32, rows, size, 3), temperatures(Number::float32, 1, rows);
    std::vector<std::int64_t> top_k(rows), tokens(rows);
    std::vector<double> top_p(rows), min_p(rows), numbers(rows);
    logits.fill(random, 0.03125, random.of({0, 30, 1000}));
    for (std::int64_t row = 0; row < rows; ++row) {
        temperatures.set(0, row, random.of({0.0, 0.5, 1.0, 4.0}));
        top_k[row] = random.of({1, 7, 1000, 5000});
        top_p[row] = random.of({0.113717, 0.831717, 0.997317, 1.0});
        min_p[row] = random.of({0.0, 0.0123, 0.77});
        numbers[row] = (random.below(1000) + 0.4321) / 1000;
    }
    on_threads([&] {
        kernels.draw({logits.floats(), logits.stride, rows, size, temperatures.floats(), top_k.data(), top_p.data(),
                      min_p.data(), numbers.data(), tokens.data()});
        return tokens;
    });
    for (std::int64_t row = 0; row < rows; ++row) {
        double temperature = temperatures.get(0, row), total = 0, passed = 0, kept_weight = 0;
        if (temperature == 0) {
            check(tokens[row] == -1, "there is a draw of no temperature");
            continue;
        }
        auto ids = sorted_ids(logits, row);
        std::size_t kept = std::min<std::size_t>(size, top_k[row]);
        std::vector<double> weights(size);
        for (int i = 0; i < size; ++i) {
            weights[i] = std::exp((logits.get(row, ids[i]) - logits.get(row, ids[0])) / temperature);
        }
        for (std::size_t i = 0; i < kept; ++i) total += weights[i];
        std::size_t nucleus = 0;
        while (nucleus < kept && (nucleus == 0 || passed < top_p[row] * total)) passed += weights[nucleus++];
        if (top_p[row] < 1) kept = nucleus;
        while (kept > 1 && weights[kept - 1] < min_p[row]) --kept;
        for (std::size_t i = 0; i < kept; ++i) kept_weight += weights[i];
        std::size_t place = 0;
        for (double sum = weights[0]; place + 1 < kept && sum <= numbers[row] * kept_weight; sum += weights[place]) {
            ++place;
        }
        check(tokens[row] == ids[place] || tokens[row] == -1, "another token is drawn");
        check(tokens[row] != -1 || size < 300, "nothing is drawn of many tokens");
    }
}

void test_dequantise(const Kernels& kernels, Random& random) {
    auto kind = random.of({BlockKind::q4_0, BlockKind::q4_1, BlockKind::q8_0});
    int block_bytes = kind == BlockKind::q4_0 ? 18 : kind == BlockKind::q4_1 ? 20 : 34;
    std::int64_t rows = random.of({0, 1, 5}), blocks = random.of({0, 1, 3}), stride = blocks * block_bytes + 7;
    Bytes stored(rows == 0 ? 0 : (rows - 1) * stride + blocks * block_bytes);
    for (std::size_t i = 0; i < stored.size; ++i) stored.data[i] = static_cast<std::uint8_t>(random.below(256));
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < blocks; ++i) {  // scales of 1 and 2
            std::uint16_t scales[] = {0x3c00, 0x4000};
            std::memcpy(stored.data.get() + row * stride + i * block_bytes, scales, kind == BlockKind::q4_1 ? 4 : 2);
        }
    }
    Matrix values(Number::float32, rows, blocks * 32);
    on_threads([&] {
        values.bytes.reset();
        kernels.dequantise({stored.data.get(), stride, rows, blocks, kind, values.floats()});
        return values.bytes.copy();
    });
    for (std::int64_t row = 0; row < rows; ++row) {
        for (int i = 0; i < blocks * 32; ++i) {
            const std::uint8_t* block = stored.data.get() + row * stride + i / 32 * block_bytes;
            int place = i % 32, first = kind == BlockKind::q4_1 ? 4 : 2;
            int half = block[first + place % 16] >> (place < 16 ? 0 : 4) & 15;
            int number = kind == BlockKind::q8_0   ? static_cast<std::int8_t>(block[2 + place])
                         : kind == BlockKind::q4_0 ? half - 8
                                                   : half + 2;
            check(values.get(row, i) == number, "a number of a block");
        }
    }
}

// The parts of a block, by the byte at which each begins; -1: it has none.
struct BlockForm {
    BlockKind kind;
    int bytes, inputs, bits, num_scales, scale_bytes, low, high;  // codes of more than four bits are low and high parts
};

constexpr BlockForm kBlockForms[] = {
    {BlockKind::q4_0, 18, 32, 4, 1, 2, 2, -1},      {BlockKind::iq4_nl, 18, 32, 4, 1, 2, 2, -1},
    {BlockKind::q4_1, 20, 32, 4, 1, 2, 4, -1},      {BlockKind::q5_0, 22, 32, 6, 1, 2, 6, 2},
    {BlockKind::q5_1, 24, 32, 6, 1, 2, 8, 4},       {BlockKind::q8_0, 34, 32, 8, 1, 2, 2, -1},
    {BlockKind::mxfp4, 17, 32, 4, 1, 1, 1, -1},     {BlockKind::q2_k, 84, 256, 4, 16, 1, 16, -1},
    {BlockKind::q3_k, 110, 256, 4, 16, 1, 32, 0},   {BlockKind::q4_k, 144, 256, 4, 8, 1, 16, -1},
    {BlockKind::q5_k, 176, 256, 6, 8, 1, 48, 16},   {BlockKind::q6_k, 210, 256, 6, 16, 1, 0, 128},
    {BlockKind::iq4_xs, 136, 256, 4, 8, 1, 8, -1},
};

// The code of an input of a block.
int block_code(const BlockForm& form, const std::uint8_t* block, int input) {
    const std::uint8_t *low = block + form.low, *high = block + form.high;
    auto nibble = [&](int half) { return low[input / (2 * half) * half + input % half] >> input / half % 2 * 4 & 15; };
    int pair = input / 128 * 32 + input % 32, shift = input % 128 / 32 * 2;  // where two bits of an input lie
    switch (form.kind) {
        case BlockKind::q5_0:
        case BlockKind::q5_1: return nibble(16) | (high[input / 8] >> input % 8 & 1) << 4;
        case BlockKind::q8_0: return low[input];
        case BlockKind::q2_k: return low[pair] >> shift & 3;
        case BlockKind::q3_k: return (low[pair] >> shift & 3) | (high[input % 32] >> input / 32 & 1) << 2;
        case BlockKind::q4_k: return nibble(32);
        case BlockKind::q5_k: return nibble(32) | (high[input % 32] >> input / 32 & 1) << 4;
        case BlockKind::q6_k: return nibble(64) | (high[pair] >> shift & 3) << 4;
        default: return nibble(16);
    }
}

// Scale and offset `number` of a superblock.
std::pair<int, int> block_sides(BlockKind kind, const std::uint8_t* block, int number) {
    const std::uint8_t *sixes = block + 4, *threes = block + 96;
    switch (kind) {
        case BlockKind::q2_k: return {block[number] & 15, -(block[number] >> 4)};
        case BlockKind::q3_k:
            return {((threes[number % 8] >> number / 8 * 4 & 15) | (threes[8 + number % 4] >> number / 4 * 2 & 3) << 4) - 32, 0};
        case BlockKind::q6_k: return {static_cast<std::int8_t>(block[192 + number]), 0};
        case BlockKind::iq4_xs:
            return {((block[4 + number / 2] >> number % 2 * 4 & 15) | (block[2 + number / 4] >> number % 4 * 2 & 3) << 4) - 32, 0};
        default: break;
    }
    if (number < 4) return {sixes[number] & 63, -(sixes[number + 4] & 63)};
    return {(sixes[number + 4] & 15) | sixes[number - 4] >> 6 << 4, -((sixes[number + 4] >> 4) | sixes[number] >> 6 << 4)};
}

// Bytes of a block that the format keeps as they are: its scale, or that of the superblock, and then its offset.
std::pair<int, int> kept_sides(BlockKind kind) {
    switch (kind) {
        case BlockKind::q4_1:
        case BlockKind::q5_1:
        case BlockKind::q4_k:
        case BlockKind::q5_k: return {0, 2};
        case BlockKind::q2_k: return {80, 82};
        case BlockKind::q3_k: return {108, -1};
        case BlockKind::q6_k: return {208, -1};
        default: return {0, -1};
    }
}

void test_split_blocks(const Kernels& kernels, Random& random) {
    BlockForm form = kBlockForms[random.below(std::size(kBlockForms))];
    bool super = form.inputs == 256;
    std::int64_t rows = random.of({0, 1, 5, 18}), blocks = random.of({1, 2, 3}), stride = blocks * form.bytes + 5;
    std::int64_t depth = blocks * form.inputs, code_bytes = form.bits == 6 ? depth / 4 * 3 : depth * form.bits / 8;
    std::int64_t side_bytes = blocks * form.num_scales * form.scale_bytes;
    Bytes stored(rows == 0 ? 0 : (rows - 1) * stride + blocks * form.bytes);
    for (std::size_t i = 0; i < stored.size; ++i) stored.data[i] = static_cast<std::uint8_t>(random.below(256));
    auto [scale_at, offset_at] = kept_sides(form.kind);
    bool offsets = offset_at >= 0;
    Bytes codes(rows * code_bytes), scales(rows * side_bytes), of_scales(offsets ? rows * side_bytes : 0);
    Bytes superblocks(super ? rows * blocks * 2 : 0), of_superblocks(super && offsets ? rows * blocks * 2 : 0);
    on_threads([&] {
        codes.reset();
        kernels.split_blocks({stored.data.get(), stride, rows, blocks, form.kind, codes.data.get(), code_bytes,
                              scales.data.get(), offsets ? of_scales.data.get() : nullptr, side_bytes,
                              super ? superblocks.data.get() : nullptr,
                              super && offsets ? of_superblocks.data.get() : nullptr, blocks * 2});
        return codes.copy();
    });
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::uint8_t* of_row = codes.data.get() + row * code_bytes;
        for (std::int64_t i = 0; i < depth; ++i) {
            const std::uint8_t* block = stored.data.get() + row * stride + i / form.inputs * form.bytes;
            int code = form.bits == 8 ? of_row[i] : of_row[i / 2] >> i % 2 * 4 & 15;
            if (form.bits == 6) code |= (of_row[depth / 2 + i / 4] >> i % 4 * 2 & 3) << 4;
            check(code == block_code(form, block, static_cast<int>(i % form.inputs)), "a code of a block");
        }
        for (std::int64_t i = 0; i < blocks; ++i) {
            const std::uint8_t* block = stored.data.get() + row * stride + i * form.bytes;
            std::int64_t place = row * blocks + i, first = place * form.num_scales;
            const Bytes &kept = super ? superblocks : scales, &kept_offsets = super ? of_superblocks : of_scales;
            int bytes = super ? 2 : form.scale_bytes;
            check(!std::memcmp(kept.data.get() + place * bytes, block + scale_at, bytes), "a scale");
            check(!offsets || !std::memcmp(kept_offsets.data.get() + place * bytes, block + offset_at, bytes), "an offset");
            for (int number = 0; super && number < form.num_scales; ++number) {
                auto [scale, offset] = block_sides(form.kind, block, number);
                check(static_cast<std::int8_t>(scales.data[first + number]) == scale, "a scale of a superblock");
                check(!offsets || static_cast<std::int8_t>(of_scales.data[first + number]) == offset, "an offset of a superblock");
            }
        }
    }
}

// What (output, input) of a weight stands for in panels of `number`; kernels.hpp has their description.
double packed_value(const std::uint8_t* panels, Number number, std::int64_t depth, std::int64_t output, std::int64_t input) {
    std::int64_t panel = output / kLanes, lane = output % kLanes;
    auto half = [](const std::uint8_t* at) {
        float16 value;
        std::memcpy(&value, at, sizeof value);
        return static_cast<double>(value);
    };
    if (number == Number::float16) return half(panels + ((panel * depth + input) * kLanes + lane) * 2);
    if (number == Number::float32 || number == Number::bfloat16) {
        std::int64_t step = number == Number::bfloat16 ? 2 : 1;
        const std::uint8_t* unit = panels + ((panel * depth / step + input / step) * kLanes + lane) * 4;
        float value;
        if (number == Number::float32) return std::memcpy(&value, unit, 4), value;
        bfloat16 pair[2];
        return std::memcpy(pair, unit, 4), static_cast<float>(pair[input % 2]);
    }
    std::int64_t bits = number == Number::int8 ? 8 : 4, block_bytes = kScaleBlock * kLanes * bits / 8 + 4 * kLanes;
    const std::uint8_t* block = panels + (panel * depth / kScaleBlock + input / kScaleBlock) * block_bytes;
    std::int64_t row = input % kScaleBlock / 2, at_once = bits == 8 ? 2 : 4;
    std::uint8_t byte = block[row / at_once * 64 + lane / 4 * 16 + row % 2 * 8 + lane % 4 * 2 + input % 2];
    int stored = bits == 8 ? (byte & 127) * (byte & 128 ? -1 : 1) : (row % 4 < 2 ? byte & 15 : byte >> 4) - 8;
    const std::uint8_t* sides = block + block_bytes - 4 * kLanes + lane * 2;
    return half(sides) * stored + half(sides + 2 * kLanes);
}

void test_pack(const Kernels& kernels, Random& random) {
    Number number = random.of({Number::float32, Number::bfloat16, Number::float16, Number::int8, Number::int4});
    bool scaled = number > Number::float16, int4 = number == Number::int4;
    std::int64_t depth = scaled ? kScaleBlock * (1 + random.below(4)) : kLanes * (1 + random.below(20));
    std::int64_t rows = random.of({0, 1, 3, 15, 16, 17, 40, 100}), first = random.below(40);
    std::int64_t panels = (first + rows + kLanes - 1) / kLanes + 1;
    Matrix weight(random.number(), rows, depth, random.of({0, 1, 16}));
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t i = 0; i < depth; ++i) {  // with the ends of each scale block's range, so that all are exact
            int most = int4 ? 15 : 127, least = int4 ? 0 : -127, place = i % kScaleBlock;
            int step = place == 0 ? most : place == 1 ? least : least + random.below(most - least + 1);
            weight.set(row, i, 0.0625 * step);
        }
    }
    std::int64_t panel_bytes = depth * kLanes * (number == Number::float32 ? 8 : scaled ? int4 ? 1 : 2 : 4) / 2;
    Bytes packed(panels * (panel_bytes + (scaled ? depth / kScaleBlock * 4 * kLanes : 0)));
    on_threads([&] {
        packed.reset();
        kernels.pack({weight.as_rows(), rows, first, packed.data.get(), number, depth});
        return packed.copy();
    });
    for (std::int64_t output = 0; output < panels * kLanes; ++output) {
        bool written = first <= output && output < first + rows;
        for (std::int64_t i = 0; i < depth; ++i) {
            double value = packed_value(packed.data.get(), number, depth, output, i);
            check(written ? value == weight.get(output - first, i) : std::isnan(value), "a number of a panel");
        }
    }
}

void test_read(const Kernels& kernels, Random& random) {
    // Whole lines for the four streams of each of four threads, and some that nobody reads.
    std::int64_t lines = random.below(4), rest = random.below(512);
    Matrix words(Number::int32, 1, lines * 2048 + rest);
    for (std::int64_t i = 0; i < words.columns; ++i) words.set(0, i, 1);
    double sum = on_threads([&] { return kernels.read(words.data(), words.bytes.size); });
    check_near(sum, 128.0 * static_cast<double>(lines), 0, "a sum");
}

// ---------------------------------------------------------------------------------------------------------------------

void test_kernels() {
    constexpr std::pair<const char*, void (*)(const Kernels&, Random&)> kTests[] = {
        {"attend", test_attend}, {"write", test_write}, {"expand", test_expand}, {"rotate", test_rotate},
        {"linear", test_linear}, {"round", test_round}, {"route", test_route}, {"read", test_read},
        {"experts", test_experts},
        {"angles", test_angles}, {"candidates", test_candidates}, {"draw", test_draw}, {"dequantise", test_dequantise},
        {"split_blocks", test_split_blocks}, {"pack", test_pack}};
    for (const Kernels* table : usable_kernels()) {
        for (auto [name, test] : kTests) {
            for (int number = 0; number < kCases; ++number) {
                what = std::string(table->name) + " " + name + ", case " + std::to_string(number);
                Random random{std::mt19937_64(number)};
                // Kernels keep their working memory with their thread: a new thread's is as large as this case asks.
                std::thread([&] { test(*table, random); }).join();
            }
        }
        std::printf("%s: %d cases of each kernel\n", table->name, kCases);
        std::fflush(stdout);
    }
}

}  // namespace

}  // namespace longhelix

int main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback([] { std::fprintf(stderr, "FAILED: %s\n", longhelix::what.c_str()); });
#endif
    longhelix::test_collectives();
    longhelix::check(longhelix::use_openmp(nullptr), "this program's own OpenMP runtime is not found");
    longhelix::test_kernels();
}
