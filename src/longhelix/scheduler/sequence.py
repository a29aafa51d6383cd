"""The scheduler's state of waiting and running requests."""

from array import array
from dataclasses import dataclass, field

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Placement
from longhelix.scheduler.kv.windows import WindowBlocks
from longhelix.scheduler.request import Request


@dataclass(slots=True)
class JobHistory:
    """What has happened to a request so far, in all of its runs: it begins anew after each preemption.

    Attributes:
        cached_tokens: Tokens of its prompt whose KV was there when it first began. Written by `Admission`.
        preemptions: How often it was preempted. Written by `Scheduler`, as is `lost_tokens`.
        lost_tokens: Tokens with KV at its last preemption.
        recomputed_tokens: Tokens whose KV was computed again after a preemption. Written by `Admission`.
        swapped_tokens: Tokens whose KV was swapped and came back when it began. Written by `Admission`.
        moved_tokens: Tokens whose KV moved between KVP ranks while it ran. Written by `Widening`.
        moved_s: Seconds that steps spent on these moves. Written by `Scheduler`.
        scored_tokens: First tokens of its prompt after whose rows steps were asked for log-probabilities. They are not
            asked for again. Written by `Scheduler`.
    """

    cached_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    moved_tokens: int = 0
    moved_s: float = 0.0
    scored_tokens: int = 0


@dataclass(eq=False, slots=True)
class Job:
    """A request and what is known of it before it runs.

    Attributes:
        request: The request. After a preemption its prompt contains the tokens that it has generated.
        deadline_s: When its first token is due, in seconds on the engine's clock.
        prefill_s: The predicted seconds of its prefill, if it runs alone.
        history: What has happened to it.
        overtaken: Requests that were admitted before it although it came first, because they fit and it did not.
            Written by `Admission`, as is `was_tried`.
        was_tried: Whether it has failed to fit before.
    """

    request: Request
    deadline_s: float
    prefill_s: float
    history: JobHistory = field(default_factory=JobHistory)
    overtaken: int = 0
    was_tried: bool = False


@dataclass(eq=False, slots=True)
class SequenceKV:
    """The KV blocks of a sequence, by KVP rank. Written by `BlockPool`, and where they change ranks by `Widening`.

    Attributes:
        placement: Which rank owns each block. Also written by `choose_ranks`.
        room: The most blocks that each rank may come to have.
        reserved: Blocks of each rank that are reserved for it and that it does not have yet.
        block_ids: Ids of the blocks that it has on each rank, in position order.
        num_blocks: Blocks that it has on all ranks together.
        most_blocks: The most blocks that it has on one rank.
        last_owner: The rank of its last block.
        windows: Its blocks of each KV group with a limit.
    """

    placement: Placement
    room: list[int]
    reserved: list[int]
    block_ids: "list[array[int]]"
    num_blocks: int = 0
    most_blocks: int = 0
    last_owner: int = 0
    windows: tuple[WindowBlocks, ...] = ()


@dataclass(eq=False, slots=True)
class UnhashedBlocks:
    """The last blocks of a sequence, which have no content hash yet, so that the prefix cache does not find them.

    Attributes:
        blocks: The blocks, in position order. `BlockPool` adds to them, and `PrefixCache` takes what it hashes.
        parent_hash: Hash of the block before them. Written by `PrefixCache`.
    """

    blocks: list[Block] = field(default_factory=list)
    parent_hash: bytes = b""


@dataclass(eq=False, slots=True)
class SequenceSchedule:
    """Which steps have rows of a sequence.

    Attributes:
        num_rows: Rows of its prompt and its answer. The last token has none. Never changes.
        instances: See `NewSequence`. Written by `Instances`.
        microbatch: Its microbatch once its prompt is done. Written by `Microbatches`.
        joins_after: Id of the step that samples the token of its first row in the microbatch. Written by
            `Microbatches`.
        last_step: Id of the last step before its preemption. Written by `Scheduler`.
        looked_at: The round of `Decodes` in which its length was last brought up to date. `Decodes` alone uses this and
            what follows.
        due: The round in which there is something to do for it.
        counted_on: The KVP rank on which its next tokens are counted.
    """

    num_rows: int
    instances: tuple[int, ...] = ()
    microbatch: int = 0
    joins_after: int = 0
    last_step: int = 0
    looked_at: int = 0
    due: int = 0
    counted_on: int = 0


