// The FFNs that rows take, as one call: rows are gathered by expert, multiplied, and summed by row again.
//
// A *pair* is a row and one of the experts that it takes and that are here. Pairs lie expert by expert, so that an
// expert's rows are one product. Threads take panels of all experts as they come free: an expert with one row is as
// much to read as one with ten. A row's experts are summed in the order in which it names them, so its bits depend on
// nothing but itself.
#pragma once

#include <algorithm>
#include <atomic>

#include "linear.hpp"

namespace longhelix::ISA {

template <typename E>
struct RunExperts {
    using Side = typename Multiply<E>::Side;

    static constexpr std::int64_t kRowsAtOnce = 512;  // bounds the working memory
    static constexpr int kPanelsAtOnce = 4;           // that a thread takes

    const Experts& call;
    const ExpertSet& set;
    int num_experts;      // in the set
    std::int64_t widest;  // columns of an expert
    std::int64_t x_width, inner_width;  // the most sides of a row of the first and of the second product

    // Of the rows that are worked on.
    std::int64_t first_row, num_rows;
    std::int64_t* starts;  // (experts + 1): the first pair of each
    std::int64_t* items;   // (experts + 1): what there is to take of those before
    std::int64_t* pairs;   // (rows, Y): which pair it is, or -1
    u32* x;                // units of each pair's row
    Side* x_sides;         // and what stands beside them
    u8* inner;             // between the two products, of the call's number
    u32* inner_units;
    Side* inner_sides;
    float* outputs;  // (pairs, hidden): what is summed

    explicit RunExperts(const Experts& experts)
        : call(experts),
          set(*experts.set),
          num_experts(static_cast<int>(set.down.size())),
          widest(0),
          x_width(0),
          inner_width(0) {
        for (const Weight& down : set.down) {
            widest = std::max(widest, down.depth);
            inner_width = std::max(inner_width, Multiply<E>::sides_of(down));
        }
        for (const Weight& gate_up : set.gate_up) x_width = std::max(x_width, Multiply<E>::sides_of(gate_up));
    }

    void run() {
        for (first_row = 0; first_row < call.num_rows; first_row += kRowsAtOnce) {
            num_rows = std::min(kRowsAtOnce, call.num_rows - first_row);
            gather();
            each_row(num_rows, [&](std::int64_t row) { prepare(row); });
            multiply([&](int expert) { return gate_up(expert); });
            each_row(num_rows, [&](std::int64_t row) { prepare_inner(row); });
            multiply([&](int expert) { return down(expert); });
            each_row(num_rows, [&](std::int64_t row) { sum(row); });
        }
    }

    // The place in the set of a row's expert, or -1.
    int place(std::int64_t row, int choice) const {
        std::int64_t number = call.experts[(first_row + row) * call.per_row + choice];
        bool known = number >= 0 && number < static_cast<std::int64_t>(set.index_of.size());
        return known ? set.index_of[number] : -1;
    }

    // Counts and numbers the pairs, and takes the memory for them.
    void gather() {
        std::int64_t choices = num_rows * call.per_row;
        starts = array<std::int64_t>(0, 2 * (num_experts + 1) + choices);
        items = starts + num_experts + 1, pairs = items + num_experts + 1;
        std::fill_n(starts, num_experts + 1, 0);
        for (std::int64_t row = 0; row < num_rows; ++row) {
            for (int choice = 0; choice < call.per_row; ++choice) {
                int expert = place(row, choice);
                if (expert < 0) continue;
                ++call.rows_of[expert];
                if (set.down[expert].depth) ++starts[expert + 1];
            }
        }
        std::int64_t* next = items;  // which is not needed yet
        for (int expert = 0; expert < num_experts; ++expert) {
            next[expert] = starts[expert];
            starts[expert + 1] += starts[expert];
        }
        for (std::int64_t row = 0; row < num_rows; ++row) {
            for (int choice = 0; choice < call.per_row; ++choice) {
                int expert = place(row, choice);
                bool here = expert >= 0 && set.down[expert].depth;
                pairs[row * call.per_row + choice] = here ? next[expert]++ : -1;
            }
        }
        // A tile of rows reads beyond an expert's last pair, and in the end beyond them all.
        std::int64_t count = starts[num_experts], rows = count ? count + Multiply<E>::kMostRows : 0;
        x = array<u32>(1, rows * x_units());
        x_sides = array<Side>(2, rows * x_width);
        inner = array<u8>(3, count * widest * number_bytes());
        inner_units = array<u32>(4, rows * widest_units());
        inner_sides = array<Side>(5, rows * inner_width);
        outputs = array<float>(6, count * call.hidden);
        clear(x, count, rows, x_units()), clear(x_sides, count, rows, x_width);
        clear(inner_units, count, rows, widest_units()), clear(inner_sides, count, rows, inner_width);
    }

