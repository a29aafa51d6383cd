"""Turns: which sequences have rows in a step."""

from collections.abc import Collection, Set
from collections.abc import Sequence as Items
from typing import Protocol

from longhelix.scheduler.decodes import Decodes
from longhelix.scheduler.load import AnyLoad
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Turn


class Turns(Protocol):
    """Divides the decoding sequences into sets, and decides which of them the next step is for.

    In all methods, `step_id` is the id of the step that is being made, `oldest_id` that of the oldest step in flight,
    and `busy` has the KVP instances that cannot be given a step now.
    """

    def __contains__(self, seq: Sequence) -> bool: ...

    def may_begin(self, busy: Set[int]) -> bool:
        """Return whether another step may be in flight."""
        ...

    def begin(self, seq: Sequence) -> None:
        """Note that a sequence begins to run, with its prompt."""
        ...

    def prompt_done(self, seq: Sequence, step_id: int) -> None:
        """Let a sequence decode as soon as it can. Its last chunk is in the step that is being made."""
        ...

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence, whether it decodes or not."""
        ...

    def in_turn(self, step_id: int, oldest_id: int, busy: Set[int], prompts: Collection[Sequence]) -> Items[Turn]:
        """Return the turns to try for the step, in order. prompts: sequences that have prompt tokens to compute."""
        ...

    def deal(self) -> list[Sequence]:
        """Move decoding sequences between sets if that pays. Return those that leave their set."""
        ...

    def join(self, turn: Turn, step_id: int, oldest_id: int) -> list[Sequence]:
        """Let the sequences of the turn that are ready decode from this step on, and return them."""
        ...

    def decoding(self, turn: Turn) -> Items[Decodes]:
        """Return the sets that have rows in the turn's steps."""
        ...

    def load(self, turn: Turn) -> AnyLoad:
        """Return the work of the next rows of these sets."""
        ...

    def tbt_slo_s(self, turn: Turn) -> float:
        """Return the shortest time between tokens that any sequence asks for that waits for the turn's step."""
        ...

    def may_lose(self, seq: Sequence) -> bool:
        """Return whether a sequence decodes and has a row that no step has yet."""
        ...

    def grew(self, seq: Sequence) -> None:
        """Note that a decoding sequence got the KV block that its row needs."""
        ...

    def recount(self) -> None:
        """Count all tokens again, after KV blocks have moved."""
        ...

    def began(self, turn: Turn, step_id: int) -> None:
        """Note that a step of the turn is in flight."""
        ...

    def ended(self, turn: Turn) -> None:
        """Note that the oldest step of the turn is no longer in flight."""
        ...
