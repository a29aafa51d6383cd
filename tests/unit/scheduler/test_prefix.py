"""Requests that begin with KV that is there already: on a fake runner that reads back what its blocks hold."""

from array import array
from dataclasses import replace
from itertools import takewhile

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import VOCAB, WHOLE, Engine, expected_output

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.scheduler.kv.blocks import IDS_PER_BLOCK, Block
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.prefix import NO_PREFIX, Prefix
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.step import BlockTransfers, InitialKV, KnownTokens, NewSequence, SequenceChanges, Step
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 4
LONG = [(7 * index + index // 9) % VOCAB for index in range(100)]


def request(id, token_ids, new_tokens=4, stop=(), **sampling):
    params = SamplingParams(max_new_tokens=new_tokens, **sampling)
    return Request(id, array("i", token_ids), params, frozenset(stop), 0, 0.0)


def config(**more):
    return scheduler_config(**{"kvp": 2, "num_blocks": 100, "max_model_len": 1000, "block_tokens": BLOCK_TOKENS} | more)


class Beginnings:
    """Of all that runs or was kept, what begins as a request for the longest; `whole` blocks alone, or any."""

    def __init__(self, whole=False):
        self.whole = whole
        self.engine = None
        self.kept = []

    def find(self, request):
        found = (self.begin_alike(request, *filled) for filled in [*self.running(), *self.kept])
        return max(found, key=lambda prefix: prefix.num_tokens, default=NO_PREFIX)

    def running(self):
        """What earlier steps have filled of those that still hold it."""
        running = self.engine.scheduler._running
        return [(seq.token_ids[: seq.length], seq.blocks) for id, seq in self.replicas.items() if id in running]

    @property
    def replicas(self):
        return self.engine.runner.replicas

    def begin_alike(self, request, token_ids, blocks):
        pairs = zip(request.prompt_token_ids, token_ids, strict=False)
        count = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        block_tokens = self.engine.scheduler.config.block_tokens
        count -= count % block_tokens if self.whole else 0
        return Prefix(count, tuple(blocks[: -(-count // block_tokens)]))

    def keep(self, id):
        """Hold the blocks of a request, whatever becomes of it."""
        seq = self.replicas[id]
        self.hold(lambda allocator, block: allocator.share([block.id]), seq.blocks)
        self.kept.append((seq.token_ids[: seq.length], list(seq.blocks)))
        self.engine.runner.kept |= set(seq.blocks)

    def drop(self):
        """Let go of all that was kept."""
        for _, blocks in self.kept:
            self.hold(lambda allocator, block: allocator.release(array("q", [block.id]), 0), blocks)
        self.kept.clear()
        self.engine.runner.kept.clear()

    def hold(self, change, blocks):
        for block in blocks:
            change(self.engine.scheduler.pool.allocators[block.owner], block)


def engine_with(prefixes, settings, depth=1):
    engine = Engine(settings, depth, prefixes)
    prefixes.engine = engine
    return engine


def forked(donor, fork, settings=None, whole=False, depth=1):
    """An engine in which `fork` has just begun, beside the donor, which has its first token."""
    engine = engine_with(Beginnings(whole), settings or config(), depth)
    engine.add(donor)
    engine.step()
    engine.add(fork)
    engine.step()
    return engine


def assert_outputs(engine, *asked):
    outcomes = engine.drain()
    assert {one.id: outcomes[one.id].token_ids for one in asked} == {one.id: expected_output(one) for one in asked}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_full_blocks_are_shared_and_the_rest_of_the_prompt_is_computed(placement):
    donor, fork = request(0, LONG[:30], 9), request(1, [*LONG[:28], 1, 2, 3, 4, 5], 9)
    engine = forked(donor, fork, config(placement=placement, growth_limit_tokens=8), whole=True)
    step = engine.runner.steps[-1]
    new = step.changes.new[0]
    assert (new.kv.cached_tokens, step.transfers.copies) == (28, ())
    assert list(new.kv.cached_blocks) == engine.runner.replicas[0].blocks[:7]
    assert [(chunk.id, chunk.num_tokens) for chunk in step.chunks] == [(1, 5)]
    assert_outputs(engine, donor, fork)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_block_that_is_not_full_is_copied_on_its_rank_in_the_step_that_names_the_request(placement):
    donor, fork = request(0, LONG[:30], 9), request(1, [*LONG[:30], 1, 2, 3], 9)
    engine = forked(donor, fork, config(placement=placement, growth_limit_tokens=8))
    step = engine.runner.steps[-1]
    new = step.changes.new[0]
    ((source, target),) = step.transfers.copies
    assert new.kv.cached_tokens == 30
    assert source == engine.runner.replicas[0].blocks[7]
    assert target == new.kv.cached_blocks[-1] != source
    assert source.owner == target.owner
    assert list(new.kv.cached_blocks[:-1]) == engine.runner.replicas[0].blocks[:7]
    assert_outputs(engine, donor, fork)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 28, 29])
def test_one_token_of_the_prompt_is_left_to_compute(num_tokens):
    donor, fork = request(0, LONG[:30], 9), request(1, LONG[:num_tokens], 9)
    engine = forked(donor, fork)
    step = engine.runner.steps[-1]
    assert step.changes.new[0].kv.cached_tokens == num_tokens - 1
    assert [(chunk.id, chunk.num_tokens, chunk.sample) for chunk in step.chunks] == [(1, 1, True)]
    assert len(step.transfers.copies) == bool((num_tokens - 1) % BLOCK_TOKENS)
    assert_outputs(engine, donor, fork)


def test_only_blocks_that_are_not_there_are_set_aside():
    donor, fork = request(0, LONG[:30], 3), request(1, [*LONG[:28], 1, 2, 3, 4, 5], 20)
    engine = engine_with(Beginnings(), config())
    engine.add(donor)
    engine.step()
    assert engine.free_blocks() == [96, 96]  # 32 tokens: 8 blocks over 2 ranks
    engine.add(fork)
    engine.step()
    # Its prompt's 33 tokens: 9 blocks, of which 7 are there, so that one is missing on each rank.
    assert engine.free_blocks() == [95, 95]
    while engine.outcomes[0].finish_reason is None:
        engine.step()
    # What the donor had to itself is free: its eighth block.
    assert engine.free_blocks() == [95, 96]
    assert engine.abort(1) is not None
    assert engine.free_blocks() == [100, 100]
    engine.drain()


def test_a_pool_too_small_for_two_holds_two_that_begin_alike():
    donor, fork = request(0, LONG[:33], 3), request(1, LONG[:34], 3)
    asked = config(num_blocks=6)
    engine = forked(donor, fork, asked)
    assert list(engine.runner.replicas) == [0, 1]
    assert_outputs(engine, donor, fork)
    alone = Engine(asked)
    alone.add(donor, fork)
    alone.step()
    assert list(alone.runner.replicas) == [0]


@pytest.mark.parametrize("ends", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_blocks_are_free_after_the_last_of_those_that_share_them(ends):
    asked = [request(0, LONG[:30], 40), request(1, LONG[:32], 40), request(2, [*LONG[:30], 1, 1], 40)]
    engine = engine_with(Beginnings(), config())
    for one in asked:
        engine.add(one)
        engine.step()
    assert [new.kv.cached_tokens for step in engine.runner.steps for new in step.changes.new] == [0, 30, 30]
    free = [engine.free_blocks()]
    for id in ends:
        assert sum(engine.abort(id)) >= 30
        free.append(engine.free_blocks())
    assert free == sorted(free)
    assert free[-1] == [100, 100]
    engine.drain()


@pytest.mark.parametrize("tail", [0, 3])
def test_a_request_goes_on_by_its_own_placement_after_another_ones_blocks(tail):
    """A short donor on one rank; a long request that begins with its blocks is spread over all ranks, and the other
    way round."""
    asked = config(kvp=3, placement="auto", kvp_threshold_tokens=40, num_blocks=64)
    short, long = request(0, LONG[: 24 + tail], 8), request(1, LONG[:60], 8)
    engine = forked(short, long, asked)
    new = engine.runner.steps[-1].changes.new[0]
    assert new.kv.cached_tokens == 24 + tail
    assert len({block.owner for block in new.kv.cached_blocks}) == 1
    assert new.kv.spread
    assert_outputs(engine, short, long)
    held = engine.outcomes[1].kv_tokens_per_rank
    assert sum(held) == 67
    assert max(held) >= 24 + tail + (67 - 24 - tail) // 3 - BLOCK_TOKENS

    long, short = request(0, LONG[:60], 8), request(1, [*LONG[: 24 + tail], 1, 2], 8)
    engine = forked(long, short, asked)
    new = engine.runner.steps[-1].changes.new[0]
    assert new.kv.cached_tokens == 24 + tail
    assert {block.owner for block in new.kv.cached_blocks} == {0, 1, 2}
    assert not new.kv.spread
    last = new.kv.cached_blocks[-1].owner
    assert_outputs(engine, long, short)
    grown = {block.owner for step in engine.runner.steps for id, block in step.changes.grown if id == 1}
    assert grown <= {last}


def test_a_prefix_that_leaves_a_rank_too_much_is_not_used():
    """All of it on one rank: with it that rank would have to hold more than it may."""
    donor = request(0, LONG[:40], 3)
    fork = request(1, LONG[:96], 4)
    asked = config(num_blocks=30, max_model_len=100, placement="auto", kvp_threshold_tokens=48)
    engine = forked(donor, fork, asked)
    assert engine.runner.new[1].kv.cached_tokens == 0
    assert_outputs(engine, donor, fork)
    engine = forked(donor, request(1, LONG[:72], 4), asked)
    assert engine.runner.new[1].kv.cached_tokens == 0
    engine = forked(donor, request(1, LONG[:56], 4), asked)
    assert engine.runner.new[1].kv.cached_tokens == 40


@pytest.mark.parametrize("placement", ["striped", "auto"])
def test_bits_do_not_depend_on_who_has_computed_a_prefix_where_that_is_promised(placement):
    """Blocks where the request would have put them itself are the same to the merge; others are not used."""
    asked = config(placement=placement, kvp_threshold_tokens=40, batch_invariant=True)
    short, long = request(0, LONG[:24], 8), request(1, LONG[:60], 8)
    engine = forked(short, long, asked)
    assert engine.runner.new[1].kv.cached_tokens == (24 if placement == "striped" else 0)
    assert_outputs(engine, short, long)
    engine = forked(long, replace(long, id=2), asked)
    assert engine.runner.new[2].kv.cached_tokens == 59
    engine.drain()
    engine = forked(short, replace(short, id=2), asked)  # on one rank, whichever that is
    assert engine.runner.new[2].kv.cached_tokens == 23
    engine.drain()


def test_a_repetition_penalty_is_told_which_tokens_it_has_not_seen():
    for penalty, told in ((1.0, []), (1.5, sorted({*LONG[:29]}))):
        engine = forked(request(0, LONG[:30], 9), request(1, LONG[:30], 9, repetition_penalty=penalty))
        assert array("i", engine.runner.new[1].known.seen_ids).tolist() == told
        engine.drain()


def test_a_kept_prefix_outlives_its_request():
    donor, fork = request(0, LONG[:30], 3), request(1, LONG[:33], 3)
    prefixes = Beginnings()
    engine = engine_with(prefixes, config())
    engine.add(donor)
    engine.step()
    prefixes.keep(0)
    while engine.loop.has_work:
        engine.step()
    assert engine.free_blocks() == [96, 96]
    engine.add(fork)
    engine.step()
    assert engine.runner.new[1].kv.cached_tokens == 30
    while engine.loop.has_work:
        engine.step()
    assert engine.outcomes[1].token_ids == expected_output(fork)
    prefixes.drop()
    engine.assert_nothing_is_left()


@st.composite
def workloads(draw):
    """Requests that begin alike in many ways, some of them kept, some ended early, in a pool that is short or not."""
    asked = []
    for id in range(draw(st.integers(2, 7))):
        token_ids = LONG[: draw(st.integers(1, 40))] + draw(st.lists(st.integers(0, 2), max_size=6))
        stop = draw(st.sets(st.integers(0, VOCAB - 1), max_size=4))
        asked.append(request(id, token_ids, draw(st.integers(1, 10)), stop))
    block_tokens = draw(st.integers(1, 6))
    asked_of = scheduler_config(
        kvp=draw(st.integers(1, 4)),
        num_blocks=1,
        max_model_len=64,
        block_tokens=block_tokens,
        chunk_tokens=draw(st.sampled_from([1, 7, 16, WHOLE])),
        max_running=draw(st.integers(1, 5)),
        placement=draw(st.sampled_from((*PLACEMENTS, "auto"))),
        growth_limit_tokens=block_tokens * draw(st.integers(1, 3)),
        kvp_threshold_tokens=draw(st.integers(0, 50)),
        batch_invariant=draw(st.booleans()),
    )
    places = [asked_of.place(len(one.prompt_token_ids), one.capacity_tokens, 0) for one in asked]
    longest = max(place.local_length(rank, 64) for place in places for rank in range(asked_of.kvp))
    num_blocks = -(-longest // block_tokens) + draw(st.integers(0, 30))
    events = draw(
        st.dictionaries(
            st.integers(0, 40),
            st.tuples(st.sampled_from(["abort", "keep", "drop"]), st.sampled_from(asked)),
            max_size=5,
        )
    )
    return replace(asked_of, num_blocks=num_blocks), asked, events, draw(st.integers(1, 4)), draw(st.booleans())


@given(workload=workloads(), arrivals=st.lists(st.integers(1, 4), min_size=1, max_size=7))
def test_any_requests_that_begin_alike_get_their_own_output_and_leave_nothing(workload, arrivals):
    asked_of, asked, events, depth, whole = workload
    prefixes = Beginnings(whole)
    engine = engine_with(prefixes, asked_of, depth)
    waiting, count = list(asked), 0
    while waiting or engine.loop.has_work:
        if count % arrivals[count % len(arrivals)] == 0 and waiting:
            engine.add(waiting.pop(0))
        event, one = events.get(count, (None, None))
        if event == "abort":
            engine.abort(one.id)
        if event == "keep" and one.id in engine.scheduler._running and one.id in engine.runner.replicas:
            prefixes.keep(one.id)
        if event == "drop" or not engine.scheduler._running:  # what waits may need the room
            prefixes.drop()
        if engine.loop.has_work:
            engine.step()
        count += 1
    prefixes.drop()
    engine.assert_nothing_is_left()
    for allocator in engine.scheduler.pool.allocators:
        assert not allocator._extra_holders
    for one in asked:
        outcome, expected = engine.outcomes[one.id], expected_output(one)
        ended_early = outcome.finish_reason == "abort"
        assert outcome.token_ids == (expected[: len(outcome.token_ids)] if ended_early else expected)


def test_messages_say_nothing_of_what_a_step_has_not():
    sampling = SamplingParams()
    new = NewSequence(3, sampling, 0, 9, InitialKV((1,), False))
    step = Step(7, changes=SequenceChanges(new=(new,)))
    (changed,) = msgspec.msgpack.decode(msgspec.msgpack.encode(step))[2][0]
    assert changed.keys() == {"id", "sampling", "seed", "capacity_tokens", "kv"}
    assert len(msgspec.msgpack.encode(Step(7))) == 28  # a byte for most fields, and no names


def test_messages_carry_copies_and_what_is_cached():
    source, target = Block(1, 5), Block(0, 2)
    new = NewSequence(3, SamplingParams(), 0, 9, InitialKV((1,), False, 3, (target,)), KnownTokens(b"1234"))
    step = Step(7, changes=SequenceChanges(new=(new,)), transfers=BlockTransfers(copies=((source, target),)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step


def test_sequences_that_share_list_no_more_ids_than_workers_have_room_for():
    """All share the blocks of the first: they take next to nothing of the pool, and ids of their own all the same."""
    settings = config(kvp=1, num_blocks=40, max_running=64)
    long = [index % VOCAB for index in range(100)]
    requests = [request(id, [*long, id], 20) for id in range(12)]
    engine = engine_with(Beginnings(whole=True), settings)
    engine.add(requests[0])
    engine.step()
    for one in requests[1:]:
        engine.add(one)
    arena, extents, most = BlockArena(IDS_PER_BLOCK * settings.num_blocks, torch.device("cpu")), {}, 0
    seen = 0
    while engine.scheduler.has_work:
        for step in engine.runner.steps[seen:]:
            for id in step.changes.ended:
                arena.close(extents.pop(id))
            for new in step.changes.new:
                extents[new.id] = arena.open(new.kv.blocks_per_rank[0])
            most = max(most, len(extents))
        seen = len(engine.runner.steps)
        engine.step()
    assert 1 < most < len(requests)  # the ids are what they wait for: blocks there are for all of them
    assert_outputs(engine, *requests)
