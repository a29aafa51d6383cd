"""The runner of one rank: a Step becomes tensors, the model runs, and all ranks get the next tokens."""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.cache.block_arena import BlockArena
from longhelix.cache.pool import KVPool
from longhelix.cache.swap_space import SwapSpace
from longhelix.guide import TokenTable
from longhelix.kernels.angles import rotation, rotation_by_axes
from longhelix.kernels.flashinfer import PageLists
from longhelix.kv.blocks import IDS_PER_BLOCK
from longhelix.layout import HeadShape
from longhelix.models.batch import Batch, ImageRows
from longhelix.models.decoder import Decoder
from longhelix.models.image_positions import positions as image_positions
from longhelix.models.rope import inverse_frequencies
from longhelix.models.token_shards import TokenShards
from longhelix.parallel.collectives import RankGroup
from longhelix.parallel.holders import Holders
from longhelix.parallel.meetings import Shared
from longhelix.parallel.mesh import Mesh
from longhelix.runner.adjustments import Adjustments
from longhelix.runner.config import takes_images
from longhelix.runner.copies import copy_blocks, swap_blocks
from longhelix.runner.decode_rows import DecodeRows
from longhelix.runner.execution import Execution
from longhelix.runner.handover import Handover
from longhelix.runner.layers import make_layers
from longhelix.runner.matchers import Matchers
from longhelix.runner.progress import Progress
from longhelix.runner.row_memory import RowMemory, RowParts, RowTensors
from longhelix.runner.sampling import Sampling
from longhelix.runner.scoring import Scoring
from longhelix.runner.seen_tokens import SeenTokens
from longhelix.runner.sequence_state import HELD, SequenceState, sequence_numbers
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec
from longhelix.step import Chunk, NewSequence, PromptLogprobs, SampledToken, Step, StepResult

_MOST_BATCHES = 16  # of decodes that are kept: little of a step differs from the last one's


