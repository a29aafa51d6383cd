"""The next tokens of a step, chosen once: every rank finds the candidates of its part of the vocabulary, the stage's
first rank chooses among all of them, and all ranks hear what it chose.

Rows that their candidates do not decide are few. All ranks hear which, and gather these whole.
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
    """How tokens are chosen after rows, and where their candidates lie: all that stays while the rows' sequences are
    the same."""

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
        self.asked = [row for row, each in enumerate(self.params) if each.logprobs is not None]
        self.found = Candidates.new(len(rows), self.count, device)
        self.memory_X = self.found.memory()
        self.tokens_S = torch.empty(len(rows), dtype=torch.int64)

    def adjust(self, logits_Sv: Tensor) -> dict[int, str]:
        """What requests want to be done to their logits, in place. Returns why it cannot be, by row."""
        errors: dict[int, str] = {}
        for row, line, adjustments in self._adjusted:
            error = adjustments.adjust(logits_Sv[row], self.numbers.values.item(line, LENGTH))
            if error:
                errors[row] = error
        return errors

    def draw_keys(self) -> list[tuple[int, int]]:
        """What draws are keyed by."""
        lengths = self.numbers.values[self.lines_S, LENGTH].tolist()
        return list(zip(self.seeds, lengths, strict=True))

    def shard(self, memory_X: Tensor, first_id: int) -> choice.VocabularyShard:
        """What lies in such memory, of a part of the vocabulary that begins at `first_id`."""
        return choice.VocabularyShard.of(memory_X.numpy(), len(self.ids), self.count, first_id)


class Sampling:
    """One rank's share in the choice of tokens."""

    def __init__(self, mesh: Mesh, vocab_size: int, device: torch.device, spans: Spans = UNTRACED) -> None:
        self._ffn, self._device = mesh.ffn, device
        self._size, self._spans = vocab_size, spans
        # Those of each microbatch, and of steps in which prompts end. Rows of drafts are new in every step.
        self._settings = lru_cache(2 * mesh.layout.pp)(partial(_Settings, device=device))
        self._parts = [mesh.layout.vocabulary(vocab_size, rank) for rank in mesh.ffn.ranks]
        self._first_ids = [part.start for part in self._parts]

    def __call__(
        self, logits_Sv: Tensor, rows: tuple[SampledRow, ...], together: RankGroup
    ) -> tuple[SampledToken, ...]:
        """Choose each row's `last_token`; the first of the ranks that sample together, which is the first one of a
        copy of the vocabulary, returns them, with what else was asked for.

        logits_Sv: float32, over this rank's part of the vocabulary; they are used up. What goes wrong with one row ends
        its sequence alone: other requests go on, and so do the ranks that wait for tokens.
        """
        has_drafts = any(isinstance(row, DraftRow) for row in rows)
        settings = _Settings(rows, self._device) if has_drafts else self._settings(rows)
        asked_AV = self.gather(logits_Sv[settings.asked]) if settings.asked else ()
        refused = settings.adjust(logits_Sv)
        self._choose(logits_Sv, settings, together)
        self._hear(settings.tokens_S, together)
        token_ids, errors = settings.tokens_S.tolist(), {}
        if UNDECIDED in token_ids:
            errors = self._choose_of_all(logits_Sv, settings, token_ids, together) | refused
        settings.numbers.values[settings.lines_S, LAST_TOKEN] = token_ids
        if together.index != 0:
            return ()
        sampled = tuple(map(SampledToken, settings.ids, token_ids))
        if not (errors or settings.asked):
            return sampled
        logits_of = dict(zip(settings.asked, asked_AV, strict=True))
        return tuple(
            _described(token, each, errors.get(row, ""), logits_of.get(row))
            for row, (token, each) in enumerate(zip(sampled, settings.params, strict=True))
        )

    def gather(self, logits_Sv: Tensor) -> Tensor:
        """Logits over the whole vocabulary, on the first rank of each copy of it; elsewhere empty."""
        if self._ffn.size == 1:
            return logits_Sv
        # Uneven shares are padded to the largest, because a gather wants equal shapes.
        most = max(map(len, self._parts))
        shards = self._ffn.gather(torch.nn.functional.pad(logits_Sv, (0, most - logits_Sv.shape[1])))
        trimmed = [shard_Sv[:, : len(part)] for shard_Sv, part in zip(shards, self._parts, strict=False)]
        return torch.cat(trimmed, dim=1) if trimmed else logits_Sv.new_empty(len(logits_Sv), 0)

    def _choose(self, logits_Sv: Tensor, settings: _Settings, together: RankGroup) -> None:
        """On the first rank the tokens, where their candidates decide them."""
        span = self._spans.begin("candidates")
        candidates(logits_Sv, settings.weighing, settings.count, settings.found)
        self._spans.end(span)
        gathered = [memory_X.cpu() for memory_X in self._ffn.gather(settings.memory_X)]
        if together.index != 0:
            return
        if settings.greedy:
            take_largest(gathered, self._first_ids, settings.tokens_S)
            return
        shards = list(map(settings.shard, gathered, self._first_ids))
        merged = choice.merge(shards, settings.weighing.temperatures_S.numpy())
        settings.tokens_S.numpy()[:] = choice.choose(merged, self._size, settings.params, settings.draw_keys())

    def _choose_of_all(
        self, logits_Sv: Tensor, settings: _Settings, token_ids: list[int], together: RankGroup
    ) -> dict[int, str]:
        """Choose the tokens that are undecided, of whole rows. Returns errors, by row."""
        left = [row for row, token_id in enumerate(token_ids) if token_id == UNDECIDED]
        undecided = [settings.rows[row] for row in left]
        left_Uv = logits_Sv if len(left) == len(token_ids) else logits_Sv[left]
        penalise(left_Uv, _weighing(undecided))
        whole_UV = self.gather(left_Uv)
        tokens_U, errors = torch.empty(len(left), dtype=torch.int64), {}
        if together.index == 0:
            keys = settings.draw_keys()
            sampled = _sample(undecided, whole_UV, [keys[row] for row in left])
            tokens_U.copy_(torch.tensor([token_id for token_id, _ in sampled]))
            errors = {row: error for row, (_, error) in zip(left, sampled, strict=True) if error}
        self._hear(tokens_U, together)
        for row, token_id in zip(left, tokens_U.tolist(), strict=True):
            token_ids[row] = token_id
        return errors

    def _hear(self, tokens_S: Tensor, together: RankGroup) -> None:
        """Take over what the first rank has, int64 on the CPU."""
        heard_S = together.broadcast(tokens_S.to(self._device))
        if heard_S is not tokens_S:
            tokens_S.copy_(heard_S)


def _weighing(rows: Sequence[SampledRow]) -> Weighing:
    params = [row.new.sampling for row in rows]
    return Weighing(
        [None if row.seen is None else row.seen.words_W for row in rows],
        torch.tensor([each.repetition_penalty for each in params], dtype=torch.float32),
        torch.tensor([each.temperature for each in params], dtype=torch.float32),
    )


def _sample(rows: Sequence[SampledRow], logits_SV: Tensor, keys: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
    """The token of each, or 0 and why there is none."""
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


def _described(token: SampledToken, params: SamplingParams, error: str, logits_V: Tensor | None) -> SampledToken:
    """The token with its logprobs, where there are logits for them."""
    found: dict[int, float] = {}
    if logits_V is not None and not error:
        try:
            found = sampler.logprobs(logits_V, params.logprobs, token.token_id)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return SampledToken(token.sequence_id, 0 if error else token.token_id, found, error)
