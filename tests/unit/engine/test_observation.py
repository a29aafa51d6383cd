"""What an engine is seen to do: its scheduler's requests and blocks, and the steps of its loop."""

from array import array
from dataclasses import replace

import pytest

from longhelix.engine.observation import Observation, RanChunk, RankBlocks, StepLog, WindowPools, observe
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.recording import Completed, Scheduled
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Draft, SampledToken, Step, StepMeasurements, StepResult
from longhelix.scheduler.work import Work
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

CONFIG = scheduler_config(max_model_len=256, kvp=3, num_blocks=8, block_tokens=4, chunk_tokens=16, placement="striped")


class Instantly:
    """A runner whose steps take two seconds each, and give each sequence that is asked for one token 7."""

    def __init__(self):
        self.steps, self.decoding = [], []

    def submit(self, step):
        self.decoding = [
            id
            for id in (*self.decoding, *step.changes.joining)
            if id not in (*step.changes.leaving, *step.changes.ended)
        ]
        sampled = [*self.decoding, *(chunk.id for chunk in step.chunks if chunk.sample)]
        tokens = tuple(SampledToken(id, 7) for id in sampled)
        self.steps.append(
            StepResult(step.id, tokens, len(tokens), measured=StepMeasurements(2.0, exposed_s=0.25, exchanged_bytes=10))
        )

    def collect(self, timeout_s):
        return self.steps.pop(0)


def request(id, prompt_tokens, new_tokens):
    sampling = SamplingParams(max_new_tokens=new_tokens)
    return Request(id, array("i", range(prompt_tokens)), sampling, frozenset(), 0, 0.0)


def test_requests_and_blocks_are_those_of_the_scheduler_in_every_step():
    scheduler, log = Scheduler(CONFIG), StepLog(lambda work: 0.5 * work.rows)
    loop = Loop(scheduler, Instantly(), lambda: 0.0, on_event=log.on_event)
    loop.add(request(0, 21, 5))
    loop.add(request(1, 3, 2))
    ran, lengths = [], []
    while loop.has_work and loop.step() is not None:
        seen = observe(scheduler)
        ran += log.take()
        for each in seen.running:
            seq = next(seq for seq in scheduler.running if seq.id == each.id)
            assert sum(each.kv_blocks_per_rank) == -(-seq.length // 4)
            assert each.placement == "striped"
        held = [sum(each.kv_blocks_per_rank[rank] for each in seen.running) for rank in range(3)]
        assert [rank.held for rank in seen.ranks] == held
        assert all(rank.held + rank.cached <= rank.total == 8 for rank in seen.ranks)
        lengths.append({each.id: (each.prefilled_tokens, each.new_tokens) for each in seen.running})
    assert lengths[0] == {0: (16, 0), 1: (0, 0)}
    assert lengths[1] == {0: (21, 1), 1: (3, 1)}
    assert ran[0].chunks == (RanChunk(0, 16),)
    assert ran[1].chunks == (RanChunk(0, 5), RanChunk(1, 3))
    assert sum(chunk.num_tokens for step in ran for chunk in step.chunks) == 24
    assert sum(step.decode_rows for step in ran) == 4 + 1
    assert [step.predicted_s for step in ran] == [
        0.5 * (step.decode_rows + sum(chunk.num_tokens for chunk in step.chunks)) for step in ran
    ]
    assert {(step.taken_s, step.exposed_s, step.exchanged_bytes) for step in ran} == {(2.0, 0.25, 10)}
    assert log.take() == []
    assert observe(scheduler).running == ()
    assert {rank.held for rank in observe(scheduler).ranks} == {0}
    assert observe(scheduler).ranks[0] == RankBlocks(8, 0, scheduler.pool.allocators[0].num_cached, 0)


def test_steps_that_nobody_takes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("longhelix.engine.observation._MOST_KEPT", 3)
    scheduler, log = Scheduler(CONFIG), StepLog(lambda work: None)
    loop = Loop(scheduler, Instantly(), lambda: 0.0, on_event=log.on_event)
    loop.add(request(0, 4, 8))
    while loop.has_work and loop.step() is not None:
        pass
    ran = log.take()
    assert len(ran) == 3
    assert ran[-1].id - ran[0].id == 2


@pytest.mark.parametrize(("all_limited", "usage"), [(False, 0.9), (True, 0.5)])
def test_usage_is_that_of_the_fullest_group(all_limited, usage):
    """Where all layers have a limit, the blocks of layers without one take no memory."""
    full = RankBlocks(total=100, held=90, cached=0, promised=0)
    windows = [
        WindowPools(window_tokens=8, chunk_tokens=None, ranks=(replace(full, total=10, held=held),)) for held in (2, 5)
    ]
    seen = Observation((), num_waiting=0, block_tokens=16, ranks=(full, full), windows=tuple(windows))
    assert seen.usage(all_limited=all_limited) == usage


def test_rows_of_drafts_count_as_rows_of_decodes():
    log = StepLog(lambda work: None)
    draft = Draft(1, 5, array("i", [1, 2, 3]).tobytes(), ())
    log.on_event(Scheduled(0.0, Step(1, drafts=(draft,), work=Work(decode_rows=4, chunk_rows=3))))
    log.on_event(Completed(StepResult(1, (), 7)))
    (ran,) = log.take()
    assert ran.decode_rows == 7
