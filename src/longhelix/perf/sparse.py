"""Attention to chosen tokens (DeepSeek sparse attention): the cost of the choice, and the work after it."""

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import CostItem, kernels, product, sends
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.stored_layers import StoredWeights
from longhelix.scheduler.work import Work
from longhelix.spec import Indexer
from longhelix.spec.layer import Attention

_SCORE_BYTES = 4.0
_CANDIDATE_BYTES = 8.0  # a score and a token's position


def index_items(
    setting: Setting, layouts: Layouts, attention: Attention, stored: StoredWeights, rank_work: Work
) -> list[CostItem]:
    """Return the cost items of one layer's choice, from a rank's work before it.

    Every rank scores the keys that it keeps with all heads of the indexer, and selects the best keys. KVP ranks that
    share a request gather the best keys of all ranks with their scores, and choose again (vLLM pull request 46076).
    """
    amounts, indexer = weights.indexer(setting, layouts, stored), attention.visibility.indexer
    assert indexer is not None
    decode_pairs = rank_work.decode_kv_tokens * setting.request_rows
    pairs, keys = decode_pairs + rank_work.chunk_pairs, rank_work.decode_kv_tokens + rank_work.chunk_kv_tokens
    candidates = _at_most(indexer.chosen_tokens, rank_work.decode_rows, decode_pairs)
    candidates = candidates + _at_most(indexer.chosen_tokens, rank_work.chunk_rows, rank_work.chunk_pairs)
    groups = RankGroups(layouts.kvp, layouts.tpa)
    gathered_bytes = groups.size * candidates * _CANDIDATE_BYTES
    gathered = collectives.all_gather(setting.system, groups, gathered_bytes)
    return [
        product("indexer projections", setting, layouts, amounts, rank_work.rows, count=2.0),
        kernels(
            "indexer",
            setting,
            layouts,
            flops=pairs * indexer.pair_flops,
            hbm_bytes=keys * indexer.key_bytes + pairs * _SCORE_BYTES,
            dtype=setting.indexes_in,
            compute_efficiency=setting.system.arithmetic.attention_efficiency,
        ),
        kernels("top-k", setting, layouts, hbm_bytes=pairs * _SCORE_BYTES),
        sends("candidates", gathered.seconds, gathered.net_bytes, gathered.fixed_s),
        kernels("top-k of all", setting, layouts, hbm_bytes=gathered_bytes).where(layouts.exchanges),
    ]


def chosen(setting: Setting, layouts: Layouts, indexer: Indexer, rank_work: Work) -> Work:
    """Return a rank's attention work after the choice. Every row reads its own chosen tokens.

    A rank has its share of the chosen tokens, or all of them if `evenly_chosen` is False. The result is an upper limit
    if some requests are shorter than the number of chosen tokens and others are longer.
    """
    share = indexer.chosen_tokens / (layouts.kvp if setting.evenly_chosen else 1.0)
    pairs = _at_most(share, rank_work.chunk_rows, rank_work.chunk_pairs)
    return rank_work._replace(
        decode_kv_tokens=_at_most(share, rank_work.decode_rows, rank_work.decode_kv_tokens * setting.request_rows),
        chunk_kv_tokens=pairs,
        chunk_pairs=pairs,
    )


def _at_most(tokens: float | Array, rows: float | Array, pairs: float | Array) -> Array:
    """Return the pairs of rows and keys, limited to `tokens` keys per row."""
    limited: Array = np.minimum(pairs, rows * tokens)
    return limited
