"""Sends and receives what pipeline stages exchange in each step: hidden states and tokens."""

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
    """Sends hidden states to the next stage, and tokens from the last stage to the first.

    The last stage samples tokens, and the first embeds them. Other stages need no tokens. Tokens arrive in the order of
    the steps that sample them. A rank waits for them when a step needs them, or when enough later steps have run that
    the tokens must have arrived.
    """

    def __init__(self, pipeline: Pipeline, layout: Layout, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self.pipeline = pipeline
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._most_in_flight = most_in_flight(layout.pp)
        self._awaited: deque[AwaitedTokens] = deque()

    def expect(self, step: Step) -> None:
        """Prepare to receive the hidden states of a step. Call it once per step, in their order, except on the first
        stage."""
        if step.work.rows:
            self.pipeline.expect(torch.empty(step.work.rows, self._hidden_size, dtype=self._dtype, device=self._device))

    def receive_hidden(self) -> Tensor:
        """Return hidden_TH of the first expected step that was not yet received."""
        return self.pipeline.receive()

    def send_hidden(self, hidden_TH: Tensor) -> None:
        """Send the hidden states of a step to the next stage."""
        self.pipeline.send(hidden_TH)

    def send_tokens(self, sequences: Sequence[SequenceState]) -> None:
        """Send the tokens that a step has sampled to the first stage."""
        self.pipeline.send_tokens(torch.tensor([seq.last_token for seq in sequences], device=self._device))

    def expect_tokens(self, sequences: Sequence[SequenceState]) -> None:
        """Prepare to receive the tokens of the step that this rank has just run. For the first stage."""
        tokens_S = torch.empty(len(sequences), dtype=torch.int64, device=self._device)
        awaited = AwaitedTokens(sequences, self.pipeline.expect_tokens(tokens_S))
        self._awaited.append(awaited)
        for seq in sequences:
            seq.awaited_tokens = awaited
        while (
            len(self._awaited) > self._most_in_flight
        ):  # a result is known, or the engine would not have sent this one
            self._receive_next_tokens()

    def receive_tokens(self, decodes: Collection[SequenceState]) -> None:
        """Wait for the last tokens of `decodes`."""
        for seq in decodes:
            while seq.awaited_tokens is not None:
                self._receive_next_tokens()

    def receive_all_tokens(self) -> None:
        """Wait for all expected tokens."""
        while self._awaited:
            self._receive_next_tokens()

    def _receive_next_tokens(self) -> None:
        """Wait for the tokens that were expected first."""
        awaited = self._awaited.popleft()
        self.pipeline.wait(awaited.transfer, "tokens")
        for seq, token_id in zip(awaited.sequences, awaited.transfer.values.tolist(), strict=True):
            seq.last_token = token_id
            if seq.awaited_tokens is awaited:
                seq.awaited_tokens = None
