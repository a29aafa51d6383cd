"""The truth in plain torch: slow, short, float32 inside. Every fast form is tested against these functions."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.spec import Activation, MoE

# Rows are taken in tiles: bounds the score matrix, and skips keys that no row of a tile may see.
_TILE_ROWS = 128
ROW_BLOCK = 64  # inputs of a scale block of a row of bytes
INPUT_BLOCK = 128  # inputs of a scale block of a row in e4m3
LARGEST_ROUNDED = 448.0  # of e4m3
LEAST_ROUNDED = 2.0**-100  # scale blocks of smaller numbers are zero
_PACKED_ELEMENTS = 2**22  # numbers of a packed weight that are unpacked at a time


def partial_attention(
    q_TqC: Tensor,
    k_PDkC: Tensor,
    v_PDkC: Tensor,
    blocks_X: Tensor,
    extents_B2: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
    firsts_T: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See `attention.partial_attention`."""
    firsts_T = torch.zeros_like(limits_T) if firsts_T is None else firsts_T
    # Rows that see nothing read nothing.
    limits_T = limits_T.masked_fill(firsts_T >= limits_T, 0)
    out_TqC = q_TqC.new_zeros(*q_TqC.shape[:2], v_PDkC.shape[-1])
    lse_Tq = torch.full(q_TqC.shape[:2], -torch.inf, dtype=torch.float32, device=q_TqC.device)
    starts, block_tokens = row_starts_B.tolist(), k_PDkC.shape[1]
    for (begin, end), start, stop in zip(extents_B2.tolist(), starts[:-1], starts[1:], strict=True):
        blocks_J = blocks_X[begin:end]
        longest = int(limits_T[start:stop].max()) if stop > start else 0
        if longest == 0:
            continue
        if longest > len(blocks_J) * block_tokens:
            raise ValueError(f"a row sees {longest} tokens, but its sequence has {len(blocks_J)} KV blocks here")
        seen_T = limits_T[start:stop] > 0
        first_block = int(firsts_T[start:stop][seen_T].min()) // block_tokens
        used, read_from = blocks_J[first_block : -(-longest // block_tokens)], first_block * block_tokens
        k_SkC = k_PDkC[used].flatten(0, 1)[: longest - read_from].float()
        v_SkC = v_PDkC[used].flatten(0, 1)[: longest - read_from].float()
        for tile in range(start, stop, _TILE_ROWS):
            rows = slice(tile, min(tile + _TILE_ROWS, stop))
            seen = int(limits_T[rows].max()) - read_from
            if seen <= 0:
                continue
            sight = firsts_T[rows] - read_from, limits_T[rows] - read_from
            out_TqC[rows], lse_Tq[rows] = _attend(q_TqC[rows], k_SkC[:seen], v_SkC[:seen], *sight, scale, cap)
    return out_TqC, lse_Tq


def _attend(
    q_TqC: Tensor,
    k_SkC: Tensor,
    v_SkC: Tensor,
    firsts_T: Tensor,
    limits_T: Tensor,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of rows that each see keys `firsts_T` to `limits_T`; query heads in groups over KV heads."""
    rows, num_query_heads, head_size = q_TqC.shape
    num_kv_heads = k_SkC.shape[1]
    # The heads of a group lie side by side as rows of one product, so that K and V are read once for all of them.
    q_kXC = q_TqC.float().mul(scale).view(rows, num_kv_heads, -1, head_size).permute(1, 2, 0, 3).flatten(1, 2)
    scores_kgTS = (q_kXC @ k_SkC.permute(1, 2, 0)).unflatten(1, (-1, rows))
    if cap is not None:
        scores_kgTS = (scores_kgTS / cap).tanh_().mul_(cap)
    s_S = torch.arange(k_SkC.shape[0], device=limits_T.device)
    hidden_TS = (s_S >= limits_T.unsqueeze(1)) | (s_S < firsts_T.unsqueeze(1))
    scores_kgTS.masked_fill_(hidden_TS, -torch.inf)
    largest_kgT1 = scores_kgTS.amax(-1, keepdim=True)
    # A row that sees nothing has no finite score; any finite base then gives exp(-inf) = 0 in place of NaN.
    base_kgT1 = largest_kgT1.masked_fill(largest_kgT1 == -torch.inf, 0.0)
    weights_kgTS = scores_kgTS.sub_(base_kgT1).exp_()
    total_kgT1 = weights_kgTS.sum(-1, keepdim=True)
    sum_kgTC = (weights_kgTS.flatten(1, 2) @ v_SkC.transpose(0, 1)).unflatten(1, (-1, rows))
    out_kgTC = sum_kgTC / total_kgT1.masked_fill(total_kgT1 == 0, 1.0)
    lse_kgT = (base_kgT1 + total_kgT1.log()).squeeze(-1)
    out_TqC = out_kgTC.permute(2, 0, 1, 3).reshape(rows, num_query_heads, -1)
    # A value that overflowed is seen by the other rows of its tile as 0 * inf; a row that sees nothing stays 0.
    out_TqC = out_TqC.masked_fill((limits_T <= firsts_T).view(-1, 1, 1), 0.0)
    return out_TqC.to(q_TqC.dtype), lse_kgT.permute(2, 0, 1).reshape(rows, num_query_heads)


def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """See `attention.merge_states`."""
    accurate = torch.promote_types(out_NTQC.dtype, torch.float32)
    exact_NTQ = lse_NTQ.to(accurate)
    largest_TQ = exact_NTQ.amax(0)
    # Where all shards are empty, any finite base makes every weight exp(-inf) = 0.
    base_TQ = largest_TQ.masked_fill(largest_TQ == -torch.inf, 0.0)
    total_TQ = torch.zeros_like(base_TQ)
    sum_TQC = torch.zeros(out_NTQC.shape[1:], dtype=accurate, device=out_NTQC.device)
    for out_TQC, lse_TQ in zip(out_NTQC, exact_NTQ, strict=True):  # rank order: the same bits on every run
        weight_TQ = (lse_TQ - base_TQ).exp()
        # An empty shard's output may hold anything, NaN included, and 0 * NaN is NaN.
        out_TQC = out_TQC.to(accurate).masked_fill((lse_TQ == -torch.inf).unsqueeze(-1), 0.0)
        sum_TQC += weight_TQ.unsqueeze(-1) * out_TQC
        total_TQ += weight_TQ
    lse_TQ = base_TQ + total_TQ.log()
    out_TQC = sum_TQC / total_TQ.masked_fill(total_TQ == 0, 1.0).unsqueeze(-1)
    return out_TQC.to(out_NTQC.dtype), lse_TQ.to(lse_NTQ.dtype)


def write_rows(x_Tk: Tensor, pool_PDk: Tensor, slots_T: Tensor) -> None:
    """See `write.write_kv`: one array of the pool, keys or values or scales; further dims are those of both."""
    mine_T = slots_T >= 0
    block_T, offset_T = slots_T[mine_T] // pool_PDk.shape[1], slots_T[mine_T] % pool_PDk.shape[1]
    pool_PDk[block_T, offset_T] = x_Tk[mine_T]


def expand_latents(latent_SC: Tensor, up_qXZ: Tensor, nope_size: int) -> tuple[Tensor, Tensor]:
    """k_SqC, v_SqC of `direct.expand_latents`, from latents with their rotated keys; in the wider of both dtypes."""
    dtype = torch.promote_types(latent_SC.dtype, up_qXZ.dtype)
    heads, channels, latent_size = up_qXZ.shape
    latent_SZ, rotated_SC = latent_SC.to(dtype).split((latent_size, latent_SC.shape[1] - latent_size), dim=1)
    made_SqX = (latent_SZ @ up_qXZ.flatten(0, 1).to(dtype).T).unflatten(1, (heads, channels))
    k_SqC, v_SqC = made_SqX.split((nope_size, channels - nope_size), dim=2)
    return torch.cat((k_SqC, rotated_SC.unsqueeze(1).expand(-1, heads, -1)), dim=2), v_SqC


def rotate(
    qkv_TX: Tensor,
    num_kv_heads: int,
    head_size: int,
    q_norm_C: Tensor | None,
    k_norm_C: Tensor | None,
    norm_eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_TqC, k_TkC, v_TkC of `write.rotate_and_write`, before the write."""
    heads_TXC = qkv_TX.unflatten(1, (-1, head_size))
    num_query_heads = heads_TXC.shape[1] - 2 * num_kv_heads
    q_TqC, k_TkC, v_TkC = heads_TXC.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm_C is not None:
        q_TqC = rms_norm(q_TqC, q_norm_C, norm_eps)
    if k_norm_C is not None:
        k_TkC = rms_norm(k_TkC, k_norm_C, norm_eps)
    return rotate_heads(q_TqC, cos_TR, sin_TR), rotate_heads(k_TkC, cos_TR, sin_TR), v_TkC


def rotate_heads(x_TQC: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate channels up to 2R. Computed in float32, returned in the dtype of x."""
    pairs = cos_TR.shape[1]
    first_TQR, second_TQR, others_TQC = x_TQC.float().split((pairs, pairs, x_TQC.shape[-1] - 2 * pairs), dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    rotated = (first_TQR * cos_T1R - second_TQR * sin_T1R, second_TQR * cos_T1R + first_TQR * sin_T1R)
    return torch.cat((*rotated, others_TQC), dim=-1).to(x_TQC.dtype)


def linear(
    x_TX: Tensor,
    weight_OX: Tensor | PackedRows,
    bias_O: Tensor | None,
    norm_X: Tensor | None,
    norm_eps: float,
    activation: Activation | None,
    residual_TO: Tensor | None,
    dtype: torch.dtype,
    rounds_inputs: bool = False,
) -> Tensor:
    """See `products.linear`; every step is rounded to the dtype of x, after the norm to one that has the weight's
    numbers as well."""
    if norm_X is not None:
        x_TX = rms_norm(x_TX, norm_X, norm_eps)
    if isinstance(weight_OX, PackedRows):
        wide_TX = round_inputs(x_TX, weight_OX.lead) if rounds_inputs else x_TX.float()
        out_TO = _multiply_packed(wide_TX, weight_OX)
        out_TO = out_TO if bias_O is None else out_TO + bias_O.float()
        out_TO = out_TO.to(dtype if activation is None else x_TX.dtype)
    else:
        wide = torch.promote_types(x_TX.dtype, weight_OX.dtype)
        bias_O = None if bias_O is None else bias_O.to(wide)
        out_TO = torch.nn.functional.linear(x_TX.to(wide), weight_OX.to(wide), bias_O)
    if activation is not None:
        out_TO = activate(out_TO, activation)
    if residual_TO is not None:
        out_TO = out_TO + residual_TO
    return out_TO.to(dtype)


def _multiply_packed(x_TX: Tensor, rows: PackedRows) -> Tensor:
    """Return the product with a packed weight in float32. Unpacks some outputs at a time, to save memory."""
    step = max(_PACKED_ELEMENTS // max(rows.depth, 1), 1)
    parts = (rows.numbers(slice(first, first + step)) for first in range(0, rows.outputs, step))
    return torch.cat([x_TX @ part_OX.T for part_OX in parts] or [x_TX.new_empty(len(x_TX), 0)], dim=1)


def round_inputs(x_TX: Tensor, lead: int) -> Tensor:
    """Return rows that are rounded to e4m3, in float32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

    A row has a scale for each 128 inputs, which makes the largest magnitude 448. Scale blocks begin where those of the
    weight do. A block with an infinity or a NaN becomes NaN.

    lead: `PackedRows.lead` of the weight.
    """
    depth = x_TX.shape[1]
    x_TGB = pad(x_TX.float(), (lead, -(lead + depth) % INPUT_BLOCK)).unflatten(1, (-1, INPUT_BLOCK))
    largest_TG1 = x_TGB.abs().amax(-1, keepdim=True).clamp(min=LEAST_ROUNDED)
    # A number over a tensor would be that times the tensor's reciprocal, which is rounded before.
    factor_TG1 = torch.full_like(largest_TG1, LARGEST_ROUNDED) / largest_TG1
    rounded_TGB = (x_TGB * factor_TG1).to(torch.float8_e4m3fn).float() * (largest_TG1 / LARGEST_ROUNDED)
    return rounded_TGB.flatten(1)[:, lead : lead + depth]


def activate(x_TX: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to the outputs of an FFN's first product. With a gate, gates are the first half."""
    if not activation.gated:
        return _FUNCTIONS[activation.function](x_TX)
    gate_Tf, up_Tf = x_TX.chunk(2, dim=-1)
    if activation.function == "clamped_swiglu":
        up_Tf = up_Tf.clamp(-_LIMIT, _LIMIT) + 1
    return _FUNCTIONS[activation.function](gate_Tf) * up_Tf


_LIMIT, _ALPHA = 7.0, 1.702  # of gpt-oss


def _clamped_silu(gate_Tf: Tensor) -> Tensor:
    limited_Tf = gate_Tf.clamp(max=_LIMIT)
    return (limited_Tf.float() * (limited_Tf.float() * _ALPHA).sigmoid()).to(gate_Tf.dtype)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu_squared": lambda x_TX: x_TX.relu().square(),
    "clamped_swiglu": _clamped_silu,
}


def quantise_rows(x_TX: Tensor) -> tuple[Tensor, Tensor]:
    """See `products.quantise_rows`, after the norm."""
    blocks = [_round_block(block_TX.float()) for block_TX in x_TX.split(ROW_BLOCK, dim=1)]
    if not blocks:
        return x_TX.to(torch.int8), x_TX.new_empty(x_TX.shape, dtype=torch.float32)
    parts, scales = zip(*blocks, strict=True)
    return torch.cat(parts, dim=1), torch.stack(scales, dim=1)


def _round_block(x_TX: Tensor) -> tuple[Tensor, Tensor]:
    most_T = x_TX.abs().amax(-1)
    kept_T = (most_T >= 2.0**-112) & most_T.isfinite()
    # A number over a tensor would be that times the tensor's reciprocal, which is rounded before.
    inverse_T = torch.where(kept_T, torch.full_like(most_T, 127.0) / most_T, 0.0)
    q_TX = torch.where(kept_T.unsqueeze(1), (x_TX * inverse_T.unsqueeze(1)).round(), 0.0)
    return q_TX.to(torch.int8), torch.where(most_T.isfinite(), most_T / 127.0, torch.nan)


def multiply_bytes(q_TX: Tensor, scales_TX: Tensor, weight_OX: Tensor, scales_O: Tensor) -> Tensor:
    """The product of `products.linear` with a weight of w8a8, bytes with scales: float32, one scale block after the
    other. float64 adds integers exactly."""
    out_TO = q_TX.new_zeros(len(q_TX), len(weight_OX), dtype=torch.float32)
    blocks = zip(q_TX.split(ROW_BLOCK, dim=1), weight_OX.split(ROW_BLOCK, dim=1), scales_TX.unbind(1), strict=True)
    for block_TX, weights_OX, scales_T in blocks:
        out_TO += (block_TX.double() @ weights_OX.double().T).float() * scales_T.unsqueeze(1)
    return out_TO * scales_O


def route(logits_TX: Tensor, bias_E: Tensor | None, moe: MoE) -> tuple[Tensor, Tensor]:
    """See `experts.route`."""
    logits_TE = logits_TX[:, : moe.num_experts].float()
    scores_TE = logits_TE.sigmoid() if moe.routing.sigmoid else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if moe.routing.groups_per_token < moe.routing.num_groups:
        choice_TE = _limit_groups(choice_TE, moe)
    experts_TY = _best(choice_TE, moe.experts_per_token)
    weights_TY = scores_TE.gather(1, experts_TY)
    if moe.routing.normalised:
        weights_TY = weights_TY / weights_TY.sum(-1, keepdim=True)
    weights_TY = weights_TY * moe.routing.scale
    if not moe.shared_size:
        return weights_TY, experts_TY
    gate_T1 = logits_TX[:, -1:].float().sigmoid() if moe.routing.shared_gate else torch.ones_like(weights_TY[:, :1])
    shared_T1 = torch.full_like(experts_TY[:, :1], moe.num_experts)
    return torch.cat((weights_TY, gate_T1), dim=1), torch.cat((experts_TY, shared_T1), dim=1)


def _limit_groups(choice_TE: Tensor, moe: MoE) -> Tensor:
    """Only experts of the best groups can be chosen."""
    groups_TGE = choice_TE.unflatten(1, (moe.routing.num_groups, -1))
    best = min(2, groups_TGE.shape[-1]) if moe.routing.sigmoid else 1
    of_group_TG = groups_TGE.topk(best, dim=-1).values.sum(-1)
    taken_TG = _best(of_group_TG, moe.routing.groups_per_token)
    left_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter_(1, taken_TG, False)
    return groups_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def _best(values_TX: Tensor, count: int) -> Tensor:
    """Where the largest values are. (Which of equal ones torch.topk takes is not defined.)"""
    return values_TX.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def run_experts(
    normed_TH: Tensor,
    gate_up: list[Tensor] | list[PackedRows],
    down: list[Tensor] | list[PackedRows],
    weights_TY: Tensor,
    experts_TY: Tensor,
    rows_e: Tensor,
    ids: list[int],
    activation: Activation,
    rounds_inputs: bool = False,
) -> Tensor:
    """See `experts.run_experts`, after the norm and without the residual; sorted by expert, a product of all rows for
    each."""
    out_TH = torch.zeros_like(normed_TH, dtype=torch.float32)
    none = max(ids, default=-1) + 1  # stands for whatever number no expert has, of any size and sign
    taken = experts_TY.flatten()
    taken = taken.masked_fill((taken < 0) | (taken > none), none)
    pairs = taken.argsort(stable=True).split(torch.bincount(taken, minlength=none + 1).tolist())
    for index, expert in enumerate(ids):
        rows, weights_X1 = pairs[expert] // experts_TY.shape[1], weights_TY.flatten()[pairs[expert]].unsqueeze(1)
        rows_e[index] += len(rows)
        if not len(rows):
            continue
        dtype = normed_TH.dtype
        inner = linear(normed_TH[rows], gate_up[index], None, None, 0.0, activation, None, dtype, rounds_inputs)
        out_XH = linear(inner, down[index], None, None, 0.0, None, None, torch.float32, rounds_inputs)
        out_TH.index_add_(0, rows, out_XH * weights_X1)
    return out_TH.to(normed_TH.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; float32 inside, rounded to the weight's dtype before it.

    The result has the dtype of x. With a weight in float32, it is rounded only once.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)
