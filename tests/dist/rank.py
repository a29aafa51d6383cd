"""One rank of a test world: reads cases as JSON lines, runs the engine's own scheduler and runner, writes logits.

Every rank runs the same deterministic scheduler, so no messages are needed; only collectives connect the ranks.
"""

import json
import sys
import traceback
import warnings
from array import array
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from known_tokens import KnownTokens

from longhelix.compute.kernels import PANELS, native
from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.models import experts as experts_module
from longhelix.compute.models import latent_attention
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.parallel import exchange as exchange_module
from longhelix.compute.parallel.collectives import SharedMemoryRankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import sampler
from longhelix.compute.runner.batches import Batches
from longhelix.compute.runner.config import takes_images
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.graphed_layers import GraphedLayers
from longhelix.compute.runner.rank import load_model, meet, new_pool, rank_capabilities
from longhelix.compute.runner.row_memory import RowMemory
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.sampling import Sampling
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.shown_images import ShownImage, ShownImages
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.engine.workers.step_cost import step_cost
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.kv import splits
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.loop import Loop, most_in_flight
from longhelix.scheduler.prefix import NO_PREFIX, Prefix
from longhelix.scheduler.request import ImageSpan, Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spec.layout import Layout


class RecordingRunner(ModelRunner):
    """Keeps the logits of every row, by sequence and position; computes at `submit`, so that `collect` only returns.

    For every step: each request's rows and local length, and what kernels and transport counted meanwhile (products of
    numbers, rows x heads x tokens of attention, bytes handed to other ranks).
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.logits = {}
        self.local_lengths = {}
        self.history, self.rows, self.counted, self.fingerprints = [], [], [], []
        self.most_parts = 0
        self.lengths, self.num_drafted = [], 0
        self.copies = ()  # that the next step makes beside its own
        self.copied_bytes = 0
        self.moves = []  # of sequences that were widened: owners before and after
        self._results = []
        self.shown = ShownImages(0, 0)

    def submit(self, step):
        for rows in self.shown.rows(step):
            if takes_images(self.spec, self.mesh.layout, self.mesh.rank):
                self.take_image_rows(rows.id, rows.start, rows.states)
        self.most_parts = max(self.most_parts, step.work.parts)
        transfers = msgspec.structs.replace(step.transfers, copies=self.copies + step.transfers.copies)
        step = msgspec.structs.replace(step, transfers=transfers)
        self.moves += [(source.owner, target.owner) for source, target in step.moved]
        self.copies, sent_before = (), self.mesh.kvp.exchanged_bytes
        self.expect(step)
        result, sampled = self.execute(step), self.next_tokens.last_sampled(step) if self._is_last else ()
        self._results.append(msgspec.structs.replace(result, sampled=sampled))
        self.copied_bytes += self.mesh.kvp.exchanged_bytes - sent_before - self._results[-1].measured.exchanged_bytes
        self.fingerprints.append(self._results[-1].measured.fingerprint)

    def collect(self, timeout_s):
        """Of ranks that decide alike, all need the tokens, and not the last stage alone."""
        result, layout = self._results.pop(0), self.mesh.layout
        if layout.pp == 1:
            return result
        said = [result.sampled]
        dist.broadcast_object_list(said, src=layout.world_size - 1)
        return msgspec.structs.replace(result, sampled=said[0])

    def forward(self, step):
        before = self.counts()
        hidden_TH = super().forward(step)
        self.counted.append([after - at_first for at_first, after in zip(before, self.counts(), strict=True)])
        counts = dict.fromkeys(self.running.decoding, 1) | {segment.id: segment.num_tokens for segment in step.segments}
        self.rows.append([counts.get(i, 0) for i in range(self.num_requests)])
        rows = iter(self.next_tokens.sampling.gather(self.model.logits(hidden_TH)) if self._is_last else ())
        for draft in step.drafts:  # what was rejected since the last one
            del self.logits[draft.id][draft.start :]
        for sequence_id, count in counts.items():
            kept = self.logits.setdefault(sequence_id, [])
            kept += [row.numpy().copy() for row in islice(rows, count)]
            self.local_lengths[sequence_id] = self.running.by_id[sequence_id].local_length
        self.history.append([self.local_lengths.get(i, -1) for i in range(self.num_requests)])
        self.lengths.append([seq.length for seq in self.running.by_id.values()])
        self.num_drafted += sum(draft.num_tokens - 1 for draft in step.drafts)
        return hidden_TH

    def counts(self):
        multiplied, attended = native.module.work() if native.module is not None else (0, 0)
        return multiplied, attended, self.mesh.kvp.exchanged_bytes


class FirstRequest:
    """The first `num_tokens` of request 0, from which all others begin; moved to other ranks, or where they are."""

    def __init__(self, num_tokens, moved):
        self.num_tokens, self.moved = num_tokens, moved
        self.blocks, self.owners = (), []

    def find(self, request):
        return Prefix(self.num_tokens, self.blocks) if self.blocks else NO_PREFIX

    def take(self, runner, scheduler):
        """Once its prompt is computed. A block that is moved goes as many ranks further as blocks lie before it."""
        block_tokens, kvp = scheduler.config.block_tokens, scheduler.config.kvp
        seq = scheduler._running[0]
        ids = [iter(of_rank) for of_rank in seq.kv.block_ids]
        owners = [seq.kv.placement.owner(position) for position in range(0, self.num_tokens, block_tokens)]
        self.blocks = tuple(Block(owner, next(ids[owner])) for owner in owners)
        if self.moved:
            targets = []
            for index, owner in enumerate(owners):
                allocator = scheduler.pool.allocators[(owner + index) % kvp]
                allocator.reserve(1)
                targets.append(Block((owner + index) % kvp, allocator.take_reserved()))
            runner.copies = tuple(zip(self.blocks, targets, strict=True))
            self.owners = [(source.owner, target.owner) for source, target in runner.copies]
            self.blocks = tuple(targets)

    def release(self, scheduler):
        for block in self.blocks if self.moved else ():
            scheduler.pool.allocators[block.owner].release(array("q", [block.id]), 0)


class DirectRows:
    """Counts the rows that attend directly to latents."""

    def __init__(self):
        self.count = 0
        self._attend, latent_attention.direct_attention = latent_attention.direct_attention, self

    def __call__(self, q_TqC, *more):
        self.count += len(q_TqC)
        return self._attend(q_TqC, *more)


class RoutingGap:
    """The least difference between two experts' scores that a row has seen: where it is tiny, rounding chooses."""

    def __init__(self):
        self.least = np.inf

    def __enter__(self):
        self._route, experts_module.route = experts_module.route, self
        return self

    def __exit__(self, *_):
        experts_module.route = self._route

    def __call__(self, logits_TX, bias_E, moe):
        scores_TE = logits_TX[:, : moe.num_experts]
        scores_TE = scores_TE if bias_E is None else scores_TE.sigmoid() + bias_E
        gaps = scores_TE.sort(dim=1).values.diff(dim=1)
        self.least = min(self.least, float(gaps.min())) if gaps.numel() else self.least
        return self._route(logits_TX, bias_E, moe)


