// What reads weights, for Python.
#include "bindings.hpp"
#include "kernels.hpp"

namespace longhelix {

void bind_loading(nb::module_& module) {
    auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    nb::enum_<BlockKind>(module, "BlockKind")
        .value("q4_0", BlockKind::q4_0)
        .value("q4_1", BlockKind::q4_1)
        .value("q8_0", BlockKind::q8_0)
        .value("q5_0", BlockKind::q5_0)
        .value("q5_1", BlockKind::q5_1)
        .value("q2_k", BlockKind::q2_k)
        .value("q3_k", BlockKind::q3_k)
        .value("q4_k", BlockKind::q4_k)
        .value("q5_k", BlockKind::q5_k)
        .value("q6_k", BlockKind::q6_k)
        .value("iq4_nl", BlockKind::iq4_nl)
        .value("iq4_xs", BlockKind::iq4_xs)
        .value("mxfp4", BlockKind::mxfp4);
    module.def(
        "dequantise",
        [](Address from, std::int64_t stride_bytes, std::int64_t num_rows, std::int64_t blocks_per_row,
           BlockKind kind, Address to) {
            if (kind > BlockKind::q8_0) throw std::invalid_argument("blocks of this kind are not made into numbers");
            kernels().dequantise(
                {at<const void>(from), stride_bytes, num_rows, blocks_per_row, kind, at<float>(to)});
        },
        unlocked);
    module.def(
        "split_blocks",
        [](Address blocks, std::int64_t stride, std::int64_t num_rows, std::int64_t blocks_per_row, BlockKind kind,
           Address codes, std::int64_t code_stride, Address scales, Address offsets, std::int64_t scale_stride,
           Address superblock_scales, Address superblock_offsets, std::int64_t superblock_stride) {
            kernels().split_blocks({at<const std::uint8_t>(blocks), stride, num_rows, blocks_per_row, kind,
                                    at<std::uint8_t>(codes), code_stride, at<std::uint8_t>(scales),
                                    at<std::uint8_t>(offsets), scale_stride, at<std::uint8_t>(superblock_scales),
                                    at<std::uint8_t>(superblock_offsets), superblock_stride});
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
    module.def(
        "pack_codes",
        [](Address codes, std::int64_t code_stride, Address scales, std::int64_t scale_stride, Address zeros,
           std::int64_t zero_stride, Address superblock_scales, std::int64_t superblock_scale_stride,
           Address superblock_offsets, std::int64_t superblock_offset_stride, Address output_scales,
           std::int64_t num_rows, std::int64_t first, const Weight& weight) {
            if (!is_code(weight.number)) throw std::invalid_argument("a weight does not hold codes of this type");
            kernels().pack_codes({at<const std::uint8_t>(codes), code_stride, at<const std::uint8_t>(scales), scale_stride,
                                  at<const std::uint8_t>(zeros), zero_stride, at<const std::uint8_t>(superblock_scales),
                                  superblock_scale_stride, at<const std::uint8_t>(superblock_offsets),
                                  superblock_offset_stride, at<const float>(output_scales), num_rows, first, weight,
                                  const_cast<std::uint8_t*>(weight.data)});
        },
        unlocked);
}

}  // namespace longhelix
