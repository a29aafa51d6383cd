"""Memory pressure, the prefix cache and adaptive chunks together: any schedule gives each request its own tokens."""

import dataclasses
from array import array
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from test_scheduler import VOCAB, Engine, FakeRunner, expected_logprobs, expected_output, next_token

from longhelix.scheduler import admission, chain
from longhelix.scheduler.admission import MOST_PREEMPTIONS
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.kv.windows import KVWindow, span_blocks
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.request import Request, SamplingParams, ServiceLevel
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.work import Work
from longhelix.spec.attention import Visibility
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

_HASHED = chain._HASHED_AT_ONCE, admission._HASHED_A_STEP, admission._HASHED_OF_EACH
LONG = [(7 * index + index // 9) % VOCAB for index in range(100)]


class ByWork:
    """Rows and pairs of rows and keys take time."""

    def seconds(self, work: Work) -> float:
        return 1e-3 + 1e-4 * work.rows + 1e-6 * (work.chunk_pairs + work.decode_kv_tokens)


class RandomDrafts:
    """Draft tokens of two requests of three: any number, of which any are right."""

    def __init__(self, seed):
        self._chance = Random(seed)

    def drafts(self, request):
        return request.id % 3 > 0

    def propose(self, seq):
        known, found = [*seq.request.prompt_token_ids, *seq.tokens.output], array("i")
        for _ in range(self._chance.randrange(12)):
            found.append(next_token([*known, *found]) if self._chance.random() < 0.8 else self._chance.randrange(VOCAB))
        return found


class Pressed(Engine):
    """An engine with a cost, over a clock that the test moves."""

    def __init__(self, config, depth=1, swap_s=0.0, drafter=None):
        self.scheduler = Scheduler(config, ByWork(), swap_s=swap_s, drafter=drafter)
        self.runner = FakeRunner(config, in_turn=False, seconds=ByWork().seconds, drafter=drafter)
        self.now_s = 0.0
        self.loop = Loop(self.scheduler, self.runner, lambda: self.now_s, depth)
        self.outcomes = {}
        self.num_sampled = 0
        self.usages = {}

    def step(self):
        self.now_s += 0.01
        stepped = self.loop.step()
        if stepped is None:
            return
        for event in stepped[1]:
            outcome = self.outcomes[event.request_id]
            assert outcome.finish_reason is None
            outcome.prompt_logprobs += event.prompt_logprobs
            if event.sampled is not None:
                outcome.token_ids.append(event.sampled.token_id)
            if event.finish_reason is not None:
                outcome.finish_reason = event.finish_reason
                self.usages[event.request_id] = event.usage

    def drain(self):
        for _ in range(20_000):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "requests wait for each other, or again and again"
        self.assert_nothing_is_left()
        return self.outcomes


def config(**more):
    return scheduler_config(
        **{"kvp": 2, "num_blocks": 12, "max_model_len": 100, "block_tokens": 4, "prefix_cache": True} | more
    )


def request(id, tokens, new_tokens, stop=(), arrival_s=0.0, prompt_logprobs=None, **service):
    params = SamplingParams(max_new_tokens=new_tokens, prompt_logprobs=prompt_logprobs)
    return Request(id, array("i", tokens), params, frozenset(stop), 0, arrival_s, ServiceLevel(**service))


def check_blocks(scheduler):
    """On every rank: free, held and cached ones are all there are, and holders are counted."""
    for rank, allocator in enumerate(scheduler.pool.allocators):
        held = Counter(block for seq in scheduler._running.values() for block in seq.kv.block_ids[rank])
        assert allocator._num_free + len(held) + allocator.num_cached == allocator.num_blocks
        assert held.keys().isdisjoint(allocator._cached)
        assert allocator._extra_holders == {block: count - 1 for block, count in held.items() if count > 1}
        assert allocator.reserved == sum(seq.kv.reserved[rank] for seq in scheduler._running.values())
        assert allocator.available >= 0
    assert sorted(scheduler.pool.index.values(), key=lambda block: (block.owner, block.id)) == sorted(
        scheduler.pool.allocators[0].index.values(), key=lambda block: (block.owner, block.id)
    )
    for at, window in enumerate(scheduler.pool.windows):
        check_window(scheduler, at, window)
    named = sum(len(allocator._hashes) for allocator in scheduler.pool.allocators)
    assert len(scheduler.pool.index) == named
    check_slots(scheduler)
    check_placements(scheduler)


def check_window(scheduler, at, window):
    """Of a KV group with a limit on every rank: free, held and cached ones are all there are, and holders are counted;
    a sequence has the blocks from the first one that it keeps to its last one, where the others have them too."""
    block_tokens = scheduler.config.block_tokens
    running = list(scheduler._running.values())
    for rank, allocator in enumerate(window.allocators):
        held = Counter(block.id for seq in running for block in seq.kv.windows[at].blocks if block.owner == rank)
        assert allocator._num_free + len(held) + allocator.num_cached == allocator.num_blocks
        assert held.keys().isdisjoint([*allocator._cached, *allocator._expired])
        assert allocator._extra_holders == {block: count - 1 for block, count in held.items() if count > 1}
        promised = sum(seq.kv.windows[at].reserved[rank] for seq in running)
        assert allocator.reserved == promised + sum(allocator._extra_holders.values())
        assert allocator.available >= 0
        assert len(allocator.index) == len(allocator._hashes)
    for seq in running:
        held = seq.kv.windows[at]
        assert held.first + len(held.blocks) == seq.kv.num_blocks
        assert [block.owner for block in held.blocks] == [
            seq.kv.placement.owner(place * block_tokens) for place in range(held.first, seq.kv.num_blocks)
        ]
        assert held.first * block_tokens <= window.visibility.first_seen(seq.length)


def check_placements(scheduler):
    """The closed forms say where the blocks of each sequence are, and no rank has more than there is room for."""
    block_tokens = scheduler.config.block_tokens
    for seq in scheduler._running.values():
        blocks = [len(ids) for ids in seq.kv.block_ids]
        tokens = seq.kv.num_blocks * block_tokens
        assert [seq.kv.placement.local_length(rank, tokens) for rank in range(len(blocks))] == [
            count * block_tokens for count in blocks
        ]
        most = [
            -(-seq.kv.placement.local_length(rank, seq.schedule.num_rows) // block_tokens)
            for rank in range(len(blocks))
        ]
        assert all(count <= room for count, room in zip(most, seq.kv.room, strict=True))
        assert all(
            count + promised <= room for count, promised, room in zip(blocks, seq.kv.reserved, seq.kv.room, strict=True)
        )
        assert max(seq.kv.room) <= scheduler.config.num_blocks
        assert all(block.id in seq.kv.block_ids[block.owner] for block in seq.unhashed.blocks)
    listed = [sum(rooms) for rooms in zip(*(seq.kv.room for seq in scheduler._running.values()), strict=True)]
    assert scheduler.pool._listed == (listed or [0] * scheduler.config.kvp)
    assert max(scheduler.pool._listed) <= scheduler.pool._most_listed


def check_slots(scheduler):
    """Each has one content, under which it is found; nothing is left over between steps."""
    for window in scheduler.pool.windows:
        for rank, swaps in enumerate(window.swaps):
            assert not swaps.evicted
            assert not swaps._pending
            used = swaps._used[rank]
            assert sorted(slot.id for slot in used) == list(range(len(used)))
            assert len(used) <= swaps.num_slots
            assert swaps.index == {content_hash: slot for slot, content_hash in used.items()}
    swaps = scheduler.pool.swaps
    assert not swaps.evicted
    assert not swaps._pending
    for rank, used in enumerate(swaps._used):
        assert {slot.owner for slot in used} <= {rank}
        assert sorted(slot.id for slot in used) == list(range(len(used)))
        assert len(used) <= swaps.num_slots
    assert swaps.index == {content_hash: slot for used in swaps._used for slot, content_hash in used.items()}
    assert swaps._starts.keys() == (scheduler.pool.index.keys() if swaps.num_slots else set())


class Traffic(RuleBasedStateMachine):
    """Requests come, end early and run, in any order, under any policy and placement, in a pool that is short."""

    kvps = st.integers(1, 4)
    placements = st.sampled_from((*PLACEMENTS, "auto"))
    batch_invariant = st.booleans()
    more_blocks = st.integers(0, 8)
    windowed = st.just(False)
    drafters = st.just(None)

    @initialize(data=st.data())
    def begin(self, data):
        draw = data.draw
        block_tokens, kvp, windowed = draw(st.integers(1, 5)), draw(self.kvps), draw(self.windowed)
        made = scheduler_config(
            kvp=kvp,
            num_blocks=1,
            max_model_len=64,
            block_tokens=block_tokens,
            chunk_tokens=draw(st.sampled_from([1, 7, 16, 10_000])),
            max_running=draw(st.integers(1, 6)),
            placement=draw(self.placements),
            growth_limit_tokens=draw(st.sampled_from([None, 1, 2, 3]).map(lambda n: n and n * block_tokens)),
            kvp_threshold_tokens=draw(st.integers(0, 50)),
            batch_invariant=draw(self.batch_invariant),
            policy=draw(st.sampled_from(POLICIES)),
            adaptive=draw(st.booleans()),
            tbt_target_s=draw(st.sampled_from([None, 0.001, 0.004])),
            prefix_cache=(prefix_cache := draw(st.booleans())),
            swap_blocks=draw(st.integers(0, 20)) if prefix_cache else 0,
            pp=(pp := draw(st.sampled_from([1, 1, 2, 3]))),
        )
        least = -(-made.longest_local_tokens // block_tokens)
        num_blocks = least + draw(self.more_blocks)
        windows = self.draw_windows(draw, made, num_blocks) if windowed else ()
        cache = dataclasses.replace(made.cache, windows=windows)
        made = dataclasses.replace(made, num_blocks=num_blocks, cache=cache)
        self.hash_no_more_than(draw(st.booleans()))
        # A token takes 100 us, after others up to a few more.
        swap_s = draw(st.sampled_from([0.0, 1.02e-4 * block_tokens, 1.0]))
        self.cache = made.cache
        self.engine = Pressed(made, draw(st.integers(1, max(3, pp + 1))), swap_s, draw(self.drafters))
        self.asked = []

    @staticmethod
    def draw_windows(draw, made, num_blocks):
        """One or two groups, each with no more blocks than one request needs, or some more."""
        sizes = st.integers(1, 30)
        visibilities = draw(
            st.lists(
                st.builds(Visibility, window_tokens=sizes) | st.builds(Visibility, chunk_tokens=sizes),
                min_size=1,
                max_size=2,
            )
        )
        least = [span_blocks(one, made.block_tokens) for one in visibilities]
        return tuple(
            KVWindow(
                one,
                min(count, num_blocks) + draw(st.integers(0, 12)),
                draw(st.integers(0, 20)) if made.cache.swap_blocks else 0,
            )
            for one, count in zip(visibilities, least, strict=True)
        )

    @staticmethod
    def hash_no_more_than(few):
        """Of a prompt in a step: `few` blocks, or as many as always, which is more than any prompt here has."""
        chain._HASHED_AT_ONCE, admission._HASHED_A_STEP, admission._HASHED_OF_EACH = (1, 2, 1) if few else _HASHED

    def limits(self, capacity_tokens):
        """Those that a request may name: it has room on all ranks, and no rank has to hold more than it may."""
        settings = self.engine.scheduler.config
        if settings.placement.name not in ("growing", "auto"):
            return st.none()
        least = -(-capacity_tokens // (settings.kvp * settings.block_tokens)) * settings.block_tokens
        most = settings.most_blocks * settings.block_tokens
        return st.none() | st.integers(least, most) if least <= most else st.none()

    @precondition(lambda self: len(self.asked) < 12)
    @rule(data=st.data(), copies=st.integers(1, 3))
    def add(self, data, copies):
        draw = data.draw
        tokens = LONG[: draw(st.integers(1, 40))] + draw(st.lists(st.integers(0, 2), max_size=4))
        prompt_logprobs = draw(st.sampled_from([None, None, 0]))
        new_tokens = draw(st.integers(int(prompt_logprobs is None), 64 - len(tokens)))
        stop = draw(st.sets(st.integers(0, VOCAB - 1), max_size=1))
        service = {
            "ttft_slo_s": draw(st.sampled_from([None, 0.01, 1.0])),
            "tbt_slo_s": draw(st.sampled_from([None, 0.002])),
            "priority": draw(st.integers(0, 1)),
            "client": draw(st.sampled_from(["", "a"])),
            "cache_salt": draw(st.sampled_from(["", "salt"])),
            "growth_limit_tokens": draw(self.limits(len(tokens) + max(new_tokens, 1))),
        }
        for _ in range(copies):
            one = request(len(self.asked), tokens, new_tokens, stop, self.engine.now_s, prompt_logprobs, **service)
            self.asked.append(one)
            self.engine.add(one)

    @precondition(lambda self: self.engine.loop.has_work)
    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.cache.prefix_cache and not self.cache.windows)
    @rule(num_tokens=st.integers(1, 40))
    def load(self, num_tokens):
        """Fill blocks from elsewhere between two steps, as a saved context does."""
        held = self.engine.pin(request(-1, LONG[:num_tokens], 1))
        if held is not None:
            self.engine.runner.load(held.blocks, held.num_cached, LONG)
            held.publish(self.engine.scheduler.pool)
            held.release(self.engine.scheduler.pool)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(self.asked)).id)

    @invariant()
    def blocks_add_up(self):
        if hasattr(self, "engine"):
            check_blocks(self.engine.scheduler)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            self.end()
        finally:
            self.hash_no_more_than(False)

    def end(self):
        outcomes = self.engine.drain()
        for one in self.asked:
            outcome, expected = outcomes[one.id], expected_output(one)
            ended_early = outcome.finish_reason == "abort"
            assert outcome.token_ids == (expected[: len(outcome.token_ids)] if ended_early else expected)
            found, expected = outcome.prompt_logprobs, expected_logprobs(one)
            assert found == (expected[: len(found)] if ended_early else expected)
        assert all(usage.preemptions <= MOST_PREEMPTIONS for usage in self.engine.usages.values())
        moved = self.engine.runner.moved_blocks
        block_tokens = self.engine.scheduler.config.block_tokens
        for id, usage in self.engine.usages.items():
            assert usage.moved_tokens == block_tokens * moved.get(id, 0)
        self.engine.scheduler.pool.forget()
        assert not self.engine.scheduler.pool.index
        assert not any(each.index for window in self.engine.scheduler.pool.windows for each in window.allocators)
        assert all(not allocator._extra_holders for allocator in self.engine.scheduler.pool.allocators)


class WindowedTraffic(Traffic):
    """Beside layers that see everything there are some with windows and chunks, in small pools of their own."""

    windowed = st.just(True)


class UnevenTraffic(Traffic):
    """Ranks fill up one by one, so that blocks move to those that have room."""

    kvps = st.integers(2, 4)
    placements = st.sampled_from(("growing", "local"))
    batch_invariant = st.just(False)
    more_blocks = st.integers(0, 2)


class DraftedTraffic(Traffic):
    """Sequences have several rows in a step, and go on by as many tokens as are accepted."""

    windowed = st.booleans()
    drafters = st.builds(RandomDrafts, st.integers(0, 99))


class UnevenDraftedTraffic(UnevenTraffic):
    """The same where ranks fill up one by one."""

    windowed = st.booleans()
    drafters = st.builds(RandomDrafts, st.integers(0, 99))


TestTraffic = Traffic.TestCase
TestUnevenTraffic = UnevenTraffic.TestCase
TestWindowedTraffic = WindowedTraffic.TestCase
TestDraftedTraffic = DraftedTraffic.TestCase
TestUnevenDraftedTraffic = UnevenDraftedTraffic.TestCase
for case in (TestTraffic, TestUnevenTraffic, TestWindowedTraffic, TestDraftedTraffic, TestUnevenDraftedTraffic):
    case.settings = settings(stateful_step_count=25)


def test_more_run_at_once_than_could_with_their_whole_answers_set_aside():
    """Eight short prompts whose answers could take three pools end after a few tokens: all run at once."""
    engine = Pressed(config(num_blocks=24, prefix_cache=False))
    asked = [request(id, [id] * 8, 64) for id in range(8)]
    ends = [expected_output(one)[2] for one in asked]
    asked = [request(id, [id] * 8, 64, stop=[end]) for id, end in enumerate(ends)]
    engine.add(*asked)
    engine.step()
    assert len(engine.runner.replicas) == 8
    outcomes = engine.drain()
    assert all(outcomes[one.id].token_ids == expected_output(one) for one in asked)
    assert not any(usage.preemptions for usage in engine.usages.values())


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_request_that_loses_least_is_preempted_and_ends_with_its_own_tokens(depth, prefix_cache):
    engine = Pressed(config(kvp=1, num_blocks=16, prefix_cache=prefix_cache), depth)
    long, short = request(0, LONG[:40], 20), request(1, LONG[50:60], 30)
    engine.add(long, short)
    outcomes = engine.drain()
    assert [outcomes[one.id].token_ids for one in (long, short)] == [expected_output(one) for one in (long, short)]
    assert engine.usages[0].preemptions == 0
    assert engine.usages[1].preemptions == 1
    again = [step.changes.new for step in engine.runner.steps if any(new.id == 1 for new in step.changes.new)]
    assert len(again) == 2
    assert engine.usages[1].recomputed_tokens + again[1][0].kv.cached_tokens >= 16
    assert (again[1][0].kv.cached_tokens > 0) == prefix_cache


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 512])
def test_a_prompt_that_is_preempted_is_scored_once(chunk_tokens, depth, prefix_cache):
    """In the middle of it or behind it, because one of a higher priority grows. What has not been scored is not taken
    from another request, which has computed all of it."""
    engine = Pressed(config(kvp=1, num_blocks=16, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache), depth)
    engine.add(request(0, LONG[40:70], 1))
    engine.drain()
    engine.add(request(1, LONG[:24], 36, priority=1))
    while len(engine.outcomes[1].token_ids) < 6 - depth:
        engine.step()
    asked = request(2, LONG[40:70], 20, prompt_logprobs=0)
    engine.add(asked)
    engine.drain()
    assert engine.usages[2].preemptions == 1
    assert engine.outcomes[2].prompt_logprobs == expected_logprobs(asked)
    assert engine.outcomes[2].token_ids == expected_output(asked)
    begun = [step.id for step in engine.runner.steps for new in step.changes.new if new.id == 2]
    assert len(begun) == 2
    scored = Counter()
    for step in engine.runner.steps:
        scored[step.id >= begun[1]] += sum(len(c.scored.targets) // 4 for c in step.chunks if c.scored)
    assert sum(scored.values()) == 29
    assert (scored[False] < 29) == (chunk_tokens < 512)
    cached = [new.kv.cached_tokens for step in engine.runner.steps for new in step.changes.new if new.id == 2]
    assert cached[0] == 0
    assert cached[1] <= scored[False] or not scored[True]


def test_what_is_cached_is_computed_again_where_it_is_scored_and_serves_others():
    engine = Pressed(config(kvp=1, num_blocks=32, chunk_tokens=8))
    for id, scored in enumerate((None, 0, None)):
        engine.add(request(id, LONG[:40], 2, prompt_logprobs=scored))
        engine.drain()
    assert [engine.usages[id].cached_tokens for id in range(3)] == [0, 0, 39]
    assert engine.outcomes[1].prompt_logprobs == expected_logprobs(request(1, LONG[:40], 2, prompt_logprobs=0))


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_a_request_for_no_new_token_ends_with_its_prompt_whatever_is_sampled(length):
    one = request(0, LONG[:length], 1, prompt_logprobs=0)
    engine = Pressed(config(chunk_tokens=4))
    engine.add(request(0, LONG[:length], 0, stop=expected_output(one), prompt_logprobs=0))
    outcome = engine.drain()[0]
    assert (outcome.token_ids, outcome.finish_reason) == ([], "length")
    assert outcome.prompt_logprobs == expected_logprobs(one)


def test_an_error_in_scoring_ends_its_request_alone():
    engine = Pressed(config(chunk_tokens=64))
    score = engine.runner.score

    def broken(chunk):
        return replace(score(chunk), logprobs=(), error="ValueError: no") if chunk.id == 0 else score(chunk)

    engine.runner.score = broken
    asked = [request(id, LONG[id : id + 5], 3, prompt_logprobs=0) for id in range(2)]
    engine.add(*asked)
    outcomes = engine.drain()
    assert (outcomes[0].finish_reason, outcomes[0].prompt_logprobs) == ("error", [])
    assert (outcomes[1].finish_reason, outcomes[1].prompt_logprobs) == ("length", expected_logprobs(asked[1]))


def test_a_request_is_preempted_twice_at_most():
    """Growing ones that push each other out: the third time one runs with all that it may ever need."""
    engine = Pressed(config(kvp=1, num_blocks=16, max_running=8, prefix_cache=False))
    asked = [request(id, LONG[id : id + 8], 50) for id in range(6)]
    engine.add(*asked)
    outcomes = engine.drain()
    assert all(outcomes[one.id].token_ids == expected_output(one) for one in asked)
    preemptions = [engine.usages[one.id].preemptions for one in asked]
    assert max(preemptions) == MOST_PREEMPTIONS


def test_a_prompt_begins_only_where_all_of_it_has_room():
    """Chunk by chunk it would take what is left, and lose it again to those that grow."""
    engine = Pressed(config(kvp=1, num_blocks=12, chunk_tokens=4, prefix_cache=False))
    engine.add(request(0, LONG[:20], 20))
    engine.step()
    engine.add(request(1, LONG[40:75], 2))
    while 0 in engine.runner.replicas and engine.outcomes[0].finish_reason is None:
        assert 1 not in engine.runner.replicas
        engine.step()
    engine.drain()
    assert engine.usages[1].preemptions == 0


def test_a_preempted_request_can_be_aborted_before_its_last_token_is_back():
    engine = Pressed(config(kvp=1, num_blocks=16, prefix_cache=False), depth=3)
    engine.add(request(0, LONG[:40], 20), request(1, LONG[50:60], 30))
    while 1 not in engine.scheduler._preempted:
        engine.step()
    usage = engine.loop.abort(1)
    assert usage.kv_tokens_per_rank == (0,)
    engine.outcomes[1].finish_reason = "abort"
    engine.drain()


def test_what_fits_may_pass_what_does_not_but_not_forever():
    """A prompt for most of the pool waits beside small ones that never stop coming."""
    engine = Pressed(config(kvp=1, num_blocks=16, policy="srpt", prefix_cache=False))
    engine.add(*(request(id, [id % VOCAB] * 8, 9) for id in range(3)), request(3, LONG[:50], 2))
    passed = 0
    for id in range(4, 400):
        engine.add(request(id, [id % VOCAB] * 8, 9, arrival_s=engine.now_s))
        engine.step()
        passed += 3 not in engine.runner.new
    assert 8 < passed < 120
    engine.drain()


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("kvp", "num_blocks"), [(1, 4), (2, 2), (4, 1)])
def test_a_prompt_that_fills_the_pool_runs_again_and_again(kvp, num_blocks, batch_invariant):
    """All of it is there, and one token is computed: with a copy of its last block it would not fit."""
    engine = Pressed(config(kvp=kvp, num_blocks=num_blocks, batch_invariant=batch_invariant))
    asked = [request(id, LONG[:16], 1) for id in range(3)]
    for one in asked:
        engine.add(one)
        for _ in range(10):
            engine.step()
        assert engine.outcomes[one.id].token_ids == expected_output(one)
    assert engine.usages[2].cached_tokens == 12


