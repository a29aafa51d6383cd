"""Sampling over ranks: every rank finds the candidates in its part of the vocabulary, the stage's first rank chooses
among all candidates, and broadcasts the tokens.

In a few rows, the candidates do not determine the token. The ranks gather these rows completely.
"""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.kernels.candidates import Candidates, Weighing, candidates, penalise, take_largest
from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import choice, sampler
from longhelix.compute.runner.sequence_state import LAST_TOKEN, LENGTH, SequenceState
from longhelix.compute.runner.verification import DraftRow
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import SampledToken
from longhelix.scheduler.work import CANDIDATES
from longhelix.spans import UNTRACED, Spans

SampledRow = SequenceState | DraftRow  # the last row of a sequence, or a row of its draft


class _Settings:
    """Sampling parameters and candidate memory of some rows. Reused while the rows belong to the same sequences.

    Attributes:
        logprob_rows: Rows whose requests return log-probabilities.
        candidates: The candidates in this rank's part of the vocabulary.
        memory_X: Memory of the candidates. int64.
        tokens_S: The chosen tokens. int64, on the CPU.
    """

    def __init__(self, rows: tuple[SampledRow, ...], device: torch.device) -> None:
        self.rows = rows
        self.numbers = rows[0].numbers
        self.lines_S = np.array([row.line for row in rows], np.int64)
        self.ids = [row.new.id for row in rows]
        self.seeds = [row.new.seed for row in rows]
        self.params = [row.new.sampling for row in rows]
        self.weighing = _weighing(rows)
        self.greedy = not self.weighing.temperatures_S.any()
        self.count = 1 if self.greedy else CANDIDATES
        self._adjusted = [(at, row.line, row.adjustments) for at, row in enumerate(rows) if row.adjustments is not None]
        self.logprob_rows = [row for row, request in enumerate(self.params) if request.logprobs is not None]
        self.candidates = Candidates.new(len(rows), self.count, device)
        self.memory_X = self.candidates.memory()
        self.tokens_S = torch.empty(len(rows), dtype=torch.int64)

    def adjust(self, logits_Sv: Tensor) -> dict[int, str]:
        """Apply the adjustments that requests have asked for, in place. Returns errors by row."""
        errors: dict[int, str] = {}
        for row, line, adjustments in self._adjusted:
            error = adjustments.adjust(logits_Sv[row], self.numbers.values.item(line, LENGTH))
            if error:
                errors[row] = error
        return errors

    def draw_keys(self) -> list[tuple[int, int]]:
        """Return the key of each row's random draw: seed and position."""
        lengths = self.numbers.values[self.lines_S, LENGTH].tolist()
        return list(zip(self.seeds, lengths, strict=True))

    def shard(self, memory_X: Tensor, first_id: int) -> choice.VocabularyShard:
        """Read candidates from memory like `memory_X`, for a part of the vocabulary that begins at `first_id`."""
        return choice.VocabularyShard.of(memory_X.numpy(), len(self.ids), self.count, first_id)


