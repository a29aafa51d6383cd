"""The next tokens of a step, chosen once: every rank finds the candidates of its part of the vocabulary, the stage's
first rank chooses among all of them, and all ranks hear what it chose.

Rows that their candidates do not decide are few. All ranks hear which, and gather these whole.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longhelix.kernels.candidates import Candidates, Weighing, candidates, penalise
from longhelix.kernels.draw import UNDECIDED
from longhelix.parallel.collectives import RankGroup
from longhelix.parallel.mesh import Mesh
from longhelix.request import CANDIDATES, SampledToken
from longhelix.runner import choice, sampler
from longhelix.runner.sequence_state import SequenceState
from longhelix.spans import UNTRACED, Spans


class _Settings:
    """How sequences choose their tokens: what does not change while the same ones do."""

    def __init__(self, sequences: Sequence[SequenceState]) -> None:
        self.news = [seq.new for seq in sequences]
        self.params = [new.sampling for new in self.news]
        seen = [None if seq.seen is None else seq.seen.words_W for seq in sequences]
        penalties_S = torch.tensor([each.repetition_penalty for each in self.params], dtype=torch.float32)
        temperatures_S = torch.tensor([each.temperature for each in self.params], dtype=torch.float32)
        self.weighing = Weighing(seen, penalties_S, temperatures_S)
        self.count = CANDIDATES if temperatures_S.any() else 1
        self.asked = [row for row, each in enumerate(self.params) if each.logprobs is not None]

    def are_of(self, sequences: Sequence[SequenceState]) -> bool:
        return len(sequences) == len(self.news) and all(
            seq.new is new for seq, new in zip(sequences, self.news, strict=True)
        )


class Sampling:
    """One rank's share in the choice of tokens."""

    def __init__(self, mesh: Mesh, vocab_size: int, device: torch.device, spans: Spans = UNTRACED) -> None:
        self._ffn, self._device = mesh.ffn, device
        self._size, self._spans = vocab_size, spans
        self._begin = mesh.layout.vocabulary(vocab_size, mesh.rank).start
        self._settings = _Settings(())
        self._parts = [mesh.layout.vocabulary(vocab_size, rank) for rank in mesh.ffn.ranks]

    def __call__(
        self, logits_Sv: Tensor, sequences: Sequence[SequenceState], together: RankGroup
    ) -> tuple[SampledToken, ...]:
        """Choose each sequence's `last_token`; the first of the ranks that sample together, which is the first one of a
        copy of the vocabulary, returns them, with what else was asked for.

        logits_Sv: float32, over this rank's part of the vocabulary; they are used up. What goes wrong with one row ends
        its sequence alone: other requests go on, and so do the ranks that wait for tokens.
        """
        is_first = together.index == 0
        if not self._settings.are_of(sequences):
            self._settings = _Settings(sequences)
        asked = self._settings.asked
        asked_AV = self.gather(logits_Sv[asked]) if asked else ()
        token_ids = self._hear(self._choose(logits_Sv, sequences, is_first), len(sequences), together)
        errors: dict[int, str] = {}
        left = [row for row, token_id in enumerate(token_ids) if token_id == UNDECIDED]
        if left:
            undecided = [sequences[row] for row in left]
            left_Uv = logits_Sv if len(left) == len(sequences) else logits_Sv[left]
            penalise(left_Uv, _Settings(undecided).weighing)
            whole_UV = self.gather(left_Uv)
            sampled = _sample(undecided, whole_UV) if is_first else []
            errors = {row: error for row, (_, error) in zip(left, sampled, strict=False) if error}
            found = self._hear([token_id for token_id, _ in sampled], len(left), together)
            for row, token_id in zip(left, found, strict=True):
                token_ids[row] = token_id
        for seq, token_id in zip(sequences, token_ids, strict=True):
            seq.last_token = token_id
        if not is_first:
            return ()
        logits_of = dict(zip(asked, asked_AV, strict=True))
        return tuple(_described(seq, errors.get(row, ""), logits_of.get(row)) for row, seq in enumerate(sequences))

    def gather(self, logits_Sv: Tensor) -> Tensor:
        """Logits over the whole vocabulary, on the first rank of each copy of it; elsewhere empty."""
        if self._ffn.size == 1:
            return logits_Sv
        # Uneven shares are padded to the largest, because a gather wants equal shapes.
        most = max(map(len, self._parts))
        shards = self._ffn.gather(torch.nn.functional.pad(logits_Sv, (0, most - logits_Sv.shape[1])))
        trimmed = [shard_Sv[:, : len(part)] for shard_Sv, part in zip(shards, self._parts, strict=False)]
        return torch.cat(trimmed, dim=1) if trimmed else logits_Sv.new_empty(len(logits_Sv), 0)

    def _choose(self, logits_Sv: Tensor, sequences: Sequence[SequenceState], is_first: bool) -> list[int]:
        """On the first rank the tokens, where their candidates decide them; elsewhere none."""
        settings, span = self._settings, self._spans.begin("candidates")
        found = candidates(logits_Sv, settings.weighing, settings.count)
        self._spans.end(span)
        shards = self._gather_candidates(found)
        if not is_first:
            return []
        merged = choice.merge(shards, settings.weighing.temperatures_S.numpy())
        return choice.choose(merged, self._size, settings.params, _keys(sequences)).tolist()

    def _gather_candidates(self, found: Candidates) -> list[choice.Shard]:
        """Of all parts of the vocabulary, on the first rank of each copy of it; elsewhere none."""
        if self._ffn.size == 1:
            return [choice.Shard(*(tensor.cpu().numpy() for tensor in found))]
        ids_SK = torch.where(found.ids_SK < 0, found.ids_SK, found.ids_SK + self._begin)
        # As one tensor, which holds all of them exactly: so little costs what a collective costs to start.
        packed_SX = torch.cat([found.values_SK.double(), ids_SK.double(), found.sums_S[:, None]], dim=1)
        return [_unpacked(shard_SX.cpu().numpy()) for shard_SX in self._ffn.gather(packed_SX)]

    def _hear(self, token_ids: list[int], count: int, together: RankGroup) -> list[int]:
        """What the first rank says: `count` token ids."""
        tokens_S = torch.from_numpy(np.array(token_ids or [0] * count, np.int64)).to(self._device)
        return together.broadcast(tokens_S).tolist()


