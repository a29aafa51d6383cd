"""What a rank of a pipeline stage takes over from other stages in each step, and hands over to them."""

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from longhelix.compute.parallel.pipeline import Pipeline
from longhelix.compute.runner.sequence_state import AwaitedTokens, SequenceState
from longhelix.scheduler.loop import most_in_flight
from longhelix.scheduler.step import Step
from longhelix.spec.layout import Layout


class Handover:
    """Hidden states go from stage to stage, and tokens from the last stage, which samples them, to the first, which
    embeds them. Other stages do without tokens.

    Tokens come in the order of the steps that sample them. They are taken when a step needs them, or when so many more
    steps have been done here that they are there.
    """

    def __init__(self, pipeline: Pipeline, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.pipeline = pipeline
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._most_in_flight = most_in_flight(layout.pp)
        self._awaited: deque[AwaitedTokens] = deque()

    def expect(self, step: Step) -> None:
        """The hidden states of a step will come; steps in their order, each once. For ranks of all stages but the
        first."""
        if step.work.rows:
            self.pipeline.expect(torch.empty(step.work.rows, self._hidden_size, dtype=self._dtype, device=self._device))

    def take_hidden(self) -> Tensor:
        """hidden_TH of the next step that was expected."""
        return self.pipeline.receive()

    def give_hidden(self, hidden_TH: Tensor) -> None:
        """Hand a step over to the next stage."""
        self.pipeline.send(hidden_TH)

    def give_tokens(self, sequences: Sequence[SequenceState]) -> None:
        """Say which tokens a step has sampled."""
        self.pipeline.send_tokens(torch.tensor([seq.last_token for seq in sequences], device=self._device))

    def await_tokens(self, sequences: Sequence[SequenceState]) -> None:
        """Tokens of sequences will come, of a step of this rank, which is of the first stage."""
        tokens_S = torch.empty(len(sequences), dtype=torch.int64, device=self._device)
        awaited = AwaitedTokens(sequences, self.pipeline.expect_tokens(tokens_S))
        self._awaited.append(awaited)
        for seq in sequences:
            seq.awaited = awaited
        while (
            len(self._awaited) > self._most_in_flight
        ):  # a result is known, or the engine would not have sent this one
            self._take_next()

    def take_tokens(self, decodes: Collection[SequenceState]) -> None:
        """Know the last tokens of `decodes`."""
        for seq in decodes:
            while seq.awaited is not None:
                self._take_next()

    def settle(self) -> None:
        """Know all tokens that are on their way."""
        while self._awaited:
            self._take_next()

    def _take_next(self) -> None:
        """Those that were awaited first."""
        awaited = self._awaited.popleft()
        self.pipeline.wait(awaited.travelling, "tokens")
        for seq, token_id in zip(awaited.sequences, awaited.travelling.values.tolist(), strict=True):
            seq.last_token = token_id
            if seq.awaited is awaited:
                seq.awaited = None
