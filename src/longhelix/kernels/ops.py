"""The ops that models call, with their shapes (letters in docs/shapes.md) and fakes, so that graphs keep them whole.

LSE is a natural logarithm in float32, everywhere.
"""

import torch
from torch import Tensor

from longhelix.kernels import reference


@torch.library.custom_op("longhelix::partial_attention", mutates_args=())
def partial_attention(
    q_TqC: Tensor,
    k_PDkC: Tensor,
    v_PDkC: Tensor,
    blocks_BJ: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows over this rank's part of their KV, with the log-sum-exp that makes it mergeable.

    q_TqC: rows of B sequences, one after the other. k_PDkC, v_PDkC: one layer's pool. blocks_BJ (int64): each
    sequence's local KV blocks in position order. row_starts_B (int64, B + 1): the first row of each sequence, then
    T. limits_T (int64): how many local tokens a row sees. Returns out_TqC (dtype of q) and lse_Tq (float32); a row
    with limit 0 gives 0 and -inf. Source: FlashAttention's online softmax (arXiv 2205.14135), split by keys.
    """
    return reference.partial_attention(q_TqC, k_PDkC, v_PDkC, blocks_BJ, row_starts_B, limits_T, scale)


@partial_attention.register_fake
def _(q_TqC, k_PDkC, v_PDkC, blocks_BJ, row_starts_B, limits_T, scale):
    return torch.empty_like(q_TqC), q_TqC.new_empty(q_TqC.shape[:2], dtype=torch.float32)


@torch.library.custom_op("longhelix::merge_states", mutates_args=())
def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial attentions over disjoint sets of keys into the attention over their union, exactly.

    m = max of lse over N; weights exp(lse - m), summed in rank order in float32 (float64 for float64 input);
    lse = m + log(sum). A shard with LSE -inf has weight 0, whatever its output holds; all empty gives 0 and -inf.
    Any float dtype in, the same out: (out_TQC, lse_TQ). Source: Helix, arXiv 2507.07120, section 2.1.
    """
    return reference.merge_states(out_NTQC, lse_NTQ)


@merge_states.register_fake
def _(out_NTQC, lse_NTQ):
    return torch.empty_like(out_NTQC[0]), torch.empty_like(lse_NTQ[0])


@torch.library.custom_op("longhelix::write_kv", mutates_args=("k_PDkC", "v_PDkC"))
def write_kv(k_TkC: Tensor, v_TkC: Tensor, k_PDkC: Tensor, v_PDkC: Tensor, slots_T: Tensor) -> None:
    """Write the rows that this rank owns into one layer's pool, in the pool's dtype.

    slots_T (int64): block id * D + offset in the block, or -1 for a row that another rank owns.
    """
    reference.write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, slots_T)
