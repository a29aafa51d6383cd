"""FlashInfer's attention, with a module in its place that does what its documentation says, in plain torch."""

import importlib.util
import math
import sys
import types

import pytest
import torch

from longhelix.compute.kernels import ROWS, KVFormat, flashinfer, partial_attention, reference
from longhelix.errors import UserError

PAGE, KV_HEADS, GROUP, CHANNELS = 16, 2, 4, 64
CPU = torch.device("cpu")


class BatchDecodeWithPagedKVCacheWrapper:
    """Pages in CSR form, lists on the host; with graphs, they are copied into buffers given once. LSE in base 2."""

    def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores, **buffers):
        assert layout == "NHD"
        assert use_cuda_graph
        self.indptr, self.indices, self.last = (
            buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
        )

    def plan(self, indptr, indices, last, q_heads, kv_heads, head_dim, page_size, *, sm_scale, q_data_type, **more):
        assert {indptr.dtype, indices.dtype, last.dtype} == {torch.int32}
        assert (last >= 1).all()
        assert (last <= page_size).all()
        assert (indptr.diff() >= 1).all()
        self.indptr.copy_(indptr)
        self.indices[: len(indices)].copy_(indices)
        self.last.copy_(last)
        self.group, self.scale, self.dtype = q_heads // kv_heads, sm_scale, q_data_type

    def run(self, q, kv, return_lse):
        assert return_lse
        assert q.dtype == self.dtype
        outs, lses = [], []
        for row in range(len(q)):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            tokens = (len(pages) - 1) * PAGE + int(self.last[row])
            k, v = (kv[pages, side].flatten(0, 1)[:tokens].double() for side in (0, 1))
            scores = torch.einsum("qc,sqc->qs", q[row].double(), k.repeat_interleave(self.group, 1)) * self.scale
            outs.append(torch.einsum("qs,sqc->qc", scores.softmax(-1), v.repeat_interleave(self.group, 1)))
            lses.append(scores.logsumexp(-1) / math.log(2))
        return torch.stack(outs).to(q.dtype), torch.stack(lses).float()


@pytest.fixture
def installed(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "_planned", {})


def pool_format(dtype="bfloat16", channels=CHANNELS):
    return KVFormat(dtype, PAGE, KV_HEADS, channels, channels, ROWS)


def test_prepared_decode_steps_equal_the_reference_and_others_are_left_alone(installed):
    torch.manual_seed(0)
    format = pool_format()
    layer = format.new_layer(64, CPU)
    layer.values.copy_(torch.randn(layer.values.shape))
    page_lists = flashinfer.PageLists(format, KV_HEADS * GROUP, CHANNELS**-0.5, torch.bfloat16)
    blocks, limits = torch.empty(40, dtype=torch.int64), torch.empty(5, dtype=torch.int64)
    extents = torch.empty(5, 2, dtype=torch.int64)
    starts = torch.arange(6)
    for step in range(3):  # the same memory each time, as in a graph
        blocks.copy_(torch.randperm(64)[:40])
        limits.copy_(torch.tensor([1, 0, PAGE, 128, 70]) if step else torch.tensor([0, 5, 33, 16, 17]))
        # A row that sees nothing has no blocks, and the last one's end where the memory does.
        counts = -(limits // -PAGE)
        ends = 40 - counts.flip(0).cumsum(0).flip(0) + counts
        extents.copy_(torch.stack((ends - counts, ends), dim=1))
        q = torch.randn(5, KV_HEADS * GROUP, CHANNELS).bfloat16()
        page_lists.prepare(blocks, extents, limits, max_rows=1)
        out, lse = partial_attention(q, layer, blocks, extents, starts, limits, CHANNELS**-0.5)
        planned = flashinfer._planned.pop(limits.data_ptr())
        expected_out, expected_lse = reference.partial_attention(
            q, *layer.keys_and_values(), blocks, extents, starts, limits, CHANNELS**-0.5
        )
        flashinfer._planned[limits.data_ptr()] = planned
        torch.testing.assert_close(out, expected_out, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
        assert (lse[limits == 0] == -math.inf).all()
        assert not out[limits == 0].any()
    page_lists.prepare(blocks, extents, limits, max_rows=2)
    assert flashinfer.attend(q, layer.values, limits) is None


def test_what_it_does_not_read_is_refused_in_a_sentence(installed, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="install it"):
        flashinfer.check(pool_format(), "bfloat16")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    flashinfer.check(pool_format(), "bfloat16")
    for format, dtype in (
        (pool_format(channels=80), "bfloat16"),
        (pool_format("fp8"), "bfloat16"),
        (pool_format("float32"), "float32"),
    ):
        with pytest.raises(UserError, match="leave the option out"):
            flashinfer.check(format, dtype)
