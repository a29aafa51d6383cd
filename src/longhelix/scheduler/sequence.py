"""A request, from its arrival on, and a running one, as the scheduler follows them."""

from array import array
from dataclasses import dataclass, field

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Placement
from longhelix.scheduler.kv.windows import WindowBlocks
from longhelix.scheduler.request import Request


@dataclass(eq=False, slots=True)
class Job:
    """A request and what is known of it before it runs.

    deadline_s: when its first token is due. prefill_s: the predicted seconds of its prefill, if it runs alone.
    cached_tokens: of its prompt, those whose KV was there when it began. preemptions: how often it was preempted;
    lost_tokens: with KV, the last time; recomputed_tokens: those that were computed again, all times. swapped_tokens:
    those whose KV was swapped and came back when it began, all times. overtaken: requests that were admitted before it,
    although it came first, because they fit and it did not. was_tried: it has not fitted before. moved_tokens: those
    whose KV moved between KVP ranks while it ran, all times; moved_s: how long the steps that moved them were busy with
    that. scored_tokens: of its prompt's first ones, those after whose rows steps were asked for log-probabilities,
    which are not asked for again.
    """

    request: Request
    deadline_s: float
    prefill_s: float
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    lost_tokens: int = 0
    overtaken: int = 0
    was_tried: bool = False
    moved_tokens: int = 0
    moved_s: float = 0.0
    scored_tokens: int = 0


@dataclass(eq=False, slots=True)
class Sequence:
    """length: tokens whose rows have been submitted; for a sequence that decodes, as of the last look of `Decodes`; for
    one with draft tokens, only those that are known to be accepted.

    room: how many KV blocks each KVP rank may come to have of it. promised: those that are promised to it and that it
    does not have yet. block_ids: those that it has on each rank, in position order. unnamed: of its last blocks those
    without a content hash, in order; digest: the hash of the block before them. output: tokens that have come back.
    num_rows: of its prompt and its answer; the last token has none. is_scored: whether log-probabilities of its prompt
    are asked for. max_output: the most tokens that may come back. windows: its blocks of each group with a limit.
    next_look: after so many of them there is more to do than to pass one on.
    microbatch: its microbatch, once its prompt is done. looked_at, due: rounds of `Decodes`, and counted_on: the KVP
    rank for which it counts the sequence's next tokens; it alone uses them.
    joins_after, last_step: ids of the step that samples the token of its first row in a microbatch, and of the last
    step before its preemption. instances: see `NewSequence`.
    """

    job: Job
    placement: Placement
    room: list[int]
    promised: list[int]
    block_ids: "list[array[int]]"
    request: Request = field(init=False)
    id: int = field(init=False)
    num_prompt: int = field(init=False)
    num_rows: int = field(init=False)
    max_output: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    is_scored: bool = field(init=False)
    output: "array[int]" = field(default_factory=lambda: array("i"))
    next_look: int = 1
    length: int = 0
    num_blocks: int = 0
    most_blocks: int = 0  # on one rank
    last_owner: int = 0
    unnamed: list[Block] = field(default_factory=list)
    digest: bytes = b""
    microbatch: int = 0
    looked_at: int = 0
    due: int = 0
    counted_on: int = 0
    joins_after: int = 0
    last_step: int = 0
    instances: tuple[int, ...] = ()
    windows: tuple[WindowBlocks, ...] = ()

    def __post_init__(self) -> None:
        self.request = self.job.request
        self.id = self.request.id
        self.num_prompt = len(self.request.prompt_token_ids)
        self.num_rows = self.request.num_rows
        self.max_output = self.request.sampling.most_sampled
        self.is_scored = self.request.sampling.prompt_logprobs is not None
        self.stop_token_ids = self.request.stop_token_ids

    @property
    def prompt_left(self) -> int:
        return max(self.num_prompt - self.length, 0)

    def scored(self, num_tokens: int) -> range:
        """Of its next tokens those after whose rows log-probabilities of the prompt's next ones are wanted. What it has
        generated before a preemption is not asked about, and neither is its first new token."""
        stop = min(self.length + num_tokens, self.request.given_tokens - 1) if self.is_scored else 0
        return range(max(self.length, self.job.scored_tokens), stop)

    @property
    def home(self) -> int | None:
        """The KVP rank that alone computes the prompt; None where several take part."""
        return self.placement.home

    @property
    def even(self) -> bool:
        """Whether all KVP ranks have the same share of its tokens."""
        return self.placement.even

    @property
    def rank_tokens(self) -> list[int]:
        """Of its first `length` tokens those of each KVP rank. Those beyond its blocks count for the last one's."""
        block_tokens = self.placement.block_tokens
        tokens = [len(block_ids) * block_tokens for block_ids in self.block_ids]
        tokens[self.last_owner] += self.length - self.num_blocks * block_tokens
        return tokens

    @property
    def known_length(self) -> int:
        """Of its first tokens, those that are known and whose rows have been submitted."""
        return self.num_prompt + len(self.output) - 1 if self.output else min(self.length, self.num_prompt)

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Known tokens from `start` to `stop`, int32 in this machine's byte order."""
        num_prompt = self.num_prompt
        if start >= num_prompt:
            return self.output[start - num_prompt : stop - num_prompt].tobytes()
        prompt = self.request.prompt_token_ids[start:stop].tobytes()
        return prompt if stop <= num_prompt else prompt + self.output[: stop - num_prompt].tobytes()
