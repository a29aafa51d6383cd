"""What travels between pipeline stages: hidden states to the next one, and tokens from the last one to the first."""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longhelix.compute.parallel.collectives import is_lost_peer
from longhelix.errors import PeerLostError
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout

# Steps that may be on their way at once, beside one for each stage: the engine keeps one, and a rank runs one.
_SPARE = 2

Start = Callable[[], dist.Work]
_T = TypeVar("_T")


class Travelling:
    """Values on their way from another stage or to it. Their memory must stay until they are there.

    work: None until the way is opened, which `open` does once.
    """

    def __init__(self, values: Tensor, peer: int, start: Start) -> None:
        self.values = values
        self.peer = peer
        self._start = start
        self._work: dist.Work | None = None

    def open(self) -> dist.Work:
        if self._work is None:
            self._work = _named(f"rank {self.peer}", self._start)
        return self._work


class Pipeline:
    """The stages as one rank sees them: each rank has a peer in every other stage, the one in the same place.

    Steps go through every stage in their order. `send` returns at once, and hidden states that are expected travel
    while this rank computes; on GPUs they travel once they are asked for, because a GPU that waits for anything waits
    for them too, and they may hang on a step that it has not done. Hidden states and tokens have groups of their own,
    so that neither waits for the other. A peer that is gone raises PeerLostError.

    waited_s: for what other stages send. network_bytes: that this rank has sent to other hosts.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        hosts: Hosts,
        hidden: dist.ProcessGroup,
        tokens: dist.ProcessGroup,
        spans: Spans = UNTRACED,
    ) -> None:
        self._layout, self._rank, self._spans = layout, rank, spans
        self._of_own_host = frozenset(hosts.ranks[hosts.node_of(rank)])
        self.waited_s, self.network_bytes = 0.0, 0
        self._hidden, self._tokens = hidden, tokens
        self._expected: deque[Travelling] = deque()
        self._sent: deque[Travelling] = deque()
        self._waits = 0
        self._current = ""

    @classmethod
    def build(cls, layout: Layout, rank: int, hosts: Hosts, spans: Spans = UNTRACED) -> "Pipeline":
        """Make the groups, together with all ranks of the world."""
        return cls(layout, rank, hosts, hidden=dist.new_group(), tokens=dist.new_group(), spans=spans)

    def progress(self) -> str:
        """Which other stage this rank waits for, and for what, in words, or "". Any thread may ask."""
        return self._current

    def expect(self, values: Tensor) -> None:
        """The hidden states that the stage before sends next, behind those that are expected already, go into
        `values`."""
        peer = self._rank - self._layout.num_ranks
        expected = Travelling(values, peer, lambda: self._hidden.recv([values], peer, 0))
        self._expected.append(expected)
        if not values.is_cuda:
            expected.open()

    def receive(self) -> Tensor:
        """The hidden states that were expected first, once they are there."""
        expected = self._expected.popleft()
        self.wait(expected, "hidden states")
        return expected.values

    def send(self, hidden_TH: Tensor) -> None:
        """Give hidden states to the next stage. They may be overwritten at once."""
        self._give(self._hidden, hidden_TH.clone(), self._rank + self._layout.num_ranks)

    def send_tokens(self, tokens_S: Tensor) -> None:
        """Give the tokens of a step to the first stage."""
        self._give(self._tokens, tokens_S, self._rank % self._layout.num_ranks)

    def expect_tokens(self, tokens_S: Tensor) -> Travelling:
        """The tokens of a step, which the last stage sends once it has done it, behind those that are expected already.
        For `wait`."""
        peer = self._rank + (self._layout.pp - 1) * self._layout.num_ranks
        expected = Travelling(tokens_S, peer, lambda: self._tokens.recv([tokens_S], peer, 0))
        expected.open()  # what nobody receives, an idle GPU would still be sending
        return expected

    def wait(self, expected: Travelling, what: str) -> None:
        """Until it is there."""
        span, before_s = self._spans.begin(f"wait for {what}"), time.perf_counter()
        self._await(expected, f"{what} from rank {expected.peer}")
        if expected.values.is_cuda:  # where the work's wait is the stream's
            torch.cuda.current_stream(expected.values.device).synchronize()
        self.waited_s += time.perf_counter() - before_s
        self._spans.end(span)

    def _give(self, group: dist.ProcessGroup, values: Tensor, peer: int) -> None:
        if len(self._sent) == self._layout.pp + _SPARE:
            self._await(self._sent.popleft(), f"that rank {peer} takes what it was sent")
        given = Travelling(values, peer, lambda: group.send([values], peer, 0))
        given.open()
        self._sent.append(given)
        if peer not in self._of_own_host:
            self.network_bytes += values.nbytes

    def _await(self, travelling: Travelling, what: str) -> None:
        self._waits += 1
        self._current = f"wait {self._waits} for another stage, {what}"
        work = travelling.open()
        _named(f"rank {travelling.peer}", work.wait)
        self._current = ""


def _named(peer: str, call: Callable[[], _T]) -> _T:
    """What `call` gives; its error names the peer, if that is gone."""
    try:
        return call()
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLostError(f"{peer}, of another stage: {error}") from error
