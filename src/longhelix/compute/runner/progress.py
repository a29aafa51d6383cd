"""How far a rank has come, for its watchdog."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a rank has come."""

    step_id: int = 0  # of the running step; 0: none
    collectives: int = 0  # begun so far
    collective: str = ""  # the running collective, in words
    layers: int = 0  # begun op by op; ranks may differ, because layers of tapes and graphs do not count
    swapped_blocks: int = 0
    awaited: str = ""  # what the rank waits for from other pipeline stages, in words
    guide_steps: int = 0