    template <typename T>
    static T* array(int slot, std::int64_t count) {
        return static_cast<T*>(scratch(slot, static_cast<std::size_t>(count) * sizeof(T)));
    }

    template <typename T>
    static void clear(T* rows, std::int64_t first, std::int64_t stop, std::int64_t width) {
        std::fill_n(rows + first * width, (stop - first) * width, T{});
    }

    // Of a row of the first and of the second product.
    std::int64_t x_units() const { return call.hidden / E::kStep * Multiply<E>::planes_of(call.x.number); }
    std::int64_t widest_units() const { return widest / E::kStep * Multiply<E>::planes_of(call.number); }
    std::int64_t number_bytes() const { return call.number == Number::float32 ? 4 : 2; }

    // One of an expert's two products, and its rows as units.
    struct Product {
        Linear linear;
        u32* x;
        Side* sides;
    };

    Product gate_up(int expert) const {
        std::int64_t start = starts[expert], rows = starts[expert + 1] - start, columns = set.down[expert].depth;
        Number number = call.number;
        Linear linear{call.x, rows, call.norm, call.norm_eps, set.gate_up[expert], nullptr, call.activation,
                      {nullptr, number, 0}, inner_of(expert), number, columns, call.scales};
        return {linear, x + start * x_units(), x_sides + start * x_width};
    }

    Product down(int expert) const {
        std::int64_t start = starts[expert], rows = starts[expert + 1] - start, columns = set.down[expert].depth;
        Linear linear{{inner_of(expert), call.number, columns}, rows,  nullptr, 0.0f, set.down[expert], nullptr, {},
                      {nullptr, Number::float32, 0}, outputs + start * call.hidden, Number::float32, call.hidden};
        return {linear, inner_units + start * widest_units(), inner_sides + start * inner_width};
    }

    u8* inner_of(int expert) const { return inner + starts[expert] * widest * number_bytes(); }

    // A row as units, normalised, once for each of its pairs.
    void prepare(std::int64_t row) const {
        std::int64_t units = x_units(), sides = x_width, first = -1;
        for (int choice = 0; choice < call.per_row; ++choice) {
            std::int64_t pair = pairs[row * call.per_row + choice];
            if (pair < 0) continue;
            if (first < 0) {
                first = pair;
                Product product = gate_up(place(row, choice));
                Multiply<E>(product.linear).prepare(first_row + row, x + pair * units, x_sides + pair * sides);
            } else {
                std::copy_n(x + first * units, units, x + pair * units);
                std::copy_n(x_sides + first * sides, sides, x_sides + pair * sides);
            }
        }
    }

    void prepare_inner(std::int64_t row) const {
        for (int choice = 0; choice < call.per_row; ++choice) {
            std::int64_t pair = pairs[row * call.per_row + choice];
            if (pair < 0) continue;
            int expert = place(row, choice);
            Product product = down(expert);
            Multiply<E> multiply(product.linear);
            std::int64_t index = pair - starts[expert];
            multiply.prepare(index, product.x + index * multiply.row_units(), product.sides + index * multiply.num_sides);
        }
    }

    // The products of all experts that have rows, a few panels at a time.
    template <typename ProductOf>
    void multiply(ProductOf product_of) const {
        items[0] = 0;
        for (int expert = 0; expert < num_experts; ++expert) {
            bool has_rows = starts[expert + 1] > starts[expert];
            int panels = has_rows ? Multiply<E>(product_of(expert).linear).num_panels : 0;
            items[expert + 1] = items[expert] + (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
        }
        if (items[num_experts] == 0) return;
        std::atomic<std::int64_t> next{0};
        on_all_threads([&](int) {
            int expert = 0;
            for (std::int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items[num_experts];) {
                while (item >= items[expert + 1]) ++expert;
                Product product = product_of(expert);
                Multiply<E> multiply(product.linear);
                int panel = static_cast<int>(item - items[expert]) * kPanelsAtOnce;
                multiply.all_rows(product.x, product.sides, panel, std::min(panel + kPanelsAtOnce, multiply.num_panels));
            }
        });
    }

    void sum(std::int64_t row) const {
        const std::int64_t* mine = pairs + row * call.per_row;
        row += first_row;
        const float* weights = call.weights + row * call.per_row;
        Number number = call.number;
        for (std::int64_t c = 0; c < call.hidden; c += kLanes) {
            f32x16 total{};
            for (int choice = 0; choice < call.per_row; ++choice) {
                if (mine[choice] < 0) continue;
                f32x16 output = load<f32x16>(outputs + mine[choice] * call.hidden + c);
                total = multiply_add(output, splat(weights[choice]), total);
            }
            if (call.residual.data) {
                // The sum is rounded before it is added, as separate operations would.
                round_to(number, total);
                total += load_number(call.residual.data, row * call.residual.stride + c, number);
            }
            store_number(call.out, row * call.hidden + c, number, total);
        }
    }
};

}  // namespace longhelix::ISA
