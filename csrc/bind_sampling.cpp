// What chooses tokens, for Python.
#include "bindings.hpp"
#include "kernels.hpp"

namespace longhelix {

void bind_sampling(nb::module_& module) {
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
