"""The loop over a predicted runner, against times that are worked out by hand."""

import tracemalloc
from array import array
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.perf.layouts import Layouts
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.scheduler.request import Request, SamplingParams, ServiceLevel
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, StepResult
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.runner import PredictedRunner
from longhelix.simulate.simulation import Server, Simulation, simulate
from longhelix.simulate.synthetic import Synthetic, chat, parse_mix
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

GB200, LLAMA = load_system("gb200"), load_model("llama-3.1-405b")
SETTING = Setting(LLAMA, GB200, Dtypes("fp4", "fp4", "fp4"))


@dataclass(frozen=True)
class Constant:
    """Every step takes `step_s`."""

    step_s: float

    def seconds(self, work):
        return self.step_s


@dataclass(frozen=True)
class ByRows:
    """A step takes a millisecond for each of its rows."""

    def seconds(self, work):
        return 1e-3 * work.rows


class Steps:
    """Keeps what it is told."""

    def __init__(self):
        self.steps, self.records = [], {}

    def ran(self, step):
        self.steps.append(step)

    def ended(self, id, record):
        self.records[id] = record


def config(**more):
    return scheduler_config(
        **{"kvp": 1, "num_blocks": 10_000, "max_model_len": 100_000, "block_tokens": 4, "chunk_tokens": 8} | more
    )


def run(arrivals, cost=None, settings=None, stages=1):
    seen = Steps()
    simulation = Simulation(
        Scheduler(settings or config(pp=stages)), PredictedRunner(cost or Constant(1.0), stages), arrivals, seen
    )
    simulation.run()
    return simulation.outcome(4), seen


def near(seconds):
    return pytest.approx(seconds, rel=1e-3)


def test_one_request_step_by_step():
    """A prompt of 20 tokens is three chunks of 8, 8 and 4; its third step gives the first of 5 tokens."""
    outcome, seen = run([Arrival(2.0, 20, 5)])
    # The step that tells the ranks of its end has no rows, and takes no time.
    assert [(ran.begin_s, ran.end_s) for ran in seen.steps] == [(2.0 + n, 3.0 + n) for n in range(7)] + [(9.0, 9.0)]
    record = seen.records[0]
    assert (record.begin_s, record.first_s, record.output) == (2.0, 5.0, 5)
    assert (outcome.steps, outcome.tokens, outcome.duration_s) == (7, 5, 7.0)
    assert outcome.busy_s == 7.0
    assert outcome.gpu_s == 28.0
    assert outcome.ttft.percentile(50) == near(3.0)
    assert (outcome.tbt.count, outcome.tbt.sum_s) == (4, 4.0)
    assert outcome.tokens_per_s == 5 / 7


def test_steps_wait_for_what_they_swap():
    """The third prompt begins like the first, whose KV the second one displaced: 2 ms for a block out and in, where a
    row takes 1 ms. A block on one rank waits for none on another. Each prompt has 6 blocks on one rank and 5 on the
    other, of 7."""
    arrivals = [Arrival(10.0 * id, 44, 1, pieces=(piece,), piece_tokens=40) for id, piece in enumerate((1, 2, 1))]
    settings = config(kvp=2, num_blocks=7, chunk_tokens=100, swap_blocks=20, prefix_cache=True)
    seen = Steps()
    runner = PredictedRunner(ByRows(), swap_s=0.002)
    Simulation(Scheduler(settings, ByRows(), swap_s=0.002), runner, arrivals, seen).run()
    prompts = [ran for ran in seen.steps if ran.step.chunks]
    assert [ran.step.work.rows for ran in prompts] == [44, 44, 4]
    out = [[swap.block.owner for swap in ran.step.transfers.swapped_out] for ran in prompts]
    back = [[swap.block.owner for swap in ran.step.transfers.swapped_in] for ran in prompts]
    assert [(owners.count(0), owners.count(1)) for owners in out] == [(0, 0), (5, 3), (5, 3)]
    assert [(owners.count(0), owners.count(1)) for owners in back] == [(0, 0), (0, 0), (4, 3)]
    taken_ms = [1e3 * (ran.end_s - ran.begin_s) for ran in prompts]
    assert taken_ms == pytest.approx([44, 44 + 5, 4 + 5 + 4], abs=1e-6)


