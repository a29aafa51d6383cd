"""Weights as they are laid out natively, beside a reference in torch: the same bits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from longhelix.compute.kernels import PANELS, make_weight, native

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels"),
]

LANES, SCALE_BLOCK = 16, 32
DTYPES = ["float32", "bfloat16", "float16"]
NARROW = ["int8", "int4"]


def packed(weight_OI: Tensor, dtype: str, halves: int = 1) -> Tensor:
    """The bytes of the panels of W (compute/kernels/weight.py has their description)."""
    width = len(weight_OI) // halves
    padded_OI = pad(weight_OI.unflatten(0, (halves, width)), (0, 0, 0, -width % LANES)).flatten(0, 1)
    lanes_OXI = padded_OI.unflatten(0, (-1, LANES))
    if dtype in NARROW:
        return packed_narrow(lanes_OXI.float(), dtype)
    typed_OXI = lanes_OXI.to(getattr(torch, dtype))
    units = typed_OXI.unflatten(2, (-1, 2)) if dtype == "bfloat16" else typed_OXI
    return units.transpose(1, 2).contiguous().view(-1).view(torch.uint8)


def packed_narrow(lanes_OXI: Tensor, dtype: str) -> Tensor:
    blocks = lanes_OXI.unflatten(2, (-1, SCALE_BLOCK))  # (panels, lanes, blocks, 32)
    codes, scales, offsets = quantised(blocks, dtype)
    rows = SCALE_BLOCK // 2  # of pairs; in twos, or in fours
    if dtype == "int8":
        split = codes.view(*codes.shape[:1], 4, 4, codes.shape[2], rows // 2, 2, 2)
        stored = split.permute(0, 3, 4, 1, 5, 2, 6).flatten(2)
    else:
        split = codes.view(*codes.shape[:1], 4, 4, codes.shape[2], rows // 4, 2, 2, 2)
        low, high = split.unbind(5)
        stored = (low | high << 4).permute(0, 3, 4, 1, 5, 2, 6).flatten(2)
    sides = [side.transpose(1, 2).contiguous().view(torch.uint8) for side in (scales, offsets)]
    return torch.cat((stored, *sides), dim=2).contiguous().view(-1)


def quantised(blocks: Tensor, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8), float16 scales and offsets of blocks along the last dim."""
    if dtype == "int8":
        scales = (blocks.abs().amax(-1) / 127).half()
        values = (blocks / scales.float().clamp(min=1e-12).unsqueeze(-1)).round().clamp(-127, 127)
        return values.abs().to(torch.uint8) | (values < 0).to(torch.uint8) << 7, scales, torch.zeros_like(scales)
    least, most = blocks.aminmax(dim=-1)
    scales = ((most - least) / 15).half()
    values = ((blocks - least.unsqueeze(-1)) / scales.float().clamp(min=1e-12).unsqueeze(-1)).round().clamp(0, 15)
    return values.to(torch.uint8), scales, (least + 8 * scales.float()).half()


def matrix(outputs: int, depth: int, seed: int, dtype: str) -> Tensor:
    """Numbers of all sizes that float16 has, subnormal ones of the dtype, equal ones, steps and their halves."""
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(outputs, depth, generator=generator)
    kinds_O = torch.randint(0, 5, (outputs, 1), generator=generator)
    sizes_O = 2.0 ** torch.randint(-30, 14, (outputs, 1), generator=generator)
    halves_OI = torch.randint(-255, 256, (outputs, depth), generator=generator) / 2
    weight_OI = torch.where(kinds_O == 0, weight_OI, weight_OI * sizes_O)
    weight_OI = torch.where(kinds_O == 1, halves_OI, weight_OI)
    weight_OI = torch.where(kinds_O == 2, sizes_O, weight_OI)
    weight_OI = torch.where(kinds_O == 3, weight_OI * 2.0**-110, weight_OI)
    weight_OI[torch.rand(outputs, depth, generator=generator) < 0.05] = 0
    return weight_OI.to(getattr(torch, dtype))


@given(
    width=st.integers(1, 70),
    blocks=st.integers(1, 9),
    halves=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES + NARROW),
    source=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 1, 16]),
    seed=st.integers(0, 2**31),
)
@example(width=16, blocks=9, halves=1, dtype="bfloat16", source="bfloat16", gap=0, seed=0)
@example(width=33, blocks=2, halves=2, dtype="int4", source="bfloat16", gap=1, seed=0)
def test_packing_is_the_reference_to_the_bit(width, blocks, halves, dtype, source, gap, seed):
    depth = blocks * (SCALE_BLOCK if dtype in NARROW else LANES)
    weight_OI = matrix(halves * width, depth + gap, seed, source)[:, gap:]
    found = make_weight(weight_OI, dtype, halves)
    assert found.arrangement is PANELS
    assert torch.equal(found.values, packed(weight_OI, dtype, halves))


@given(
    width=st.integers(1, 70),
    halves=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES + NARROW),
    cuts=st.lists(st.integers(0, 140), max_size=5),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**31),
)
def test_rows_may_come_in_any_pieces_and_on_any_number_of_threads(width, halves, dtype, cuts, threads, seed):
    weight_OI = matrix(halves * width, 96, seed, "bfloat16")
    weight = PANELS.new_panels(*weight_OI.shape, dtype, halves)
    ends = sorted({0, len(weight_OI), *(cut for cut in cuts if cut < len(weight_OI))})
    before = torch.get_num_threads()
    try:
        native.set_num_threads(threads)
        for first, stop in reversed([*pairwise(ends)]):
            PANELS.write(weight_OI[first:stop], first, weight, halves)
    finally:
        native.set_num_threads(before)
    assert torch.equal(weight.values, packed(weight_OI, dtype, halves))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_what_it_is(dtype, source):
    row_I = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 8).to(getattr(torch, source))
    weight = make_weight(row_I.expand(20, -1).contiguous(), dtype)
    kept_TI, given_I = weight.rows(torch.arange(20)), row_I.to(getattr(torch, dtype))
    assert torch.equal(kept_TI.isnan(), given_I.isnan().expand(20, -1))
    there = ~given_I.isnan()
    same = kept_TI[:, there].view(torch.uint8) == given_I[there].expand(20, -1).contiguous().view(torch.uint8)
    assert same.all()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("place", [0, 5, 31])
def test_a_block_with_what_is_no_number_has_none(dtype, place):
    weight_OI = torch.ones(16, 64, dtype=torch.bfloat16)
    weight_OI[3, 32 + place] = torch.nan
    blocks = make_weight(weight_OI, dtype).values.view(2, -1)
    scales = np.ascontiguousarray(blocks[:, -64:-32].numpy()).view(np.float16)
    assert np.isnan(scales).nonzero()[0].tolist() == [1]
    assert np.isnan(scales).nonzero()[1].tolist() == [3]
