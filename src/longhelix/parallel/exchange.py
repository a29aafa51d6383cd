"""The exchange: one all-to-all over query heads that carries partial outputs and LSEs together, then the merge.

Helix, arXiv 2507.07120, section 2.1: each rank of a KVP group sends every other one that one's slice of query heads
and merges the slices that it receives. Bytes sent depend on rows and heads, never on the KV length.
"""

import torch
from torch import Tensor

from longhelix.kernels import merge_states
from longhelix.parallel.collectives import Group

_LSE_BYTES = 4


def gather_heads(out_TnC: Tensor, group: Group, heads_per_rank: list[int]) -> Tensor:
    """All heads of the group, out_TqC, from the slices that its ranks hold whole: the tied layout's second exchange."""
    if group.size == 1:
        return out_TnC
    rows, _, head_size = out_TnC.shape
    sizes = [rows * heads * head_size for heads in heads_per_rank]
    received = group.all_to_all(
        out_TnC.reshape(-1).repeat(group.size), send_sizes=[out_TnC.numel()] * group.size, receive_sizes=sizes
    )
    return torch.cat([part.view(rows, -1, head_size) for part in received.split(sizes) if part.numel()], dim=1)


def exchange(out_TqC: Tensor, lse_Tq: Tensor, group: Group, heads_per_rank: list[int]) -> Tensor:
    """Merged attention of this rank's slice of query heads: out_TnC, in the dtype of `out_TqC`.

    `heads_per_rank`: how the q local query heads fall to the ranks of `group`; a rank may get none.
    """
    if group.size == 1:
        return out_TqC
    if (merged_TnC := group.exchange_states(out_TqC, lse_Tq, heads_per_rank)) is not None:
        return merged_TnC
    rows, _, head_size = out_TqC.shape
    out_bytes = head_size * out_TqC.element_size()
    row_bytes = out_bytes + _LSE_BYTES
    packed_qTX = torch.cat(
        (out_TqC.contiguous().view(torch.uint8), lse_Tq.unsqueeze(-1).contiguous().view(torch.uint8)), dim=-1
    ).transpose(0, 1)
    own_heads = heads_per_rank[group.index]
    received = group.all_to_all(
        packed_qTX.reshape(-1),
        send_sizes=[heads * rows * row_bytes for heads in heads_per_rank],
        receive_sizes=[own_heads * rows * row_bytes] * group.size,
    )
    received_NnTX = received.view(group.size, own_heads, rows, row_bytes)
    out_NnTC = received_NnTX[..., :out_bytes].contiguous().view(out_TqC.dtype)
    lse_NnT = received_NnTX[..., out_bytes:].contiguous().view(torch.float32).squeeze(-1)
    merged_nTC, _ = merge_states(out_NnTC, lse_NnT)
    return merged_nTC.transpose(0, 1)
