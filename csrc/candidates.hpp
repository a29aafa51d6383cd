// What the next tokens of rows of logits are chosen by: the largest logits, in order, and the sum of all weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "linear.hpp"

namespace longhelix::ISA {

// The `count` largest of what it is shown, of equal ones the first.
class Largest {
  public:
    struct Item {
        float value;
        std::int32_t id;
        bool operator<(const Item& other) const {
            return value > other.value || (value == other.value && id < other.id);
        }
    };

    // What is no larger than `least` is not among them.
    Largest(Item* room, int count, float least) : items_(room), count_(count), least_(least) {}

    float least() const { return least_; }

    // Sixteen at `values`, of which the first has this id.
    void show(const float* values, std::int32_t id) {
        for (u32 above = lanes_above(load<f32x16>(values), least_); above != 0; above &= above - 1) {
            int lane = __builtin_ctz(above);
            if (!(values[lane] > least_)) continue;  // which may have grown
            items_[size_++] = {values[lane], id + lane};
            if (size_ == 2 * count_) shrink();
        }
    }

    // How many there are, in order.
    int sort() {
        if (size_ > count_) shrink();
        std::sort(items_, items_ + size_);
        return size_;
    }

  private:
    void shrink() {
        std::nth_element(items_, items_ + count_ - 1, items_ + size_);
        size_ = count_;
        least_ = items_[count_ - 1].value;
    }

    Item* items_;  // room for twice as many
    int count_, size_ = 0;
    float least_;
};

constexpr int kBlock = 512;             // logits at a time: they stay in the nearest cache
constexpr int kSeenBytes = kBlock / 8;  // a bit for each

INLINE bool any(const u8* seen) {
    std::uint64_t found = 0, eight;
    for (int i = 0; i < kSeenBytes; i += 8) {
        std::memcpy(&eight, seen + i, sizeof eight);
        found |= eight;
    }
    return found != 0;
}

// A block that ends a row, with what is never taken behind it.
INLINE const float* filled_up(const float* block, int size, float* to) {
    std::copy(block, block + size, to);
    std::fill(to + size, to + kBlock, kMinusInfinity);
    return to;
}

INLINE const float* penalised(const float* block, const u8* seen, float penalty, float* to) {
    f32x16 divisor = splat(penalty);
    for (int i = 0; i < kBlock; i += kLanes) {
        f32x16 x = load<f32x16>(block + i);
        f32x16 less = choose(x > 0.0f, x / divisor, x * divisor);
        store(to + i, choose(lanes_of(load<std::uint16_t>(seen + i / 8)), less, x));
    }
    return to;
}

struct PenaliseRows {
    const Penalty& call;

    explicit PenaliseRows(const Penalty& penalty) : call(penalty) {}

    void run() const {
        each_row(call.num_rows, [&](std::int64_t row) {
            const auto* seen = reinterpret_cast<const u8*>(call.seen[row]);
            for (std::int64_t begin = 0; seen && begin < call.num_logits; begin += kBlock) {
                if (any(seen + begin / 8)) penalise(row, begin, seen + begin / 8);
            }
        });
    }

  private:
    void penalise(std::int64_t row, std::int64_t begin, const u8* seen) const {
        float* block = call.logits + row * call.stride + begin;
        auto size = static_cast<int>(std::min<std::int64_t>(kBlock, call.num_logits - begin));
        alignas(64) float copied[kBlock];
        penalised(filled_up(block, size, copied), seen, call.penalties[row], copied);
        std::copy(copied, copied + size, block);
    }
};

struct TakeCandidates {
    const Candidates& call;

    static constexpr float kNegligible = -58.0f;   // log2 of a weight: of 2^20 such, float64 does not see the sum

    explicit TakeCandidates(const Candidates& candidates) : call(candidates) {}

    void run() const {
        each_row(call.num_rows, [&](std::int64_t row) { take(row); });
    }

    void take(std::int64_t row) const {
        std::int64_t num_blocks = (call.num_logits + kBlock - 1) / kBlock;
        auto* tops = static_cast<float*>(scratch(0, 2 * num_blocks * sizeof(float)));
        auto* room = static_cast<Largest::Item*>(scratch(1, 2 * call.count * sizeof(Largest::Item)));
        float scale = call.inverse_temperatures[row] * kLog2e, most = kMinusInfinity;
        double sum = 0.0;
        auto is_nan = f32x16{} != f32x16{};
        alignas(64) float copied[kBlock];
        for (std::int64_t i = 0; i < num_blocks; ++i) {
            const float* logits = block(row, i, copied);
            f32x16 high = splat(kMinusInfinity);
            for (int j = 0; j < kBlock; j += kLanes) {
                f32x16 x = load<f32x16>(logits + j);
                high = larger(x, high);
                is_nan = is_nan | (x != x);
            }
            float top = tops[i] = largest(high);
            if (scale == 0.0f || top == kMinusInfinity) continue;
            if (top > most) {
                sum *= std::exp2(static_cast<double>((most - top) * scale));
                most = top;
            }
            if ((top - most) * scale > kNegligible) sum += weight(logits, most, scale);
        }
        // Every one of the `count` blocks with the largest tops has a logit that is no less than the least of these.
        Largest found(room, call.count, below_largest(tops, num_blocks));
        for (std::int64_t i = 0; i < num_blocks; ++i) {
            if (!(tops[i] > found.least())) continue;
            const float* logits = block(row, i, copied);
            for (int j = 0; j < kBlock; j += kLanes) found.show(logits + j, i * kBlock + j);
        }
        int size = found.sort();
        for (int i = 0; i < call.count; ++i) {
            call.values[row * call.count + i] = i < size ? room[i].value : kMinusInfinity;
            call.ids[row * call.count + i] = i < size ? room[i].id : -1;
        }
        if (holds_anywhere(is_nan)) call.values[row * call.count] = __builtin_nanf("");
        call.sums[row] = sum;
    }

  private:
    const float* logits_of(std::int64_t row) const { return call.logits + row * call.stride; }

    // Its logits, after the penalty and filled up with what is never taken: `copied`, where that makes a difference.
    const float* block(std::int64_t row, std::int64_t index, float* copied) const {
        const float* logits = logits_of(row) + index * kBlock;
        const u8* seen = reinterpret_cast<const u8*>(call.seen[row]);
        auto size = static_cast<int>(std::min<std::int64_t>(kBlock, call.num_logits - index * kBlock));
        if (size < kBlock) logits = filled_up(logits, size, copied);
        if (!seen || !any(seen + index * kSeenBytes)) return logits;
        return penalised(logits, seen + index * kSeenBytes, call.penalties[row], copied);
    }

    // The largest number that is less than `count` of the values; there is room for a copy of these behind them.
    float below_largest(float* values, std::int64_t size) const {
        if (size < call.count) return kMinusInfinity;
        float* copies = std::copy(values, values + size, values + size) - size;
        std::nth_element(copies, copies + call.count - 1, copies + size, std::greater());
        return std::nextafter(copies[call.count - 1], kMinusInfinity);
    }

    // The sum of 2^(scale * (x - most)), for x of at most `most`.
    static double weight(const float* block, float most, float scale) {
        f32x16 weights{};
        for (int i = 0; i < kBlock; i += kLanes) {
            f32x16 x = (load<f32x16>(block + i) - most) * scale;
            weights += exp2_summand(larger(splat(-126.0f), x));
        }
        return total(weights);
    }
};

}  // namespace longhelix::ISA
