"""What travels between pipeline stages: hidden states to the next one, and tokens from the last one to the first."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from longhelix.errors import PeerLostError
from longhelix.layout import Layout
from longhelix.parallel.collectives import is_lost_peer
from longhelix.spans import UNTRACED, Spans

# Steps that may be on their way at once, beside one for each stage: the engine keeps one, and a rank runs one.
_SPARE = 2


@dataclass(frozen=True)
class _Travelling:
    """Its memory must stay until it is there."""

    work: dist.Work
    values: Tensor


class Pipeline:
    """The stages as one rank sees them: each rank has a peer in every other stage, the one in the same place.

    Steps go through every stage in their order. `send` returns at once; what is expected travels while this rank
    computes. Hidden states and tokens have groups of their own, so that neither waits for the other. A peer that is
    gone raises PeerLostError.

    waited_s: for what other stages send. sent_bytes: to other stages.
    """

    def __init__(
        self, layout: Layout, rank: int, hidden: dist.ProcessGroup, tokens: dist.ProcessGroup, spans: Spans = UNTRACED
    ) -> None:
        self._layout, self._rank, self._spans = layout, rank, spans
        self.waited_s = 0.0
        self.sent_bytes = 0
        self._hidden, self._tokens = hidden, tokens
        self._expected: deque[_Travelling] = deque()
        self._sent: deque[_Travelling] = deque()
        self._received = 0
        self._current = ""

    @classmethod
    def build(cls, layout: Layout, rank: int, spans: Spans = UNTRACED) -> "Pipeline":
        """Make the groups, together with all ranks of the world."""
        return cls(layout, rank, dist.new_group(), dist.new_group(), spans)

    def progress(self) -> str:
        """What this rank waits for, in words, or "". Any thread may ask."""
        return self._current

    def expect(self, values: Tensor) -> None:
        """The hidden states that the stage before sends next, behind those that are expected already, go into
        `values`."""
        peer = self._rank - self._layout.num_ranks
        self._expected.append(
            _Travelling(self._call(f"from rank {peer}", self._hidden.recv, [values], peer, 0), values)
        )

    @property
    def num_expected(self) -> int:
        """How many steps' hidden states are expected and have not been received."""
        return len(self._expected)

    def receive(self) -> Tensor:
        """The hidden states that were expected first, once they are there."""
        expected = self._expected.popleft()
        self._wait("hidden states", self._rank - self._layout.num_ranks, expected.work)
        return expected.values

    def send(self, hidden_TH: Tensor) -> None:
        """Give hidden states to the next stage. They may be overwritten at once."""
        self._give(self._hidden, hidden_TH.clone(), self._rank + self._layout.num_ranks)

    def send_tokens(self, tokens_S: Tensor) -> None:
        """Give the tokens of a step to the first stage."""
        self._give(self._tokens, tokens_S, self._rank % self._layout.num_ranks)

    def receive_tokens(self, tokens_S: Tensor) -> Tensor:
        """The tokens of the next step that has some, from the last stage, once they are there, in `tokens_S`."""
        peer = self._rank + (self._layout.pp - 1) * self._layout.num_ranks
        self._wait("tokens", peer, self._call(f"from rank {peer}", self._tokens.recv, [tokens_S], peer, 0))
        return tokens_S

    def _give(self, group: dist.ProcessGroup, values: Tensor, peer: int) -> None:
        if len(self._sent) == self._layout.pp + _SPARE:
            self._call(f"to rank {peer}", self._sent.popleft().work.wait)  # which has been read by now
        self._sent.append(_Travelling(self._call(f"to rank {peer}", group.send, [values], peer, 0), values))
        self.sent_bytes += values.nbytes

    def _wait(self, what: str, peer: int, work: dist.Work) -> None:
        span, before_s = self._spans.begin(f"wait for {what}"), time.perf_counter()
        self._received += 1
        self._current = f"receive {self._received}, {what} from rank {peer}"
        self._call(f"{what} from rank {peer}", work.wait)
        self._current = ""
        self.waited_s += time.perf_counter() - before_s
        self._spans.end(span)

    def _call(self, what: str, call: Callable, *arguments):
        try:
            return call(*arguments)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise PeerLostError(f"{what}: {error}") from error