def test_what_is_promised_counts_when_a_request_is_to_be_preempted():
    """A prompt whose turn has not come holds no block and loses nothing; those that run have a higher priority."""
    engine = Pressed(config(kvp=1, num_blocks=12, chunk_tokens=1, prefix_cache=False))
    engine.add(request(0, LONG[:8], 20, priority=1))
    while not engine.outcomes[0].token_ids:
        engine.step()
    engine.add(request(1, LONG[40:48], 2, priority=1), request(2, LONG[60:88], 1))
    outcomes = engine.drain()
    assert [engine.usages[id].preemptions for id in (0, 1)] == [0, 0]
    assert engine.usages[2].preemptions > 0
    assert [len(outcomes[id].token_ids) for id in range(3)] == [20, 2, 1]


def test_a_growing_request_takes_no_block_from_one_of_higher_priority():
    """It has none of its own on the rank that it grows onto, which the other one fills."""
    engine = Pressed(config(placement="growing", growth_limit_tokens=8, num_blocks=2, prefix_cache=False))
    engine.add(request(0, LONG[30:34], 10))
    while len(engine.outcomes[0].token_ids) < 4:
        engine.step()
    engine.add(request(1, LONG[:5], 4, priority=5))
    engine.drain()
    assert [engine.usages[id].preemptions for id in range(2)] == [1, 0]


def test_requests_that_are_cancelled_while_none_can_begin_leave_nothing():
    engine = Pressed(config(max_running=1))
    engine.add(request(0, LONG[:8], 60))
    engine.step()
    for id in range(1, 5000):
        engine.add(request(id, [1] * 4, 1))
        engine.abort(id)
    assert len(engine.scheduler._waiting._waiting._order) < 200
    engine.drain()
