"""Blocks of GGUF files as packed rows, with the native kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longhelix.compute.kernels import native

if TYPE_CHECKING:
    from torch import Tensor

    from longhelix.compute.kernels.packed_rows import PackedRows


def pack(blocks_OBX: Tensor, kind: str, rows: PackedRows) -> None:
    """Fill packed rows with the numbers of whole blocks.

    Args:
        blocks_OBX: Bytes of the blocks of each row (uint8), on the CPU. The blocks of a row lie side by side.
        kind: Kind of the blocks, such as "Q4_K".
        rows: Packed rows in the format of this kind, with as many inputs as the blocks have.
    """
    outputs, blocks, _ = blocks_OBX.shape
    assert blocks_OBX[0].is_contiguous()
    native.module.split_blocks(
        blocks_OBX.data_ptr(),
        blocks_OBX.stride(0),
        outputs,
        blocks,
        getattr(native.module.BlockKind, kind.lower()),
        rows.code_rows.data_ptr(),
        rows.code_rows.stride(0),
        rows.scales.data_ptr(),
        _address(rows.offsets),
        rows.scales.stride(0) * rows.scales.itemsize,
        _address(rows.superblock_scales),
        _address(rows.superblock_offsets),
        0 if rows.superblock_scales is None else rows.superblock_scales.stride(0) * rows.superblock_scales.itemsize,
    )


def _address(section: Tensor | None) -> int:
    return 0 if section is None else section.data_ptr()
