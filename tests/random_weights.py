"""Random weights in packed formats."""

import torch

from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.spec import FORMATS

_LARGEST = 30  # of e4m3, beside which smaller numbers still count
_TYPICAL = {"e4m3": 5, "int8": 74, "uint4": 5, "e2m1": 3}  # magnitude of the numbers of random codes


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
    scales = torch.rand(rows.scales.shape, generator=generator) + 0.5
    if rows.output_scales is None:
        scales /= _TYPICAL[rows.codes.element] * max(depth, 1) ** 0.5
    else:
        factor = (torch.rand(outputs, generator=generator) + 0.5) / _TYPICAL[rows.codes.element]
        rows.output_scales.copy_(factor / max(depth, 1) ** 0.5)
    rows.scales.copy_(scales)
    if rows.zeros is not None:
        rows.zeros.random_(0, 16, generator=generator)
    return PackedRows(rows.buffer.to(device or "cpu"), dtype, outputs, depth, lead)
