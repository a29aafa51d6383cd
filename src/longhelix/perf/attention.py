"""The attention half of a layer: from the first norm to the sum of the output projection."""

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.collectives import RankGroups, Sent
from longhelix.perf.cost_item import CostItem, kernels, product, sends
from longhelix.perf.hop_b import Overlap
from longhelix.perf.layouts import Array, Layouts, Mask
from longhelix.perf.setting import ACTIVATION_BYTES, LSE_BYTES, Setting
from longhelix.perf.sparse import chosen, index_items
from longhelix.perf.stored_layers import StoredWeights
from longhelix.scheduler.work import Work
from longhelix.spec.attention import MultiHeadLatentAttention, Visibility
from longhelix.spec.layer import Attention
from longhelix.spec.layout import HeadShape


def attention_items(
    setting: Setting, layouts: Layouts, attention: Attention, stored: StoredWeights, work: Work
) -> list[CostItem]:
    """Return the cost items of one layer with this attention, in order. stored: its weights."""
    rank_work = layouts.of_rank(work, setting.request_rows)
    if attention.visibility.limit_tokens is not None:
        rank_work = _in_window(setting, layouts, attention.visibility, rank_work)
    choice, indexer = list[CostItem](), attention.visibility.indexer
    if indexer is not None:
        choice, rank_work = (
            index_items(setting, layouts, attention, stored, rank_work),
            chosen(setting, layouts, indexer, rank_work),
        )
    attended = _attention(setting, layouts, attention, rank_work)
    value, exchange, channels = _exchange(setting, layouts, attention, stored, rank_work)
    projected = weights.output_projection(setting, layouts, stored)
    hidden_bytes = rank_work.rows * setting.model.hidden_size * ACTIVATION_BYTES
    sharers = RankGroups(layouts.output_ranks, layouts.ones)
    summed = collectives.all_reduce(setting.system, sharers, hidden_bytes + layouts.zeros)
    return [
        *_projections(setting, layouts, attention, stored, rank_work),
        *choice,
        attended,
        *value,
        _exposed(setting, layouts, rank_work, _overlap(setting, attended, exchange), exchange),
        _merge(setting, layouts, attention, rank_work, channels),
        product("output projection", setting, layouts, projected, rank_work.rows),
        sends("all-reduce after attention", summed.seconds, summed.net_bytes, summed.fixed_s),
    ]


def _in_window(setting: Setting, layouts: Layouts, visibility: Visibility, rank_work: Work) -> Work:
    """What a layer with a window attends to of a rank's work.

    A decode row reads min(context, window) tokens; T rows of a prompt read the window before the first of them and
    themselves, T - 1 + window, and have T times as many pairs as a row sees on average. Windows lie over KVP ranks as
    evenly as all KV. All requests that decode are as long, each reads for all its rows at once, and the rows of chunks
    are one prompt's.
    """
    assert visibility.limit_tokens is not None
    share = 1 / layouts.kvp
    seen = share * visibility.limit_tokens
    return rank_work._replace(
        decode_kv_tokens=np.minimum(rank_work.decode_kv_tokens, rank_work.decode_rows / setting.request_rows * seen),
        chunk_kv_tokens=np.minimum(rank_work.chunk_kv_tokens, share * (rank_work.chunk_rows - 1) + seen),
        chunk_pairs=np.minimum(rank_work.chunk_pairs, rank_work.chunk_rows * (share * visibility.mean_tokens)),
    )


def _projections(
    setting: Setting, layouts: Layouts, attention: Attention, stored: StoredWeights, rank_work: Work
) -> list[CostItem]:
    heads, latents = attention.heads, attention.latents if isinstance(attention, MultiHeadLatentAttention) else None
    count = 3.0 if latents is not None and latents.q_lora_rank is not None else 1.0
    qkv = product("QKV", setting, layouts, weights.qkv(setting, layouts, stored), rank_work.rows, count=count)
    channels = attention.head_size * (setting.query_heads(layouts, heads) + 2 * setting.kv_heads(layouts, heads))
    moved_bytes = 2 * rank_work.rows * channels * ACTIVATION_BYTES
    write = kernels("RoPE and KV write", setting, layouts, hbm_bytes=moved_bytes)
    if not isinstance(attention, MultiHeadLatentAttention):
        return [qkv, write]
    absorbed = weights.key_absorption(setting, layouts, attention, stored)
    return [qkv, product("key absorption", setting, layouts, absorbed, _absorbed_rows(attention, rank_work)), write]


