"""KV groups with a limit: a request has blocks for what its next rows see, and the others are free or cached."""

import random
from array import array
from dataclasses import replace

import pytest
from test_pressure import LONG, ByWork, Pressed, check_blocks, config, request
from test_scheduler import VOCAB, expected_output

from longhelix.errors import UserError
from longhelix.scheduler.config import CacheConfig, PlacementConfig
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.kv.windows import EXPIRED_ID, KVWindow, WindowGroup, span_blocks
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, StepResult
from longhelix.spec.attention import Visibility
from scheduler_settings import scheduler_config
from tiers import few

pytestmark = pytest.mark.unit

WINDOW, CHUNK = Visibility(window_tokens=6), Visibility(chunk_tokens=8)


def windowed(visibility=WINDOW, blocks=30, **more):
    return config(**{"num_blocks": 40, "windows": (KVWindow(visibility, blocks),)} | more)


def held_in(engine, at=0):
    return [seq.kv.windows[at] for seq in engine.scheduler._running.values()]


@pytest.mark.parametrize("visibility", [WINDOW, CHUNK, Visibility(window_tokens=1), Visibility(window_tokens=4)])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_behind_a_window_is_given_back(visibility, placement, depth):
    """After each step a request has the blocks that its next row sees, one more, and one to write to."""
    engine = Pressed(windowed(visibility, placement=placement, chunk_tokens=4, growth_limit_tokens=12), depth)
    asked = request(0, LONG[:50], 30)
    engine.add(asked)
    most = 0
    while engine.loop.has_work:
        engine.step()
        check_blocks(engine.scheduler)
        for held in held_in(engine):
            most = max(most, len(held.blocks))
    assert engine.outcomes[0].token_ids == expected_output(asked)
    assert 0 < most <= span_blocks(visibility, 4)


@pytest.mark.parametrize("seed", few(range(24), 8))
def test_any_schedule_gives_each_request_its_own_tokens(seed):
    """Requests that share prefixes come and end early, in pools that are short. The ranks of the test check that all
    that a row sees is where it was written."""
    draw = random.Random(seed)
    block_tokens, kvp = draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    visibilities = draw.sample([WINDOW, CHUNK, Visibility(window_tokens=1), Visibility(window_tokens=17)], 2)
    num_blocks = 64 // block_tokens + draw.randrange(12)
    made = scheduler_config(
        kvp=kvp,
        num_blocks=num_blocks,
        max_model_len=64,
        block_tokens=block_tokens,
        chunk_tokens=draw.choice([3, 16, 1000]),
        max_running=draw.choice([2, 5]),
        placement=draw.choice([*PLACEMENTS, "auto"]),
        growth_limit_tokens=4 * block_tokens,
        kvp_threshold_tokens=24,
        policy=draw.choice(POLICIES),
        prefix_cache=draw.random() < 0.8,
        pp=draw.choice([1, 1, 2]),
        windows=tuple(
            KVWindow(each, min(span_blocks(each, block_tokens) + draw.randrange(16), num_blocks))
            for each in visibilities
        ),
    )
    engine, asked = Pressed(made, depth=draw.choice([1, 2, 3])), []
    for id in range(30):
        start = draw.choice([0, 0, 30])
        prompt = LONG[start : start + draw.randrange(1, 40)] + [draw.randrange(3)] * draw.randrange(3)
        stop = {draw.randrange(VOCAB)} if draw.random() < 0.3 else ()
        asked.append(request(id, prompt, draw.randrange(1, 64 - len(prompt)), stop, engine.now_s))
        engine.add(asked[-1])
        for _ in range(draw.randrange(12)):
            engine.step()
            check_blocks(engine.scheduler)
        if draw.random() < 0.1:
            engine.abort(draw.randrange(len(asked)))
    outcomes = engine.drain()
    for one in asked:
        outcome, expected = outcomes[one.id], expected_output(one)
        ended_early = outcome.finish_reason == "abort"
        assert outcome.token_ids == (expected[: len(outcome.token_ids)] if ended_early else expected)


