"""Attention to chosen tokens (DeepSeek sparse attention): what the choice costs, and what is left to attend to."""

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import CostItem, kernels, product, sends
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.scheduler.work import Work
from longhelix.spec import Indexer
from longhelix.spec.layer import Attention

_SCORE_BYTES = 4.0
_CANDIDATE_BYTES = 8.0  # a score and a token's position


def index_items(setting: Setting, layouts: Layouts, attention: Attention, own: Work) -> list[CostItem]:
    """The cost items of one layer's choice, from a rank's work before it.

    Every rank scores the keys that it keeps with all heads of the indexer, and finds the best of them. Where KVP ranks
    share a request, they gather the best of all with their scores, and choose again (vLLM pull request 46076).
    """
    elements, indexer = weights.indexer(setting, layouts, attention), attention.visibility.indexer
    assert indexer is not None
    decode_pairs = own.decode_kv_tokens * setting.request_rows
    pairs, keys = decode_pairs + own.chunk_pairs, own.decode_kv_tokens + own.chunk_kv_tokens
    candidates = _at_most(indexer.chosen_tokens, own.decode_rows, decode_pairs)
    candidates = candidates + _at_most(indexer.chosen_tokens, own.chunk_rows, own.chunk_pairs)
    groups = RankGroups(layouts.kvp, layouts.tpa)
    gathered_bytes = groups.size * candidates * _CANDIDATE_BYTES
    gathered = collectives.all_gather(setting.system, groups, gathered_bytes)
    return [
        product("indexer projections", setting, layouts, elements, own.rows, count=2.0),
        kernels(
            "indexer",
            setting,
            layouts,
            flops=pairs * indexer.pair_flops,
            hbm_bytes=keys * indexer.key_bytes + pairs * _SCORE_BYTES,
            dtype=setting.indexes_in,
            compute_efficiency=setting.system.attention_efficiency,
        ),
        kernels("top-k", setting, layouts, hbm_bytes=pairs * _SCORE_BYTES),
        sends("candidates", gathered.seconds, gathered.net_bytes, gathered.fixed_s),
        kernels("top-k of all", setting, layouts, hbm_bytes=gathered_bytes).where(layouts.exchanges),
    ]


def chosen(setting: Setting, layouts: Layouts, indexer: Indexer, own: Work) -> Work:
    """What a rank attends to after the choice, of which every row reads its own: its share of the chosen tokens, or all
    of them where it may have these alone.

    Requests count together: where some are shorter than what is chosen, and others longer, this is more than they read.
    """
    share = indexer.chosen_tokens / (layouts.kvp if setting.evenly_chosen else 1.0)
    pairs = _at_most(share, own.chunk_rows, own.chunk_pairs)
    return own._replace(
        decode_kv_tokens=_at_most(share, own.decode_rows, own.decode_kv_tokens * setting.request_rows),
        chunk_kv_tokens=pairs,
        chunk_pairs=pairs,
    )


def _at_most(tokens: float | Array, rows: float | Array, pairs: float | Array) -> Array:
    """Pairs of rows with keys, at most so many keys of each."""
    found: Array = np.minimum(pairs, rows * tokens)
    return found
