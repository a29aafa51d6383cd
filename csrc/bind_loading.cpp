// What reads weights, for Python.
#include "bindings.hpp"
#include "kernels.hpp"

namespace longhelix {

void bind_loading(nb::module_& module) {
    auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    nb::enum_<BlockKind>(module, "BlockKind")
        .value("q4_0", BlockKind::q4_0)
        .value("q4_1", BlockKind::q4_1)
        .value("q8_0", BlockKind::q8_0);
    module.def(
        "dequantise",
        [](Address from, std::int64_t stride_bytes, std::int64_t num_rows, std::int64_t blocks_per_row,
           BlockKind kind, Address to) {
            kernels().dequantise(
                {at<const void>(from), stride_bytes, num_rows, blocks_per_row, kind, at<float>(to)});
        },
        unlocked);
    module.def(
        "pack",
        [](Address rows, Number number, std::int64_t stride, std::int64_t num_rows, std::int64_t first, Address panels,
           Number packed_number, std::int64_t depth) {
            check_weight_number(packed_number);
            kernels().pack({rows_at(rows, number, stride), num_rows, first, at<std::uint8_t>(panels), packed_number,
                            depth});
        },
        unlocked);
}

}  // namespace longhelix
