"""Turns: whose rows a step has."""

from collections.abc import Collection, Set
from collections.abc import Sequence as Items
from typing import Protocol

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.load import AnyLoad
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Turn


class Turns(Protocol):
    """The sequences that decode, in sets, and whose step is next.

    step_id: that of the step which is made; oldest_id: of the oldest step in flight. busy: KVP instances that can be
    given no step now.
    """

    def __contains__(self, seq: Sequence) -> bool: ...

    def may_begin(self, busy: Set[int]) -> bool:
        """Whether there may be another step in flight."""
        ...

    def begin(self, seq: Sequence) -> None:
        """A sequence runs from now on, with its prompt."""
        ...

    def prompt_done(self, seq: Sequence, step_id: int) -> None:
        """A sequence's last chunk is in the step that is made; it decodes as soon as it can."""
        ...

    def leave(self, seq: Sequence) -> None:
        """A sequence runs no longer, whether it decodes or not."""
        ...

    def in_turn(self, step_id: int, oldest_id: int, busy: Set[int], prompts: Collection[Sequence]) -> Items[Turn]:
        """What the step may be of, the first to be tried first. prompts: the sequences with prompt tokens left."""
        ...

    def deal(self) -> list[Sequence]:
        """Deal the sequences that decode anew, where that pays. Returns those that leave their set."""
        ...

    def join(self, turn: Turn, step_id: int, oldest_id: int) -> list[Sequence]:
        """Let sequences decode, from the step that is made on."""
        ...

    def decoding(self, turn: Turn) -> Items[Decodes]:
        """The sets that have rows in the turn's steps."""
        ...

    def load(self, turn: Turn) -> AnyLoad:
        """The next rows of these sets."""
        ...

    def tbt_slo_s(self, turn: Turn) -> float:
        """The least time between tokens that any sequence asks for that waits for the turn's step."""
        ...

    def may_lose(self, seq: Sequence) -> bool:
        """Whether a sequence decodes and has a row that no step has yet."""
        ...

    def grew(self, seq: Sequence) -> None:
        """A sequence that decodes has the KV block that its row needs."""
        ...

    def recount(self) -> None:
        """Some of the sequences have other KV blocks."""
        ...

    def began(self, turn: Turn, step_id: int) -> None:
        """A step of the turn is in flight."""
        ...

    def ended(self, turn: Turn) -> None:
        """The oldest step of the turn is no longer in flight."""
        ...
