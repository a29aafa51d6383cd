"""Random weights in packed formats."""

import torch

from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.spec import FORMATS

_LARGEST = 30  # of e4m3, beside which smaller numbers still count
# Magnitude of the numbers of random codes.
_TYPICAL = {"e4m3": 5, "int8": 74, "uint6": 18, "uint4": 5, "nl4": 70, "e2m1": 3}


def random_rows(
    dtype: str, outputs: int, depth: int, lead: int = 0, seed: int = 0, device: torch.device | None = None
) -> PackedRows:
    """Weights of about 1 / sqrt(depth), with another scale in every block. Bytes that hold nothing are random, too."""
    generator = torch.Generator().manual_seed(seed)
    lead = FORMATS[dtype].weight_scales.lead(lead)
    rows = PackedRows.empty(dtype, outputs, depth, lead, torch.device("cpu"))
    rows.buffer.random_(0, 256, generator=generator)
    if rows.codes.element == "e4m3":
        numbers = torch.randn(rows.code_rows.shape, generator=generator) * _TYPICAL["e4m3"]
        rows.code_rows.copy_(numbers.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8))
    offset = 1 / max(depth, 1) ** 0.5
    scale = offset / _TYPICAL[rows.codes.element]
    if rows.superblock_scales is None:
        of_blocks = 1.0 if rows.output_scales is not None else scale
        filled = (rows.scales, of_blocks), (rows.offsets, offset), (rows.output_scales, scale)
    else:  # scales and offsets of blocks are random bytes
        filled = (
            (rows.superblock_scales, scale / _TYPICAL["int8"]),
            (rows.superblock_offsets, offset / _TYPICAL["int8"]),
        )
    for section, magnitude in filled:
        if section is not None:
            numbers = magnitude * (torch.rand(section.shape, generator=generator) + 0.5)
            if section.dtype == torch.float16:  # GGUF files have scales and offsets of both signs
                numbers *= torch.randint(0, 2, section.shape, generator=generator) * 2 - 1
            section.copy_(numbers)
    if rows.zeros is not None:
        rows.zeros.random_(0, 16, generator=generator)
    return PackedRows(rows.buffer.to(device or "cpu"), dtype, outputs, depth, lead)
