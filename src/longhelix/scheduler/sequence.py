"""A running request, as the scheduler follows it."""

from array import array
from dataclasses import dataclass

from longhelix.kv.placement import Placement
from longhelix.request import Request


@dataclass(eq=False)
class Sequence:
    """length: tokens whose rows have been submitted; for a sequence that decodes, as of the last look of `Decodes`.

    reserved: how many KV blocks each KVP rank still owes the sequence. block_ids: those that it has on each rank, in
    position order. num_output: tokens that have come back.
    """

    request: Request
    placement: Placement
    reserved: list[int]
    block_ids: "list[array[int]]"
    length: int = 0
    num_blocks: int = 0
    most_blocks: int = 0  # on one rank
    last_owner: int = 0
    num_output: int = 0

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def prompt_left(self) -> int:
        return max(len(self.request.prompt_token_ids) - self.length, 0)

    @property
    def decodes_left(self) -> int:
        """Rows left until all tokens have been asked for. The last token has no row of its own."""
        return self.request.capacity_tokens - 1 - self.length

    @property
    def home(self) -> int | None:
        """The KVP rank that alone computes the prompt; None where several take part."""
        return self.placement.home
