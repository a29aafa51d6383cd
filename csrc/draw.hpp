// A draw from whole rows of logits without sorting them: tokens are counted and weighed in bins of like logits, and only
// the bins in which a filter ends or the draw falls are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.hpp"

namespace longhelix::ISA {

// The tokens of one row, likeliest first, of equal ones the lowest id.
class Likeliest {
  public:
    // So many of the likeliest tokens, and their weight; the likeliest has a weight of 1.
    struct Prefix {
        std::int64_t count;
        double weight;
    };

    // Whether the row is numbers of which the largest is finite, and they are drawn from.
    bool read(const float* logits, std::int64_t size, float temperature) {
        logits_ = logits;
        size_ = size;
        temperature_ = temperature;
        f32x16 high = splat(kMinusInfinity), low = high;  // the second of what is negated
        auto is_nan = high != high;
        alignas(64) float rest[kLanes];
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const float* from = logits + i;
            if (size - i < kLanes) {
                std::fill(std::copy(from, logits + size, rest), rest + kLanes, *from);
                from = rest;
            }
            f32x16 x = load<f32x16>(from);
            high = larger(x, high);
            low = larger(-x, low);
            is_nan = is_nan | (x != x);
        }
        largest_ = largest(high);
        float least = -largest(low);
        if (holds_anywhere(is_nan) || !std::isfinite(largest_) || temperature == 0.0f) return false;
        // From here on a token has no weight that counts.
        constexpr float kFar = -80.0f;
        bins_per_unit_ = kBins / -std::min(std::max((least - largest_) / temperature, kFar), -1e-6f);
        count();
        return true;
    }

    Prefix all() const { return before_[kBins]; }

    Prefix first(std::int64_t count) {
        return walk(bin_by([&](Prefix before) { return before.count < count; }),
                    [&](Prefix so_far, double) { return so_far.count < count; });
    }

    // The fewest that weigh so much.
    Prefix reaching(double weight) {
        return walk(bin_by([&](Prefix before) { return before.weight < weight; }),
                    [&](Prefix so_far, double) { return so_far.weight < weight; });
    }

    // Those of which each weighs so much.
    Prefix each_of(double weight) {
        return walk(bin(static_cast<float>(std::log(weight))), [&](Prefix, double next) { return next >= weight; });
    }

    // Whose weight, added to that of those before it, is the first to exceed this.
    std::int64_t beyond(double weight) {
        Prefix before = walk(bin_by([&](Prefix some) { return some.weight <= weight; }),
                             [&](Prefix so_far, double next) { return so_far.weight + next <= weight; });
        return before.count;
    }

    // The id of the token at this place.
    std::int64_t id(std::int64_t place) {
        int found = bin_by([&](Prefix before) { return before.count <= place; });
        sort(found);
        return static_cast<std::uint32_t>(keys_[place - before_[found].count]);
    }

  private:
    static constexpr int kBins = 1024, kBlock = 256;

    float scaled(float logit) const { return (logit - largest_) / temperature_; }

    int bin(float scaled) const { return static_cast<int>(std::min(-scaled * bins_per_unit_, kBins - 1.0f)); }

    // e^x for x <= 0, to 1e-14 of it; 2^-1000 where it is less. Without branches, so that compilers make vectors of it.
    static double weight(float x) {
        double power = std::max(x * 1.4426950408889634, -1000.0);
        double shifted = power + 0x1.8p52;  // rounds to an integer, whose low bits are added to the exponent
        double f = (power - (shifted - 0x1.8p52)) * 0.6931471805599453;
        double sum = 1.0 / 39916800;
        for (double factor : {1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24,
                              1.0 / 6, 0.5, 1.0, 1.0}) {
            sum = sum * f + factor;
        }
        std::uint64_t bits, exponent;
        std::memcpy(&bits, &sum, sizeof bits);
        std::memcpy(&exponent, &shifted, sizeof exponent);
        bits += exponent << 52;
        std::memcpy(&sum, &bits, sizeof sum);
        return sum;
    }

    void count() {
        std::int64_t counts[kBins]{};
        double weights[kBins]{}, block_weights[kBlock];
        bins_.resize(size_ + kBlock);
        for (std::int64_t begin = 0; begin < size_; begin += kBlock) {
            int size = static_cast<int>(std::min<std::int64_t>(kBlock, size_ - begin));
            std::uint16_t* bins = bins_.data() + begin;
            for (int i = 0; i < size; ++i) {
                float x = scaled(logits_[begin + i]);
                bins[i] = static_cast<std::uint16_t>(bin(x));
                block_weights[i] = weight(x);
            }
            for (int i = 0; i < size; ++i) {
                ++counts[bins[i]];
                weights[bins[i]] += block_weights[i];
            }
        }
        before_[0] = {0, 0.0};
        for (int i = 0; i < kBins; ++i) before_[i + 1] = {before_[i].count + counts[i], before_[i].weight + weights[i]};
        sorted_ = -1;
    }