@pytest.mark.parametrize("stages", [1, 2])
def test_steps_wait_for_what_moves_between_ranks(stages):
    """Rank 0 is full before its two requests are done. The first one's last full blocks go to two other ranks: a
    second for each block that a rank sends, and 0.1 s for each that one receives, in each stage. A row takes 1 ms."""
    arrivals = [Arrival(0.0, tokens, 16) for tokens in (24, 26, 27, 14)]
    settings = config(kvp=3, num_blocks=17, max_model_len=100, chunk_tokens=512, placement="local", pp=stages)
    seen = Steps()
    runner = PredictedRunner(ByRows(), stages, move_s=lambda sent, received: sent + 0.1 * received)
    scheduler = Scheduler(settings, ByRows())
    jobs = {}
    simulation = Simulation(scheduler, runner, arrivals, seen)
    while simulation.step():
        jobs |= {seq.id: seq.job for seq in scheduler.running}
    moving = [ran for ran in seen.steps if ran.step.moved]
    for ran in moving:
        owners = [(source.owner, target.owner) for source, target in ran.step.moved]
        sent, received = (max(ranks.count(rank) for rank in range(3)) for ranks in zip(*owners, strict=True))
        assert ran.result.measured.moved_s == pytest.approx(sent + 0.1 * received)
        assert ran.result.measured.taken_s == pytest.approx(
            1e-3 * ran.step.work.rows + stages * ran.result.measured.moved_s
        )
        assert ran.end_s - ran.begin_s >= ran.result.measured.taken_s - 1e-9
    assert moving
    assert all(ran.result.measured.moved_s == 0 for ran in seen.steps if not ran.step.moved)
    assert sum(job.history.moved_s for job in jobs.values()) == pytest.approx(
        sum(ran.result.measured.moved_s for ran in moving)
    )


def test_two_requests_share_the_machine():
    """Rows take a millisecond. The second prompt arrives while the first one's only chunk runs (8 ms), waits for its
    end, and then has its chunk beside the first one's row."""
    arrivals = [Arrival(0.0, 8, 4), Arrival(0.004, 6, 2)]
    outcome, seen = run(arrivals, ByRows())
    ends_ms = [round(1e3 * ran.end_s, 6) for ran in seen.steps if ran.end_s > ran.begin_s]
    # The first chunk; a row and the chunk of 6; two steps of two rows and of one.
    assert ends_ms == [8, 15, 17, 18]
    assert seen.records[0].first_s == pytest.approx(0.008)
    assert seen.records[1].first_s == pytest.approx(0.015)
    assert seen.records[1].begin_s == pytest.approx(0.008)
    assert outcome.ttft.sum_s == pytest.approx(0.008 + 0.011)
    assert outcome.wait.most_s == pytest.approx(0.004)
    # The first had gaps of 7, 2 and 1 ms, the second one of 2 ms.
    assert outcome.tbt.count == 4
    assert outcome.tbt.sum_s == pytest.approx(0.012)
    assert (outcome.tbt.least_s, outcome.tbt.most_s) == (pytest.approx(0.001), pytest.approx(0.007))


@pytest.mark.parametrize(
    ("levels", "met"),
    [
        ([{}, {}], 2),
        ([{"ttft_slo_s": 0.009}, {"ttft_slo_s": 0.0105}], 1),
        ([{"tbt_slo_s": 0.0065}, {"tbt_slo_s": 0.0025}], 1),
        ([{"ttft_slo_s": 0.0075}, {"tbt_slo_s": 0.0015}], 0),
        ([{"ttft_slo_s": 0.0085, "tbt_slo_s": 0.0075}, {"ttft_slo_s": 0.0115, "tbt_slo_s": 0.0025}], 2),
    ],
)
def test_goodput_counts_those_that_met_both_of_their_slos(levels, met):
    shapes = [(0.0, 8, 4), (0.004, 6, 2)]
    arrivals = [Arrival(*shape, ServiceLevel(**level)) for shape, level in zip(shapes, levels, strict=True)]
    outcome, _ = run(arrivals, ByRows())
    assert outcome.met == met
    assert outcome.slo_attainment == met / 2
    assert outcome.goodput_rps == pytest.approx(met / 0.018)