def build(case, rank, meshes):
    replicas = case["kvp"] if case.get("tied") else 1
    layout = Layout(
        case["kvp"],
        case["tpa"],
        ep=case.get("ep", 1),
        pp=case.get("pp", 1),
        ffn_replicas=replicas,
        stage_layers=case.get("stage_layers"),
    )
    backend = case.get("backend")
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what cases before compiled counts as recompilations of this one
        torch._dynamo.utils.counters.clear()
    checkpoint = open_checkpoint(case["model"])
    settings = {setting.name: case[setting.name] for setting in fields(EngineOptions) if setting.name in case}
    if case["placement"] != "auto":
        settings.pop("kvp_threshold_tokens", None)
    config = resolve(checkpoint, layout, EngineOptions(**{"hop_b": 1} | settings, device="cpu"))
    # All ranks run all steps here; instances with clocks of their own have tests of theirs. Windows too have room for
    # all requests at once.
    count = len(case["prompts"])
    windows = tuple(window._replace(num_blocks=window.num_blocks * count) for window in config.scheduler.cache.windows)
    steps, cache = replace(config.scheduler.steps, own_clocks=False), replace(config.scheduler.cache, windows=windows)
    config = replace(config, scheduler=replace(config.scheduler, steps=steps, cache=cache))
    layout = config.layout
    if (layout, backend) not in meshes:
        meshes[layout, backend] = Mesh.build(layout, rank, backend)
    mesh = meshes[layout, backend]
    # Room for all requests at once; what was never written is NaN, so a row that sees it cannot pass.
    pool = new_pool(config, rank, config.scheduler.num_blocks * len(case["prompts"]))
    for layer in pool.entries():
        layer.values.view(torch.uint8).fill_(255)  # a NaN in every dtype
    model = load_model(config, mesh)
    execution = Execution.resolve(
        compile=config.execution.compile,
        replay=config.execution.replay,
        whole_batches=False,
        capabilities=rank_capabilities(mesh, model, pool),
        token_ranges=config.execution.token_ranges,
    )
    runner = RecordingRunner(config.spec, mesh, model, pool, execution)
    runner.cut = (
        Cut(step_cost(config, execution.capabilities.overlaps), config.execution.hop_b) if execution.parts else None
    )
    splits.SPLIT_TOKENS = case.get("split_tokens", 4096)
    if case.get("graphed"):
        runner.layers = GraphedLayers(partial(model.run_layers, pool=pool), mesh, 2**20, capture=run_again)
        runner.layers._seen_buckets = Everything()
    runner.num_requests = len(case["prompts"])
    return config, runner


