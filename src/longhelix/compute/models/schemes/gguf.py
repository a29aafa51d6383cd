"""Weights of GGUF files: blocks with codes, scales and offsets side by side."""

from __future__ import annotations

from collections.abc import Mapping

from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint, StoredRows
from longhelix.compute.models.schemes.part import Part
from longhelix.compute.models.schemes.scheme import Scheme, TensorForm
from longhelix.spec.gguf_quantisation import GGUF_FORMATS
from longhelix.spec.quantisation import Storage

_KINDS = {format: kind for kind, format in GGUF_FORMATS.items()}


class Gguf(Scheme):
    """Blocks of one kind, along the inputs."""

    def tensors(self, module: str, shape: tuple[int, int], storage: Storage) -> Mapping[str, TensorForm]:
        kind = _KINDS.get(storage.format, storage.format)  # numbers without blocks have the names of their dtypes
        return {f"{module}.weight": TensorForm((kind,), (shape,))}

    def _fill(self, part: Part) -> None:
        from longhelix.compute.kernels.packed_rows import PackedRows
        from longhelix.compute.models.gguf_packing import pack

        assert isinstance(part.checkpoint, GgufCheckpoint)
        stored, packed = part.checkpoint.stored[part.prefix + "weight"], part.packed
        assert isinstance(stored, StoredRows)
        block = stored.block_size
        blocks = part.spanned(part.inputs, block)
        depth = (blocks.stop - blocks.start) * block
        whole = packed if packed.depth == depth else PackedRows.empty(packed.dtype, packed.outputs, depth)
        pack(stored.read_blocks(part.rows, blocks), _KINDS[packed.dtype], whole)
        if whole is not packed:
            first = part.inputs.start - blocks.start * block
            packed.copy_(whole.cut(slice(first, first + packed.depth)))
        # Scales and offsets inside superblocks are integers.
        sides = (packed.scales, packed.offsets, packed.superblock_scales, packed.superblock_offsets)
        for numbers in sides:
            if numbers is not None and numbers.is_floating_point():
                part.check_scales("weight", numbers, zero=True, negative=True)