def _attention(setting: Setting, layouts: Layouts, attention: Attention, rank_work: Work) -> CostItem:
    """Decode rows and chunks apart: one reads, the other computes. Two kernels: splits of the KV, and their merge.

    A request's KV is read once for all its rows. Beside KV they read queries, and write outputs and LSEs; what passes
    between the two counts for nothing.
    """
    entry, num_query_heads = attention.cache_entry, setting.query_heads(layouts, attention.heads)
    token_bytes = setting.kv_heads(layouts, attention.heads) * setting.kv_head_bytes(attention)
    channels = entry.key_size + entry.value_size
    pair_flops, row_bytes = 2 * channels * num_query_heads, num_query_heads * _row_head_bytes(channels)
    decode_bytes = rank_work.decode_kv_tokens * token_bytes + rank_work.decode_rows * row_bytes
    reads = (
        1 if attention.visibility.indexer is not None else setting.request_rows
    )  # of chosen tokens each row has its own
    decode = _attend(setting, layouts, decode_bytes, rank_work.decode_kv_tokens * reads * pair_flops)
    chunk_bytes = rank_work.chunk_kv_tokens * token_bytes + rank_work.chunk_rows * row_bytes
    chunk = _attend(setting, layouts, chunk_bytes, rank_work.chunk_pairs * pair_flops)
    if isinstance(attention, MultiHeadLatentAttention):
        chunk = _where(_is_direct(attention, rank_work), _direct(setting, layouts, attention, rank_work), chunk)
    launched = kernels("attention", setting, layouts, count=2.0)
    return CostItem(
        name="attention",
        seconds=decode.seconds + chunk.seconds + launched.seconds,
        flops=decode.flops + chunk.flops,
        hbm_bytes=decode.hbm_bytes + chunk.hbm_bytes,
        net_bytes=launched.net_bytes,
        fixed_s=launched.fixed_s,
        compute_bound=np.where(decode.seconds >= chunk.seconds, decode.compute_bound, chunk.compute_bound),
    )


def _row_head_bytes(channels: int) -> float:
    """Return bytes of a row and head: `channels` of its query and its output together, and an LSE."""
    return channels * ACTIVATION_BYTES + LSE_BYTES


def _attend(setting: Setting, layouts: Layouts, hbm_bytes: float | Array, flops: float | Array) -> CostItem:
    return kernels(
        "attention",
        setting,
        layouts,
        flops=flops,
        hbm_bytes=hbm_bytes,
        dtype=setting.attends_in,
        count=0.0,
        compute_efficiency=setting.system.arithmetic.attention_efficiency,
    )


def _direct(setting: Setting, layouts: Layouts, attention: MultiHeadLatentAttention, rank_work: Work) -> CostItem:
    """MLA of a chunk whose keys and values are made from the latents of all its context, written and read again."""
    mla, num_query_heads = attention.latents, setting.query_heads(layouts, attention.heads)
    made = num_query_heads * (mla.nope_size + mla.value_size)
    made_tokens = rank_work.chunk_kv_tokens * rank_work.parts  # every part makes them again
    flops = 2 * made_tokens * mla.kv_lora_rank * made
    channels = mla.nope_size + mla.rope_size + mla.value_size
    flops = flops + 2 * rank_work.chunk_pairs * num_query_heads * channels
    token_bytes = setting.kv_head_bytes(attention) + 2 * made * ACTIVATION_BYTES
    row_bytes = num_query_heads * _row_head_bytes(channels)
    return _attend(setting, layouts, made_tokens * token_bytes + rank_work.chunk_rows * row_bytes, flops)


def _is_direct(attention: MultiHeadLatentAttention, rank_work: Work) -> Mask:
    """Whether the chunk attends directly; as the models decide it, part by part."""
    rows = rank_work.chunk_rows / rank_work.parts + np.zeros_like(rank_work.decode_rows)
    # Of chosen tokens each row has its own (TensorRT-LLM, tech blog 15: absorbed in prefill as well).
    if attention.visibility.indexer is not None:
        return np.zeros_like(rows, dtype=np.bool_)
    direct: Mask = rows >= attention.latents.direct_rows
    return direct


def _absorbed_rows(attention: MultiHeadLatentAttention, rank_work: Work) -> Array:
    """Rows whose queries are turned into latents, and their outputs into values."""
    decode_rows: Array = rank_work.decode_rows
    rows: Array = rank_work.rows
    return np.where(_is_direct(attention, rank_work), decode_rows, rows)


