// Paged partial attention: one form for decode rows and for prefill chunks.
//
// A row block's keys are taken in *spans* (attend_span.hpp), whose states are merged in order: a span is what a thread
// can take by itself. Spans and their strips lie at absolute positions, and every sum has one order, so a row's bits
// depend on nothing but its own keys: not on its batch, not on its chunk, not on the number of threads.
#pragma once

#include <atomic>

#include "attend_span.hpp"
#include "runs.hpp"

namespace longhelix::ISA {

constexpr int kBlockRows = 96;  // rows of a row block that read a strip while it is in the cache
constexpr float kLn2 = 0.69314718056f;

template <typename E>
struct Attend {
    using RowBlock = typename AttendSpan<E>::RowBlock;
    using Memory = typename AttendSpan<E>::Memory;

    const Attention& call;
    const AttendSpan<E> kernel;
    int group, value_size;

    explicit Attend(const Attention& attention)
        : call(attention), kernel(attention), group(kernel.group), value_size(kernel.value_size) {}

    // The state that the results hold, as it was before the call.
    void load_held(const RowBlock& block, const State& state) const {
        for (int r = 0; r < block.num_rows; ++r) {
            std::int64_t row = block.first_row + r / group, head = block.head * group + r % group;
            std::int64_t at = row * call.num_query_heads + head;
            float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
            for (int c = 0; c < value_size; c += kLanes) {
                store(out + c, load_number(call.out, at * value_size + c, call.q.number));
            }
            state.base[r] = call.lse[at] * kLog2e;
            state.sum[r] = call.lse[at] == kMinusInfinity ? 0.0f : 1.0f;
        }
    }

    void finish(const RowBlock& block, const Memory& memory) const {
        const State& state = memory.span;
        if (call.onto) {
            load_held(block, memory.run);
            merge_state(state, memory.run, block.num_rows, value_size);
        }
        for (int r = 0; r < block.num_rows; ++r) {
            std::int64_t row = block.first_row + r / group, head = block.head * group + r % group;
            float factor = state.sum[r] == 0 ? 0.0f : 1.0f / state.sum[r];
            std::int64_t to = (row * call.num_query_heads + head) * value_size;
            const float* out = state.out + static_cast<std::ptrdiff_t>(r) * value_size;
            for (int c = 0; c < value_size; c += kLanes) {
                store_number(call.out, to + c, call.q.number, load<f32x16>(out + c) * factor);
            }
            call.lse[row * call.num_query_heads + head] =
                state.sum[r] == 0 ? kMinusInfinity : (state.base[r] + __builtin_log2f(state.sum[r])) * kLn2;
        }
    }

    // A row block, whole or one of its spans; a block's spans are merged by whoever finishes last.
    // A block's first span that has a token which one of its rows sees.
    static std::int64_t first_span(const RowBlock& block) { return num_spans(block.from + 1) - 1; }

    struct Item {
        RowBlock block;
        std::int64_t span;      // -1: all of them
        std::size_t state;      // where this block's first span's state lies, in floats
        int* left;              // how many of the block's spans are not done
    };

    bool run() const {
        int rows_per_block = group < kBlockRows ? kBlockRows / group : 1;
        int most_rows = 0;
        std::size_t num_items = 0, num_blocks = 0, num_floats = 0;
        Item* items = nullptr;
        int* counters = nullptr;
        // The same walk twice: to count, and to write down.
        for (int pass = 0; pass < 2; ++pass) {
            if (pass) {
                items = static_cast<Item*>(scratch(1, num_items * sizeof(Item) + 64));
                counters = static_cast<int*>(scratch(2, num_blocks * sizeof(int) + 64));
                num_items = num_blocks = num_floats = 0;
            }
            for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
                std::int64_t begin = call.row_starts[sequence], end = call.row_starts[sequence + 1];
                const std::int64_t* extent = call.extents + 2 * sequence;
                const std::int64_t* blocks = call.blocks + extent[0];
                std::int64_t most = (extent[1] - extent[0]) * call.pool.tiles_per_block * kLanes;
                std::int64_t row_blocks = (end - begin + rows_per_block - 1) / rows_per_block * call.pool.num_kv_heads;
                bool split = row_blocks < 4 * threads();
                for (std::int64_t first = begin; first < end; first += rows_per_block) {
                    std::int64_t count = end - first < rows_per_block ? end - first : rows_per_block;
                    std::int64_t from = most, seen = 0;
                    for (std::int64_t row = first; row < first + count; ++row) {
                        std::int64_t limit = kernel.limit(row);
                        if (limit > seen) seen = limit;
                        if (limit && kernel.first_token(row) < from) from = kernel.first_token(row);
                    }
                    if (seen > most) return false;
                    int rows = static_cast<int>(count) * group;
                    if (rows > most_rows) most_rows = rows;
                    for (int head = 0; head < call.pool.num_kv_heads; ++head) {
                        RowBlock block{blocks, head, first, rows, from, seen};
                        std::int64_t spans = seen ? num_spans(seen) - first_span(block) : 0;
                        if (!split || spans <= 1) {
                            if (pass) items[num_items] = {block, -1, 0, nullptr};
                            ++num_items;
                            continue;
                        }
                        if (pass) counters[num_blocks] = static_cast<int>(spans);
                        for (std::int64_t span = 0; span < spans; ++span) {
                            if (pass) items[num_items] = {block, first_span(block) + span, num_floats, counters + num_blocks};
                            ++num_items;
                        }
                        ++num_blocks;
                        num_floats += spans * state_floats(rows, value_size);
                    }
                }
            }
        }
        float* states = static_cast<float*>(scratch(3, num_floats * sizeof(float) + 64));
        Runs runs(static_cast<std::int64_t>(num_items));
        on_all_threads([&](int thread) {
            Memory memory = kernel.memory(most_rows);
            runs.take(thread, [&](std::int64_t item) { work(items[item], states, memory); });
        });
        return true;
    }

    // Where the state of a span of the item's block waits for the others.
    State kept(float* states, const Item& item, std::int64_t span) const {
        int rows = item.block.num_rows;
        std::size_t place = item.state + (span - first_span(item.block)) * state_floats(rows, value_size);
        return state_at(states + place, rows, value_size);
    }

    void work(const Item& item, float* states, const Memory& memory) const {
        const RowBlock& block = item.block;
        int rows = block.num_rows;
        kernel.gather_queries(block, memory);
        if (item.span < 0) {
            reset_state(memory.span, rows, value_size);
            for (std::int64_t span = first_span(block); span < num_spans(block.seen); ++span) {
                kernel.attend(block, span, memory);
                merge_state(memory.span, memory.run, rows, value_size);
            }
            return finish(block, memory);
        }
        kernel.attend(block, item.span, memory);
        copy_state(kept(states, item, item.span), memory.run, rows, value_size);
        if (std::atomic_ref(*item.left).fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        reset_state(memory.span, rows, value_size);
        for (std::int64_t span = first_span(block); span < num_spans(block.seen); ++span) {
            merge_state(memory.span, kept(states, item, span), rows, value_size);
        }
        finish(block, memory);
    }
};

}  // namespace longhelix::ISA