class Sampling:
    """Chooses tokens together with the other ranks of the stage."""

    def __init__(self, mesh: Mesh, vocab_size: int, device: torch.device, spans: Spans = UNTRACED) -> None:
        self._ffn, self._device = mesh.ffn, device
        self._size, self._spans = vocab_size, spans
        # Two entries per microbatch: decodes, and steps with last chunks. Rows of drafts are new in every step.
        self._settings = lru_cache(2 * mesh.layout.pp)(partial(_Settings, device=device))
        self._vocabulary_ranges = [mesh.layout.vocabulary(vocab_size, rank) for rank in mesh.ffn.ranks]
        self._first_ids = [part.start for part in self._vocabulary_ranges]

    def __call__(self, logits_Sv: Tensor, rows: tuple[SampledRow, ...], group: RankGroup) -> tuple[SampledToken, ...]:
        """Choose a token after each row, and set the rows' `last_token` on all ranks.

        An error in one row ends only the sequence of that row.

        Args:
            logits_Sv: Logits over this rank's part of the vocabulary. float32. Overwritten.
            rows: The S rows.
            group: The ranks that sample together. Its first rank is also the first of a copy of the vocabulary.

        Returns:
            Tokens and log-probabilities, on the first rank of `group`. Other ranks return nothing.
        """
        has_drafts = any(isinstance(row, DraftRow) for row in rows)
        settings = _Settings(rows, self._device) if has_drafts else self._settings(rows)
        logits_AV = self.gather(logits_Sv[settings.logprob_rows]) if settings.logprob_rows else ()
        refused = settings.adjust(logits_Sv)
        self._choose(logits_Sv, settings, group)
        self._broadcast(settings.tokens_S, group)
        token_ids, errors = settings.tokens_S.tolist(), {}
        if UNDECIDED in token_ids:
            errors = self._choose_from_whole_rows(logits_Sv, settings, token_ids, group) | refused
        settings.numbers.values[settings.lines_S, LAST_TOKEN] = token_ids
        if group.index != 0:
            return ()
        sampled = tuple(map(SampledToken, settings.ids, token_ids))
        if not (errors or settings.logprob_rows):
            return sampled
        logits_of = dict(zip(settings.logprob_rows, logits_AV, strict=True))
        return tuple(
            _with_logprobs(token, params, errors.get(row, ""), logits_of.get(row))
            for row, (token, params) in enumerate(zip(sampled, settings.params, strict=True))
        )

    def gather(self, logits_Sv: Tensor) -> Tensor:
        """Return logits over the whole vocabulary on the first rank of each copy of it, an empty tensor elsewhere."""
        if self._ffn.size == 1:
            return logits_Sv
        # Uneven shares are padded to the largest, because a gather wants equal shapes.
        largest_size = max(map(len, self._vocabulary_ranges))
        shards = self._ffn.gather(torch.nn.functional.pad(logits_Sv, (0, largest_size - logits_Sv.shape[1])))
        trimmed = [shard_Sv[:, : len(part)] for shard_Sv, part in zip(shards, self._vocabulary_ranges, strict=False)]
        return torch.cat(trimmed, dim=1) if trimmed else logits_Sv.new_empty(len(logits_Sv), 0)

    def _choose(self, logits_Sv: Tensor, settings: _Settings, group: RankGroup) -> None:
        """Choose tokens on the first rank. Rows that the candidates do not determine get UNDECIDED."""
        span = self._spans.begin("candidates")
        candidates(logits_Sv, settings.weighing, settings.count, settings.candidates)
        self._spans.end(span)
        gathered = [memory_X.cpu() for memory_X in self._ffn.gather(settings.memory_X)]
        if group.index != 0:
            return
        if settings.greedy:
            take_largest(gathered, self._first_ids, settings.tokens_S)
            return
        shards = list(map(settings.shard, gathered, self._first_ids))
        merged = choice.merge(shards, settings.weighing.temperatures_S.numpy())
        settings.tokens_S.numpy()[:] = choice.choose(merged, self._size, settings.params, settings.draw_keys())

    def _choose_from_whole_rows(
        self, logits_Sv: Tensor, settings: _Settings, token_ids: list[int], group: RankGroup
    ) -> dict[int, str]:
        """Replace UNDECIDED in `token_ids` by tokens chosen from complete rows of logits. Returns errors by row."""
        undecided = [row for row, token_id in enumerate(token_ids) if token_id == UNDECIDED]
        rows = [settings.rows[row] for row in undecided]
        logits_Uv = logits_Sv if len(undecided) == len(token_ids) else logits_Sv[undecided]
        penalise(logits_Uv, _weighing(rows))
        whole_UV = self.gather(logits_Uv)
        tokens_U, errors = torch.empty(len(undecided), dtype=torch.int64), {}
        if group.index == 0:
            keys = settings.draw_keys()
            sampled = _sample(rows, whole_UV, [keys[row] for row in undecided])
            tokens_U.copy_(torch.tensor([token_id for token_id, _ in sampled]))
            errors = {row: error for row, (_, error) in zip(undecided, sampled, strict=True) if error}
        self._broadcast(tokens_U, group)
        for row, token_id in zip(undecided, tokens_U.tolist(), strict=True):
            token_ids[row] = token_id
        return errors

    def _broadcast(self, tokens_S: Tensor, group: RankGroup) -> None:
        """Overwrite `tokens_S` (int64, on the CPU) by the values of the first rank."""
        received_S = group.broadcast(tokens_S.to(self._device))
        if received_S is not tokens_S:
            tokens_S.copy_(received_S)


def _weighing(rows: Sequence[SampledRow]) -> Weighing:
    params = [row.new.sampling for row in rows]
    return Weighing(
        [None if row.seen is None else row.seen.words_W for row in rows],
        torch.tensor([request.repetition_penalty for request in params], dtype=torch.float32),
        torch.tensor([request.temperature for request in params], dtype=torch.float32),
    )


def _sample(rows: Sequence[SampledRow], logits_SV: Tensor, keys: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """Return the token of each row and "", or 0 and an error message."""
    token_ids = sampler.sample_rows(logits_SV, [row.new.sampling for row in rows], keys)
    return [
        _sample_alone(logits_V, row.new.sampling, key) if token_id == UNDECIDED else (token_id, "")
        for row, logits_V, token_id, key in zip(rows, logits_SV, token_ids, keys, strict=True)
    ]


def _sample_alone(logits_V: Tensor, params: SamplingParams, key: tuple[int, int]) -> tuple[int, str]:
    try:
        return sampler.sample(logits_V, params, *key), ""
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"


def _with_logprobs(token: SampledToken, params: SamplingParams, error: str, logits_V: Tensor | None) -> SampledToken:
    """Return the token with its log-probabilities, if there are logits for them."""
    logprobs: dict[int, float] = {}
    if logits_V is not None and not error:
        try:
            logprobs = sampler.logprobs(logits_V, params.logprobs, token.token_id)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return SampledToken(token.sequence_id, 0 if error else token.token_id, logprobs, error)
