"""Transfers between pipeline stages: hidden states to the next stage, and tokens from the last stage to the first."""

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

# Steps in flight beyond one for each stage: the engine keeps one, and a rank runs one.
_SPARE = 2

Start = Callable[[], dist.Work]
_T = TypeVar("_T")


class Transfer:
    """Values that a rank sends to another stage, or receives. Their memory must stay until the transfer has ended."""

    def __init__(self, values: Tensor, peer: int, start: Start) -> None:
        self.values = values
        self.peer = peer
        self._start = start
        self._work: dist.Work | None = None

    def open(self) -> dist.Work:
        """Start the transfer, unless it has started."""
        if self._work is None:
            self._work = _named(f"rank {self.peer}", self._start)
        return self._work


class Pipeline:
    """Connects a rank with its peers: the ranks in the same place of other stages. Raises PeerLostError if one is gone.

    Every stage runs the steps in the same order. `send` returns at once. On CPUs, expected hidden states travel while
    this rank computes. On GPUs, they travel from the call of `receive` on: any wait of a GPU includes them, and they
    may depend on a step that the GPU has not run yet. Hidden states and tokens use separate groups, so that neither
    waits for the other.

    Attributes:
        waited_s: Seconds that this rank has waited for other stages.
        network_bytes: Bytes that this rank has sent to other hosts.
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
        self._ranks_of_host = frozenset(hosts.ranks[hosts.node_of(rank)])
        self.waited_s, self.network_bytes = 0.0, 0
        self._hidden, self._tokens = hidden, tokens
        self._expected: deque[Transfer] = deque()
        self._sent: deque[Transfer] = deque()
        self._waits = 0
        self._current = ""

    @classmethod
    def build(cls, layout: Layout, rank: int, hosts: Hosts, spans: Spans = UNTRACED) -> "Pipeline":
        """Make the groups, together with all ranks of the world."""
        return cls(layout, rank, hosts, hidden=dist.new_group(), tokens=dist.new_group(), spans=spans)

    def progress(self) -> str:
        """Return what this rank waits for from another stage, in words or "". Any thread may call this."""
        return self._current

    def expect(self, values: Tensor) -> None:
        """Receive the next hidden states of the previous stage into `values`, after those that are already expected."""
        peer = self._rank - self._layout.num_ranks
        expected = Transfer(values, peer, lambda: self._hidden.recv([values], peer, 0))
        self._expected.append(expected)
        if not values.is_cuda:
            expected.open()

    def receive(self) -> Tensor:
        """Wait for the hidden states that were expected first, and return them."""
        expected = self._expected.popleft()
        self.wait(expected, "hidden states")
        return expected.values

    def send(self, hidden_TH: Tensor) -> None:
        """Send hidden states to the next stage. The caller may overwrite them at once."""
        self._send(self._hidden, hidden_TH.clone(), self._rank + self._layout.num_ranks)

    def send_tokens(self, tokens_S: Tensor) -> None:
        """Send the tokens of a step to the first stage."""
        self._send(self._tokens, tokens_S, self._rank % self._layout.num_ranks)

    def expect_tokens(self, tokens_S: Tensor) -> Transfer:
        """Receive the tokens of a step from the last stage, after those that are already expected. Call `wait` on the
        result."""
        peer = self._rank + (self._layout.pp - 1) * self._layout.num_ranks
        expected = Transfer(tokens_S, peer, lambda: self._tokens.recv([tokens_S], peer, 0))
        expected.open()  # otherwise an idle GPU would still be sending
        return expected

    def wait(self, expected: Transfer, what: str) -> None:
        """Wait for a transfer. what: its name in messages."""
        span, before_s = self._spans.begin(f"wait for {what}"), time.perf_counter()
        self._await(expected, f"{what} from rank {expected.peer}")
        if expected.values.is_cuda:  # where only the stream waits for the work
            torch.cuda.current_stream(expected.values.device).synchronize()
        self.waited_s += time.perf_counter() - before_s
        self._spans.end(span)

    def _send(self, group: dist.ProcessGroup, values: Tensor, peer: int) -> None:
        if len(self._sent) == self._layout.pp + _SPARE:
            self._await(self._sent.popleft(), f"that rank {peer} takes what it was sent")
        transfer = Transfer(values, peer, lambda: group.send([values], peer, 0))
        transfer.open()
        self._sent.append(transfer)
        if peer not in self._ranks_of_host:
            self.network_bytes += values.nbytes

    def _await(self, transfer: Transfer, what: str) -> None:
        self._waits += 1
        self._current = f"wait {self._waits} for another stage, {what}"
        work = transfer.open()
        _named(f"rank {transfer.peer}", work.wait)
        self._current = ""


def _named(peer: str, call: Callable[[], _T]) -> _T:
    """Return the result of `call`. If the peer is gone, the error names it."""
    try:
        return call()
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLostError(f"{peer}, of another stage: {error}") from error
