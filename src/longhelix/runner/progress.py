"""How far a rank is, for whoever watches it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a rank is: the step that it runs (0: none), collectives that it has begun, the one that it is in, and
    layers that it has begun op by op: those of tapes and graphs are not seen, and ranks differ in them."""

    step_id: int = 0
    collectives: int = 0
    collective: str = ""
    layers: int = 0
