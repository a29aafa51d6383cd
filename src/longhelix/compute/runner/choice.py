"""Chooses the next tokens of many rows at once, from candidates only.

Chooses the same token as `compute/runner/sampler.py` does from the whole row, or none: if the choice depends on tokens
that are not candidates, or is so close that it depends on the rounding of sums.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.runner import sampler
from longhelix.scheduler.request import SamplingParams

# Share of all probability. Errors of sums of weights, which are added in float32, are smaller.
_MARGIN = 1e-5


class VocabularyShard(NamedTuple):
    """Candidates of `kernels.candidates` in a part of the vocabulary or all of it, with ids of the whole vocabulary."""

    values_SK: np.ndarray  # float32
    ids_SK: np.ndarray  # int64
    sums_S: np.ndarray  # float64

    @classmethod
    def of(cls, words_X: np.ndarray, rows: int, count: int, first_id: int) -> Self:
        """Read `Candidates.memory` with `count` candidates per row, for a part that begins at `first_id`."""
        ids = rows * count
        ids_SK = words_X[:ids].reshape(rows, count)
        if first_id:
            ids_SK = np.where(ids_SK < 0, ids_SK, ids_SK + first_id)
        values_SK = words_X[ids + rows :].view(np.float32)[:ids].reshape(rows, count)
        return cls(values_SK, ids_SK, words_X[ids : ids + rows].view(np.float64))


def merge(shards: Sequence[VocabularyShard], temperatures_S: np.ndarray) -> VocabularyShard:
    """Merge the candidates of all parts of the vocabulary, in its order."""
    if len(shards) == 1:
        return shards[0]
    values_SX = np.concatenate([shard.values_SK for shard in shards], axis=1)
    ids_SX = np.concatenate([shard.ids_SK for shard in shards], axis=1)
    order_SX = np.where(ids_SX < 0, np.inf, -values_SX).argsort(axis=1, kind="stable")
    order_SK = order_SX[:, : shards[0].ids_SK.shape[1]]
    values_SK, ids_SK = np.take_along_axis(values_SX, order_SK, axis=1), np.take_along_axis(ids_SX, order_SK, axis=1)
    values_SK[np.isnan(values_SX).any(axis=1), 0] = np.nan
    largest_NS = np.array([shard.values_SK[:, 0] for shard in shards])
    with np.errstate(all="ignore"):  # of temperature 0, and of logits that are not finite
        factors_NS = np.exp((largest_NS - largest_NS.max(axis=0)) / temperatures_S.astype(np.float64))
        sums_S = (np.array([shard.sums_S for shard in shards]) * factors_NS).sum(axis=0)
    return VocabularyShard(values_SK, ids_SK, sums_S)


@np.errstate(all="ignore")  # rows whose largest logit is not finite stay undecided
def choose(
    candidates: VocabularyShard, size: int, params: Sequence[SamplingParams], keys: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Choose the tokens of S rows.

    Args:
        candidates: Candidates in the whole vocabulary.
        size: Size of the vocabulary.
        params: Sampling parameters of each row.
        keys: Seed and position of each row's draw.

    Returns:
        Token ids, or UNDECIDED. int64.
    """
    values_SK, ids_SK, sums_S = candidates
    rows_S, rank_K = np.arange(len(ids_SK)), np.arange(ids_SK.shape[1])
    temperatures_S = np.array([each.temperature for each in params], np.float32)
    greedy_S = temperatures_S == 0
    scaled_SK = (values_SK - values_SK[:, :1]) / np.where(greedy_S, np.float32(1), temperatures_S)[:, None]
    # If some candidates are not finite, no other token has a probability.
    finite_S = np.isfinite(values_SK).sum(axis=1)
    all_S = finite_S < ids_SK.shape[1]
    ids_SK, known_S = _in_order(scaled_SK, ids_SK, np.where(all_S, finite_S, (ids_SK >= 0).sum(axis=1)), all_S, size)

    weights_SK = np.where(rank_K < known_S[:, None], np.exp(scaled_SK.astype(np.float64)), 0.0)
    cumulative_SK = weights_SK.cumsum(axis=1)
    top_k_S = np.array([each.top_k or size for each in params]).clip(max=np.where(all_S, known_S, size))
    top_p_S = np.array([each.top_p for each in params])
    min_p_S = np.array([each.min_p for each in params])

    # After each filter: number of remaining candidates, whether no other token remains, and whether that is certain.
    kept_S = np.minimum(top_k_S, known_S)
    whole_S = top_k_S <= known_S
    decided_S = (known_S > 0) & (whole_S | (top_k_S == size))
    totals_S = np.where(whole_S, cumulative_SK[rows_S, kept_S - 1], sums_S)
    shares_SK = cumulative_SK / totals_S[:, None]
    nucleus_S, inside_SK = top_p_S < 1, rank_K < kept_S[:, None]
    decided_S &= ~(nucleus_S & (inside_SK & (abs(shares_SK - top_p_S[:, None]) < _MARGIN)).any(axis=1))
    whole_S |= nucleus_S & (shares_SK[rows_S, kept_S - 1] >= top_p_S)
    reached_S = 1 + (inside_SK & (shares_SK < top_p_S[:, None])).sum(axis=1)
    kept_S = np.where(nucleus_S, np.minimum(reached_S, kept_S), kept_S)

    likely_S, inside_SK = min_p_S > 0, rank_K < kept_S[:, None]
    near_SK = abs(weights_SK - min_p_S[:, None]) < _MARGIN * min_p_S[:, None]
    decided_S &= ~(likely_S & (inside_SK & near_SK).any(axis=1))
    whole_S |= likely_S & (weights_SK[rows_S, kept_S - 1] < min_p_S)
    above_min_p_S = (inside_SK & (weights_SK >= min_p_S[:, None])).sum(axis=1)
    kept_S = np.where(likely_S, np.maximum(above_min_p_S, 1), kept_S)
    decided_S &= whole_S | ~(nucleus_S | likely_S)

    totals_S = np.where(whole_S, cumulative_SK[rows_S, kept_S - 1], sums_S)
    drawn_S = np.array(
        [0.0 if each.temperature == 0 else sampler.uniform(*key) for each, key in zip(params, keys, strict=True)]
    )
    drawn_S *= totals_S
    # If no other token remains, the last candidate gets all draws above the others.
    between_SK = rank_K < (kept_S - whole_S)[:, None]
    decided_S &= ~(between_SK & (abs(cumulative_SK - drawn_S[:, None]) < _MARGIN * totals_S[:, None])).any(axis=1)
    chosen_S = (between_SK & (cumulative_SK <= drawn_S[:, None])).sum(axis=1)
    decided_S &= chosen_S < kept_S
    chosen_S = np.where(greedy_S, 0, np.minimum(chosen_S, kept_S - 1))
    decided_S = np.isfinite(values_SK[:, 0]) & (greedy_S | (decided_S & np.isfinite(sums_S)))
    return np.where(decided_S, ids_SK[rows_S, chosen_S], UNDECIDED)


def _in_order(
    scaled_SK: np.ndarray, ids_SK: np.ndarray, known_S: np.ndarray, all_S: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sort ids of equal scaled logits, lowest first, and count the ids that come before all other tokens.

    Different logits may be equal once they are scaled, and another token may be equal to the last candidate.

    Args:
        all_S: Whether no other token has a probability.
    """
    known_SK = np.arange(ids_SK.shape[1]) < known_S[:, None]
    last_S1 = scaled_SK[np.arange(len(known_S)), known_S - 1][:, None]
    before_S = (known_SK & (scaled_SK > last_S1)).sum(axis=1)
    ids_SK = np.where(known_SK, ids_SK, size)
    equal_SK = scaled_SK[:, 1:] == scaled_SK[:, :-1]
    if (equal_SK & (ids_SK[:, 1:] < ids_SK[:, :-1])).any():
        ids_SK = np.take_along_axis(ids_SK, np.lexsort((ids_SK, -scaled_SK), axis=1), axis=1)
    return ids_SK, np.where(all_S | (known_S >= size), known_S, before_S)
