"""What crosses between the scheduler and the runner: steps and their results.

Steps carry deltas only: a worker keeps its own copy of every sequence (last token, blocks, lengths) and advances it by
what the step says (Medha, section 5: replicated sequence state).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import ImageSpan, SamplingParams
from longhelix.scheduler.work import NO_WORK, Work

TOKEN_BYTES = 4


class InitialKV(msgspec.Struct, frozen=True, array_like=True):
    """Where the KV of a new sequence goes, and what of it is cached.

    Attributes:
        blocks_per_rank: The most KV blocks that the sequence ever has, by KVP rank.
        spread: Every KVP rank takes part in its attention from the first row on. Otherwise only ranks with its KV do.
        cached_tokens: Tokens at its start whose KV exists when the step's layers run. Chunks bring the other tokens of
            the prompt.
        cached_blocks: The blocks with this KV, in position order. The sequence only writes to the last one, and only
            if that is not full.
    """

    blocks_per_rank: tuple[int, ...]
    spread: bool
    cached_tokens: int = 0
    cached_blocks: tuple[Block, ...] = ()


class KnownTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of a new sequence that ranks need and that no chunk brings. Ids are int32 in this machine's byte order.

    Attributes:
        seen_ids: The different tokens among the cached ones, if the sequence has a repetition penalty.
        generated_ids: The tokens that it had generated before it was preempted, if its sampling depends on them.
        last_id: The last token that was sampled for it. None if there is none.
    """

    seen_ids: bytes = b""
    generated_ids: bytes = b""
    last_id: int | None = None


NO_TOKENS = KnownTokens()


class NewSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that ranks see for the first time.

    Attributes:
        id: The sequence's id.
        sampling: How its tokens are chosen.
        seed: Of its random numbers.
        capacity_tokens: Tokens of its prompt and answer at most. They decide its RoPE frequencies if these depend on
            length.
        kv: Where its KV goes, and what of it is cached.
        known: Tokens that ranks need and that no chunk brings.
        instances: If KVP instances have their own clocks, those that take part in it from now on. The first one samples
            its tokens.
        images: The images in its prompt, in order. Ranks that need the images have them by their digests.
    """

    id: int
    sampling: SamplingParams
    seed: int
    capacity_tokens: int
    kv: InitialKV
    known: KnownTokens = NO_TOKENS
    instances: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_rows(self) -> int:
        """`Request.num_rows`: the most tokens that have KV. The last new one never has."""
        return self.capacity_tokens - min(self.sampling.max_new_tokens, 1)


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens whose log-probabilities a request asks for, within one chunk.

    Attributes:
        first: Row of the chunk before the first of these tokens.
        targets: The tokens, one after each row from `first` on. The last one may be the first token of the next chunk.
            int32 in this machine's byte order.
    """

    first: int
    targets: bytes


@dataclass(frozen=True)
class Chunk:
    """The next tokens of a sequence's prompt.

    Attributes:
        id: The sequence's id.
        token_ids: int32 in this machine's byte order.
        new_blocks: The KV blocks that they need in addition.
        sample: Whether to sample a token after them.
        scored: The tokens to score, if the request asks for `prompt_logprobs`.
    """

    id: int
    token_ids: bytes
    new_blocks: tuple[Block, ...]
    sample: bool
    scored: Scored | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(frozen=True)