def show(case, runner):
    """The images of each prompt, rows of which the runner gets with its steps."""
    states = {bytes.fromhex(digest): states_LXH for digest, states_LXH in np.load(case["states"]).items()}
    runner.shown = ShownImages(len(next(iter(states.values()))), 2**30)
    spans = [tuple(ImageSpan(*place, bytes.fromhex(digest)) for *place, digest in spans) for spans in case["images"]]
    for request_id, of_prompt in enumerate(spans):
        runner.shown.add(request_id, [ShownImage(span, states[span.digest].tobytes) for span in of_prompt])
    return spans


class Everything:
    """Contains whatever it is asked for: chunks whose shape comes once are captured too."""

    def __contains__(self, _):
        return True


def run_again(call):
    """What a CUDA graph does, without one: the same call over the same memory."""
    result = call().clone()
    return result, lambda: result.copy_(call())


def params_of(max_new_tokens, logit_bias=(), **choice):
    """logit_bias: pairs, because keys of JSON are strings."""
    return SamplingParams(max_new_tokens, logit_bias=dict(logit_bias), **choice)


def run(case, rank, meshes, direct_rows):
    config, runner = build(case, rank, meshes)
    direct_rows.count = 0
    sent_before = runner.mesh.kvp.exchanged_bytes
    first = FirstRequest(case["cached_tokens"], case["moved"]) if "cached_tokens" in case else None
    drafter = KnownTokens(case["prompts"], **case["drafts"]) if "drafts" in case else None
    scheduler = Scheduler(config.scheduler, cut=runner.cut, prefixes=first, drafter=drafter)
    for allocator in scheduler.pool.allocators:
        count = case.get("pool_blocks", runner.pool.num_blocks)
        allocator.__init__(count, allocator.rank, allocator.index, allocator.evicted)
    pp = config.layout.pp
    loop = Loop(scheduler, runner, lambda: 0.0, depth=case.get("depth", 1 if pp == 1 else most_in_flight(pp)))
    choices = case.get("sampling", [{}] * len(case["prompts"]))
    requests = [
        Request(i, array("i", prompt), params_of(case["max_new_tokens"], **choice), frozenset(), i, 0.0)
        for i, (prompt, choice) in enumerate(zip(case["prompts"], choices, strict=True))
    ]
    if "images" in case:
        requests = [replace(one, images=spans) for one, spans in zip(requests, show(case, runner), strict=True)]
    for request in requests if first is None else requests[:1]:
        loop.add(request)
    tokens, usages = {}, {}
    # Where layers run from Python: on tapes and in graphs it would be one operator more.
    routing_gap = RoutingGap()
    with mutation(case.get("mutation")), routing_gap if case.get("execution") == "eager" else nullcontext():
        while (stepped := loop.step()) is not None:
            for event in stepped[1]:
                tokens.setdefault(event.request_id, []).append(event.sampled.token_id)
                if event.finish_reason:
                    usages[event.request_id] = event.usage
            if first is not None and stepped[1] and len(tokens[0]) == 2:
                first.take(runner, scheduler)
            if first is not None and stepped[1] and len(tokens[0]) == 3:  # what was moved is there now
                for request in requests[1:]:
                    loop.add(request)
    runner.receive_all_tokens()  # the next case's tokens come behind them
    if first is not None:
        first.release(scheduler)
        assert {allocator.available for allocator in scheduler.pool.allocators} == {runner.pool.num_blocks}
    arrays = {"local_lengths": np.array([runner.local_lengths[i] for i in range(len(case["prompts"]))])}
    products = runner.model.products()
    arrays["packed"] = np.array([runner.pool.packed and weight.arrangement is PANELS for weight in products])
    arrays["packed_pool"] = np.array(runner.pool.packed)
    arrays["routing_gap"] = np.array(routing_gap.least)
    arrays["tapes"] = np.array(len(getattr(runner.layers, "_tapes", ())))
    arrays["graphs"] = np.array([*getattr(runner.layers, "_graphs", ())])
    arrays |= {name: np.array(count) for name, count in sequence_parallel_counts().items()}
    arrays["expert_rows"] = np.array([rows for rows in runner.model.expert_rows() if rows])
    arrays["direct_rows"] = np.array(direct_rows.count)
    arrays["exchanged_bytes"] = np.array(runner.mesh.kvp.exchanged_bytes - sent_before)
    arrays |= {"history": np.array(runner.history), "rows": np.array(runner.rows), "counted": np.array(runner.counted)}
    arrays["fingerprints"] = np.array(runner.fingerprints, dtype=np.uint64)
    arrays |= {
        "copied_bytes": np.array(runner.copied_bytes),
        "moves": np.array(runner.moves if first is None else first.owners),
    }
    arrays["parts"] = np.array(runner.most_parts)
    arrays["sequences_left"] = np.array(len(runner.running.by_id))
    arrays["lengths"] = np.array([length for lengths in runner.lengths for length in lengths])
    arrays["num_drafted"] = np.array(runner.num_drafted)
    for index, prompt in enumerate(case["prompts"]):
        arrays[f"tokens_{index}"] = np.array(tokens[index])
        arrays[f"held_{index}"] = np.array(usages[index].kv_tokens_per_rank)
        arrays[f"moved_{index}"] = np.array(usages[index].moved_tokens)
        arrays[f"preemptions_{index}"] = np.array(usages[index].preemptions)
        if rank == config.layout.stage_groups()[-1][0]:
            count = len(prompt) + len(tokens[index]) - 1 if "drafts" in case else None
            arrays[f"logits_{index}"] = np.stack(runner.logits[index][:count])
    np.savez(Path(case["out"]) / f"rank{rank}.npz", **arrays)


