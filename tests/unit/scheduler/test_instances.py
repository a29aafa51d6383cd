"""KVP instances with clocks of their own: they step by themselves, meet for the requests that they share, and each
request gets its own tokens whatever takes how long."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from msgspec.structs import astuple
from test_pressure import LONG, ByWork, RandomDrafts, check_blocks, config, request
from test_scheduler import expected_output, next_token

from longhelix.errors import UserError
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Draft, NewSequence, SampledToken, StepResult

pytestmark = pytest.mark.unit


@dataclass
class Follower:
    """What one instance knows of a sequence that it takes part in."""

    new: NewSequence
    length: int
    last_token: int | None
    local: list[int]
    last_owner: int
    blocks: list[Block] = field(default_factory=list)  # all, on the instances that have followed it from the first one


class FakeInstances:
    """Instances that execute their steps in order, each when all of its step's instances have come to it. Which steps
    end next, a random generator says."""

    def __init__(self, config, choose):
        self.config, self.choose = config, choose
        self.queues = [deque() for _ in range(config.kvp)]
        self.followers = [{} for _ in range(config.kvp)]
        self.decoding = [{} for _ in range(config.kvp)]
        self.pools = [{} for _ in range(config.kvp)]
        self.slots = [{} for _ in range(config.kvp)]
        self.steps, self.ended = [], []
        self.num_accepted = 0  # draft tokens

    def submit(self, step):
        assert step.turn.instances == tuple(sorted(step.turn.instances))
        self.steps.append(step)
        for one in step.turn.instances:
            self.queues[one].append(step)

    def collect(self, timeout_s):
        heads = {queue[0].id: queue[0] for queue in self.queues if queue}
        ready = [step for step in heads.values() if all(self.queues[one][0] is step for one in step.turn.instances)]
        step = self.choose(ready)
        for one in step.turn.instances:
            self.queues[one].popleft()
        self.ended.append(step.id)
        return self.execute(step)

    def execute(self, step):
        swapped = [swap.block for swap in step.transfers.swapped_out + step.transfers.swapped_in]
        touched = swapped + [block for copy in step.transfers.copies for block in copy]
        assert {block.owner for block in touched} <= set(step.turn.instances)
        parts = {one: step.of_instance(one, self.followers[one]) for one in step.turn.instances}
        for one, part in parts.items():
            self.follow(one, part)
        rows = {}
        for one, part in parts.items():
            for id in self.decoding[one]:
                rows.setdefault(id, []).append(
                    (one, 1, [block for grown, block in part.changes.grown if grown == id], None)
                )
            for span in part.segments:
                rows.setdefault(span.id, []).append((one, span.num_tokens, span.new_blocks, span))
        sampled = [one for id, each in rows.items() for one in self.run(id, each)]
        assert len(rows) <= step.work.rows * len(step.turn.instances)
        return StepResult(step.id, tuple(sampled), 0)

    def follow(self, one, part):
        """An instance's own share of what a step changes."""
        block_tokens, followers = self.config.block_tokens, self.followers[one]
        for id in part.changes.ended:
            del followers[id]
            self.decoding[one].pop(id, None)
        for id in part.changes.leaving:
            del self.decoding[one][id]
        pool, slots = self.pools[one], self.slots[one]
        for block, slot, _ in map(astuple, part.transfers.swapped_out):
            if block.owner == one:
                slots[slot] = [pool.get((block.id, offset)) for offset in range(block_tokens)]
        for block, slot, _ in map(astuple, part.transfers.swapped_in):
            if block.owner == one:
                pool.update({(block.id, offset): entry for offset, entry in enumerate(slots[slot])})
        for source, target in part.transfers.copies:
            if source.owner == one:
                assert target.owner == one
                pool.update({(target.id, at): pool.get((source.id, at)) for at in range(block_tokens)})
        for new in part.changes.new:
            assert one in new.instances
            assert new.id not in followers
            blocks = list(new.kv.cached_blocks)
            last_owner = blocks[-1].owner if blocks else -1
            local = [block.id for block in blocks if block.owner == one]
            followers[new.id] = Follower(new, new.kv.cached_tokens, new.known.last_id, local, last_owner, blocks)
        for joined in part.changes.joined:
            followers[joined.id].new = joined
        for id in part.changes.joining:
            self.decoding[one][id] = None

    def run(self, id, each):
        """The rows of one sequence, on all instances that have them. Each has them, and knows as much."""
        followers = [self.followers[one][id] for one, *_ in each]
        instances = followers[0].new.instances
        assert sorted(instances) == sorted(one for one, *_ in each)
        lead = self.followers[instances[0]][id]
        _, num_tokens, new_blocks, span = each[0]
        if isinstance(span, Draft):
            assert not any(id in decoding for decoding in self.decoding)
            for follower in followers:
                assert span.start <= follower.length
                follower.length = span.start
                del follower.blocks[-(-span.start // self.config.block_tokens) :]
            for one, follower in zip((one for one, *_ in each), followers, strict=True):
                del follower.local[sum(block.owner == one for block in lead.blocks) :]
        tokens = self.tokens_of(id, lead)
        start = lead.length
        assert all(follower.length == start and follower.new.instances == instances for follower in followers)
        assert all((num, blocks) == (num_tokens, list(new_blocks)) for _, num, blocks, _ in map(listed, each))
        if span is None:
            assert len({follower.last_token for follower in followers}) == 1
            tokens = [*tokens, lead.last_token]
        else:
            tokens = [*tokens, *memoryview(span.token_ids).cast("i")]
        for one, follower in zip((one for one, *_ in each), followers, strict=True):
            follower.local += [block.id for block in new_blocks if block.owner == one]
            follower.blocks += new_blocks
            follower.length = start + num_tokens
        assert {block.owner for block in lead.blocks} <= set(instances)
        for one, follower in zip((one for one, *_ in each), followers, strict=True):
            assert follower.local == [block.id for block in lead.blocks if block.owner == one]
        for position in range(start, start + num_tokens):
            block, offset = self.place(lead, position)
            self.pools[block.owner][block.id, offset] = (position, tokens[position])
        assert self.tokens_of(id, lead) == tokens
        if isinstance(span, Draft):
            return self.verify(id, tokens, start)
        if span is not None and not span.sample:
            return []
        token = next_token(tokens)
        for follower in followers:
            follower.last_token = token
        return [SampledToken(id, token)]

    def verify(self, id, tokens, start):
        """A token after each row that is accepted."""
        found = []
        for length in range(start + 1, len(tokens) + 1):
            found.append(next_token(tokens[:length]))
            if length < len(tokens) and found[-1] != tokens[length]:
                break
        self.num_accepted += len(found) - 1
        return [SampledToken(id, token) for token in found]

    def place(self, lead, position):
        return lead.blocks[position // self.config.block_tokens], position % self.config.block_tokens

    def tokens_of(self, id, lead):
        """As the KV of all instances has them."""
        places = [self.place(lead, position) for position in range(lead.length)]
        entries = [self.pools[block.owner][block.id, offset] for block, offset in places]
        assert [position for position, _ in entries] == list(range(lead.length))
        return [token for _, token in entries]


def listed(one):
    return (*one[:2], list(one[2]), one[3])


class Run:
    def __init__(self, config, choose, depth=2, drafter=None):
        self.runner = FakeInstances(config, choose)
        self.scheduler = Scheduler(config, ByWork(), drafter=drafter)
        self.now_s = 0.0
        self.loop = Loop(self.scheduler, self.runner, lambda: self.now_s, depth)
        self.tokens, self.reasons, self.asked, self.usages = {}, {}, {}, {}

    def add(self, *requests):
        for one in requests:
            self.asked[one.id], self.tokens[one.id] = one, []
            self.loop.add(one)

    def step(self):
        self.now_s += 0.01
        stepped = self.loop.step()
        for event in stepped[1] if stepped else ():
            if event.sampled is not None:
                self.tokens[event.request_id].append(event.sampled.token_id)
            if event.finish_reason:
                self.reasons[event.request_id] = event.finish_reason
                self.usages[event.request_id] = event.usage
        return stepped

    def abort(self, id):
        self.loop.abort(id)
        self.reasons[id] = "abort"

    def drain(self):
        for _ in range(10_000):
            if not self.loop.has_work:
                break
            self.step()
            check_blocks_between(self.scheduler)
        assert not self.loop.has_work, "requests wait for each other, or again and again"
        assert not any(self.runner.followers)
        check_blocks(self.scheduler)
        for id, one in self.asked.items():
            expected = expected_output(one)
            assert self.tokens[id] == (expected[: len(self.tokens[id])] if self.reasons[id] == "abort" else expected)


def check_blocks_between(scheduler):
    """On every rank: free, held and cached ones are all there are. Some may be held for a copy that is to come."""
    for rank, allocator in enumerate(scheduler.pool.allocators):
        held = {block for seq in scheduler._running.values() for block in seq.kv.block_ids[rank]}
        borrowed = {block.id for block, *_ in scheduler.pool._borrowed if block.owner == rank}
        assert allocator._num_free + len(held | borrowed) + allocator.num_cached == allocator.num_blocks
        assert allocator.reserved == sum(seq.kv.reserved[rank] for seq in scheduler._running.values())


def own(**more):
    return config(
        **{"own_clocks": True, "placement": "local", "prefix_cache": False, "kvp": 3, "num_blocks": 30} | more
    )


def first(ready):
    return min(ready, key=lambda step: step.id)


def test_instances_take_steps_without_waiting_for_each_other():
    """Instance 0 stands still in its second step. Meanwhile the others go on to their ends."""
    blocked = []

    def choose(ready):
        others = (
            [step for step in ready if not (0 in step.turn.instances and step.id >= blocked[0])] if blocked else ready
        )
        return first(others or ready)

    run = Run(own(), choose)
    run.add(*(request(id, LONG[id : id + 5], 20) for id in range(3)))
    for _ in range(3):
        run.step()
    blocked.append(next(step.id for step in run.runner.steps if step.turn.instances == (0,) and step.id > 3))
    while not {1, 2} <= run.reasons.keys():
        run.step()
    assert len(run.tokens[0]) < 3
    assert {step.turn.instances for step in run.runner.steps} == {(0,), (1,), (2,)}
    run.drain()


def test_those_that_share_a_request_step_together_and_others_do_not():
    """Request 0 has its prompt on instances 0 and 1; request 1 is short, on instance 2."""
    run = Run(own(placement="growing", growth_limit_tokens=8, num_blocks=8), first)
    run.add(request(0, LONG[:13], 8), request(1, LONG[20:24], 4))
    run.drain()
    assert run.usages[0].kv_tokens_per_rank == (8, 8, 4)
    teams = Counter(step.turn.instances for step in run.runner.steps if step.work.rows)
    assert set(teams) == {(0,), (1,), (2,), (0, 1), (0, 1, 2)} - ({(2,)} if (2,) not in teams else set()) - {(1,)}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_that_decodes_takes_instances_one_after_the_other(depth):
    run = Run(own(placement="growing", growth_limit_tokens=4), first, depth)
    run.add(request(0, LONG[:2], 13))
    run.drain()
    with_rows = [step.turn.instances for step in run.runner.steps if step.work.rows]
    # 2 rows of the prompt, then one each: the fifth row and the ninth need other instances' blocks.
    assert with_rows == [(0,)] * 3 + [(0, 1)] * 4 + [(0, 1, 2)] * 6
    joined = [one for step in run.runner.steps for one in step.changes.joined]
    assert [(one.instances, one.kv.cached_tokens) for one in joined] == [((0, 1), 4), ((0, 1, 2), 8)]
    assert [one.known.last_id for one in joined] == [run.tokens[0][2], run.tokens[0][6]]


def test_an_aborted_request_ends_on_all_of_its_instances():
    run = Run(own(placement="striped", num_blocks=20), first)
    run.add(request(0, LONG[:20], 30), request(1, LONG[3:8], 6))
    for _ in range(5):
        run.step()
    run.abort(0)
    run.drain()


@pytest.mark.parametrize("swap_blocks", [0, 6])
@pytest.mark.parametrize("placement", ["local", "growing", "auto", "striped"])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_its_own_tokens(seed, placement, swap_blocks):
    """Random traffic over short pools: prefix hits, preemption, aborts, steps that end in any order, draft tokens."""
    chance = random.Random(f"{seed} {placement} {swap_blocks}")
    more = {"kvp_threshold_tokens": 12} if placement == "auto" else {}
    settings = own(
        kvp=chance.choice([2, 3, 4]),
        placement=placement,
        num_blocks=chance.choice([14, 20]),
        prefix_cache=swap_blocks > 0 or chance.random() < 0.5,
        swap_blocks=swap_blocks,
        growth_limit_tokens=chance.choice([4, 8, 16]),
        chunk_tokens=chance.choice([3, 8, 64]),
        adaptive=chance.random() < 0.3,
        policy=chance.choice(["fcfs", "srpt", "lars"]),
        max_running=chance.choice([3, 8]),
        max_model_len=50,
        **more,
    )
    drafter = RandomDrafts(seed) if seed % 2 else None
    run = Run(settings, chance.choice, chance.choice([1, 2, 3]), drafter)
    running, next_id = [], 0
    for _ in range(150):
        draw = chance.random()
        if draw < 0.2 and next_id < 25:
            start, length = chance.choice([0, 0, 7]), chance.randint(1, 30)
            stop = chance.sample(range(50), 2)
            run.add(request(next_id, LONG[start : start + length], chance.randint(1, 20), stop, run.now_s))
            running.append(next_id)
            next_id += 1
        elif draw < 0.24 and running:
            id = chance.choice(running)
            if id not in run.reasons:
                run.abort(id)
        else:
            run.step()
            check_blocks_between(run.scheduler)
    run.drain()
    assert (run.runner.num_accepted > 0) == (drafter is not None)


@pytest.fixture
def swapping():
    """A request that hits swapped KV of instance 0 has begun, and no step says so yet: that instance is busy."""
    run = Run(own(kvp=2, num_blocks=4, prefix_cache=True, swap_blocks=4), first, depth=1)
    for one in request(0, LONG[:9], 1), request(1, LONG[20:36], 1):
        run.add(one)
        run.drain()
    run.add(request(2, LONG[:9], 1))
    assert run.scheduler.schedule(run.now_s, busy={0}) is None
    assert run.scheduler._running
    return run


def hold(run, request):
    return run.scheduler.pin_prefix(request, run.scheduler.hashes(request))


def test_kv_that_is_yet_to_be_swapped_in_is_not_saved(swapping):
    held = hold(swapping, request(-1, LONG[:8], 1))
    assert held is not None
    assert held.num_cached == 0
    held.release(swapping.scheduler.pool)
    swapping.drain()


def test_what_was_to_be_swapped_in_for_an_aborted_request_does_not_overwrite_what_is_loaded(swapping):
    swapping.abort(2)
    held = hold(swapping, request(-1, LONG[50:66], 1))
    assert {block.owner for block in held.blocks} == {0}
    for position in range(16):
        block = held.blocks[position // 4]
        swapping.runner.pools[0][block.id, position % 4] = (position, LONG[50 + position])
    held.publish(swapping.scheduler.pool)
    held.release(swapping.scheduler.pool)
    swapping.add(request(3, LONG[50:65], 1))
    swapping.drain()
    assert swapping.usages[3].cached_tokens == 12


def test_stages_have_one_clock():
    with pytest.raises(UserError, match="needs a single pipeline stage, but pp is 2: set pp to 1"):
        own(pp=2)