class Draft:
    """The next rows of a decoding sequence whose next tokens were guessed: one for its last token, then one for each
    draft token.

    A token is sampled after every row. A draft token is accepted if it is the token that was sampled before it, and if
    all draft tokens before it are accepted.

    Attributes:
        id: The sequence's id.
        start: Its tokens with KV so far. Ranks discard the KV of rejected draft tokens behind them.
        token_ids: Its last token and the draft tokens. int32 in this machine's byte order.
        new_blocks: The KV blocks that the rows need in addition, if all draft tokens are accepted.
    """

    id: int
    start: int
    token_ids: bytes
    new_blocks: tuple[Block, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A full KV block of a sequence that goes to another KVP rank, in layers without a limit.

    In layers with a limit, no row sees the block any longer.

    Attributes:
        source: Where the block is.
        target: Where it goes.
        place: Blocks of the sequence before it, on all ranks together.
    """

    source: Block
    target: Block
    place: int


class Swap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A KV block whose content goes to a slot outside of its pool, or comes from there.

    Attributes:
        block: The block.
        slot: Number of the slot, on the KVP rank of the block.
        group: Their KV group.
    """

    block: Block
    slot: int
    group: int = 0


class Rebalance(msgspec.Struct, frozen=True, array_like=True):
    """A decoding sequence whose KV is from now on placed on other KVP ranks than planned.

    Attributes:
        id: The sequence's id.
        moves: The blocks that move, in position order.
        blocks_per_rank: As in `InitialKV`, from now on.
    """

    id: int
    moves: tuple[Move, ...]
    blocks_per_rank: tuple[int, ...]


class Turn(NamedTuple):
    """The ranks and sequences that a step is for.

    Attributes:
        microbatch: The microbatch whose rows the step has.
        instances: The KVP instances that run the step. Empty: all ranks run it.
    """

    microbatch: int = 0
    instances: tuple[int, ...] = ()

    def has(self, instances: tuple[int, ...]) -> bool:
        """Whether one of these instances, or all ranks, take the step."""
        return not self.instances or not instances or any(one in self.instances for one in instances)


class SequenceChanges(msgspec.Struct, frozen=True, array_like=True):
    """What changes for running sequences.

    Attributes:
        new: Sequences that start.
        ended: Ids of the sequences that end.
        joining: Ids of the sequences that begin to decode.
        leaving: Ids of the sequences that stop decoding and do not end.
        grown: KV blocks that decoding sequences need for their new rows, each with the sequence's id.
        rebalances: Sequences whose blocks move together with the copies. All blocks are read before one is written,
            because a block may be overwritten in the step in which it moves.
        joined: Running sequences that one more of the turn's instances takes part in from now on. They are new to that
            instance, and all their tokens are cached.
    """

    new: tuple[NewSequence, ...] = ()
    ended: tuple[int, ...] = ()
    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    grown: tuple[tuple[int, Block], ...] = ()
    rebalances: tuple[Rebalance, ...] = ()
    joined: tuple[NewSequence, ...] = ()


class BlockTransfers(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks that are copied before the layers run.

    Attributes:
        copies: KV blocks to copy in all layers, (source, target) each. Earlier steps or swaps have filled the sources.
            Nothing reads the targets yet, so no block is both, and no target occurs twice.
        swapped_out: Blocks that earlier steps have filled. Their content goes to slots before `copies`.
        swapped_in: Blocks that get the content of slots, after `swapped_out`. Nothing reads these blocks yet.
    """

    copies: tuple[tuple[Block, Block], ...] = ()
    swapped_out: tuple[Swap, ...] = ()
    swapped_in: tuple[Swap, ...] = ()


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One iteration of the engine over a mixed batch: a row for each decoding sequence, then the rows of drafts, then
    prefill chunks.

    A step carries only changes. A sequence decodes in every step from the one that names it in `joining` until one
    names it in `leaving` or `ended`. Ranks know its last token. A sequence with draft tokens decodes only in the steps
    that have a draft of it, because its next rows depend on how many tokens were accepted.

    If the model has KV groups with a limit, a sequence has one block of each group at each place, all on the same KVP
    rank: first the block of the layers without a limit, then those of the other groups. The id -1 means that no row
    sees the place any longer. Lists of a sequence's blocks and copies then contain this many items for each place.

    Attributes:
        id: Number of the step.
        turn: Whose rows it has. With pipeline stages, the decoding sequences are split into as many microbatches. The
            rows of the step are those of one, and sequences in `joining` join it. If KVP instances have clocks of their
            own, each instance takes its own part of the step (`of_instance`).
        changes: What changes for running sequences.
        drafts: The rows of decoding sequences with draft tokens.
        chunks: Prompt tokens to compute.
        transfers: KV blocks that are copied or swapped.
        most_tokens: The most tokens of one sequence for which any KVP rank has room, in blocks after this step.
        work: The sum of all work, and the number of parts in which attention runs. Both are chosen here and not by the
            ranks, because ranks that choose differently would wait for each other forever.
    """

    id: int
    turn: Turn = Turn()
    changes: SequenceChanges = SequenceChanges()
    drafts: tuple[Draft, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    transfers: BlockTransfers = BlockTransfers()
    most_tokens: int = 0
    work: Work = NO_WORK

    def of_instance(self, instance: int, known: Container[int]) -> "Step":
        """Return the part of the step for one KVP instance.

        Args:
            instance: the instance.
            known: ids of the sequences in which it takes part so far. Sequences that it joins are new to it.
        """
        changes = self.changes
        new = tuple(one for one in changes.new if instance in one.instances)
        new += tuple(one for one in changes.joined if instance in one.instances and one.id not in known)
        ids = {one.id for one in new}

        def has(id: int) -> bool:
            return id in ids or id in known

        return msgspec.structs.replace(
            self,
            changes=msgspec.structs.replace(
                changes,
                new=new,
                ended=tuple(id for id in changes.ended if id in known),
                joining=tuple(filter(has, changes.joining)),
                leaving=tuple(filter(has, changes.leaving)),
                grown=tuple(one for one in changes.grown if has(one[0])),
                joined=tuple(one for one in changes.joined if one.id in known and one.id not in ids),
            ),
            drafts=tuple(draft for draft in self.drafts if has(draft.id)),
            chunks=tuple(chunk for chunk in self.chunks if has(chunk.id)),
        )

    @property
    def segments(self) -> tuple[Draft | Chunk, ...]:
        """The sequences with any number of rows, in the order of the rows."""
        return self.drafts + self.chunks

    @property
    def moved(self) -> tuple[tuple[Block, Block], ...]:
        """The blocks that move to another rank, (source, target) each."""
        return tuple((move.source, move.target) for one in self.changes.rebalances for move in one.moves)


class SampledToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next token of a sequence.

    Attributes:
        sequence_id: The sequence's id.
        token_id: The token. Meaningless if there is an error.
        logprobs: Natural logarithms of the model's own distribution, by token id.
        error: Why no token could be chosen. The request then ends. Empty if there is a token.
    """

    sequence_id: int
    token_id: int
    logprobs: Mapping[int, float] = {}
    error: str = ""


class PromptLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log-probabilities of a prompt's tokens that a chunk asks for (`Chunk.scored`).

    Attributes:
        sequence_id: The sequence's id.
        logprobs: For each of these tokens, natural logarithms of the model's own distribution before it, by token id.
        error: Why there are none. The request then ends. Empty if there are any.
    """

    sequence_id: int
    logprobs: tuple[Mapping[int, float], ...]
    error: str = ""


class StepMeasurements(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was measured of a step. A rank reports its own numbers, and the runner combines those of all ranks.

    Attributes:
        taken_s: Seconds that the step took. Combined: the longest. 0 if nothing measured it.
        moved_s: Of these, the seconds in which blocks moved between ranks. Combined: the longest.
        exposed_s: Seconds in which a rank waited for exchanges and had nothing left to attend to. Combined: the
            longest. None if nothing measured it.
        exchanged_bytes: Bytes sent in exchanges of attention. Combined: the sum.
        network_bytes: Bytes sent to ranks of other hosts, in all collectives. Combined: the sum.
        fingerprint: Fingerprint of the collectives that the rank ran. The same on all ranks.
        parts: The step's number of parts. The same on all ranks.
    """

    taken_s: float = 0.0
    moved_s: float = 0.0
    exposed_s: float | None = None
    exchanged_bytes: int = 0
    network_bytes: int = 0
    fingerprint: int = 0
    parts: int = 1


NOT_MEASURED = StepMeasurements()


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step produced. A rank reports its own tokens, and the runner combines those of all ranks.

    Attributes:
        step_id: Number of the step.
        sampled: Sampled tokens, in the order of the step's rows. Of a draft those that were sampled after its last
            token and after each accepted draft token.
        num_tokens: Rows that ran. Combined: the sum over ranks that return tokens.
        prompt_logprobs: In the order of the step's chunks.
        measured: What was measured of the step.
    """

    step_id: int
    sampled: tuple[SampledToken, ...]
    num_tokens: int
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    measured: StepMeasurements = NOT_MEASURED
