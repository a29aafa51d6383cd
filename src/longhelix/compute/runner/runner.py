"""The runner of one rank: a Step becomes tensors, the model runs, and all ranks get the next tokens."""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.kernels.flashinfer import PageLists
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.rope import all_frequencies
from longhelix.compute.models.token_shards import TokenShards
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.adjustments import Adjustments
from longhelix.compute.runner.batches import Batches
from longhelix.compute.runner.copies import copy_blocks, swap_blocks
from longhelix.compute.runner.decode_rows import DecodeRows
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.handover import Handover
from longhelix.compute.runner.layers import make_layers
from longhelix.compute.runner.matchers import Matchers
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.sampling import Sampling
from longhelix.compute.runner.scoring import Scoring
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import (
    Frequencies,
    SequenceState,
    by_instances,
    sequence_numbers,
    token_ids,
)
from longhelix.scheduler.guide import TokenTable
from longhelix.scheduler.kv.blocks import IDS_PER_BLOCK
from longhelix.scheduler.step import NewSequence, PromptLogprobs, SampledToken, Step, StepResult
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec


class ModelRunner:
    """Executes steps on one rank, in order. Every rank executes every step, or where KVP instances have clocks of their
    own, those of its instance; ranks of all stages but the first are told of each by `expect` before.

    swap_space: where swapped KV blocks go (None: no step swaps).
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        model: Decoder,
        pool: KVPool,
        execution: Execution,
        page_lists: PageLists | None = None,
        spans: Spans = UNTRACED,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self.spec = spec
        self.mesh = mesh
        self.model = model
        self.execution = execution
        self.layers = make_layers(spec, execution, model, pool, page_lists, spans)
        self.sampling = Sampling(mesh, spec.vocab_size, pool.device, spans)
        self._scoring = Scoring(mesh, spec.vocab_size, pool.device)
        self.pool = pool
        self.swap_space = swap_space
        self.block_tokens = pool.block_tokens
        self.device = pool.device
        self.kvp_rank = mesh.layout.kvp_rank(mesh.rank)
        self.sequences: dict[int, SequenceState] = {}
        self._microbatches = [DecodeRows() for _ in range(mesh.layout.pp)]
        self.decoding = self._microbatches[0]  # those of the step that runs
        self.handover = (
            None
            if mesh.pipeline is None
            else Handover(mesh.pipeline, mesh.layout, spec.hidden_size, model.dtype, pool.device)
        )
        self._is_first, self._is_last = mesh.layout.has_embedding(mesh.rank), mesh.layout.has_head(mesh.rank)
        self._step_id = 0
        self.arena = BlockArena(IDS_PER_BLOCK * pool.num_blocks, self.device, pool.num_groups)
        self._numbers = sequence_numbers(mesh.layout.kvp)
        self._frequencies = lru_cache(self._new_frequencies)
        self._spans = spans
        self._matchers: Matchers | None = None
        self._image_rows: dict[tuple[int, int], Tensor] = {}  # of the next step, as `Batches` has them
        self.batches = Batches(
            spec, mesh, self.block_tokens, self.sequences, self._numbers, self.arena, self._image_rows
        )

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run a step. Afterwards every rank of the last stage knows the sampled tokens; its first rank returns them."""
        if self.mesh.instance_groups is not None:
            self.mesh.instance_groups.begin(step.id)
        traffic_before, begun_s = self.mesh.traffic, time.perf_counter()
        if step.instances:
            step = step.of_instance(self.kvp_rank, self.sequences)
        others_before_s = self._waited_for_stages_s
        self._step_id = step.id
        span = self._spans.begin("admit", "host")
        self.admit(step)
        self._spans.end(span)
        if self.swap_space is not None:
            swap_blocks(step, self.swap_space, self.kvp_rank)
        network_before = self.mesh.network_bytes
        moved_s = self._copy(step)
        sent_before, waited_before_s = self.mesh.exchanged_bytes, self.mesh.waited_s
        num_rows = self._num_rows(step)
        sampled: tuple[SampledToken, ...] = ()
        scored: tuple[PromptLogprobs, ...] = ()
        if self.decoding or step.chunks:
            whole = self._spans.begin(f"step {step.id}", "step")
            hidden_TH = self.forward(step)
            if self._is_last:
                sampled = self.sample(step, hidden_TH)
            if self.handover is not None:
                self._hand_over(self.handover, step, hidden_TH)
            if self._is_last:
                scored = self._score(step, hidden_TH)
            self._spans.end(whole)
        self._step_id = 0
        self._image_rows.clear()
        sent, waited_s = self.mesh.exchanged_bytes - sent_before, self.mesh.waited_s - waited_before_s
        exposed_s = waited_s if self.execution.sees_waits else None
        fingerprint = self.mesh.fingerprint(since=traffic_before)
        if self.device.type == "cuda" and (step.chunks or not self._is_last):
            # A step that sampled nothing has not waited for it. Not the device: that may hang on other stages.
            torch.cuda.current_stream(self.device).synchronize()
        taken_s = time.perf_counter() - begun_s - (self._waited_for_stages_s - others_before_s)
        parts = step.work.parts
        return StepResult(
            step_id=step.id,
            sampled=sampled,
            num_tokens=num_rows,
            exchanged_bytes=sent,
            parts=parts,
            exposed_s=exposed_s,
            fingerprint=fingerprint,
            taken_s=taken_s,
            moved_s=moved_s,
            prompt_logprobs=scored,
            network_bytes=self.mesh.network_bytes - network_before,
        )

    def _num_rows(self, step: Step) -> int:
        """The rows of the step that no other instance counts."""
        decodes = sum(map(self._leads, self.decoding.sequences)) if step.instances else len(self.decoding)
        return decodes + sum(chunk.num_tokens for chunk in step.chunks if self._leads(self.sequences[chunk.id]))

    def _leads(self, seq: SequenceState) -> bool:
        """Whether this rank samples the sequence's tokens: where instances have clocks of their own, the first of those
        that take part in it does."""
        return not seq.instances or seq.instances[0] == self.kvp_rank

    def _copy(self, step: Step) -> float:
        """Copy and move KV blocks. Returns the seconds that moves took."""
        begun_s = time.perf_counter()
        moved = step.moved
        if step.copies or moved:
            copy_blocks(step.copies, moved, self.pool, self.mesh.kvp)
        if not moved:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - begun_s

    @property
    def _waited_for_stages_s(self) -> float:
        return 0.0 if self.mesh.pipeline is None else self.mesh.pipeline.waited_s

    def expect(self, step: Step) -> None:
        """A step comes, after those before it: what other stages send for it may travel from now on."""
        if not self._is_first and self.handover is not None:
            self.handover.expect(step)

    def _hand_over(self, handover: Handover, step: Step, hidden_TH: Tensor) -> None:
        """What other stages need of a step that is done here."""
        if not self._is_last:
            handover.give_hidden(hidden_TH)
        sampled = self._sampled(step)
        if not sampled:
            return
        if self._is_first:
            handover.await_tokens(sampled)
        if self._is_last:
            handover.give_tokens(sampled)

    def take_tokens(self, table: TokenTable) -> None:
        """Know what tokens stand for, for sequences with guides."""
        self._matchers = Matchers(table)

    def take_image_rows(self, sequence_id: int, start: int, states: bytes) -> None:
        """Keep rows of an image, as `TakeImageRows` has them, until the next step has ended."""
        assert self.spec.vision is not None
        states_X = torch.frombuffer(bytearray(states), dtype=self.model.dtype).to(self.device)
        shape = 1 + self.spec.vision.num_deepstack, -1, self.spec.hidden_size
        self._image_rows[sequence_id, start] = states_X.view(shape)

    def take_blank_rows(self, sequence_id: int, num_rows: int) -> None:
        """Keep rows of a blank image that is at the start of a prompt, likewise."""
        assert self.spec.vision is not None
        shape = 1 + self.spec.vision.num_deepstack, num_rows, self.spec.hidden_size
        self._image_rows[sequence_id, 0] = torch.zeros(1, dtype=self.model.dtype, device=self.device).expand(shape)

    def settle(self) -> None:
        """Know all tokens that other stages have sampled. For ranks that go on with other steps than an engine's."""
        if self.handover is not None:
            self.handover.settle()

    def progress(self) -> Progress:
        """How far it has come. Any thread may ask."""
        swapped = 0 if self.swap_space is None else self.swap_space.swapped_blocks
        awaited = "" if self.mesh.pipeline is None else self.mesh.pipeline.progress()
        guided = 0 if self._matchers is None else self._matchers.steps
        return Progress(self._step_id, *self.mesh.progress(), self.model.layers_begun, swapped, awaited, guided)

    def admit(self, step: Step) -> None:
        """Forget ended sequences, take in new ones, and note which sequences decode from here on."""
        for sequence_id in step.ended:
            seq = self.sequences.pop(sequence_id)
            self._microbatches[seq.microbatch].leave(sequence_id)
            seq.end()
        for sequence_id in step.leaving:
            self._microbatches[self.sequences[sequence_id].microbatch].leave(sequence_id)
        for change in step.rebalances:
            self.sequences[change.id].rebalance(change, self.kvp_rank, self.block_tokens)
        for joined in step.joined:
            self.sequences[joined.id].instances = joined.instances
        for new in step.new:
            frequencies = self._frequencies(all_frequencies(self.spec, new.num_rows))
            seen = self._seen(new) if self._samples(new) else None
            adjustments = self._adjustments(new) if self._samples(new) else None
            seq = SequenceState(new, frequencies, self._numbers, self.arena, seen, adjustments)
            seq.begin(self.kvp_rank, self.block_tokens)
            self.sequences[new.id] = seq
        if self._matchers is not None:
            self._matchers.trim()
        self.decoding = self._microbatches[step.microbatch]
        for sequence_id in step.joining:
            seq = self.sequences[sequence_id]
            seq.microbatch = step.microbatch
            self.decoding.join(seq)

    def _new_frequencies(self, of_rotations: tuple[tuple[float, ...], ...]) -> Frequencies:
        tensors = (torch.tensor(each, dtype=torch.float64, device=self.device) for each in of_rotations)
        return Frequencies(tuple(tensors))

    def _samples(self, new: NewSequence) -> bool:
        """Whether this rank has a share in the choice of its tokens."""
        return self._is_last and (not new.instances or new.instances[0] == self.kvp_rank)

    def _seen(self, new: NewSequence) -> SeenTokens | None:
        if new.sampling.repetition_penalty == 1:
            return None
        seen = SeenTokens(self._vocabulary)
        seen.add(token_ids(new.seen_token_ids))
        return seen

    def _adjustments(self, new: NewSequence) -> Adjustments | None:
        params = new.sampling
        if not (params.logit_bias or params.min_tokens or params.needs_generated):
            return None
        matcher = None
        if params.guide is not None:
            assert self._matchers is not None, "the engine has told what tokens stand for"
            matcher = self._matchers.new(params.guide)
        adjustments = Adjustments(new, self._vocabulary, self.spec.eos_token_ids, self.device, matcher)
        for token_id in token_ids(new.generated_token_ids).tolist():
            for record in adjustments.records:
                record.add_one(token_id)
        return adjustments

    @property
    def _vocabulary(self) -> range:
        return self.mesh.layout.vocabulary(self.spec.vocab_size, self.mesh.rank)

    def forward(self, step: Step) -> Tensor:
        """Hidden states of all rows of the step after this stage, hidden_TH."""
        if self._is_first and self.handover is not None:
            self.handover.take_tokens(self.decoding.sequences)
        span = self._spans.begin("batch", "host")
        batch = self.batches.of(step, self.decoding)
        ranges = self.execution.token_ranges
        if ranges.flash_comm and ranges.shards(len(batch.token_ids_T), batch.decodes):
            batch = replace(batch, shards=TokenShards(self.mesh.ffn, batch.token_ids_T))
        self._spans.end(span)
        if not self._is_first:
            assert self.handover is not None
            return self.layers(self.handover.take_hidden(), batch)
        span = self._spans.begin("embedding")
        hidden_TH = self.model.embed(batch.token_ids_T)
        if batch.images is not None:
            hidden_TH = batch.images.embed(hidden_TH)
        self._spans.end(span)
        return self.layers(hidden_TH, batch)

    def sample(self, step: Step, hidden_TH: Tensor) -> tuple[SampledToken, ...]:
        """Next tokens of the sequences that want one, on ranks of the last stage; its first rank returns them, and that
        of every instance with a clock of its own those of the sequences that it leads."""
        sampling = self._sampled(step)
        sequences = tuple(filter(self._leads, sampling)) if step.instances else sampling
        sampled: tuple[SampledToken, ...] = ()
        if sequences:
            span = self._spans.begin("head")
            whole = not step.chunks and len(sequences) == len(hidden_TH)
            logits_Sv = self.model.logits(hidden_TH if whole else self._last_rows(step, hidden_TH))
            self._spans.end(span)
            span = self._spans.begin("sampling", "host")
            sampled = self.sampling(logits_Sv, sequences, self._together(step))
            self._spans.end(span)
        if step.instances:
            self._hear_tokens(sampling)
        return sampled

    def _together(self, step: Step) -> RankGroup:
        """The ranks that sample together, of which the first returns what was found."""
        return self.mesh.ffn if step.instances else self.mesh.stage

    def _score(self, step: Step, hidden_TH: Tensor) -> tuple[PromptLogprobs, ...]:
        """Log-probabilities of prompts' tokens, where they were asked for; returned as sampled tokens are."""
        found: list[PromptLogprobs] = []
        starts = accumulate((chunk.num_tokens for chunk in step.chunks), initial=len(self.decoding))
        for start, chunk in zip(starts, step.chunks, strict=False):
            seq = self.sequences[chunk.id]
            if chunk.scored is None or not self._leads(seq):
                continue
            targets_T, first = token_ids(chunk.scored.targets), start + chunk.scored.first
            count, rows_TH = seq.new.sampling.prompt_logprobs, hidden_TH[first : first + len(targets_T)]
            assert count is not None, "it asks for them"
            span = self._spans.begin("scoring", "host")
            one = self._scoring(chunk.id, rows_TH, targets_T, count, self.model.logits, self._together(step))
            self._spans.end(span)
            if one is not None:
                found.append(one)
        return tuple(found)

    def _last_rows(self, step: Step, hidden_TH: Tensor) -> Tensor:
        """hidden_SH: after which is sampled here."""
        chunk_ends = accumulate((chunk.num_tokens for chunk in step.chunks), initial=len(self.decoding) - 1)
        ends = zip(step.chunks, islice(chunk_ends, 1, None), strict=True)
        decodes = (row for row, seq in enumerate(self.decoding.sequences) if self._leads(seq))
        prompts = (end for chunk, end in ends if chunk.sample and self._leads(self.sequences[chunk.id]))
        return hidden_TH[[*decodes, *prompts]]

    def _hear_tokens(self, sequences: Iterable[SequenceState]) -> None:
        """The tokens of sequences that several instances take part in, from those that have sampled them."""
        for instances, together in by_instances(sequences):
            assert self.mesh.instance_groups is not None
            group = self.mesh.instance_groups.of(tuple(sorted(instances)))
            tokens_S = torch.tensor([seq.last_token for seq in together], device=self.device)
            heard = group.broadcast(tokens_S, root=sorted(instances).index(instances[0]))
            for seq, token_id in zip(together, heard.tolist(), strict=True):
                seq.last_token = token_id

    def tokens_of(self, step: Step) -> tuple[SampledToken, ...]:
        """The tokens that the last step chose, as every rank of the last stage knows them: without logprobs and
        errors."""
        return tuple(SampledToken(seq.new.id, seq.last_token) for seq in self._sampled(step))

    def _sampled(self, step: Step) -> tuple[SequenceState, ...]:
        """The sequences that get a token in the step, in the order of its rows."""
        ends = [self.sequences[chunk.id] for chunk in step.chunks if chunk.sample]
        return (*self.decoding.sequences, *ends) if ends else self.decoding.sequences
