"""The ops that models call: signatures, shapes (letters in docs/shapes.md) and fakes, so that graphs keep them whole.

LSE is a natural logarithm in float32, everywhere. Registered as torch.ops.longhelix.*; every backend that has no
form of its own runs the reference.
"""

import torch
from torch import Tensor

from longhelix.kernels import reference

_library = torch.library.Library("longhelix", "DEF")
_library.define(
    "partial_attention(Tensor q_TqC, Tensor k_PDkC, Tensor v_PDkC, Tensor blocks_BJ, Tensor row_starts_B, "
    "Tensor limits_T, float scale) -> (Tensor, Tensor)"
)
_library.define("merge_states(Tensor out_NTQC, Tensor lse_NTQ) -> (Tensor, Tensor)")
_library.define("write_kv(Tensor k_TkC, Tensor v_TkC, Tensor(a!) k_PDkC, Tensor(b!) v_PDkC, Tensor slots_T) -> ()")
_library.impl("partial_attention", reference.partial_attention, "CompositeExplicitAutograd")
_library.impl("merge_states", reference.merge_states, "CompositeExplicitAutograd")
_library.impl("write_kv", reference.write_kv, "CompositeExplicitAutograd")


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
    return torch.ops.longhelix.partial_attention(q_TqC, k_PDkC, v_PDkC, blocks_BJ, row_starts_B, limits_T, scale)


@torch.library.register_fake("longhelix::partial_attention", lib=_library)
def _(q_TqC, k_PDkC, v_PDkC, blocks_BJ, row_starts_B, limits_T, scale):
    return q_TqC.new_empty(q_TqC.shape), q_TqC.new_empty(q_TqC.shape[:2], dtype=torch.float32)


def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial attentions over disjoint sets of keys into the attention over their union, exactly.

    m = max of lse over N; weights exp(lse - m), summed in rank order in float32 (float64 for float64 input);
    lse = m + log(sum). A shard with LSE -inf has weight 0, whatever its output holds; all empty gives 0 and -inf.
    Any float dtype in, the same out: (out_TQC, lse_TQ). Source: Helix, arXiv 2507.07120, section 2.1.
    """
    return torch.ops.longhelix.merge_states(out_NTQC, lse_NTQ)


@torch.library.register_fake("longhelix::merge_states", lib=_library)
def _(out_NTQC, lse_NTQ):
    return out_NTQC.new_empty(out_NTQC.shape[1:]), lse_NTQ.new_empty(lse_NTQ.shape[1:])


def write_kv(k_TkC: Tensor, v_TkC: Tensor, k_PDkC: Tensor, v_PDkC: Tensor, slots_T: Tensor) -> None:
    """Write the rows that this rank owns into one layer's pool, in the pool's dtype.

    slots_T (int64): block id * D + offset in the block, or -1 for a row that another rank owns.
    """
    torch.ops.longhelix.write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, slots_T)


@torch.library.register_fake("longhelix::write_kv", lib=_library)
def _(k_TkC, v_TkC, k_PDkC, v_PDkC, slots_T):
    return None
