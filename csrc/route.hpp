// Which experts rows take: scores, groups, the best of them, weights. Of equal scores the first is better.
#pragma once

#include <algorithm>

#include "linear.hpp"

namespace longhelix::ISA {

struct RouteRows {
    const Route& call;
    int padded;  // scores of a row

    explicit RouteRows(const Route& route) : call(route), padded((route.num_experts + kLanes - 1) / kLanes * kLanes) {}

    void run() const {
        each_row(call.num_rows, [&](std::int64_t row) {
            float* scores = static_cast<float*>(scratch(0, (2 * padded + call.num_groups) * sizeof(float)));
            float *choice = scores + padded, *of_group = choice + padded;
            const float* logits = call.logits + row * (call.num_experts + call.shared_gate);
            std::int64_t place = row * (call.per_token + call.shared);
            score(logits, scores);
            for (int e = 0; e < call.num_experts; ++e) choice[e] = scores[e] + (call.bias ? call.bias[e] : 0.0f);
            if (call.groups_per_token < call.num_groups) limit_groups(choice, of_group);
            take_best(choice, call.experts + place);
            weigh(scores, call.experts + place, call.weights + place);
            if (!call.shared) return;
            call.experts[place + call.per_token] = call.num_experts;
            float gate = call.shared_gate ? first(sigmoid(splat(logits[call.num_experts]))) : 1.0f;
            call.weights[place + call.per_token] = gate;
        });
    }

    void score(const float* logits, float* scores) const {
        std::copy_n(logits, call.num_experts, scores);
        std::fill(scores + call.num_experts, scores + padded, kMinusInfinity);
        if (call.sigmoid) {
            for (int e = 0; e < padded; e += kLanes) store(scores + e, sigmoid(load<f32x16>(scores + e)));
            return;
        }
        f32x16 most = splat(kMinusInfinity), sum{};
        for (int e = 0; e < padded; e += kLanes) most = larger(most, load<f32x16>(scores + e));
        f32x16 base = splat(largest(most));
        for (int e = 0; e < padded; e += kLanes) {
            f32x16 weight = exp2((load<f32x16>(scores + e) - base) * kLog2e);
            sum += weight;
            store(scores + e, weight);
        }
        f32x16 whole = splat(total(sum));
        for (int e = 0; e < padded; e += kLanes) store(scores + e, load<f32x16>(scores + e) / whole);
    }

    // Only experts of the best groups can be chosen.
    void limit_groups(float* choice, float* of_group) const {
        int size = call.num_experts / call.num_groups;
        for (int group = 0; group < call.num_groups; ++group) {
            float first = kMinusInfinity, second = kMinusInfinity;
            for (const float* value = choice + group * size; value < choice + (group + 1) * size; ++value) {
                if (*value > first) {
                    second = first, first = *value;
                } else if (*value > second) {
                    second = *value;
                }
            }
            of_group[group] = call.sigmoid && size > 1 ? first + second : first;
        }
        for (int group = 0; group < call.num_groups; ++group) {
            int better = 0;
            for (int other = 0; other < call.num_groups; ++other) {
                better += of_group[other] > of_group[group] || (other < group && of_group[other] == of_group[group]);
            }
            if (better >= call.groups_per_token) std::fill_n(choice + group * size, size, kMinusInfinity);
        }
    }

    void take_best(const float* choice, std::int64_t* experts) const {
        int taken = 0;
        for (int e = 0; e < call.num_experts; ++e) {
            int at = taken;
            while (at > 0 && choice[e] > choice[experts[at - 1]]) --at;
            if (at == call.per_token) continue;
            if (taken < call.per_token) ++taken;
            std::copy_backward(experts + at, experts + taken - 1, experts + taken);
            experts[at] = e;
        }
    }

    void weigh(const float* scores, const std::int64_t* experts, float* weights) const {
        float sum = 0.0f;
        for (int y = 0; y < call.per_token; ++y) sum += weights[y] = scores[experts[y]];
        for (int y = 0; y < call.per_token; ++y) weights[y] = weights[y] / (call.normalised ? sum : 1.0f) * call.scale;
    }
};

}  // namespace longhelix::ISA