def test_a_million_tokens_take_the_blocks_of_a_window():
    """The rank with most of them never has more than its share of a window and of the tokens of a step."""
    made = scheduler_config(
        kvp=4,
        num_blocks=16_000,
        max_model_len=1_000_100,
        block_tokens=16,
        chunk_tokens=8192,
        windows=(KVWindow(Visibility(window_tokens=128), 140),),
    )
    scheduler = Scheduler(made, ByWork())
    scheduler.add(request(0, array("i", range(1_000_000)), 40))
    most, ended = 0, False
    while not ended:
        step = scheduler.schedule(0.0)
        most = max(most, *(allocator.num_held for allocator in scheduler.pool.windows[0].allocators))
        done = any(chunk.sample for chunk in step.chunks) or not step.chunks
        events = scheduler.complete(StepResult(step.id, (SampledToken(0, 1),) if done else (), 1))
        ended = any(event.finish_reason for event in events)
    assert 8192 / 16 / 4 < most <= 8192 / 16 / 4 + span_blocks(Visibility(window_tokens=128), 16) / 4 + 1


def test_a_chunk_is_cut_to_the_blocks_that_are_free():
    """The pool of the window holds 10 blocks of 4 tokens; of these two chunks of 1,000 tokens get what there is."""
    engine = Pressed(windowed(blocks=10, kvp=1, num_blocks=100, chunk_tokens=1000))
    asked = [request(id, LONG[id : id + 60], 3) for id in range(2)]
    engine.add(*asked)
    outcomes = engine.drain()
    assert [outcomes[one.id].token_ids for one in asked] == list(map(expected_output, asked))
    assert max(chunk.num_tokens for step in engine.runner.steps for chunk in step.chunks) <= 40


def test_a_hit_is_what_all_groups_have():
    """The window's blocks of the end are there, with one before it; those in the middle are not once others needed
    room, and then a prompt that leaves the cached one there has nothing of it."""
    engine = Pressed(windowed(kvp=1, blocks=8, chunk_tokens=8))
    engine.add(request(0, LONG[:40], 1))
    engine.drain()
    same, longer, leaves = LONG[:40], LONG[:44], [*LONG[:12], 1, 1]
    for id, prompt in enumerate([same, longer, leaves], start=1):
        engine.add(request(id, prompt, 1))
        engine.step()
        check_blocks(engine.scheduler)
        engine.drain()
    cached = [engine.runner.new[id].kv.cached_tokens for id in (1, 2, 3)]
    assert cached == [39, 40, 0]
    blocks = engine.runner.new[2].kv.cached_blocks[1::2]
    passed = [block.id == EXPIRED_ID for block in blocks]
    assert passed == [True] * 8 + [False] * 2, "rows behind token 40 see tokens from 35 on"


def test_a_prompt_goes_on_where_its_window_is_still_there():
    """With more room, the blocks in the middle stay cached until others need theirs."""
    engine = Pressed(windowed(kvp=1, blocks=40, chunk_tokens=8))
    engine.add(request(0, LONG[:40], 1))
    engine.drain()
    engine.add(request(1, [*LONG[:20], 1, 1], 1))
    engine.drain()
    assert engine.runner.new[1].kv.cached_tokens == 20


def test_a_request_whose_window_has_no_room_is_refused():
    engine = Pressed(windowed(kvp=1, blocks=3))
    engine.add(request(0, LONG[:8], 1))
    with pytest.raises(UserError, match="needs 5 KV blocks of a window on one rank, but a rank has 3"):
        engine.add(request(1, LONG[:30], 1))


@pytest.mark.parametrize("visibility", [WINDOW, CHUNK])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_slots", [0, 20])
def test_what_a_row_sees_comes_back_after_others_have_had_its_room(visibility, placement, num_slots):
    """Both groups swap. Without slots for the window, not all rows of the document can be left out."""
    windows = (KVWindow(visibility, 8, num_slots),)
    engine = Pressed(config(num_blocks=16, swap_blocks=80, windows=windows, placement=placement))
    document = [*LONG[:45], 1, 2]
    engine.add(request(0, document, 1))
    engine.drain()
    for id in range(1, 5):
        engine.add(request(id, LONG[::-1][id * 10 : id * 10 + 50], 14))
        engine.drain()
    engine.add(request(9, [*document, 3, 4], 5))
    engine.drain()
    assert (engine.usages[9].cached_tokens == 44) == (num_slots > 0)
    assert (engine.runner.num_swapped[1] > 0) == (num_slots > 0)
    assert engine.outcomes[9].token_ids == expected_output(request(9, [*document, 3, 4], 5))


