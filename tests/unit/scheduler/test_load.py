"""What a step's work is: that of the fullest KVP rank. `FakeRunner.check_work` counts that of every step again."""

import random

import pytest
from test_pressure import LONG, ByWork, Pressed, config, request

from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import StepResult
from longhelix.scheduler.work import NO_WORK, Work

pytestmark = pytest.mark.unit

KVP = 3


def engine(placement, **more):
    settings = {"kvp": KVP, "num_blocks": 30, "placement": placement, "prefix_cache": False, "growth_limit_tokens": 12}
    return Pressed(config(**settings | more))


def random_run(placement, seed, num_blocks):
    """Requests that come while others run, some of which begin alike, and preempt and move each other."""
    chance = random.Random(seed)
    run = engine(placement, num_blocks=num_blocks, chunk_tokens=24, kvp_threshold_tokens=40, prefix_cache=True)
    for id in range(30):
        start = chance.choice([0, 0, chance.randrange(30)])
        run.add(request(id, LONG[start:][: chance.randint(1, 40)], chance.randint(1, 40)))
        for _ in range(chance.randrange(4)):
            run.step()
    run.drain()
    return run


@pytest.mark.parametrize("placement", ["growing", "local", "auto"])
def test_every_step_of_random_traffic_is_counted_by_its_fullest_rank(placement):
    runs = [random_run(placement, seed, num_blocks=22) for seed in range(4)]
    usages = [usage for run in runs for usage in run.usages.values()]
    steps = [step for run in runs for step in run.runner.steps]
    assert any(usage.preemptions for usage in usages)
    assert any(usage.cached_tokens for usage in usages)
    assert any(step.moved for step in steps)
    assert sum(step.work.decode_rows > 1 and step.work.chunk_rows > 1 for step in steps) > 20


def test_striped_work_is_the_sum_over_all_ranks():
    run, works = engine("striped", prefix_cache=True, chunk_tokens=7), []
    execute = run.runner.execute

    def counted(step):
        result = execute(step)
        replicas = run.runner.replicas
        decodes = [Work.decode(1, seq.length) for seq in run.runner.decoding.values()]
        chunks = [
            Work.chunk(chunk.num_tokens, replicas[chunk.id].length - chunk.num_tokens, sampled=chunk.sample)
            for chunk in step.chunks
        ]
        works.append(sum([*decodes, *chunks], NO_WORK))
        return result

    run.runner.execute = counted
    for id in range(5):
        run.add(request(id, LONG[: 10 + 7 * id], 9))
        for _ in range(3):
            run.step()
    run.drain()
    assert [step.work for step in run.runner.steps] == works
    assert any(usage.cached_tokens for usage in run.usages.values())


def chunk_steps(run):
    return [step.work for step in run.runner.steps if step.chunks]


def test_a_prompt_on_one_rank_counts_as_often_as_there_are_ranks():
    """In chunks of 8: at the limit of 12 the next rank joins in the middle of a chunk, of whose last 4 rows alone it
    has keys; the first rank's 12 are the most until the third rank is full and all go on striped."""
    run = engine("growing", chunk_tokens=8)
    run.add(request(0, LONG[:40], 1))
    run.drain()
    works = chunk_steps(run)
    assert [work.chunk_kv_tokens for work in works] == [KVP * most for most in (8, 12, 12, 12, 16)]
    pairs = [8 * 9 / 2, 8 * 8 + 4 * 5 / 2 + 4 * 4, 8 * 12, 8 * 12, 8 * 12 + 4 * 5 / 2]
    assert [work.chunk_pairs for work in works] == [KVP * most for most in pairs]


