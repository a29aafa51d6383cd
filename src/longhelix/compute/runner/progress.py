"""How far a rank has come, for its watchdog."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a rank has come: the step that it runs (0: none), the collectives that it has begun, the one that it is
    in, the layers that it has begun op by op, the KV blocks that it has swapped, what it waits for from other pipeline
    stages, in words, and the steps of its guides. Layers of tapes and graphs are not counted, so ranks may differ in
    layers."""

    step_id: int = 0
    collectives: int = 0
    collective: str = ""
    layers: int = 0
    swapped_blocks: int = 0
    awaited: str = ""
    guide_steps: int = 0