def test_one_slow_token_of_a_hundred_is_within_the_99th_percentile_and_two_are_not():
    """102 tokens are 101 gaps: the 100th in order counts."""
    for late, met in ((1, True), (2, False)):
        arrivals = [Arrival(0.0, 8, 102, ServiceLevel(tbt_slo_s=0.0025))]
        arrivals += [Arrival(0.02 + 0.02 * n, 8, 1) for n in range(late)]
        outcome, seen = run(arrivals, ByRows())
        assert seen.records[0].met is met
        assert outcome.tbt.count == 101
        assert outcome.tbt.most_s > 0.008


def test_time_passes_while_nothing_is_there():
    outcome, seen = run([Arrival(0.0, 4, 1), Arrival(100.0, 4, 1)])
    assert [ran.begin_s for ran in seen.steps if ran.end_s > ran.begin_s] == [0.0, 100.0]
    assert (outcome.duration_s, outcome.busy_s) == (101.0, 2.0)


def test_a_request_that_can_never_run_is_refused_and_others_go_on():
    outcome, _ = run([Arrival(0.0, 50_000, 1), Arrival(0.0, 4, 1)])
    assert (outcome.requests, outcome.finished, outcome.refused) == (2, 1, 1)
    assert "need" in outcome.refusal
    assert outcome.slo_attainment == 0.5


def test_stages_overlap_chunks_and_wait_for_tokens():
    """Three chunks of a prompt are in two stages at a time; a decode begins when the step before has ended."""
    outcome, seen = run([Arrival(0.0, 24, 3)], Constant(2.0), stages=2)
    assert [(ran.begin_s, ran.end_s) for ran in seen.steps if ran.end_s > ran.begin_s] == [
        (0.0, 2.0),
        (1.0, 3.0),
        (2.0, 4.0),
        (4.0, 6.0),
        (6.0, 8.0),
    ]
    assert outcome.busy_s == 8.0


@pytest.mark.parametrize("pp", [1, 4])
def test_a_long_prompt_takes_what_the_planner_says(pp):
    layout = Layout(kvp=4, tpa=8, pp=pp)
    settings = config(kvp=4, pp=pp, num_blocks=10**6, max_model_len=2 * 10**6, block_tokens=16, chunk_tokens=4096)
    outcome = simulate(Server(SETTING, layout, settings, hop_b=False), [Arrival(0.0, 10**6, 1)])
    planned_s = prefill_seconds(SETTING, Layouts.of([layout], hop_b=False), 1e6, 4096.0)[0]
    assert outcome.ttft.most_s == pytest.approx(planned_s, rel=0.01)


def test_the_steps_are_those_of_the_scheduler_driven_by_hand():
    """What the loop makes of it: arrivals, time, two steps in flight where the first has no chunks."""
    arrivals = list(Synthetic(40, 30.0, parse_mix("1:2-60:1-40"), seed=3))
    settings = config(max_running=6, kvp=2)
    cost = ByRows()
    _, seen = run(arrivals, cost, settings)
    assert [ran.step for ran in seen.steps] == by_hand(arrivals, cost, settings)


def by_hand(arrivals, cost, settings):
    """No loop, no runner: steps in flight as (step, end, sampled), sequences as what they still owe."""
    scheduler, waiting, steps, flying, decoding = Scheduler(settings), list(enumerate(arrivals)), [], [], []
    now_s = free_s = 0.0
    while True:
        while waiting and waiting[0][1].arrival_s <= now_s:
            id, arrival = waiting.pop(0)
            prompt = array("i", [2 * id + 1] * arrival.prompt_tokens)
            sampling = SamplingParams(max_new_tokens=arrival.output_tokens, ignore_eos=True)
            scheduler.add(Request(id, prompt, sampling, frozenset(), 0, arrival.arrival_s))
        while len(flying) < (1 if flying and flying[-1][0].chunks else 2):
            step = scheduler.schedule(now_s)
            if step is None:
                break
            decoding = [id for id in decoding if id not in step.changes.ended + step.changes.leaving] + list(
                step.changes.joining
            )
            sampled = tuple(SampledToken(id, 0) for id in [*decoding, *(c.id for c in step.chunks if c.sample)])
            free_s = max(now_s, free_s) + cost.seconds(step.work)
            flying.append((step, free_s, sampled))
            steps.append(step)
        if flying:
            step, end_s, sampled = flying.pop(0)
            now_s = max(now_s, end_s)
            scheduler.complete(StepResult(step.id, sampled, 0))
        elif waiting:
            now_s = waiting[0][1].arrival_s
        else:
            return steps


