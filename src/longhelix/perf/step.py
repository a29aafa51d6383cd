"""The cost items of a step: layers, stages, embedding, head, sampling."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.attention import attention_items
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import CostItem, kernels, merged, product, sends, total_seconds
from longhelix.perf.ffn import ffn_items
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.linear import linear_items
from longhelix.perf.setting import ACTIVATION_BYTES, CANDIDATE_BYTES, CANDIDATES_SUM_BYTES, LOGIT_BYTES, Setting
from longhelix.perf.stored_layers import LayerPart
from longhelix.scheduler.work import CANDIDATES, Number, Work
from longhelix.spec import LinearAttention
from longhelix.spec.layer import FFN, Mixer
from longhelix.spec.moe import MoE

WAIT = "wait for the slowest stage"
# Items of the first and of the last stage besides their layers, and items of all stages.
_FIRST, _LAST, _BETWEEN = ("embedding",), ("head", "sampling"), ("stage to stage", "host")


def step_items(setting: Setting, layouts: Layouts, work: Work) -> list[CostItem]:
    """Return the cost items of a step whose rows pass through all stages. Items cover all layers; their seconds add up.

    `work` is the work of one stage at a time. With several stages, this is one micro-batch. If groups of ranks share
    neither requests nor the FFN, each group steps alone, with its share of the requests.
    """
    layouts, work = _alone(layouts, work)
    if setting.drafts.tokens:
        drafts = work.decode_rows * setting.drafts.tokens
        work = work._replace(decode_rows=work.decode_rows + drafts, sampled_rows=work.sampled_rows + drafts)
    num_layers = layouts.stage_layers(setting.model.num_layers) * layouts.pp
    layers = [_norms(setting, layouts, work).times(num_layers)]
    for mixers, counts in setting.mixers_of_stages(layouts):
        mixer_items = [item for mixer in mixers for item in _mixer_items(setting, layouts, mixer, work)]
        layers += [item.times(counts * layouts.pp) for item in mixer_items]
    for ffns, counts in _ffns_of_layers(setting, num_layers):
        layers += [
            item.times(counts) for ffn in ffns for item in ffn_items(setting, layouts, ffn.spec, ffn.weights, work)
        ]
    ends = [_embedding(setting, layouts, work), _head(setting, layouts, work)]
    between = [_stages(setting, layouts, work), _host(setting, layouts)]
    return _merged([*ends[0], *layers, *between, *ends[1]])


def cycle_items(
    setting: Setting, layouts: Layouts, work: Work, micro_batches: float | Array | None = None
) -> list[CostItem]:
    """Return the cost items of one cycle: from when a step enters the first stage until it may enter it again.

    The cycle has `micro_batches` steps of this work (None: one for each stage). Every stage computes each of them once,
    so the slowest stage, which is mostly the one with the head, limits the cycle. The time that the other stages wait
    for it is a separate item.
    """
    items = step_items(setting, layouts, work)
    wait_s = _wait_seconds(setting, layouts, items, layouts.pp if micro_batches is None else micro_batches)
    return [*items, sends(WAIT, wait_s, layouts.zeros, layouts.zeros)]


def _wait_seconds(setting: Setting, layouts: Layouts, items: Sequence[CostItem], micro_batches: float | Array) -> Array:
    """Return the time that stages wait for the slowest one.

    A stage computes its layers, its host's work and its sends. The first and the last stage also compute the embedding
    or the head. m micro-batches take m times the time of the slowest stage, but at least the time that one micro-batch
    takes through all stages.
    """
    num_layers = setting.model.num_layers
    first_s, last_s = (total_seconds(item for item in items if item.name in end) for end in (_FIRST, _LAST))
    stage_s = (total_seconds(items) - first_s - last_s) / layouts.pp
    layers_s = stage_s - total_seconds(item for item in items if item.name in _BETWEEN) / layouts.pp
    most = layouts.stage_layers(num_layers)
    spare_s = layers_s * (1 - layouts.last_stage_layers(num_layers) / most)
    slowest_s = stage_s + np.maximum(first_s, last_s - spare_s)
    waited: Array = np.maximum(micro_batches * slowest_s - total_seconds(items), 0.0)
    return np.where(layouts.pp > 1, waited, 0.0)


def _alone(layouts: Layouts, work: Work) -> tuple[Layouts, Work]:
    """Return a single group and its rows, for layouts whose groups share nothing. A chunk belongs to one group."""
    alone = layouts.grouped & (layouts.ffn_replicas > 1)
    if not alone.any():
        return layouts, work

    def group_rows(rows: Number) -> Array:
        rows = rows + layouts.zeros
        divided: Array = np.where(alone, np.ceil(rows / layouts.dp), rows)
        return divided

    ones, share = layouts.ones, np.where(alone, 1 / layouts.dp, 1.0)  # KV counts as a multiple of the fullest rank's
    by_itself = replace(
        layouts,
        dp=np.where(alone, ones, layouts.dp),
        ffn_replicas=np.where(alone, ones, layouts.ffn_replicas),
    )
    return by_itself, work._replace(
        decode_rows=group_rows(work.decode_rows),
        decode_kv_tokens=work.decode_kv_tokens * share,
        chunk_kv_tokens=work.chunk_kv_tokens * share,
        chunk_pairs=work.chunk_pairs * share,
        sampled_rows=group_rows(work.sampled_rows),
    )


def step_seconds(setting: Setting, layouts: Layouts, work: Work) -> Array:
    return total_seconds(step_items(setting, layouts, work))


def cycle_seconds(setting: Setting, layouts: Layouts, work: Work) -> Array:
    return total_seconds(cycle_items(setting, layouts, work))


def decode_items(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> list[CostItem]:
    """Return the cost items of a step in which each of `batch` requests of `context` tokens decodes.

    With PP stages, the batch runs in PP micro-batches, so that every stage always has one. A token takes as long as its
    micro-batch takes through all stages, including waits for the slowest stage.
    """
    work = layouts.decode(np.ceil(batch / layouts.pp), context)
    return cycle_items(setting, layouts, work, np.minimum(batch, layouts.pp))


def decode_seconds(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    return total_seconds(decode_items(setting, layouts, batch, context))


def token_seconds(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Return the average time per token of a request. A step gives `accepted_tokens` tokens."""
    return decode_seconds(setting, layouts, batch, context) / setting.drafts.accepted


