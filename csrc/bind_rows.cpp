// What prepares the rows of a step, for Python.
#include <nanobind/stl/pair.h>

#include "advance.hpp"
#include "bindings.hpp"
#include "kernels.hpp"

namespace longhelix {

void bind_rows(nb::module_& module) {
    module.def("advance", [](Address numbers, std::int64_t columns, Address lines, std::int64_t num_rows, Address bounds,
                             Address blocks, std::int64_t num_groups, std::int64_t group_stride, Address places,
                             std::int64_t block_tokens, std::int64_t kvp_rank, Address limits_of_views,
                             std::int64_t num_views, Address rows) {
        return Advance{at<std::int64_t>(numbers),
                       columns,
                       at<const std::int64_t>(lines),
                       num_rows,
                       at<const std::int64_t>(bounds),
                       at<const std::int64_t>(blocks),
                       num_groups,
                       group_stride,
                       at<const std::int64_t>(places),
                       block_tokens,
                       kvp_rank,
                       at<const std::int64_t>(limits_of_views),
                       num_views,
                       at<std::int64_t>(rows)}
            .run();
    });
    module.def(
        "angles",
        [](Address positions, std::int64_t num_rows, Address frequencies, std::int64_t stride, std::int64_t num_pairs,
           double factor, Address cos, Address sin) {
            kernels().angles({at<const std::int64_t>(positions), num_rows, at<const double>(frequencies), stride,
                              num_pairs, factor, at<float>(cos), at<float>(sin)});
        },
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace longhelix