def _where(chosen: Mask, first: CostItem, second: CostItem) -> CostItem:
    return CostItem(
        name=first.name,
        seconds=np.where(chosen, first.seconds, second.seconds),
        flops=np.where(chosen, first.flops, second.flops),
        hbm_bytes=np.where(chosen, first.hbm_bytes, second.hbm_bytes),
        net_bytes=first.net_bytes,
        fixed_s=first.fixed_s,
        compute_bound=np.where(chosen, first.compute_bound, second.compute_bound),
    )


def _exchange(
    setting: Setting, layouts: Layouts, attention: Attention, stored: StoredWeights, rank_work: Work
) -> tuple[list[CostItem], Sent, Array]:
    """MLA's value projection, the exchange, of latent outputs before it or of values after it, and how many channels a
    head of these has.

    Whichever is faster: values are a fraction of the bytes, but before the exchange a rank projects all heads of its
    TPA share, after it the merged ones alone. Values, where a chunk attends directly.
    """
    heads, output_size = attention.heads, attention.output_size
    values = _exchanged(setting, layouts, heads, rank_work, output_size)
    if not isinstance(attention, MultiHeadLatentAttention):
        return [], values, layouts.zeros + output_size
    latent_size, rows = attention.latents.kv_lora_rank, _absorbed_rows(attention, rank_work)
    before, after = (
        product("value projection", setting, layouts, weights.value_projection(attention, stored, num_heads), rows)
        for num_heads in (setting.query_heads(layouts, heads), setting.merged_query_heads(layouts, heads))
    )
    latents = _exchanged(setting, layouts, heads, rank_work, latent_size)
    late = after.seconds + latents.seconds < before.seconds + values.seconds
    late = late & ~_is_direct(attention, rank_work)
    return (
        [before.where(~late), after.where(late)],
        latents.where(late, values),
        np.where(late, float(latent_size), float(output_size)),
    )


def _exchanged(setting: Setting, layouts: Layouts, heads: HeadShape, rank_work: Work, channels: int) -> Sent:
    """One all-to-all over KVP of partial outputs with `channels` a head, and LSEs.

    Copies of the FFN need all heads: they gather what was merged, or, where that is faster, all send all partial
    outputs at once.
    """
    groups = RankGroups(layouts.kvp, layouts.tpa)
    rows_heads = rank_work.rows * setting.query_heads(layouts, heads)
    partial_bytes = rows_heads * (channels * ACTIVATION_BYTES + LSE_BYTES)
    shared = collectives.all_to_all(setting.system, groups, partial_bytes)
    gathered = collectives.all_gather(setting.system, groups, rows_heads * channels * ACTIVATION_BYTES)
    both = shared + gathered
    if not setting.system.shared:  # processes of one machine run as longhelix's engine does, which has both collectives
        both = both.or_cheaper(collectives.all_gather(setting.system, groups, partial_bytes * layouts.kvp))
    return both.where(layouts.ffn_replicas > 1, shared)


def _overlap(setting: Setting, attention: CostItem, exchange: Sent) -> Overlap:
    fixed_s, fixed_share = attention.fixed_s + setting.system.fixed.part_s, setting.system.fixed.part_share
    return Overlap(
        attention_s=attention.seconds,
        attention_fixed_s=fixed_s,
        exchange_s=exchange.seconds,
        exchange_fixed_s=exchange.fixed_s,
        part_fixed_share=fixed_share,
    )


def _exposed(setting: Setting, layouts: Layouts, rank_work: Work, cut: Overlap, exchange: Sent) -> CostItem:
    """Return the part of the exchange that attention does not hide."""
    requests = rank_work._replace(decode_rows=rank_work.decode_rows / setting.request_rows)
    together_s = np.where(layouts.hop_b, cut.overlapped_s(requests.most_parts), cut.seconds(rank_work.parts))
    seconds = np.maximum(together_s - cut.attention_s, 0.0)  # rounding may leave less than nothing
    return sends("exchange", seconds, exchange.net_bytes, np.minimum(exchange.fixed_s, seconds))


def _merge(setting: Setting, layouts: Layouts, attention: Attention, rank_work: Work, channels: Array) -> CostItem:
    """Return the merge's item. A rank reads its share of heads from every KVP rank, with LSEs, and writes it once."""
    heads = setting.query_heads(layouts, attention.heads)
    read = heads * (channels * ACTIVATION_BYTES + LSE_BYTES)
    written = (
        setting.priced_amount(layouts, np.ceil(heads / layouts.kvp), heads / layouts.kvp) * channels * ACTIVATION_BYTES
    )
    return kernels("merge", setting, layouts, hbm_bytes=rank_work.rows * (read + written)).where(layouts.exchanges)