@pytest.mark.parametrize("placement", ["growing", "local"])
def test_all_of_a_prompt_in_one_chunk(placement):
    """Through all ranks and, where they are full, striped over them: each row sees what is at and before it."""
    run = engine(placement, chunk_tokens=100)
    run.add(request(0, LONG[:90], 1))
    run.drain()
    (work,) = chunk_steps(run)
    owners = [0] * 90
    if placement == "growing":
        owners = [position // 12 if position < 36 else position // 4 % 3 for position in range(90)]
    pairs = [sum(90 - position for position in range(90) if owners[position] == rank) for rank in range(KVP)]
    assert work.chunk_pairs == KVP * max(pairs)
    assert work.chunk_kv_tokens == KVP * owners.count(pairs.index(max(pairs)))


def test_local_decodes_count_by_the_rank_with_most_of_them():
    """Of 3 ranks one has requests of 20 and 9 tokens, when the others have one of 30 and one of 25."""
    run = engine("local", chunk_tokens=100)
    run.add(*(request(id, LONG[:tokens], 2) for id, tokens in enumerate((30, 25, 20, 8))))
    run.drain()
    (work,) = [step.work for step in run.runner.steps if step.work.decode_rows]
    assert work == Work(decode_rows=4, decode_kv_tokens=KVP * 31, sampled_rows=4)


def test_ranks_that_do_different_things_at_once_are_not_added_up():
    """One rank reads the KV of a long decode while another computes a prompt: the step takes what takes longer."""
    for tokens, longest in ((60, "decode"), (2, "prompt")):
        run = engine("local", chunk_tokens=100)
        run.add(request(0, LONG[:tokens], 30))
        run.step()
        run.add(request(1, LONG[: 10 if longest == "decode" else 60], 1))
        run.step()
        run.step()
        work = next(step.work for step in run.runner.steps if step.work.decode_rows and step.work.chunk_rows)
        assert (work.decode_kv_tokens > 0, work.chunk_pairs > 0) == (longest == "decode", longest == "prompt")
        run.drain()


class ByPairs:
    """Pairs of row and key take time."""

    def seconds(self, work):
        return 4e-9 * (work.chunk_pairs + work.decode_kv_tokens)


@pytest.mark.parametrize(("placement", "smaller"), [("striped", 1), ("growing", KVP), ("local", KVP)])
def test_chunks_adapt_to_the_rank_that_attends(placement, smaller):
    """So many times fewer rows fit a target where one rank has all that they see."""
    settings = config(kvp=KVP, placement=placement, adaptive=True, tbt_target_s=0.02, num_blocks=10_000,
                      max_model_len=100_000, chunk_tokens=4096, growth_limit_tokens=50_000)  # fmt: skip
    scheduler = Scheduler(settings, ByPairs())
    scheduler.add(request(0, LONG * 200, 1))
    works = []
    while scheduler.has_work and sum(work.chunk_rows for work in works) < 18_000:
        works.append(scheduler.schedule(0.0).work)
        scheduler.complete(StepResult(len(works), (), works[-1].chunk_rows))
    before, rows = sum(work.chunk_rows for work in works[:-1]), works[-1].chunk_rows
    target_s = 4 * 0.85 * 0.02
    assert 0.8 * target_s < 4e-9 * smaller * rows * (before + (rows + 1) / 2) <= target_s


def test_a_prefill_takes_as_long_as_one_rank_has_it_alone():
    times, cost = PrefillTimes(ByWork(), KVP), ByWork()
    even = times.until(8192, 0)
    assert even == pytest.approx(sum(cost.seconds(Work.chunk(1024, 1024 * index)) for index in range(8)))
    rows_s = 8 * 1e-3 + 8192 * 1e-4
    assert times.until(8192, float("inf")) - rows_s == pytest.approx(KVP * (even - rows_s))
    # With 1024 a rank the first one is full after a chunk; an even share is more from the fourth on.
    pairs = [1024 * 1025 / 2 * KVP, 1024 * 1024 * KVP, 1024 * 1024 * KVP]
    pairs += [1024 * (1024 * index + 1025 / 2) for index in range(3, 8)]
    assert times.until(8192, 1024) - rows_s == pytest.approx(1e-6 * sum(pairs))
    assert times.between(1024, 2048, 1024) == pytest.approx(1e-3 + 1024e-4 + 1e-6 * pairs[1])
    assert PrefillTimes(None, KVP).until(100, 50) == 100
