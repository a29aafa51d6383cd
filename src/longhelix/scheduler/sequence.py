"""A running request, as the scheduler follows it."""

from array import array
from dataclasses import dataclass, field

from longhelix.kv.placement import Placement
from longhelix.request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """length: tokens whose rows have been submitted; for a sequence that decodes, as of the last look of `Decodes`.

    needed: how many KV blocks each KVP rank keeps or still owes the sequence. block_ids: those that it has on each
    rank, in position order. num_output: tokens that have come back. num_rows: of its prompt and its answer; the last
    token has none. looked_at, due: rounds of `Decodes`, which alone uses them.
    """

    request: Request
    placement: Placement
    needed: list[int]
    block_ids: "list[array[int]]"
    id: int = field(init=False)
    num_rows: int = field(init=False)
    length: int = 0
    num_blocks: int = 0
    most_blocks: int = 0  # on one rank
    last_owner: int = 0
    num_output: int = 0
    looked_at: int = 0
    due: int = 0

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.num_rows = self.request.capacity_tokens - 1

    @property
    def prompt_left(self) -> int:
        return max(len(self.request.prompt_token_ids) - self.length, 0)

    @property
    def home(self) -> int | None:
        """The KVP rank that alone computes the prompt; None where several take part."""
        return self.placement.home