def test_blocks_behind_a_window_are_not_swapped():
    """A long prompt passes many. Only those that its last row sees are worth a slot."""
    engine = Pressed(config(kvp=1, num_blocks=40, swap_blocks=40, windows=(KVWindow(WINDOW, 8, 20),)))
    for id in range(4):
        engine.add(request(id, [id, *LONG[:60]], 1))
        engine.drain()
    swapped = [swap for step in engine.runner.steps for swap in step.transfers.swapped_out if swap.group]
    assert 0 < len(swapped) <= 3 * 3


def test_groups_are_sized_for_all_that_run():
    """Of the shape of gpt-oss-20b: 256 requests, windows of 128 tokens over 4 ranks. Each request needs 11 blocks, 3 of
    a rank; with as many cached ends again and the chunks of a step."""
    made = scheduler_config(kvp=4, num_blocks=10**6, max_model_len=131_072, chunk_tokens=2048, max_running=256)
    (window,) = made.windows_of([Visibility(window_tokens=128)], 10**6)
    assert window.num_blocks == 256 * 3 + 2048 // 16 // 4
    cached = replace(made, cache=CacheConfig(prefix_cache=True))
    assert cached.windows_of([Visibility(window_tokens=128)], 10**6)[0].num_blocks == 2 * 256 * 3 + 32
    local = replace(made, placement=PlacementConfig("local"))
    assert local.windows_of([Visibility(window_tokens=128)], 10**6)[0].num_blocks == 256 * 11 + 128
    assert made.windows_of([Visibility(window_tokens=128)], 50)[0].num_blocks == 50, "never more than other layers have"


def test_a_prompt_keeps_no_more_room_than_its_window_once_its_chunk_is_behind():
    """Many long prompts end after as many steps as without windows: none holds the blocks of its last chunk."""

    def steps_of(windows):
        made = scheduler_config(
            kvp=4, num_blocks=8000, max_model_len=2048, chunk_tokens=512, max_running=32, windows=windows
        )
        scheduler = Scheduler(made, ByWork())
        for id in range(32):
            scheduler.add(request(id, array("i", [id] * 1500), 2))
        count = 0
        while (step := scheduler.schedule(0.0)) is not None:
            count += 1
            sampled = [chunk.id for chunk in step.chunks if chunk.sample] + [
                seq.id for seq in scheduler.running if seq in scheduler._turns and seq.id not in step.changes.joining
            ]
            scheduler.complete(StepResult(step.id, tuple(SampledToken(id, 1) for id in dict.fromkeys(sampled)), 1))
        return count

    visibility = Visibility(window_tokens=128)
    sized = scheduler_config(kvp=4, num_blocks=1, max_model_len=2048, chunk_tokens=512, max_running=32)
    assert steps_of(sized.windows_of([visibility], 8000)) == steps_of(())


def test_a_long_prompt_leaves_the_ends_of_others_cached():
    """What it has passed is written over first."""
    engine = Pressed(windowed(kvp=1, blocks=30, num_blocks=80, max_model_len=300, chunk_tokens=8))
    chats = [request(id, LONG[id * 9 : id * 9 + 20], 1) for id in range(3)]
    long = request(3, [VOCAB - 1 - token for token in LONG] * 2, 1)
    for one in [*chats, long]:
        engine.add(one)
        engine.drain()
    for id, one in enumerate(chats, start=10):
        engine.add(request(id, [*one.prompt_token_ids, 1, 2], 1))
        engine.drain()
    assert [engine.runner.new[id].kv.cached_tokens for id in (10, 11, 12)] == [20, 20, 20]


