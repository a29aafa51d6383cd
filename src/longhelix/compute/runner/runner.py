"""The runner of one rank: turns each Step into tensors, runs the model, and samples the next tokens."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.kernels.flashinfer import PageLists
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.token_shards import TokenShards
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.batches import Batches
from longhelix.compute.runner.copies import copy_blocks, swap_blocks
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.handover import Handover
from longhelix.compute.runner.layers import make_layers
from longhelix.compute.runner.meter import Meter
from longhelix.compute.runner.next_tokens import NextTokens
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.running_sequences import RunningSequences
from longhelix.scheduler.step import PromptLogprobs, SampledToken, Step, StepResult
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec


class ModelRunner:
    """Executes steps on one rank, in order.

    Every rank executes every step. If KVP instances have their own clocks, a rank executes the steps of its instance.
    On ranks of all stages but the first, call `expect` for each step before `execute`.

    Args:
        swap_space: Storage of swapped KV blocks. None: no step swaps.
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
        self.pool = pool
        self.swap_space = swap_space
        self.block_tokens = pool.block_tokens
        self.device = pool.device
        self.kvp_rank = mesh.layout.kvp_rank(mesh.rank)
        self.running = RunningSequences(spec, mesh, pool)
        self.next_tokens = NextTokens(
            running=self.running,
            logits=model.logits,
            mesh=mesh,
            vocab_size=spec.vocabulary.size,
            device=pool.device,
            spans=spans,
        )
        self.handover = (
            None
            if mesh.pipeline is None
            else Handover(mesh.pipeline, mesh.layout, spec.hidden_size, dtype=model.dtype, device=pool.device)
        )
        self._is_first, self._is_last = mesh.layout.has_embedding(mesh.rank), mesh.layout.has_head(mesh.rank)
        self._step_id = 0
        self._spans = spans
        self._image_rows: dict[tuple[int, int], Tensor] = {}  # of the next step, as `Batches` reads them
        self.batches = Batches(spec, mesh, self.running, self._image_rows)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run a step. All ranks of the last stage then know the sampled tokens. The first of them returns them."""
        self._step_id = step.id
        if self.mesh.instance_groups is not None:
            self.mesh.instance_groups.begin(step.id)
        if step.turn.instances:
            step = step.of_instance(self.kvp_rank, self.running.by_id)
        meter = Meter(self.mesh)
        self._admit(step)
        moved_s = self._copy(step)
        meter.begin_layers()
        sampled, scored = self._compute(step) if self.running.decoding or step.segments else ((), ())
        self._image_rows.clear()
        self._wait_for_device(step)
        self._step_id = 0
        return meter.result(
            step,
            sampled,
            scored,
            num_rows=self._num_rows(step),
            moved_s=moved_s,
            sees_waits=self.execution.sees_waits,
        )

    def _admit(self, step: Step) -> None:
        span = self._spans.begin("admit", "host")
        self.running.admit(step)
        self._spans.end(span)

    def _copy(self, step: Step) -> float:
        """Swap, copy and move KV blocks. Returns the seconds that moves took."""
        if self.swap_space is not None:
            swap_blocks(step, self.swap_space, self.kvp_rank)
        begun_s = time.perf_counter()
        moved = step.moved
        if step.transfers.copies or moved:
            copy_blocks(step.transfers.copies, moved, self.pool, self.mesh.kvp)
        if not moved:
            return 0.0
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - begun_s

    def _compute(self, step: Step) -> tuple[tuple[SampledToken, ...], tuple[PromptLogprobs, ...]]:
        """Run this stage's layers over the step's rows. Returns the tokens and scores that this rank reports."""
        span = self._spans.begin(f"step {step.id}", "step")
        hidden_TH = self.forward(step)
        sampled = self.next_tokens.sample(step, hidden_TH) if self._is_last else ()
        if self.handover is not None:
            self._hand_over(self.handover, step, hidden_TH)
        scored = self.next_tokens.score(step, hidden_TH) if self._is_last else ()
        self._spans.end(span)
        return sampled, scored

    def _wait_for_device(self, step: Step) -> None:
        """Wait until the GPU has finished the step. Ranks that sampled tokens after all rows have already waited."""
        if self.device.type == "cuda" and (step.segments or not self._is_last):
            # Not for the whole device: that may hang on other stages.
            torch.cuda.current_stream(self.device).synchronize()

    def _num_rows(self, step: Step) -> int:
        """Count the rows of the step that no other instance counts."""
        running = self.running
        decodes = sum(map(running.leads, running.decoding.sequences)) if step.turn.instances else len(running.decoding)
        return decodes + sum(span.num_tokens for span in step.segments if running.leads(running.by_id[span.id]))

    def expect(self, step: Step) -> None:
        """Prepare to receive what other stages send for a step. Call it once per step, in their order."""
        if not self._is_first and self.handover is not None:
            self.handover.expect(step)

    def _hand_over(self, handover: Handover, step: Step, hidden_TH: Tensor) -> None:
        """Exchange the results of a finished step with other stages: hidden states and tokens."""
        if not self._is_last:
            handover.send_hidden(hidden_TH)
        sampled = self.running.sampled(step)
        if not sampled:
            return
        if self._is_first:
            handover.expect_tokens(sampled)
        if self._is_last:
            handover.send_tokens(sampled)

    def take_image_rows(self, sequence_id: int, start: int, states: bytes) -> None:
        """Keep rows of an image until the end of the next step. The arguments are those of `TakeImageRows`."""
        assert self.spec.vision is not None
        states_X = torch.frombuffer(bytearray(states), dtype=self.model.dtype).to(self.device)
        shape = 1 + self.spec.vision.num_deepstack, -1, self.spec.hidden_size
        self._image_rows[sequence_id, start] = states_X.view(shape)

    def take_blank_rows(self, sequence_id: int, num_rows: int) -> None:
        """Keep rows of a blank image at the start of a prompt until the end of the next step."""
        assert self.spec.vision is not None
        shape = 1 + self.spec.vision.num_deepstack, num_rows, self.spec.hidden_size
        self._image_rows[sequence_id, 0] = torch.zeros(1, dtype=self.model.dtype, device=self.device).expand(shape)

    def receive_all_tokens(self) -> None:
        """Wait for all tokens that other stages have sampled. Call it before steps that do not come from an engine."""
        if self.handover is not None:
            self.handover.receive_all_tokens()

    def progress(self) -> Progress:
        """Return how far this rank is. Any thread may call this."""
        collectives, collective = self.mesh.progress()
        return Progress(
            step_id=self._step_id,
            collectives=collectives,
            collective=collective,
            layers=self.model.layers_begun,
            swapped_blocks=0 if self.swap_space is None else self.swap_space.swapped_blocks,
            awaited="" if self.mesh.pipeline is None else self.mesh.pipeline.progress(),
            guide_steps=self.running.guide_steps,
        )

    def forward(self, step: Step) -> Tensor:
        """Return the hidden states of all rows of the step after this stage, hidden_TH."""
        if self._is_first and self.handover is not None:
            self.handover.receive_tokens(self.running.decoding.sequences)
        span = self._spans.begin("batch", "host")
        batch = self.batches.of(step)
        ranges = self.execution.token_ranges
        if ranges.flash_comm and ranges.shards(len(batch.token_ids_T), batch.decodes):
            token_shards = TokenShards(self.mesh.ffn, batch.token_ids_T)
            batch = replace(batch, sharding=replace(batch.sharding, token_shards=token_shards))
        self._spans.end(span)
        if not self._is_first:
            assert self.handover is not None
            return self.layers(self.handover.receive_hidden(), batch)
        span = self._spans.begin("embedding")
        hidden_TH = self.model.embed(batch.token_ids_T)
        if batch.images is not None:
            hidden_TH = batch.images.embed(hidden_TH)
        self._spans.end(span)
        return self.layers(hidden_TH, batch)
