"""What a rank of a pipeline stage takes over from other stages in each step, and hands over to them."""

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from longhelix.layout import Layout
from longhelix.parallel.pipeline import Pipeline
from longhelix.request import Step
from longhelix.runner.sequence_state import SequenceState
from longhelix.scheduler.loop import most_in_flight


class Handover:
    """Hidden states go from stage to stage, and tokens from the last stage, which samples them, to the first, which
    embeds them. Other stages do without tokens.

    Tokens come in the order of the steps that sample them. They are taken when a step needs them, or when they are
    there in any case.
    """

    def __init__(self, pipeline: Pipeline, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.pipeline = pipeline
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._most_in_flight = most_in_flight(layout.pp)
        self._awaited: deque[tuple[int, Sequence[SequenceState]]] = deque()

    def expect(self, step: Step) -> None:
        """Let the hidden states of a step that comes travel while others are computed; steps in their order, each once.
        For ranks of all stages but the first."""
        if step.work.rows:
            self.pipeline.expect(torch.empty(step.work.rows, self._hidden_size, dtype=self._dtype, device=self._device))

    def take_hidden(self, rows: int) -> Tensor:
        """hidden_TH of the next step that was expected, which has so many rows."""
        hidden_TH = self.pipeline.receive()
        assert len(hidden_TH) == rows
        return hidden_TH

    def give_hidden(self, hidden_TH: Tensor) -> None:
        """Hand a step over to the next stage."""
        self.pipeline.send(hidden_TH)

    def give_tokens(self, sequences: Sequence[SequenceState]) -> None:
        """Say which tokens a step has sampled."""
        self.pipeline.send_tokens(torch.tensor([seq.last_token for seq in sequences], device=self._device))

    def await_tokens(self, step_id: int, sequences: Sequence[SequenceState]) -> None:
        """Tokens of sequences will come, of a step of this rank, which is of the first stage."""
        if sequences:
            self._awaited.append((step_id, sequences))
            for seq in sequences:
                seq.sampled_in = step_id

    def take_tokens(self, step_id: int, decodes: Collection[SequenceState]) -> None:
        """Know the tokens that a step needs, which has rows of `decodes`."""
        needed = max((seq.sampled_in for seq in decodes), default=0)
        there = step_id - self._most_in_flight  # its result is known, or the engine would not have sent this one
        while self._awaited and self._awaited[0][0] <= max(needed, there):
            _, sequences = self._awaited.popleft()
            tokens_S = torch.empty(len(sequences), dtype=torch.int64, device=self._device)
            for seq, token_id in zip(sequences, self.pipeline.receive_tokens(tokens_S).tolist(), strict=True):
                seq.last_token = token_id