@dataclass(eq=False, slots=True)
class SequenceTokens:
    """The tokens of a sequence that have come back, and which of the next ones needs a look. Written by `Scheduler`.

    Attributes:
        num_prompt: Tokens of its prompt. Never changes.
        output: The tokens that have come back since it began, in order.
        next_look: Number of output tokens after which there is more to do than to pass one on.
        max_output: The most tokens that may come back. Never changes.
        stop_ids: Tokens that end the answer. Never changes.
    """

    num_prompt: int
    output: "array[int]"
    next_look: int
    max_output: int
    stop_ids: frozenset[int]


@dataclass(eq=False, slots=True)
class Sequence:
    """A running request.

    Attributes:
        job: The request as it waited.
        kv: Its KV blocks.
        request: The request of the job. Never changes.
        id: The request's id. Never changes.
        tokens: The tokens that have come back.
        schedule: Which steps have rows of it.
        unhashed: Its blocks that have no content hash yet.
        length: Tokens whose rows have been submitted. If it decodes, as of the last look of `Decodes`, which writes it
            then. If it has draft tokens, only those that are known to be accepted. Written by `Scheduler` and
            `Drafting`.
    """

    job: Job
    kv: SequenceKV
    request: Request = field(init=False)
    id: int = field(init=False)
    tokens: SequenceTokens = field(init=False)
    schedule: SequenceSchedule = field(init=False)
    unhashed: UnhashedBlocks = field(default_factory=UnhashedBlocks)
    length: int = 0

    def __post_init__(self) -> None:
        request = self.request = self.job.request
        self.id = request.id
        self.schedule = SequenceSchedule(request.num_rows)
        self.tokens = SequenceTokens(
            num_prompt=len(request.prompt_token_ids),
            output=array("i"),
            next_look=1,
            max_output=request.sampling.most_sampled,
            stop_ids=request.stop_token_ids,
        )

    @property
    def prompt_left(self) -> int:
        """Tokens of its prompt whose rows have not been submitted."""
        return max(self.tokens.num_prompt - self.length, 0)

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are asked for."""
        return self.request.sampling.prompt_logprobs is not None

    def scored(self, num_tokens: int) -> range:
        """Return the positions within the next `num_tokens` whose rows need log-probabilities of the next prompt token.

        Tokens generated before a preemption, and the first new token, are not included.
        """
        stop = min(self.length + num_tokens, self.request.given_tokens - 1) if self.is_scored else 0
        return range(max(self.length, self.job.history.scored_tokens), stop)

    @property
    def rank_tokens(self) -> list[int]:
        """Its first `length` tokens by KVP rank. Tokens beyond its blocks count for the rank of the last block."""
        kv, length = self.kv, self.length
        block_tokens = kv.placement.block_tokens
        tokens = [len(block_ids) * block_tokens for block_ids in kv.block_ids]
        tokens[kv.last_owner] += length - kv.num_blocks * block_tokens
        return tokens

    @property
    def known_length(self) -> int:
        """Number of first tokens that are known and whose rows have been submitted."""
        tokens = self.tokens
        return tokens.num_prompt + len(tokens.output) - 1 if tokens.output else min(self.length, tokens.num_prompt)

    def token_bytes(self, start: int, stop: int) -> bytes:
        """Return known tokens from `start` to `stop`, as int32 in this machine's byte order."""
        num_prompt, output = self.tokens.num_prompt, self.tokens.output
        if start >= num_prompt:
            return output[start - num_prompt : stop - num_prompt].tobytes()
        prompt = self.request.prompt_token_ids[start:stop].tobytes()
        return prompt if stop <= num_prompt else prompt + output[: stop - num_prompt].tobytes()
