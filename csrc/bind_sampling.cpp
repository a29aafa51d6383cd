// What chooses tokens, for Python.
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"

namespace longhelix {

namespace {

// Of each of S rows the token whose logit is the largest in all parts of the vocabulary, of equal ones the first; -1
// where that logit is not finite. A part's memory: the ids of its largest logits, from its first one, S doubles, and
// these logits.
void take_largest(const std::vector<Address>& parts, const std::vector<std::int64_t>& first_ids, std::int64_t num_rows,
                  std::int64_t* tokens) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
        float largest = -std::numeric_limits<float>::infinity();
        std::int64_t token = -1;
        for (std::size_t part = 0; part < parts.size(); ++part) {
            const auto* ids = at<const std::int64_t>(parts[part]);
            float logit = reinterpret_cast<const float*>(ids + 2 * num_rows)[row];
            if (logit <= largest) continue;
            largest = logit;
            token = ids[row] + first_ids[part];
            if (std::isnan(logit)) break;
        }
        tokens[row] = std::isfinite(largest) ? token : -1;
    }
}

}  // namespace

void bind_sampling(nb::module_& module) {
    module.def("take_largest", [](const std::vector<Address>& parts, const std::vector<std::int64_t>& first_ids,
                                  std::int64_t num_rows, Address tokens) {
        take_largest(parts, first_ids, num_rows, at<std::int64_t>(tokens));
    });
    auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    module.def(
        "penalise",
        [](Address logits, std::int64_t stride, std::int64_t num_rows, std::int64_t num_logits, Address seen,
           Address penalties) {
            Penalty call{at<float>(logits),           stride, num_rows, num_logits,
                                    at<const std::int64_t>(seen), at<const float>(penalties)};
            perform(Kind::other, [call] { kernels().penalise(call); });
        },
        unlocked);
    module.def(
        "candidates",
        [](Address logits, std::int64_t stride, std::int64_t num_rows, std::int64_t num_logits, Address seen,
           Address penalties, Address inverse_temperatures, int count, Address values, Address ids, Address sums) {
            Candidates call{at<const float>(logits),
                                       stride,
                                       num_rows,
                                       num_logits,
                                       at<const std::int64_t>(seen),
                                       at<const float>(penalties),
                                       at<const float>(inverse_temperatures),
                                       count,
                                       at<float>(values),
                                       at<std::int64_t>(ids),
                                       at<double>(sums)};
            perform(Kind::other, [call] { kernels().candidates(call); });
        },
        unlocked);
    module.def(
        "draw",
        [](Address logits, std::int64_t stride, std::int64_t num_rows, std::int64_t num_logits, Address temperatures,
           Address top_k, Address top_p, Address min_p, Address numbers, Address tokens) {
            Draws call{at<const float>(logits),
                                  stride,
                                  num_rows,
                                  num_logits,
                                  at<const float>(temperatures),
                                  at<const std::int64_t>(top_k),
                                  at<const double>(top_p),
                                  at<const double>(min_p),
                                  at<const double>(numbers),
                                  at<std::int64_t>(tokens)};
            perform(Kind::other, [call] { kernels().draw(call); });
        },
        unlocked);
}

}  // namespace longhelix
