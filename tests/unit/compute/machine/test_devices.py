"""Where ranks run: GPUs found without torch, and what a configuration makes of them."""

import dataclasses
import importlib.metadata
from array import array

import pytest

from builtin import builtin
from longhelix.compute.machine.devices import free_gpu_bytes, gpu_capabilities, gpu_names
from longhelix.compute.models.batch import Batch, StepShape
from longhelix.compute.runner.graphed_layers import Bucket
from longhelix.compute.runner.warm_up import warm_up_steps
from longhelix.engine import places
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.scheduler.kv import splits
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, Step, StepResult
from longhelix.spec.layout import Layout
from scheduler_settings import scheduler_config

GIB = 2**30


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.13.0")


def install(monkeypatch, directory, body):
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))


def test_free_memory_is_that_of_the_visible_gpus(monkeypatch, tmp_path, cuda_build):
    install(monkeypatch, tmp_path, 'case "$*" in *"--id 1,0"*) echo 10; echo 30;; *--id*) exit 6;; *) echo 30;; esac')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert free_gpu_bytes() == [30 * 2**20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert free_gpu_bytes() == [10 * 2**20, 30 * 2**20]
    for hidden in ("", "7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert free_gpu_bytes() == []


def test_names_are_those_that_the_driver_tells(monkeypatch, tmp_path, cuda_build):
    install(monkeypatch, tmp_path, 'case "$*" in *gpu=name*) echo NVIDIA H200; echo NVIDIA H200;; esac')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names() == ["NVIDIA H200", "NVIDIA H200"]


def test_capabilities_are_those_that_the_driver_tells(monkeypatch, tmp_path, cuda_build):
    install(monkeypatch, tmp_path, 'case "$*" in *gpu=compute_cap*) echo 9.0; echo 12.0; echo "[N/A]";; esac')
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_capabilities() == [(9, 0), (12, 0)]


def test_a_cpu_build_of_torch_has_no_gpus(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "echo 30")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.13.0+cpu")
    assert free_gpu_bytes() == []


def configure(monkeypatch, gpu_bytes, layout=Layout(), **options):  # noqa: B008 - frozen
    monkeypatch.setattr(places, "free_gpu_bytes", lambda: gpu_bytes)
    return resolve(builtin(), layout, EngineOptions(**options))


def test_ranks_run_on_gpus_where_there_is_one_for_each(monkeypatch):
    assert configure(monkeypatch, []).machines.device == "cpu"
    assert configure(monkeypatch, [GIB]).machines.device == "cuda"
    assert configure(monkeypatch, [GIB], device="cpu").machines.device == "cpu"
    assert configure(monkeypatch, [GIB], Layout(kvp=2)).machines.device == "cpu"
    assert configure(monkeypatch, [GIB, GIB], Layout(kvp=2)).machines.device == "cuda"


def test_the_fullest_gpu_bounds_the_pool(monkeypatch):
    kv_bytes = 2 * 30 * 3 * 64 * 2
    with pytest.warns(UserWarning, match="less than one request"):
        config = configure(monkeypatch, [8 * GIB, GIB], Layout(kvp=2), max_model_len=100_000)
    weights_bytes = config.weight_bytes(1)
    states_bytes = splits.STATES_BYTES  # of splits, since 50,000 tokens are more than one
    affordable = int((GIB - states_bytes - weights_bytes) * 0.8) // (16 * kv_bytes)
    assert config.scheduler.num_blocks == min(affordable, -(-50_000 // 16))


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        (1, {"device": "cuda", "layout": Layout(kvp=2)}, "has 2 ranks and each needs a GPU"),
        (1, {"weight_dtype": "int8"}, "weight_dtype int8 runs only on CPUs"),
        (1, {"kv_dtype": "int4"}, "kv_dtype int4 runs only on CPUs"),
        (0, {"device": "tpu"}, "device 'tpu' is not known: use one of auto, cpu, cuda"),
        (
            2,
            {"layout": Layout(kvp=2), "attention": "flashinfer", "hop_b": 2},
            "hop_b is 2, but attention flashinfer",
        ),
        (0, {"execution": "fast"}, "execution 'fast' is not known: use one of recorded, compiled, eager"),
    ],
)
def test_what_cannot_run_is_said(monkeypatch, gpus, options, words):
    with pytest.raises(UserError, match=words):
        configure(monkeypatch, [GIB] * gpus, **options)


@pytest.mark.parametrize(("chunk_tokens", "num_blocks", "kvp"), [(512, 1000, 1), (512, 4, 2), (1, 3, 1), (512, 1, 1)])
@pytest.mark.parametrize("placement", ["striped", "local", "auto"])
def test_warm_up_stays_inside_the_pool_and_leaves_nothing_behind(chunk_tokens, num_blocks, kvp, placement):
    lengths = [4096, 16384, 65536]
    steps = warm_up_steps(
        scheduler_config(kvp, num_blocks, 65536, chunk_tokens=chunk_tokens, placement=placement), lengths
    )
    opened = [new.id for step in steps for new in step.changes.new]
    assert sorted(opened) == sorted(set(opened)) == sorted(id for step in steps for id in step.changes.ended)
    for step in steps:
        for chunk in step.chunks:
            assert len(chunk.new_blocks) == -(-chunk.num_tokens // 16)
            assert all(block.owner < kvp and block.id < num_blocks for block in chunk.new_blocks)
        for rank in range(kvp):
            assert sum(new.kv.blocks_per_rank[rank] for new in step.changes.new) <= 2 * num_blocks  # an arena's room
    room_tokens = num_blocks * 16 * (1 if placement == "local" else kvp)
    longest, most_running = min(chunk_tokens, room_tokens), min(num_blocks, 64)
    beside = max(decodes for decodes in (0, 1, 2, 4) if decodes < most_running)
    rows = [tuple(chunk.num_tokens for chunk in step.chunks) for step in steps]
    assert max(map(sum, rows)) == max(longest + beside, most_running)
    kinds = {(counts, step.most_tokens) for counts, step in zip(rows, steps, strict=True) if counts}
    assert kinds == {(rows, length) for rows, _ in kinds for length in lengths}


def test_each_instance_with_a_clock_of_its_own_warms_up_with_the_steps_of_one_rank():
    alone = scheduler_config(1, 40, 600, chunk_tokens=64, max_running=4, placement="local")
    instances = dataclasses.replace(alone, kvp=3, steps=dataclasses.replace(alone.steps, own_clocks=True))
    expected, steps = warm_up_steps(alone, [4096]), warm_up_steps(instances, [4096])
    assert len(steps) == 3 * len(expected) > 0
    for at, step in enumerate(steps):
        one, instance = expected[at // 3], at % 3
        assert step.turn.instances == (instance,)
        assert (step.id, step.changes.ended, step.most_tokens) == (one.id, one.changes.ended, one.most_tokens)
        assert [new.id for new in step.changes.new] == [new.id for new in one.changes.new]
        for new, new_of_one in zip(step.changes.new, one.changes.new, strict=True):
            assert new.instances == (instance,)
            assert new.kv.blocks_per_rank[instance] == sum(new.kv.blocks_per_rank) == new_of_one.kv.blocks_per_rank[0]
        for chunk, chunk_of_one in zip(step.chunks, one.chunks, strict=True):
            assert chunk.new_blocks == tuple(Block(instance, block.id) for block in chunk_of_one.new_blocks)


def bucket(step, decodes=0):
    """That of a step of which all ranks have all rows."""
    rows = [1] * decodes + [chunk.num_tokens for chunk in step.chunks]
    shape = StepShape(num_sequences=len(rows), most_tokens=step.most_tokens, parts=step.work.parts)
    return Bucket.of(Batch(token_ids_T=range(sum(rows)), shape=shape, attention=None))


@pytest.mark.parametrize("max_running", [64, 5])
def test_a_plain_run_of_several_requests_finds_all_its_buckets_warm(max_running):
    config = scheduler_config(1, 4000, 65536, max_running=max_running)
    steps = warm_up_steps(config, splits.length_buckets(config.longest_local_tokens))
    warm = {bucket(step) for step in steps if step.chunks}
    # One prompt after the other comes beside the decodes of those before it.
    scheduler, met = Scheduler(config), set()
    for id, chunks in enumerate((1, 2, 16, 1, 3)):
        scheduler.add(
            Request(id, array("i", [1] * 512 * chunks), SamplingParams(max_new_tokens=40), frozenset(), 0, 0.0)
        )
    decoding = set()
    while (step := scheduler.schedule(0.0)) is not None:
        decoding |= set(step.changes.joining)
        decoding -= {*step.changes.leaving, *step.changes.ended}
        assert len(decoding) == step.work.decode_rows
        if step.work.rows:
            met.add(bucket(step, len(decoding)))
        sampled = [*decoding, *(chunk.id for chunk in step.chunks if chunk.sample)]
        scheduler.complete(StepResult(step.id, tuple(SampledToken(id, 1) for id in sampled), step.work.rows))
    assert len(met) > 8
    assert met <= warm
    for decodes in range(1, max_running + 1):
        assert bucket(Step(1, most_tokens=5000), decodes) in warm