def test_the_same_seed_gives_the_same_outcome_and_another_does_not():
    server = Server(SETTING, Layout(kvp=2, tpa=8), config(kvp=2, num_blocks=50_000, block_tokens=16, chunk_tokens=512))

    def outcome(seed):
        found = simulate(server, Synthetic(60, 5.0, (chat(1.0),), seed=seed))
        return found.steps, found.duration_s, found.ttft.percentiles([50, 99]), found.timeline

    assert outcome(1) == outcome(1)
    assert outcome(1) != outcome(2)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12))
def test_every_request_gets_all_its_tokens(shapes):
    arrivals = [Arrival(*shape) for shape in sorted(shapes)]
    outcome, seen = run(arrivals, ByRows(), config(max_running=3, num_blocks=20))
    assert outcome.finished == outcome.requests == len(shapes)
    assert [seen.records[id].output for id in range(len(shapes))] == [shape[2] for shape in sorted(shapes)]
    assert outcome.tokens == sum(shape[2] for shape in shapes)
    assert outcome.ttft.count == outcome.wait.count == len(shapes)
    assert outcome.tbt.count == outcome.tokens - len(shapes)
    assert all(record.arrival_s <= record.begin_s < record.first_s for record in seen.records.values())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_run(monkeypatch):
    """Twice the steps and requests take less than a byte for each step more."""
    monkeypatch.setattr("longhelix.simulate.request_tracker._SPARE", 64)
    level = ServiceLevel(ttft_slo_s=1.0, tbt_slo_s=0.05)

    def peak_bytes(requests):
        workload = Synthetic(requests, 1.0, parse_mix("1:8:20-60"), level)
        tracemalloc.start()
        simulation = Simulation(Scheduler(config(max_running=1)), PredictedRunner(Constant(0.01)), workload)
        simulation.run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        outcome = simulation.outcome(1)
        assert outcome.finished == requests
        return peak, outcome.steps

    peak_bytes(10)  # what is made once
    (first, steps), (second, more_steps) = peak_bytes(150), peak_bytes(300)
    assert more_steps > 1.8 * steps > 5000
    assert second - first < steps


def test_a_prompt_of_millions_takes_no_memory():
    tracemalloc.start()
    request = Arrival(0.0, 2_000_000_000, 1).request(0)
    assert len(request.prompt_token_ids) == 2_000_000_000
    assert len(request.prompt_token_ids[10**9 : 10**9 + 512].tobytes()) == 2048
    assert tracemalloc.get_traced_memory()[1] < 20_000
    tracemalloc.stop()


def test_prompts_are_alike_where_they_share_pieces_and_nowhere_else():
    first = Arrival(0.0, 20, 1, pieces=(7, 8), piece_tokens=8).request(0).prompt_token_ids
    second = Arrival(0.0, 18, 1, pieces=(7, 9), piece_tokens=8).request(1).prompt_token_ids
    alike = [one == other for one, other in zip(first[0:18], second[0:18], strict=True)]
    assert alike == [True] * 8 + [False] * 10
    assert first[3:19] == first[0:20][3:19]
    assert len(set(first[0:20])) == 3


def test_the_runner_ends_steps_in_order():
    scheduler = Scheduler(config(chunk_tokens=4))
    scheduler.add(Arrival(0.0, 8, 2).request(0))
    runner = PredictedRunner(Constant(1.0))
    runner.submit(scheduler.schedule(0.0))
    runner.submit(scheduler.schedule(0.0))
    assert runner.now_s == 0.0
    assert (runner.collect(inf).sampled, runner.now_s) == ((), 1.0)
    assert (runner.collect(inf).sampled, runner.now_s) == ((SampledToken(0, 0),), 2.0)
