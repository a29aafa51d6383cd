"""What crosses between the scheduler and the runner: steps and their results.

Steps carry deltas only: a worker keeps its own copy of every sequence (last token, blocks, lengths) and advances it by
what the step says (Medha, section 5: replicated sequence state).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import msgspec

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import ImageSpan, SamplingParams
from longhelix.scheduler.work import NO_WORK, Work

TOKEN_BYTES = 4


class NewSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that workers see for the first time; `num_rows` freezes length-dependent RoPE.

    blocks_per_rank: the KV blocks that each KVP rank may ever hold of it. spread: every KVP rank takes part in its
    attention from the first row on; otherwise those that hold KV of it.
    cached_tokens: its first ones, whose KV is there when the step's layers run, in `cached_blocks`, in position order;
    its chunks bring the rest of the prompt. It only writes to the last of these blocks, and only if that is not full.
    seen_token_ids: the different ones among the cached tokens, where a repetition penalty asks for them; int32 in this
    machine's byte order.
    generated_token_ids: those that it had generated before it was preempted, where it matters which; int32 as well.
    instances: where KVP instances have clocks of their own, those that take part in it from now on. The first one
    samples its tokens. last_token: the last one of its tokens that was sampled, where it has any.
    images: what its prompt shows, in order; ranks that need it have what their digests stand for.
    """

    id: int
    sampling: SamplingParams
    seed: int
    capacity_tokens: int
    blocks_per_rank: tuple[int, ...]
    spread: bool
    cached_tokens: int = 0
    cached_blocks: tuple[Block, ...] = ()
    seen_token_ids: bytes = b""
    generated_token_ids: bytes = b""
    instances: tuple[int, ...] = ()
    last_token: int | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_rows(self) -> int:
        """`Request.num_rows`: the most tokens that have KV. The last new one never has."""
        return self.capacity_tokens - min(self.sampling.max_new_tokens, 1)


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a chunk after which log-probabilities of the prompt's next token are wanted: from the chunk's row `first`
    on, one for each of `targets`, which are these tokens; int32 in this machine's byte order. The last of them may be
    the first one of the next chunk."""

    first: int
    targets: bytes


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sequence's prompt, the KV blocks that they newly need, and whether to sample after them.

    token_ids: int32 in this machine's byte order. scored: where the request asks for `prompt_logprobs`.
    """

    id: int
    token_ids: bytes
    new_blocks: tuple[Block, ...]
    sample: bool
    scored: Scored | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A full KV block of a sequence goes from one KVP rank to another, in layers without a limit; no row sees it any
    longer in others. place: how many blocks of the sequence come before it, on all ranks together."""

    source: Block
    target: Block
    place: int


class Widened(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that decodes and takes other KVP ranks than it was to. moves: of its blocks, in position order.
    blocks_per_rank: as in its `NewSequence`, from now on."""

    id: int
    moves: tuple[Move, ...]
    blocks_per_rank: tuple[int, ...]


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One iteration of the engine over a mixed batch: a row for each sequence that decodes, then prefill chunks.

    Where the model has KV groups with a limit, each place of a sequence has one block for each group, all on one KVP
    rank: first that of the layers without a limit, then those of the others, with the id -1 where no row sees the place
    any longer. Blocks and copies of a sequence then come so many at a time.
    Which sequences decode is said by changes alone. Each has a row, after which is sampled, in every step from the one
    that names it in `joining` until one names it in `leaving` or `ended`; workers know its last token. `grown`: the
    KV blocks that their new rows need. With pipeline stages the sequences that decode are dealt to as many
    microbatches: a step has rows of those of its own `microbatch`, which join it there.
    copies: KV blocks to copy, (source, target) each, all layers, before anything else is computed: from sources that
    earlier steps or swaps have filled to targets that nobody reads yet, so that none is both, or a target twice.
    swapped_out, swapped_in: KV blocks and their owner's slots, outside of its pool: before copies, first blocks that
    earlier steps have filled go to slots, then slots to blocks that nobody reads yet.
    widened: sequences of which blocks move with the copies. What a moved block had may be overwritten in this step, by
    what moves into it as well: all are read before one is written.
    most_tokens: no KVP rank has room for more tokens of one of its sequences, in the KV blocks that they have by then.
    work: the sum of it all, and in how many parts it attends. Both are chosen once, and not by ranks, which would wait
    for each other forever if they disagreed.

    instances: the KVP instances that take the step, each what concerns it (`of_instance`); empty: all take all of it.
    enlisted: sequences that run, and that another one of these takes part in from now on: to that one they are new, and
    their tokens cached.
    """

    id: int
    new: tuple[NewSequence, ...] = ()
    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    grown: tuple[tuple[int, Block], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    ended: tuple[int, ...] = ()
    most_tokens: int = 0
    work: Work = NO_WORK
    copies: tuple[tuple[Block, Block], ...] = ()
    swapped_out: tuple[tuple[Block, int], ...] = ()
    swapped_in: tuple[tuple[int, Block], ...] = ()
    microbatch: int = 0
    widened: tuple[Widened, ...] = ()
    instances: tuple[int, ...] = ()
    enlisted: tuple[NewSequence, ...] = ()

    def of_instance(self, instance: int, known: Container[int]) -> "Step":
        """What concerns one of its KVP instances, which has the `known` sequences so far: other sequences are left out,
        and those that it takes part in from now on are new to it."""
        new = tuple(one for one in self.new if instance in one.instances)
        new += tuple(one for one in self.enlisted if instance in one.instances and one.id not in known)
        ids = {one.id for one in new}

        def has(id: int) -> bool:
            return id in ids or id in known

        return msgspec.structs.replace(
            self,
            new=new,
            enlisted=tuple(one for one in self.enlisted if one.id in known and one.id not in ids),
            joining=tuple(filter(has, self.joining)),
            leaving=tuple(filter(has, self.leaving)),
            grown=tuple(one for one in self.grown if has(one[0])),
            chunks=tuple(chunk for chunk in self.chunks if has(chunk.id)),
            ended=tuple(id for id in self.ended if id in known),
        )

    @property
    def moved(self) -> tuple[tuple[Block, Block], ...]:
        """The blocks that move, each with where it goes."""
        return tuple((move.source, move.target) for one in self.widened for move in one.moves)


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence's next token; `logprobs` maps token ids to natural logs of the model's own distribution.

    error: why there is none, where choosing it failed; the request ends, and others go on. The id then means nothing.
    """

    sequence_id: int
    token_id: int
    logprobs: Mapping[int, float] = {}
    error: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a sequence's prompt, for each token that a chunk asks for in `Chunk.scored`: token ids to natural logs of the
    model's own distribution before it. error: why there are none; the request ends, and others go on."""

    sequence_id: int
    logprobs: tuple[Mapping[int, float], ...]
    error: str = ""


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step gave: sampled tokens in the order of its work, rows that ran, bytes that ranks sent in the exchange.

    A rank reports its own bytes, the runner over all ranks their sum. parts: those of the step. exposed_s: seconds that
    a rank waited for exchanges with nothing left to attend to, of all ranks the longest; None where nobody measured.
    fingerprint: of the collectives that the rank ran for it, the same on all ranks. taken_s: seconds that the step
    took, of all ranks the longest; 0 where nobody measured. moved_s: those of them in which blocks moved between ranks.
    prompt_logprobs: in the order of its chunks. network_bytes: sent to ranks of other hosts, in all collectives.
    """

    step_id: int
    sampled: tuple[SampledToken, ...]
    num_tokens: int
    exchanged_bytes: int
    parts: int = 1
    exposed_s: float | None = None
    fingerprint: int = 0
    taken_s: float = 0.0
    moved_s: float = 0.0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    network_bytes: int = 0