SEQUENCE_PARALLEL = (
    "before/all_reduce",
    "after/all_reduce",
    "patterns/MiddleAllReduceRMSNorm",
    "patterns/MiddleAllReduceRMSNormDynamicINT8",
    "patterns/MiddleLayerAllgatherAddRMSNorm",
    "patterns/MiddleLayerAllgatherAddRMSNormDynamicINT8",
    "patterns/AllGatherChunkNoOp",
)


def sequence_parallel_counts():
    """Of compiled graphs so far."""
    found = torch._dynamo.utils.counters["inductor"] if "torch._dynamo" in sys.modules else {}
    return {name: sum(count for key, count in found.items() if key.endswith("/" + name)) for name in SEQUENCE_PARALLEL}


class mutation:  # noqa: N801 - reads as a statement
    """Break one thing on purpose: what the tests then see must not pass."""

    def __init__(self, kind):
        self.kind = kind

    def __enter__(self):
        self.saved = (
            RowMemory.advance,
            Batches._segment_rows,
            Batches._is_local,
            exchange_module.merge_states,
            SharedMemoryRankGroup.merges,
            SharedMemoryRankGroup.exchange_states,
            Sampling._choose,
            sampler.sample_rows,
            sampler.sample,
        )
        advance, segment_rows, own, _, _, exchange_states, choose, _, sample = self.saved
        if self.kind == "mask":

            def segment_rows_that_see_less(*arguments):
                rows = segment_rows(*arguments)
                return rows._replace(limits=np.maximum(rows.limits - 1, 0))

            def decode_rows_that_see_less(memory, decoding):
                num_held, everywhere = advance(memory, decoding)
                limits_b = memory.arrays(len(decoding), num_held).limits_b
                limits_b[:] = np.maximum(limits_b - 1, 0)
                return num_held, everywhere

            RowMemory.advance, Batches._segment_rows = decode_rows_that_see_less, segment_rows_that_see_less
        if self.kind == "owner":

            def second_block_has_no_owner(batches, seq, positions_T):
                return own(batches, seq, positions_T) & (positions_T // batches._block_tokens != 1)

            Batches._is_local = second_block_has_no_owner
        if self.kind == "merge":
            exchange_module.merge_states = lambda out, lse: (out.nan_to_num().mean(0), lse.amax(0))
            SharedMemoryRankGroup.merges = lambda group, head_size: False
        if self.kind == "exchange":

            def keep_to_oneself(group, out_TqC, lse_Tq, heads_per_rank, places_NT):
                if places_NT is not None:
                    return exchange_states(group, out_TqC, lse_Tq, heads_per_rank, places_NT)
                first = sum(heads_per_rank[: group.index])
                return out_TqC[:, first : first + heads_per_rank[group.index]].contiguous()

            SharedMemoryRankGroup.exchange_states = keep_to_oneself
        if self.kind == "sampling":

            def undecided_for_short_sequences(sampling, logits_Sv, settings, together):
                choose(sampling, logits_Sv, settings, together)
                positions_S = torch.tensor([position for _, position in settings.draw_keys()])
                settings.tokens_S[positions_S < 20] = UNDECIDED

            def broken_for_short_sequences(logits_V, params, seed, position):
                if position < 20:
                    raise RuntimeError("this row alone")
                return sample(logits_V, params, seed, position)

            Sampling._choose = undecided_for_short_sequences
            sampler.sample_rows = lambda logits_SV, params, keys: [UNDECIDED] * len(keys)
            sampler.sample = broken_for_short_sequences

    def __exit__(self, *_):
        (
            RowMemory.advance,
            Batches._segment_rows,
            Batches._is_local,
            exchange_module.merge_states,
            SharedMemoryRankGroup.merges,
            SharedMemoryRankGroup.exchange_states,
            Sampling._choose,
            sampler.sample_rows,
            sampler.sample,
        ) = self.saved


def main():
    started = StartedRank.from_command_line()
    rank, size = started.rank, int(started.arguments[0])
    warnings.simplefilter("ignore")
    native.set_num_threads(1)
    if size > 1:
        meet(size, rank, started.directory)
    meshes, direct_rows = {}, DirectRows()
    for line in sys.stdin:
        try:
            run(json.loads(line), rank, meshes, direct_rows)
            print("ok", flush=True)
        except Exception:
            traceback.print_exc()
            print("failed", flush=True)
    return 0