def _unpacked(packed_SX: np.ndarray) -> choice.Shard:
    values_SK, ids_SK, sums_S1 = np.split(packed_SX, [packed_SX.shape[1] // 2, packed_SX.shape[1] - 1], axis=1)
    return choice.Shard(values_SK.astype(np.float32), ids_SK.astype(np.int64), sums_S1[:, 0])


def _sample(sequences: Sequence[SequenceState], logits_SV: Tensor) -> list[tuple[int, str]]:
    """The token of each, or 0 and why there is none."""
    token_ids = sampler.sample_rows(logits_SV, [seq.new.sampling for seq in sequences], _keys(sequences))
    return [
        _sample_alone(seq, logits_V) if token_id == UNDECIDED else (token_id, "")
        for seq, logits_V, token_id in zip(sequences, logits_SV, token_ids, strict=True)
    ]


def _sample_alone(seq: SequenceState, logits_V: Tensor) -> tuple[int, str]:
    try:
        return sampler.sample(logits_V, seq.new.sampling, seq.new.seed, seq.length), ""
    except Exception as error:
        return 0, f"{type(error).__name__}: {error}"


def _keys(sequences: Sequence[SequenceState]) -> list[tuple[int, int]]:
    """What draws are keyed by."""
    return [(seq.new.seed, seq.length) for seq in sequences]


def _described(seq: SequenceState, error: str, logits_V: Tensor | None) -> SampledToken:
    """The token with its logprobs, where there are logits for them."""
    found: dict[int, float] = {}
    if logits_V is not None and not error:
        try:
            found = sampler.logprobs(logits_V, seq.new.sampling.logprobs, seq.last_token)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return SampledToken(seq.new.id, 0 if error else seq.last_token, found, error)