def test_a_prefix_is_looked_through_once(monkeypatch):
    """Where the window's blocks of the middle are gone, and only the first ones of the prompt are left."""
    engine = Pressed(windowed(kvp=1, blocks=10, num_blocks=200, max_model_len=700, chunk_tokens=8))
    engine.add(request(0, LONG * 6, 1))
    engine.drain()
    looked, missing = 0, WindowGroup.last_missing

    def counted(window, first, stop, *others):
        nonlocal looked
        found = missing(window, first, stop, *others)
        looked += max(stop - (first if found is None else found), 0)
        return found

    monkeypatch.setattr(WindowGroup, "last_missing", counted)
    engine.add(request(1, [*(LONG * 6)[:500], 1], 1))
    engine.drain()
    assert engine.runner.new[1].kv.cached_tokens == 0
    assert looked <= 500 / 4 + 1


def test_a_prefix_waits_for_room_in_the_window_beside_others():
    """It is not computed again: only a request that is alone begins without what it could have."""
    engine = Pressed(windowed(kvp=1, blocks=18, num_blocks=100, max_model_len=200, chunk_tokens=100, max_running=4))
    engine.add(request(0, LONG[:60], 1))
    engine.drain()
    others = [request(id, LONG[80:88], 90) for id in (1, 2)]
    engine.add(*others)
    for _ in range(30):
        engine.step()
    engine.add(request(3, [*LONG[:60], 1], 1))
    engine.drain()
    assert engine.runner.new[3].kv.cached_tokens == 60


def test_a_request_that_waits_for_something_else_begins_once_that_is_there():
    """The pool of the other layers is full, and then has room while requests that run take more of the window."""
    engine = Pressed(windowed(kvp=1, blocks=60, num_blocks=60, max_model_len=240, chunk_tokens=1000, max_running=8))
    engine.add(request(0, LONG[:100], 60), *(request(id, [id] * 8, 40) for id in range(1, 5)))
    engine.step()
    waits = request(9, [*LONG[:40], 1, 2] * 2, 4)
    engine.add(waits)
    while 0 in {seq.id for seq in engine.scheduler.running}:
        engine.step()
        check_blocks(engine.scheduler)
    engine.step()
    engine.step()
    assert 9 in engine.runner.new
    engine.drain()


def test_a_prompt_that_ends_before_anybody_heard_of_it_gives_back_what_it_was_to_copy():
    engine = Pressed(windowed(kvp=1))
    engine.add(request(0, LONG[:22], 1))
    engine.drain()
    engine.add(request(1, LONG[:20], 1))  # of the last block it copies what is before its last token
    engine.scheduler._admit(0.0)
    assert engine.scheduler.pool._borrowed
    engine.scheduler.end(1)
    assert not engine.scheduler.pool._borrowed
    check_blocks(engine.scheduler)


@pytest.mark.parametrize("blocks", range(6, 13))
def test_swapped_blocks_of_one_rank_have_room_beside_what_others_get(blocks):
    """A local request has placed all blocks of a prefix on one rank. They are swapped, and then a striped one begins
    with them, which needs fewer blocks of each rank at once than come back."""
    windows = (KVWindow(Visibility(window_tokens=24), blocks, 60),)
    placed = {"kvp": 4, "placement": "auto", "kvp_threshold_tokens": 24, "chunk_tokens": 4, "max_model_len": 128}
    engine = Pressed(config(num_blocks=64, swap_blocks=60, windows=windows, **placed))
    first, window = request(0, LONG[:20], 1), engine.scheduler.pool.windows[0]
    engine.add(first)
    engine.drain()
    hashes, id = set(engine.scheduler.hashes(first)), 0
    while not hashes <= {content_hash for swaps in window.swaps for content_hash in swaps.index}:
        id += 1
        engine.add(request(id, [id % VOCAB] * 20, 1))
        engine.drain()
    engine.add(request(50, LONG[30:80], 40))
    for _ in range(12):
        engine.step()
    last = request(51, LONG[:20] + LONG[60:90], 10)
    engine.add(last)
    engine.drain()
    assert engine.outcomes[51].token_ids == expected_output(last)
