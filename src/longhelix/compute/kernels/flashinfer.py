"""FlashInfer's decode attention over our pool, if it is installed. Source: arXiv 2501.01005.

Its kernels need a list of a batch's pages from the host, once for all layers, and before each replay of a CUDA graph.
`prepare` makes the list. `attend` then runs instead of our kernel.
"""

import importlib.util
import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longhelix.compute.kernels.layer import KVFormat
from longhelix.errors import UserError

_WORKSPACE_BYTES = 128 * 2**20  # what its documentation advises
_HEAD_SIZES = (64, 128, 256)
_FEW_HEADS = 4  # of a group: below, its kernel without tensor cores is the faster one

# Its planned wrappers, by the address of the batch's limits: a graph's batch stays where it is.
_planned: dict[int, Any] = {}


def check(format: KVFormat, dtype: str) -> None:
    """Raise UserError if FlashInfer is not installed or cannot read pools of this format."""
    if importlib.util.find_spec("flashinfer") is None:
        raise UserError("attention flashinfer needs the package flashinfer-python: install it, or leave the option out")
    if format.key_size not in _HEAD_SIZES or dtype not in ("bfloat16", "float16") or format.dtype != dtype:
        raise UserError(
            f"attention flashinfer takes heads of {', '.join(map(str, _HEAD_SIZES))} channels with dtype and kv_dtype "
            f"both bfloat16 or both float16, but they are {format.key_size}, {dtype} and {format.dtype}: leave the "
            "option out"
        )


class PageLists:
    """Lists the pages of decode batches for FlashInfer, for the attention of one model."""

    def __init__(self, format: KVFormat, num_query_heads: int, scale: float, dtype: torch.dtype) -> None:
        self._format = format
        self._num_query_heads = num_query_heads
        self._scale = scale
        self._dtype = dtype
        self._workspace: Tensor | None = None  # of all wrappers, since only one of them runs at a time

    def prepare(self, blocks_X: Tensor, extents_B2: Tensor, limits_B: Tensor, max_rows: int) -> None:
        """List the pages of the batch that these tensors describe. Steps other than decodes use our kernel."""
        if max_rows > 1:
            self.forget(limits_B)
            return
        wrapper = _planned.get(limits_B.data_ptr())
        if wrapper is None:
            wrapper = _planned[limits_B.data_ptr()] = self._wrapper(blocks_X, len(limits_B))
        block_tokens = self._format.block_tokens
        # A page at least for each row: `attend` undoes what rows that see nothing get from theirs.
        limits = [max(limit, 1) for limit in limits_B.tolist()]
        counts = [-(-limit // block_tokens) for limit in limits]
        any_X = blocks_X.new_zeros(1)
        pages = [
            blocks_X[begin : begin + count] if begin < end else any_X
            for (begin, end), count in zip(extents_B2.tolist(), counts, strict=True)
        ]
        wrapper.plan(
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            torch.cat(pages).int(),
            torch.tensor([(limit - 1) % block_tokens + 1 for limit in limits], dtype=torch.int32),
            self._num_query_heads,
            self._format.num_kv_heads,
            self._format.key_size,
            block_tokens,
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def forget(self, limits_B: Tensor) -> None:
        """Free the page list of the batch with these limits."""
        _planned.pop(limits_B.data_ptr(), None)

    def _wrapper(self, blocks_X: Tensor, sequences: int) -> Any:
        import flashinfer

        device, int32 = blocks_X.device, torch.int32
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        most_ids = len(blocks_X) // 2  # see BlockArena
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._num_query_heads // self._format.num_kv_heads >= _FEW_HEADS,
            paged_kv_indptr_buffer=torch.empty(sequences + 1, dtype=int32, device=device),
            paged_kv_indices_buffer=torch.empty(most_ids + sequences, dtype=int32, device=device),
            paged_kv_last_page_len_buffer=torch.empty(sequences, dtype=int32, device=device),
        )


def attend(q_TqC: Tensor, kv_PADkC: Tensor, limits_T: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute `attention.partial_attention` of a prepared batch, or return None. FlashInfer's LSEs are base 2."""
    wrapper = _planned.get(limits_T.data_ptr())
    if wrapper is None:
        return None
    out_TqC, lse_Tq = wrapper.run(q_TqC.contiguous(), kv_PADkC, return_lse=True)
    empty_T = limits_T == 0
    return (
        out_TqC.masked_fill(empty_T[:, None, None], 0.0),
        (lse_Tq * math.log(2)).masked_fill(empty_T[:, None], -math.inf),
    )
