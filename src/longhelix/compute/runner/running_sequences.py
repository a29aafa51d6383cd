"""The running sequences of one rank."""

from functools import lru_cache

import torch

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.cache.pool import KVPool
from longhelix.compute.models.rope import all_frequencies
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.adjustments import Adjustments
from longhelix.compute.runner.decode_rows import DecodeRows
from longhelix.compute.runner.matchers import Matchers
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import Frequencies, SequenceState, sequence_numbers, token_ids
from longhelix.scheduler.guide import TokenTable
from longhelix.scheduler.kv.blocks import IDS_PER_BLOCK
from longhelix.scheduler.step import NewSequence, Step
from longhelix.spec import ModelSpec


class RunningSequences:
    """The running sequences. Steps begin, change and end them.

    Attributes:
        by_id: All sequences.
        decoding: Sequences with one row each in the step that was admitted last.
        numbers: Numbers that change with every token, one line for each sequence.
        arena: Their KV blocks on this rank.
        block_tokens: Tokens of a KV block.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, pool: KVPool) -> None:
        self._spec, self._device, self.block_tokens = spec, pool.device, pool.block_tokens
        self._kvp_rank = mesh.layout.kvp_rank(mesh.rank)
        self._has_head = mesh.layout.has_head(mesh.rank)
        self._vocabulary = mesh.layout.vocabulary(spec.vocabulary.size, mesh.rank)
        self.by_id: dict[int, SequenceState] = {}
        self._microbatches = [DecodeRows() for _ in range(mesh.layout.pp)]
        self.decoding = self._microbatches[0]
        self.numbers = sequence_numbers(mesh.layout.kvp)
        self.arena = BlockArena(IDS_PER_BLOCK * pool.num_blocks, pool.device, pool.num_groups)
        self._frequencies = lru_cache(self._new_frequencies)
        self._matchers: Matchers | None = None

    @property
    def guide_steps(self) -> int:
        """Number of steps of guides so far (`Matchers.steps`)."""
        return 0 if self._matchers is None else self._matchers.steps

    def set_token_table(self, table: TokenTable) -> None:
        """Set the texts of tokens, which sequences with guides need."""
        self._matchers = Matchers(table)

    def leads(self, seq: SequenceState) -> bool:
        """Return whether this rank samples the sequence's tokens, if it has the head.

        If instances have their own clocks, the first instance of the sequence samples.
        """
        return not seq.instances or seq.instances[0] == self._kvp_rank

    def ending(self, step: Step) -> tuple[SequenceState, ...]:
        """Return the sequences whose prompts end in a step."""
        return tuple([self.by_id[chunk.id] for chunk in step.chunks if chunk.sample])

    def sampled(self, step: Step) -> tuple[SequenceState, ...]:
        """Return the sequences that get one token in a step, in the order of its rows: all but those of drafts."""
        ends = self.ending(step)
        return (*self.decoding.sequences, *ends) if ends else self.decoding.sequences

    def admit(self, step: Step) -> None:
        """Forget ended sequences, take in new ones, and note which sequences decode from here on."""
        for sequence_id in step.changes.ended:
            seq = self.by_id.pop(sequence_id)
            self._microbatches[seq.microbatch].leave(sequence_id)
            seq.end()
        for sequence_id in step.changes.leaving:
            self._microbatches[self.by_id[sequence_id].microbatch].leave(sequence_id)
        for draft in step.drafts:
            self.by_id[draft.id].take_draft(draft, self.block_tokens)
        for change in step.changes.rebalances:
            self.by_id[change.id].rebalance(change, self._kvp_rank, self.block_tokens)
        for joined in step.changes.joined:
            self.by_id[joined.id].instances = joined.instances
        for new in step.changes.new:
            self.by_id[new.id] = self._begin(new)
        if self._matchers is not None:
            self._matchers.trim()
        self.decoding = self._microbatches[step.turn.microbatch]
        for sequence_id in step.changes.joining:
            seq = self.by_id[sequence_id]
            seq.microbatch = step.turn.microbatch
            self.decoding.join(seq)

    def _begin(self, new: NewSequence) -> SequenceState:
        samples = self._has_head and (not new.instances or new.instances[0] == self._kvp_rank)
        seq = SequenceState(
            new,
            self._frequencies(all_frequencies(self._spec, new.num_rows)),
            self.numbers,
            self.arena,
            seen=self._seen(new) if samples else None,
            adjustments=self._adjustments(new) if samples else None,
        )
        seq.begin(self._kvp_rank, self.block_tokens)
        return seq

    def _new_frequencies(self, of_rotations: tuple[tuple[float, ...], ...]) -> Frequencies:
        tensors = (torch.tensor(frequencies, dtype=torch.float64, device=self._device) for frequencies in of_rotations)
        return Frequencies(tuple(tensors))

    def _seen(self, new: NewSequence) -> SeenTokens | None:
        if new.sampling.repetition_penalty == 1:
            return None
        seen = SeenTokens(self._vocabulary)
        seen.add(token_ids(new.known.seen_ids))
        return seen

    def _adjustments(self, new: NewSequence) -> Adjustments | None:
        params = new.sampling
        if not (params.logit_bias or params.min_tokens or params.needs_generated):
            return None
        matcher = None
        if params.guide is not None:
            assert self._matchers is not None, "the engine sets the token table first"
            matcher = self._matchers.new(params.guide)
        adjustments = Adjustments(
            new, self._vocabulary, self._spec.vocabulary.eos_token_ids, device=self._device, matcher=matcher
        )
        for token_id in token_ids(new.known.generated_ids).tolist():
            for record in adjustments.records:
                record.add_one(token_id)
        return adjustments
