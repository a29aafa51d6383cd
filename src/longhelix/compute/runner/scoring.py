"""Log-probabilities of prompt tokens.

Each rank finds the candidates in its part of the vocabulary, and the logits of the target tokens in it. The first rank
combines all parts.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.kernels.candidates import Weighing, candidates
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import choice
from longhelix.scheduler.step import PromptLogprobs

_ROWS = 256  # logits of this many rows are in memory at a time


class Scoring:
    """Scores rows, together with the other ranks of a copy of the vocabulary."""

    def __init__(self, mesh: Mesh, vocab_size: int, device: torch.device) -> None:
        self._ffn, self._device = mesh.ffn, device
        self._vocabulary = mesh.layout.vocabulary(vocab_size, mesh.rank)
        self._first_ids = [mesh.layout.vocabulary(vocab_size, rank).start for rank in mesh.ffn.ranks]

    def __call__(
        self,
        sequence_id: int,
        hidden_TH: Tensor,
        targets_T: np.ndarray,
        count: int,
        logits: Callable[[Tensor], Tensor],
        group: RankGroup,
    ) -> PromptLogprobs | None:
        """Compute natural-log probabilities of the `count` likeliest tokens and of the target, after each row.

        Args:
            targets_T: Token ids. int64.
            logits: Returns the logits of rows, logits_Tv. float32.
            group: The ranks that sample together.

        Returns:
            The log-probabilities, likeliest first, on the first rank of `group`. None on other ranks.
        """
        entries: list[dict[int, float]] = []
        errors: list[str] = []
        for start in range(0, len(hidden_TH), _ROWS):
            rows = slice(start, start + _ROWS)
            gathered = self._gather(logits(hidden_TH[rows]), targets_T[rows], count)
            if group.index != 0:
                continue
            try:  # an error ends only this request, and other ranks continue with the next rows
                entries += self._entries(gathered, targets_T[rows], count)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        if group.index != 0:
            return None
        return PromptLogprobs(sequence_id, () if errors else tuple(entries), errors[0] if errors else "")

    def _gather(self, logits_Sv: Tensor, targets_S: np.ndarray, count: int) -> Sequence[Tensor]:
        """Gather the memory of candidates, followed by the targets' logits, from each part of the vocabulary.

        Only the first rank of a copy of the vocabulary gets the result.
        """
        memory_X = candidates(logits_Sv, _unweighted(len(logits_Sv)), _num_candidates(count)).memory()
        return self._ffn.gather(torch.cat((memory_X, self._target_logits(logits_Sv, targets_S).view(torch.int64))))

    def _target_logits(self, logits_Sv: Tensor, targets_S: np.ndarray) -> Tensor:
        """Return the targets' logits (float64), -inf for targets of other ranks."""
        local_S = torch.from_numpy(targets_S - self._vocabulary.start).to(self._device)
        is_local_S = (local_S >= 0) & (local_S < len(self._vocabulary))
        target_logits_S = torch.full((len(local_S),), -torch.inf, dtype=torch.float64, device=self._device)
        target_logits_S[is_local_S] = logits_Sv[is_local_S, local_S[is_local_S]].double()
        return target_logits_S

    def _entries(self, gathered: Sequence[Tensor], targets_S: np.ndarray, count: int) -> list[dict[int, float]]:
        """Compute the log-probabilities of each row. Raises ValueError if no token has a probability."""
        rows, words_NX = len(targets_S), [words_X.cpu().numpy() for words_X in gathered]
        shards = [
            choice.VocabularyShard.of(words_X[:-rows], rows, _num_candidates(count), first_id)
            for words_X, first_id in zip(words_NX, self._first_ids, strict=True)
        ]
        values_SK, ids_SK, sums_S = choice.merge(shards, np.ones(rows, np.float32))
        largest_S = values_SK[:, 0].astype(np.float64)
        if not np.isfinite(largest_S).all():
            largest = largest_S[~np.isfinite(largest_S)][0]
            raise ValueError(f"no token has a probability, because the largest logit is {largest}")
        totals_S = largest_S + np.log(sums_S)
        target_logprobs_S = np.max([words_X[-rows:].view(np.float64) for words_X in words_NX], axis=0) - totals_S
        best_SK = values_SK[:, :count] - totals_S[:, None]
        return [
            {token_id: value for token_id, value in zip(ids, best, strict=True) if token_id >= 0}
            | {target: target_logprob}
            for ids, best, target, target_logprob in zip(
                ids_SK[:, :count].tolist(),
                best_SK.tolist(),
                targets_S.tolist(),
                target_logprobs_S.tolist(),
                strict=True,
            )
        ]


def _num_candidates(count: int) -> int:
    """Return the number of candidates. At least one, because sums are relative to the largest."""
    return max(count, 1)


def _unweighted(rows: int) -> Weighing:
    """Return weights without penalty, at temperature 1."""
    return Weighing([None] * rows, torch.ones(rows), torch.ones(rows))