class _ChunkRows(NamedTuple):
    """Rows of a prompt that attend here. int64. positions_3T: by axis, or without images in the prompt those of one."""

    positions_3T: NDArray[np.int64]
    slots: NDArray[np.int64]
    limits: NDArray[np.int64]


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
        self.layers = make_layers(execution, model, pool, page_lists, spans)
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
        self._takes_images = takes_images(spec, mesh.layout, mesh.rank)
        self._step_id = 0
        self.arena = BlockArena(IDS_PER_BLOCK * pool.num_blocks, self.device)
        self._numbers = sequence_numbers(mesh.layout.kvp)
        num_pairs = spec.rotated_size // 2
        self._rows = RowMemory(self._numbers, self.arena, self.kvp_rank, self.block_tokens, num_pairs)
        # One tensor for all sequences that turn alike.
        self._frequencies = lru_cache(partial(torch.tensor, dtype=torch.float64, device=self.device))
        self._decode_batch = lru_cache(_MOST_BATCHES)(self._new_decode_batch)
        self._spans = spans
        self._axes_R = torch.tensor(spec.rope.axes, dtype=torch.int64, device=self.device)
        self._matchers: Matchers | None = None
        self.images: dict[bytes, Tensor] = {}  # states_LXH: its rows of the states of `ImageRows`, by digest

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run a step. Afterwards every rank of the last stage knows the sampled tokens; its first rank returns them."""
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
        sent, waited_s = self.mesh.exchanged_bytes - sent_before, self.mesh.waited_s - waited_before_s
        exposed_s = waited_s if self.execution.sees_waits else None
        fingerprint = self.mesh.fingerprint(since=traffic_before)
        if self.device.type == "cuda" and (step.chunks or not self._is_last):
            # A step that sampled nothing has not waited for it. Not the device: that may hang on other stages.
            torch.cuda.current_stream(self.device).synchronize()
        taken_s = time.perf_counter() - begun_s - (self._waited_for_stages_s - others_before_s)
        parts = step.work.parts
        return StepResult(step.id, sampled, num_rows, sent, parts, exposed_s, fingerprint, taken_s, moved_s, scored)

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
            copy_blocks(step.copies + moved, self.pool, self.mesh.kvp)
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

    def take_image(self, digest: bytes, num_tokens: int, states: bytes) -> None:
        """Keep what an image is made of, as `TakeImage` has it, for the sequences that show it."""
        assert self.spec.vision is not None
        states_X = torch.frombuffer(bytearray(states), dtype=self.model.dtype).to(self.device)
        self.images[digest] = states_X.view(1 + self.spec.vision.num_deepstack, num_tokens, self.spec.hidden_size)

    def take_blank_image(self, digest: bytes, num_tokens: int) -> None:
        """Keep an image of which nothing is seen."""
        assert self.spec.vision is not None
        shape = 1 + self.spec.vision.num_deepstack, num_tokens, self.spec.hidden_size
        self.images[digest] = torch.zeros(1, dtype=self.model.dtype, device=self.device).expand(shape)

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
        for widened in step.widened:
            self.sequences[widened.id].widen(widened, self.kvp_rank, self.block_tokens)
        for enlisted in step.enlisted:
            self.sequences[enlisted.id].instances = enlisted.instances
        for new in step.new:
            frequencies = inverse_frequencies(self.spec.rope, self.spec.rotated_size, new.capacity_tokens)
            frequencies_R = self._frequencies(tuple(frequencies))
            seen = self._seen(new) if self._samples(new) else None
            adjustments = self._adjustments(new) if self._samples(new) else None
            seq = SequenceState(new, frequencies_R, self._numbers, self.arena, seen, adjustments)
            seq.begin(self.kvp_rank, self.block_tokens)
            self.sequences[new.id] = seq
        if self._matchers is not None:
            self._matchers.trim()
        self.decoding = self._microbatches[step.microbatch]
        for sequence_id in step.joining:
            seq = self.sequences[sequence_id]
            seq.microbatch = step.microbatch
            self.decoding.join(seq)

    def _samples(self, new: NewSequence) -> bool:
        """Whether this rank has a share in the choice of its tokens."""
        return self._is_last and (not new.instances or new.instances[0] == self.kvp_rank)

    def _seen(self, new: NewSequence) -> SeenTokens | None:
        if new.sampling.repetition_penalty == 1:
            return None
        seen = SeenTokens(self._vocabulary)
        seen.add(_token_ids(new.seen_token_ids))
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
        for token_id in _token_ids(new.generated_token_ids).tolist():
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
        batch = self._batch(step)
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
            targets_T, first = _token_ids(chunk.scored.targets), start + chunk.scored.first
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
        for instances, together in _by_instances(sequences):
            assert self.mesh.meetings is not None
            group = self.mesh.meetings.of(tuple(sorted(instances)))
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

    def _batch(self, step: Step) -> Batch:
        for sequence_id, block in step.grown:
            self.sequences[sequence_id].add_blocks((block,), self.kvp_rank)
        for seq, record in self.decoding.records:
            record.add_one(seq.last_token)
        num_held, everywhere = self._rows.advance(self.decoding)
        if step.chunks:
            return self._mixed_batch(step, self._rows.arrays(len(self.decoding), num_held))
        tensors = self._rows.tensors(len(self.decoding), num_held)
        held = b"" if everywhere else self._held(self.decoding.lines).tobytes()
        turns = tensors.cos_bR, tensors.sin_bR
        rotation(tensors.rows.positions_b, self._frequencies_of((), ()), self.spec.rope.attention_factor, turns)
        batch = self._decode_batch(tensors, held, step.most_tokens, step.work.parts)
        return replace(batch, shared=self._shared(step)) if step.instances else batch

    def _new_decode_batch(self, tensors: RowTensors, held: bytes, most_tokens: int, parts: int) -> Batch:
        """held: which KVP ranks hold KV for which row; empty if all do for all rows."""
        token_ids_B, _, slots_b, limits_b, row_starts_b, extents_b2 = tensors.rows
        return Batch(
            token_ids_T=token_ids_B,
            holders=self._holders(np.frombuffer(held, np.bool_)) if held else None,
            cos_tR=tensors.cos_bR,
            sin_tR=tensors.sin_bR,
            slots_t=slots_b,
            limits_t=limits_b,
            row_starts_b=row_starts_b,
            blocks_X=self.arena.blocks_X,
            extents_b2=extents_b2,
            max_rows=min(len(slots_b), 1),
            num_sequences=len(token_ids_B),
            most_tokens=most_tokens,
            parts=parts,
            stays=True,
        )

    def _mixed_batch(self, step: Step, decodes: RowParts) -> Batch:
        prompts = [self.sequences[chunk.id] for chunk in step.chunks]
        token_ids = [decodes.token_ids_B, *map(_prompt_tokens, prompts, step.chunks)]
        chunks = list(map(self._chunk_rows, prompts, step.chunks))
        lengths = [len(some.limits) for some in chunks if len(some.limits)]
        ends = len(decodes.limits_b) + np.cumsum(lengths, dtype=np.int64)
        extents = [self.arena.extents.values[seq.extent.line] for seq in prompts if self.kvp_rank in seq.holders]
        token_ids_T, positions_t, slots_t, limits_t, row_starts_b, bounds_X = self._on_device(
            token_ids,
            [decodes.positions_b, *(some.positions_3T[0] for some in chunks)],
            [decodes.slots_b, *(some.slots for some in chunks)],
            [decodes.limits_b, *(some.limits for some in chunks)],
            [decodes.row_starts_b, ends],
            [decodes.extents_b2.reshape(-1), *extents],
        )
        frequencies = self._frequencies_of(prompts, lengths)
        turns = rotation(positions_t, frequencies, self.spec.rope.attention_factor)
        self._turn_by_axes(turns, prompts, chunks)
        held_NS = self._held(np.append(self.decoding.lines, [seq.line for seq in prompts]))
        counts = [1] * len(self.decoding) + [chunk.num_tokens for chunk in step.chunks]
        return Batch(
            token_ids_T=token_ids_T,
            holders=None if held_NS.all() else self._holders(held_NS.repeat(counts, axis=1)),
            cos_tR=turns[0],
            sin_tR=turns[1],
            slots_t=slots_t,
            limits_t=limits_t,
            row_starts_b=row_starts_b,
            blocks_X=self.arena.blocks_X,
            extents_b2=bounds_X.view(-1, 2),
            max_rows=max(lengths, default=min(len(decodes.limits_b), 1)),
            num_sequences=len(self.decoding) + len(prompts),
            most_tokens=step.most_tokens,
            parts=step.work.parts,
            shared=self._shared(step) if step.instances else None,
            images=self._image_rows(step),
        )

    def _turn_by_axes(
        self, turns: tuple[Tensor, Tensor], prompts: Sequence[SequenceState], chunks: Sequence[_ChunkRows]
    ) -> None:
        """Rotate the rows of prompts with images, the last of all that attend here, by their positions on each axis."""
        start = len(turns[0]) - sum(len(rows.limits) for rows in chunks)
        for seq, rows in zip(prompts, chunks, strict=True):
            own = slice(start, start + len(rows.limits))
            if seq.new.images and len(rows.limits):
                positions_3T = torch.from_numpy(rows.positions_3T).to(self.device)
                into, factor = (turns[0][own], turns[1][own]), self.spec.rope.attention_factor
                rotation_by_axes(positions_3T, self._axes_R, seq.frequencies_R, factor, into)
            start = own.stop

    def _image_rows(self, step: Step) -> ImageRows | None:
        """The rows of the step that images fill, where this rank's stage takes images. Before its layers run, the
        sequences' lengths are those after the step."""
        found: list[tuple[slice, Tensor]] = []
        first = len(self.decoding)
        for chunk in step.chunks if self._takes_images else ():
            seq = self.sequences[chunk.id]
            start, stop = seq.length - chunk.num_tokens, seq.length
            for image in seq.new.images:
                own = range(max(image.start, start), min(image.stop, stop))
                if own:
                    rows = slice(first + own.start - start, first + own.stop - start)
                    states_LXH = self.images[image.digest]
                    found.append((rows, states_LXH[:, own.start - image.start : own.stop - image.start]))
            first += chunk.num_tokens
        if not found:
            return None
        layers, _, size = found[0][1].shape
        mask_T = torch.zeros(first, dtype=torch.bool, device=self.device)
        states_LTH = found[0][1].new_zeros(layers, first, size)
        for rows, states_LXH in found:
            mask_T[rows] = True
            states_LTH[:, rows] = states_LXH
        return ImageRows(mask_T, states_LTH.unbind())

    def _shared(self, step: Step) -> tuple[Shared, ...]:
        """The rows that other instances have as well."""
        assert self.mesh.meetings is not None
        heads, rows = HeadShape(self.spec.num_query_heads, self.spec.num_kv_heads), dict[int, range]()
        sequences = [*self.decoding.sequences, *(self.sequences[chunk.id] for chunk in step.chunks)]
        counts = [1] * len(self.decoding) + [chunk.num_tokens for chunk in step.chunks]
        for seq, (start, stop) in zip(sequences, pairwise(accumulate(counts, initial=0)), strict=True):
            rows[seq.new.id] = range(start, stop)
        found: list[Shared] = []
        for instances, together in _by_instances(sequences):
            rows_S = torch.tensor([row for seq in together for row in rows[seq.new.id]], device=self.device)
            group = self.mesh.meetings.of(tuple(sorted(instances)))
            found.append(Shared(group, rows_S, self.mesh.layout.heads_among(heads, self.mesh.rank, group.size)))
        return tuple(found)

    def _on_device(self, *groups: Sequence[NDArray[np.int64]]) -> tuple[Tensor, ...]:
        """Integers as tensors, each of a group's pieces. They are copied there at once."""
        together_X = torch.from_numpy(np.concatenate([piece for group in groups for piece in group])).to(self.device)
        return together_X.split([sum(map(len, group)) for group in groups])

    def _held(self, lines_S: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which KVP ranks hold KV for which sequences, by their lines."""
        return self._numbers.values[lines_S, HELD:].T == 1

    def _holders(self, held_NT: NDArray[np.bool_]) -> Holders:
        return Holders.of(held_NT.reshape(self.mesh.layout.kvp, -1), self.kvp_rank, self.device)

    def _frequencies_of(self, prompts: Sequence[SequenceState], lengths: Sequence[int]) -> Tensor:
        """Those of the rows that attend here: frequencies_tR, or frequencies_R where all have the same.

        lengths: of the prompts that keep KV here the rows.
        """
        different = self.decoding.frequencies
        if prompts:
            different = different.union(seq.frequencies_R for seq in prompts)
        if len(different) == 1:
            return next(iter(different))
        held = [seq for seq in (*self.decoding.sequences, *prompts) if self.kvp_rank in seq.holders]
        if not held:  # without rows any will do
            return next(iter(different))
        counts = [1] * (len(held) - len(lengths)) + [*lengths]
        frequencies_bR = torch.stack([seq.frequencies_R for seq in held])
        return frequencies_bR.repeat_interleave(torch.tensor(counts, device=self.device), dim=0)

    def _chunk_rows(self, seq: SequenceState, chunk: Chunk) -> _ChunkRows:
        """The next rows of a prompt, which see and are stored as decodes. None if the sequence keeps no KV here."""
        start, stop = seq.length, seq.length + chunk.num_tokens
        owners = self._owners(seq, chunk)
        seq.add_blocks(chunk.new_blocks, self.kvp_rank)
        seq.length = stop
        if self.kvp_rank not in seq.holders:
            return _ChunkRows(np.zeros((1, 0), np.int64), *[np.zeros(0, np.int64)] * 2)
        positions = np.arange(start, stop)
        mine = np.array(owners)[positions // self.block_tokens - start // self.block_tokens] == self.kvp_rank
        limits = seq.local_length + mine.cumsum()
        # Local order follows position, so the i-th local token lies in the sequence's local block i // D. A row that
        # writes nothing here may find no block, and takes any.
        local_index = np.maximum(limits - 1, 0)
        blocks = self.arena.ids(seq.extent)
        block = blocks.take(local_index // self.block_tokens, mode="clip") if len(blocks) else 0
        slots = np.where(mine, block * self.block_tokens + local_index % self.block_tokens, -1)
        seq.local_length = int(limits[-1])
        by_axes = image_positions(seq.new.images, start, stop) if seq.new.images else positions[None]
        return _ChunkRows(by_axes, slots, limits)

    def _owners(self, seq: SequenceState, chunk: Chunk) -> list[int]:
        """The owners of the KV blocks that the next rows of a prompt go into: new blocks, and before them perhaps the
        last old one."""
        stop_block = -(-(seq.length + chunk.num_tokens) // self.block_tokens)
        num_old = stop_block - seq.length // self.block_tokens - len(chunk.new_blocks)
        return [seq.last_owner] * num_old + [block.owner for block in chunk.new_blocks]


def _by_instances(sequences: Iterable[SequenceState]) -> list[tuple[tuple[int, ...], list[SequenceState]]]:
    """The sequences that several instances take part in, by these; all of them come to the same in the same order."""
    found: defaultdict[tuple[int, ...], list[SequenceState]] = defaultdict(list)
    for seq in sorted(sequences, key=lambda seq: seq.new.id):
        if len(seq.instances) > 1:
            found[seq.instances].append(seq)
    return sorted(found.items())


def _prompt_tokens(seq: SequenceState, chunk: Chunk) -> np.ndarray:
    """The tokens of a chunk. They count as seen from here on."""
    ids = _token_ids(chunk.token_ids)
    if seq.seen is not None:
        seq.seen.add(ids)
    return ids


def _token_ids(message: bytes) -> np.ndarray:
    return np.frombuffer(message, np.int32).astype(np.int64)