def _mixer_items(setting: Setting, layouts: Layouts, mixer: LayerPart[Mixer], work: Work) -> list[CostItem]:
    """Return the cost items of one layer's mixer."""
    if isinstance(mixer.spec, LinearAttention):
        return linear_items(setting, layouts, mixer.spec, mixer.weights, work)
    return attention_items(setting, layouts, mixer.spec, mixer.weights, work)


def _ffns_of_layers(setting: Setting, num_layers: Array) -> Iterator[tuple[tuple[LayerPart[FFN], ...], Array]]:
    """Yield the FFNs of `num_layers` layers, and how many layers have them.

    If all stages were as large as the largest one, there would be more layers than in the model. Additional layers
    count as the first kind, which has experts if any kind has.
    """
    counts = Counter(layer.ffns for layer in setting.stored.layers)
    first, *others = sorted(counts, key=lambda ffns: not any(isinstance(ffn.spec, MoE) for ffn in ffns))
    remaining, others_counts = num_layers, []
    for ffns in others:
        others_counts.append((ffns, np.minimum(remaining, counts[ffns])))
        remaining = remaining - others_counts[-1][1]
    yield first, remaining
    yield from others_counts


def _norms(setting: Setting, layouts: Layouts, work: Work) -> CostItem:
    count = setting.norms_per_layer
    moved_bytes = (
        count * 3 * layouts.of_rank(work, setting.request_rows).rows * setting.model.hidden_size * ACTIVATION_BYTES
    )
    return kernels("norms", setting, layouts, hbm_bytes=moved_bytes, count=count)


def _embedding(setting: Setting, layouts: Layouts, work: Work) -> list[CostItem]:
    hidden_bytes = work.rows * setting.model.hidden_size * ACTIVATION_BYTES + layouts.zeros
    summed = collectives.all_reduce(setting.system, RankGroups(layouts.ffn_ranks, layouts.ones), hidden_bytes)
    return [
        kernels("embedding", setting, layouts, hbm_bytes=hidden_bytes / layouts.ffn_ranks),
        sends("embedding", summed.seconds, summed.net_bytes, summed.fixed_s),
    ]


def _stages(setting: Setting, layouts: Layouts, work: Work) -> CostItem:
    """Return the item of sending a group's hidden states from stage to stage, and the token back to the first."""
    rows = layouts.of_rank(work, setting.request_rows).rows
    hidden_bytes = rows * setting.model.hidden_size * ACTIVATION_BYTES + layouts.zeros
    sent = collectives.send(setting.system, layouts.num_ranks, hidden_bytes)
    item = sends("stage to stage", sent.seconds, sent.net_bytes, sent.fixed_s)
    return item.times(layouts.pp).where(layouts.pp > 1)


def _head(setting: Setting, layouts: Layouts, work: Work) -> list[CostItem]:
    """Return the items of the LM head, and of gathering each rank's candidates on the rank that samples."""
    system, zeros = setting.system, layouts.zeros
    logit_bytes = work.sampled_rows * setting.model.vocabulary.size * LOGIT_BYTES / layouts.ffn_ranks
    row_bytes = CANDIDATES * CANDIDATE_BYTES + CANDIDATES_SUM_BYTES
    candidate_bytes = work.sampled_rows * row_bytes * layouts.ffn_ranks
    gathered = collectives.all_gather(system, RankGroups(layouts.ffn_ranks, zeros + 1), candidate_bytes)
    wanted, amounts = logit_bytes > 0, weights.all_of(setting, layouts, setting.stored.head)
    return [
        product("head", setting, layouts, amounts, work.sampled_rows).where(wanted),
        sends("sampling", gathered.seconds, gathered.net_bytes, gathered.fixed_s).where(wanted),
        kernels("sampling", setting, layouts, hbm_bytes=logit_bytes, count=2.0).where(wanted),
    ]


def _host(setting: Setting, layouts: Layouts) -> CostItem:
    """Return the item of the hosts of all stages."""
    host_s = layouts.pp * setting.system.fixed.step_s
    return sends("host", host_s, layouts.zeros, host_s)


def _merged(items: Sequence[CostItem]) -> list[CostItem]:
    """Merge items of the same name."""
    by_name: dict[str, list[CostItem]] = {}
    for item in items:
        by_name.setdefault(item.name, []).append(item)
    return [merged(name, same) for name, same in by_name.items()]
