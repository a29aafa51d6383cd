"""Log-probabilities of tokens that are given: each rank finds the candidates of its part of the vocabulary, and the
logits of those given tokens that are in it; the first rank that is asked makes entries of all parts."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.kernels.candidates import Weighing, candidates
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import choice
from longhelix.scheduler.step import PromptLogprobs

_ROWS = 256  # of which a rank has logits at a time


class Scoring:
    """One rank's share in it. All ranks of a copy of the vocabulary come to the same collectives."""

    def __init__(self, mesh: Mesh, vocab_size: int, device: torch.device) -> None:
        self._ffn, self._device = mesh.ffn, device
        self._own = mesh.layout.vocabulary(vocab_size, mesh.rank)
        self._first_ids = [mesh.layout.vocabulary(vocab_size, rank).start for rank in mesh.ffn.ranks]

    def __call__(
        self,
        sequence_id: int,
        hidden_TH: Tensor,
        targets_T: np.ndarray,
        count: int,
        logits: Callable[[Tensor], Tensor],
        together: RankGroup,
    ) -> PromptLogprobs | None:
        """After each row natural-log probabilities of the `count` likeliest tokens and of the target, likeliest first.
        The first of the ranks that sample together returns them.

        targets_T: token ids, int64. logits: of rows, logits_Tv, float32.
        """
        found: list[dict[int, float]] = []
        errors: list[str] = []
        for start in range(0, len(hidden_TH), _ROWS):
            rows = slice(start, start + _ROWS)
            gathered = self._gather(logits(hidden_TH[rows]), targets_T[rows], count)
            if together.index != 0:
                continue
            try:  # an error concerns this request alone, and the ranks that are beside go on to the next rows
                found += self._entries(gathered, targets_T[rows], count)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        if together.index != 0:
            return None
        return PromptLogprobs(sequence_id, () if errors else tuple(found), errors[0] if errors else "")

    def _gather(self, logits_Sv: Tensor, targets_S: np.ndarray, count: int) -> Sequence[Tensor]:
        """Of each part of the vocabulary what entries are made of, on the first rank of its copy: candidates, as they
        lie in memory, and behind them the targets' logits."""
        memory_X = candidates(logits_Sv, _as_it_is(len(logits_Sv)), _kept(count)).memory()
        return self._ffn.gather(torch.cat((memory_X, self._given(logits_Sv, targets_S).view(torch.int64))))

    def _given(self, logits_Sv: Tensor, targets_S: np.ndarray) -> Tensor:
        """The targets' logits, float64; -inf for those that another rank has."""
        local_S = torch.from_numpy(targets_S - self._own.start).to(self._device)
        inside_S = (local_S >= 0) & (local_S < len(self._own))
        given_S = torch.full((len(local_S),), -torch.inf, dtype=torch.float64, device=self._device)
        given_S[inside_S] = logits_Sv[inside_S, local_S[inside_S]].double()
        return given_S

    def _entries(self, gathered: Sequence[Tensor], targets_S: np.ndarray, count: int) -> list[dict[int, float]]:
        """Raises ValueError if logits leave no token a probability."""
        rows, words_NX = len(targets_S), [words_X.cpu().numpy() for words_X in gathered]
        parts = [
            choice.VocabularyShard.of(words_X[:-rows], rows, _kept(count), first_id)
            for words_X, first_id in zip(words_NX, self._first_ids, strict=True)
        ]
        values_SK, ids_SK, sums_S = choice.merge(parts, np.ones(rows, np.float32))
        largest_S = values_SK[:, 0].astype(np.float64)
        if not np.isfinite(largest_S).all():
            largest = largest_S[~np.isfinite(largest_S)][0]
            raise ValueError(f"no token has a probability, because the largest logit is {largest}")
        totals_S = largest_S + np.log(sums_S)
        given_S = np.max([words_X[-rows:].view(np.float64) for words_X in words_NX], axis=0) - totals_S
        best_SK = values_SK[:, :count] - totals_S[:, None]
        return [
            {token_id: value for token_id, value in zip(ids, best, strict=True) if token_id >= 0} | {target: given}
            for ids, best, target, given in zip(
                ids_SK[:, :count].tolist(), best_SK.tolist(), targets_S.tolist(), given_S.tolist(), strict=True
            )
        ]


def _kept(count: int) -> int:
    """How many candidates: the largest is what sums are relative to."""
    return max(count, 1)


def _as_it_is(rows: int) -> Weighing:
    """No penalty, temperature 1."""
    return Weighing([None] * rows, torch.ones(rows), torch.ones(rows))