    // The last bin before whose end `is_short` holds no more; it is monotone.
    template <typename IsShort>
    int bin_by(IsShort is_short) const {
        const Prefix* end = std::partition_point(before_ + 1, before_ + kBins, is_short);
        return static_cast<int>(end - before_ - 1);
    }

    void sort(int bin_index) {
        if (bin_index == sorted_) return;
        keys_.clear();
        constexpr int kStretch = 64;
        for (std::int64_t begin = 0; begin < size_; begin += kStretch) {
            const std::uint16_t* bins = bins_.data() + begin;
            int found = 0;
            for (int i = 0; i < kStretch; ++i) found |= bins[i] == bin_index;
            if (!found) continue;
            std::int64_t end = std::min(begin + kStretch, size_);
            for (std::int64_t i = begin; i < end; ++i) {
                if (bins_[i] == bin_index) keys_.push_back(key(i));
            }
        }
        std::sort(keys_.begin(), keys_.end());
        sorted_ = bin_index;
    }

    // Keys grow as logits fall, and with ids.
    std::uint64_t key(std::int64_t id) const {
        float x = scaled(logits_[id]) + 0.0f;
        u32 bits;
        std::memcpy(&bits, &x, sizeof bits);
        return static_cast<std::uint64_t>(bits) << 32 | static_cast<std::uint64_t>(id);
    }

    // From the begin of a bin on, while `goes_on`: it is shown what there is so far, and what the next one weighs.
    template <typename GoesOn>
    Prefix walk(int bin_index, GoesOn goes_on) {
        sort(bin_index);
        Prefix found = before_[bin_index];
        for (std::uint64_t key : keys_) {
            u32 bits = static_cast<u32>(key >> 32);
            float x;
            std::memcpy(&x, &bits, sizeof x);
            double next = weight(x);
            if (!goes_on(found, next)) break;
            found = {found.count + 1, found.weight + next};
        }
        return found;
    }

    const float* logits_;
    std::int64_t size_;
    float temperature_, largest_, bins_per_unit_;
    Prefix before_[kBins + 1];  // what comes before each bin
    std::vector<std::uint16_t> bins_;  // of each token
    int sorted_;
    std::vector<std::uint64_t> keys_;  // of the tokens of bin `sorted_`: logit and id, in order
};

struct TakeDraws {
    const Draws& call;

    // Sums of doubles in another order, and other exponentials, are nearer than that.
    static constexpr double kMargin = 1e-10;

    explicit TakeDraws(const Draws& draws) : call(draws) {}

    void run() const {
        each_row(call.num_rows, [&](std::int64_t row) {
            thread_local Likeliest tokens;
            call.tokens[row] = draw(row, tokens);
        });
    }

  private:
    // Not inlined, because `tokens` would be looked up among the thread's at every step.
    [[gnu::noinline]] std::int64_t draw(std::int64_t row, Likeliest& tokens) const {
        std::int64_t size = call.num_logits;
        if (!tokens.read(call.logits + row * call.stride, size, call.temperatures[row])) return -1;
        Likeliest::Prefix kept = call.top_k[row] < size ? tokens.first(call.top_k[row]) : tokens.all();
        // As few, and as many, as may pass the filters that follow.
        Likeliest::Prefix few = kept, many = kept;
        if (call.top_p[row] < 1.0) {
            few = fewer(few, tokens.reaching(call.top_p[row] * (1.0 - kMargin) * kept.weight));
            many = fewer(many, tokens.reaching(call.top_p[row] * (1.0 + kMargin) * kept.weight));
        }
        if (call.min_p[row] > 0.0) {
            few = fewer(few, tokens.each_of(call.min_p[row] * (1.0 + kMargin)));
            many = fewer(many, tokens.each_of(call.min_p[row] * (1.0 - kMargin)));
        }
        if (few.count == 0) few = tokens.first(1);
        if (many.count == 0) many = tokens.first(1);
        double low = call.numbers[row] * few.weight * (1.0 - kMargin);
        double high = call.numbers[row] * many.weight * (1.0 + kMargin);
        std::int64_t place = std::min(tokens.beyond(low), few.count - 1);
        return place == std::min(tokens.beyond(high), many.count - 1) ? tokens.id(place) : -1;
    }

    static Likeliest::Prefix fewer(Likeliest::Prefix a, Likeliest::Prefix b) { return a.count < b.count ? a : b; }
};

}  // namespace longhelix::ISA
