"""The runner on one rank over layers that compute nothing: what it keeps of a sequence, and what it makes of a step."""

import sys
import tracemalloc
from array import array
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

import sorted_rows
from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import ROWS, KVFormat
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.parallel.traffic import Traffic
from longhelix.compute.runner import runner as runner_module
from longhelix.compute.runner import sampler
from longhelix.compute.runner.execution import Execution, RankCapabilities
from longhelix.compute.runner.graphed_layers import Bucket
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.warm_up import warm_up_steps
from longhelix.scheduler.kv import splits
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.prefix import NO_PREFIX, Prefix
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import BlockTransfers, SequenceChanges, Step
from longhelix.spec import RopeSpec, VisionSpec
from longhelix.spec.layout import Layout
from longhelix.spec.rope import RopeScaling, Rotation
from longhelix.spec.vocabulary import Vocabulary
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

VOCAB, EOS, CPU = 11, (4,), torch.device("cpu")
CAPABILITIES = RankCapabilities("cpu", native=False, overlaps=False, sums_in_rank_order=True, packed=False)
OP_BY_OP = Execution.resolve(compile=False, replay=False, whole_batches=False, capabilities=CAPABILITIES)
SPEC = SimpleNamespace(
    rotations=(Rotation(RopeSpec(theta=10_000.0), 8),), views=(), vocabulary=Vocabulary(VOCAB, EOS), vision=None
)


class Model:
    """Logits are a row's token and position, turned; `broken` rows have none."""

    layers_begun = 0

    def __init__(self, mesh):
        self.mesh = mesh
        self.fed, self.batches, self.broken = [], [], set()

    def embed(self, token_ids_T):
        self.fed.append(token_ids_T.tolist())
        return token_ids_T.unsqueeze(1).float()

    def run_layers(self, hidden_TH, batch, pool):
        self.batches.append(batch)
        return hidden_TH

    def logits(self, hidden_SH):
        logits_SV = ((hidden_SH.long() * 7 + torch.arange(VOCAB) * 3) % VOCAB).float()
        for row in self.broken:
            logits_SV[row] = torch.nan
        return logits_SV


def make_runner(kvp=1, rank=0, num_blocks=64, spec=SPEC):
    groups = (RankGroup((0,), 0, None),) * 3
    if kvp > 1:  # only their layout is asked for
        alone = {"size": 1, "ranks": (0,), "exchanged_bytes": 0, "network_bytes": 0, "waited_s": 0.0}
        alone |= {"broadcast": lambda tokens_S: tokens_S, "gather": lambda values: [values]}
        group = SimpleNamespace(index=rank, traffic=Traffic(), **alone)
        groups = (group,) * 3
    mesh = Mesh(Layout(kvp=kvp), rank, *groups)
    pool = KVPool([{"kv": KVFormat("float32", 16, 1, 8, 8, ROWS)}], num_blocks, CPU)
    return ModelRunner(spec, mesh, Model(mesh), pool, OP_BY_OP)


def make_request(id, prompt_tokens, new_tokens=8, **sampling):
    prompt = array("i", [(id + index) % VOCAB for index in range(prompt_tokens)])
    return Request(id, prompt, SamplingParams(max_new_tokens=new_tokens, **sampling), frozenset(), 3, 0.0)


def run_all(scheduler, runner, requests):
    """Every request's tokens."""
    tokens = {request.id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while (step := scheduler.schedule(0.0)) is not None:
        result = runner.execute(step)
        for sampled in result.sampled:
            tokens[sampled.sequence_id].append(sampled.token_id)
        scheduler.complete(result)
    return tokens


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_rows_are_the_tokens_of_prompts_and_answers_and_the_penalty_sees_all(penalty):
    runner = make_runner()
    scheduler = Scheduler(scheduler_config(kvp=1, num_blocks=64, max_model_len=512, chunk_tokens=7))
    requests = [make_request(0, 20, repetition_penalty=penalty), make_request(1, 3, temperature=0.9, top_p=0.8)]
    found = run_all(scheduler, runner, requests)
    for request in requests:
        token_ids = list(request.prompt_token_ids)
        for token in found[request.id]:
            logits_V = runner.model.logits(torch.tensor([[float(token_ids[-1])]]))[0]
            seen_V = torch.zeros(VOCAB, dtype=torch.bool)
            seen_V[token_ids] = True
            assert token == sorted_rows.sample(logits_V, request.sampling, 3, len(token_ids), seen_V)
            token_ids.append(token)
    fed = sorted(token for rows in runner.model.fed for token in rows)
    assert fed == sorted(t for r in requests for t in [*r.prompt_token_ids, *found[r.id][:-1]])


def test_a_step_and_a_worker_carry_no_more_of_a_long_request():
    messages, kept = [], []
    for prompt_tokens in (10_000, 1_000_000):
        num_blocks = prompt_tokens // 16 + 8
        runner = make_runner(num_blocks=num_blocks)
        scheduler = Scheduler(scheduler_config(1, num_blocks, prompt_tokens + 8, chunk_tokens=512))
        scheduler.add(make_request(0, prompt_tokens))
        steps = [scheduler.schedule(0.0) for _ in range(8)]
        tracemalloc.start()
        for step in steps:
            runner.execute(step)
        runner.model.fed.clear()
        runner.model.batches.clear()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        messages.append([len(msgspec.msgpack.encode(step)) for step in steps])
    assert max(messages[1]) <= max(messages[0]) + 16
    assert max(messages[1]) < 512 * 4 + 32 * 30 + 400
    assert kept[1] <= kept[0] + 4096


def test_what_goes_wrong_with_one_row_is_that_rows_alone(monkeypatch):
    runner = make_runner()
    scheduler = Scheduler(scheduler_config(1, 64, 64))
    for id in range(3):
        scheduler.add(make_request(id, 5, 4, logprobs=2))
    runner.model.broken = {1}
    broadcasts = []
    broadcast = RankGroup.broadcast

    def counted(group, tokens_S):
        broadcasts.append(tokens_S.tolist())
        return broadcast(group, tokens_S)

    monkeypatch.setattr(RankGroup, "broadcast", counted)
    first, second, third = runner.execute(scheduler.schedule(0.0)).sampled
    assert (second.token_id, second.error) == (
        0,
        "ValueError: no token has a probability, because the largest logit is nan",
    )
    assert (first.error, third.error) == ("", "")
    assert len(first.logprobs) >= 2
    assert [len(tokens) for tokens in broadcasts] == [3, 1]  # all rows, then the one that is looked at whole

    def fail(*arguments):
        raise RuntimeError("no logprobs")

    monkeypatch.setattr(sampler, "logprobs", fail)
    runner.model.broken = set()
    step = Step(2, changes=SequenceChanges(joining=(0, 1, 2)), most_tokens=16)
    assert {s.error for s in runner.execute(step).sampled} == {"RuntimeError: no logprobs"}
    assert len(broadcasts) == 3


def test_only_the_first_rank_returns_tokens_and_all_know_them():
    for rank in range(2):
        runner = make_runner(kvp=2, rank=rank)
        scheduler = Scheduler(scheduler_config(2, 64, 64))
        scheduler.add(make_request(0, 5))
        result = runner.execute(scheduler.schedule(0.0))
        assert len(result.sampled) == (rank == 0)
        assert runner.running.by_id[0].seen is None


def test_what_kernels_take_of_steps_with_chunks_begins_at_multiples_of_16_bytes():
    """Whatever the lengths: Triton compiles a kernel once more for pointers that do not."""
    scheduler, runner = Scheduler(scheduler_config(1, 64, 128, chunk_tokens=9)), make_runner()
    for id, length in enumerate((5, 7, 30, 1)):
        scheduler.add(make_request(id, length))
    mixed = 0
    while (step := scheduler.schedule(0.0)) is not None:
        scheduler.complete(runner.execute(step))
        for batch in (batch for batch in runner.model.batches if not batch.attention.is_reused):
            rows = batch.attention
            (view,) = rows.views
            taken = (batch.token_ids_T, view.slots_t, rows.limits_t, rows.row_starts_b, rows.extents_b2)
            assert not any(tensor.data_ptr() % 16 for tensor in taken)
            mixed += len(batch.token_ids_T) % 2
        runner.model.batches.clear()
    assert mixed > 2


@pytest.mark.parametrize("placement", ["striped", "growing", "local"])
def test_all_ranks_come_to_the_same_graphs(placement, monkeypatch):
    """A history of requests of many lengths, whichever ranks have their rows."""
    monkeypatch.setattr(splits, "SPLIT_TOKENS", 16)
    chance = np.random.default_rng(5)
    config = scheduler_config(3, 400, 2000, chunk_tokens=64, max_running=8, placement=placement, growth_limit_tokens=64)
    scheduler, runners = Scheduler(config), [make_runner(kvp=3, rank=rank, num_blocks=400) for rank in range(3)]
    for id in range(60):
        scheduler.add(make_request(id, int(chance.integers(1, 700)), int(chance.integers(1, 40))))
    local_differs, uneven, buckets = 0, 0, set()
    while (step := scheduler.schedule(0.0)) is not None:
        results = [runner.execute(step) for runner in runners]
        scheduler.complete(results[0])
        batches = [runner.model.batches.pop() for runner in runners if runner.model.batches]
        if not batches:
            continue
        assert len({Bucket.of(batch) for batch in batches}) == 1
        buckets.add(Bucket.of(batches[0]))
        extents = [batch.attention.extents_b2 for batch in batches]
        most = [int(extents_b2.diff().amax()) * 16 if len(extents_b2) else 0 for extents_b2 in extents]
        assert max(most) == batches[0].shape.most_tokens
        local_differs += len({splits.length_bucket(tokens) for tokens in most}) > 1
        uneven += len({len(batch.attention.limits_t) for batch in batches}) > 1
    assert local_differs > 0
    if placement == "striped":
        assert len({bucket.most_tokens for bucket in buckets}) > 1
        assert not any(bucket.rows_per_part for bucket in buckets)
    else:
        assert sum(bucket.rows_per_part > 0 for bucket in buckets) > 10
        assert uneven > 10


@pytest.mark.parametrize("placement", ["striped", "growing", "local", "auto"])
def test_what_runs_before_the_first_request_captures_decodes_and_chunks_of_evenly_used_ranks(placement):
    config = scheduler_config(3, 40, 600, chunk_tokens=64, max_running=8, placement=placement, kvp_threshold_tokens=200)
    runners = [make_runner(kvp=3, rank=rank, num_blocks=40) for rank in range(3)]
    warm = set()
    for step in warm_up_steps(config, [4096, 16384]):
        for runner in runners:
            runner.execute(step)
        batches = [runner.model.batches.pop() for runner in runners if runner.model.batches]
        if batches:
            (bucket,) = {Bucket.of(batch) for batch in batches}
            warm.add(bucket)
    assert not any(runner.running.by_id for runner in runners)
    lengths = 4096, 16384
    everywhere = {Bucket(rows, rows, 1, most, 1) for rows in (1, 2, 3, 4, 6, 8) for most in lengths}
    everywhere |= {Bucket(64, 2, 64, most, 1) for most in lengths}
    dealt = {
        Bucket(rows, held, 1, most, 1, held) for rows, held in ((1, 1), (3, 1), (6, 2), (8, 3)) for most in lengths
    }
    dealt |= {Bucket(64, 2, 64, most, 1, 64) for most in lengths}  # one prompt, or one on each rank
    dealt |= {Bucket(64, 4, 24, most, 1, 24) for most in lengths}
    assert (everywhere <= warm) == (placement != "local")
    assert (dealt <= warm) == (placement != "striped")


def lines_of(call):
    """How many lines of Python run."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("placement", ["striped", "growing", "local"])
def test_ending_a_long_request_takes_no_more_steps_of_python(placement):
    lines = []
    for prompt_tokens in (1_000, 100_000):
        config = scheduler_config(2, 7000, 100_100, chunk_tokens=200_000, placement=placement, growth_limit_tokens=16)
        scheduler = Scheduler(config)
        scheduler.add(make_request(0, prompt_tokens))
        scheduler.schedule(0.0)
        lines.append(lines_of(lambda scheduler=scheduler: scheduler.end(0)))
        assert [allocator.available for allocator in scheduler.pool.allocators] == [7000, 7000]
    assert lines[1] <= lines[0] + 3  # what was taken of a run is forgotten or not


@pytest.mark.parametrize("idle", [0, 30])
def test_a_step_takes_no_more_python_beside_long_or_idle_requests(idle):
    """A decode step of four short requests: beside them one of 1,000 or 50,000 tokens, and some that do not run."""
    lines = set()
    for tokens in (1_000, 50_005):
        runner = make_runner(num_blocks=4000)
        scheduler = Scheduler(scheduler_config(1, 4000, 60_000, chunk_tokens=60_000))
        for id, prompt_tokens in enumerate([tokens, 5, 5, 5, 5, *[5] * idle]):
            scheduler.add(make_request(id, prompt_tokens))
        runner.execute(scheduler.schedule(0.0))
        runner.running.admit(Step(2, changes=SequenceChanges(joining=(3, 0, 4, 1, 2))))
        step = Step(3, most_tokens=tokens)
        lines.add(lines_of(lambda runner=runner, step=step: runner.batches.of(step)))
    assert len(lines) == 1


def test_a_rank_has_no_rows_of_sequences_that_turn_differently():
    """Two requests on ranks 0 and 1, of lengths between which dynamic RoPE begins to stretch: rank 2 has none of them
    and takes part in every step."""
    rope = RopeSpec(scaling=RopeScaling("dynamic", 2.0, original_max_positions=32))
    spec = SimpleNamespace(**vars(SPEC) | {"rotations": (Rotation(rope, 8),)})
    runners = [make_runner(kvp=3, rank=rank, spec=spec) for rank in range(3)]
    scheduler = Scheduler(scheduler_config(3, 64, 512, placement="local"))
    for id, prompt_tokens in enumerate((5, 60)):
        scheduler.add(make_request(id, prompt_tokens))
    while (step := scheduler.schedule(0.0)) is not None:
        results = [runner.execute(step) for runner in runners]
        scheduler.complete(results[0])
    rotated = [
        [tuple(batch.attention.rotations[0].cos_tR.shape) for batch in runner.model.batches] for runner in runners
    ]
    assert rotated == [[(5, 4), *[(1, 4)] * 7], [(60, 4), *[(1, 4)] * 7], [(0, 4)] * 8]


class Beginning:
    """The first tokens of request 0 for all requests after it."""

    def __init__(self, runner, num_tokens):
        self.runner, self.num_tokens, self.blocks = runner, num_tokens, []

    def find(self, request):
        count = -(-self.num_tokens // 16) if request.id else 0
        return Prefix(self.num_tokens, tuple(self.blocks[:count])) if count else NO_PREFIX


def run_forked(kvp, num_tokens, donor, fork, placement="striped"):
    """The runners of all ranks, in the middle of both requests, and the steps that they ran."""
    runners = [make_runner(kvp=kvp, rank=rank) for rank in range(kvp)]
    beginning = Beginning(runners[0], num_tokens)
    config = scheduler_config(kvp, 64, 512, chunk_tokens=512, placement=placement, growth_limit_tokens=32)
    scheduler, steps = Scheduler(config, prefixes=beginning), []
    for request in (donor, fork):
        scheduler.add(request)
        steps.append(scheduler.schedule(0.0))
        beginning.blocks += (block for chunk in steps[-1].chunks for block in chunk.new_blocks)
        results = [runner.execute(steps[-1]) for runner in runners]
        scheduler.complete(results[0])
    return runners, steps


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 80, 95, 99])
@pytest.mark.parametrize("placement", ["striped", "growing", "local"])
def test_a_sequence_begins_with_the_tokens_that_are_cached(placement, num_tokens):
    """On each rank with those of its own blocks, after which it writes, and all its rows see them."""
    runners, steps = run_forked(3, num_tokens, make_request(0, 100), make_request(1, 130), placement)
    (new,), (chunk,) = steps[1].changes.new, (chunk for chunk in steps[1].chunks if chunk.id == 1)
    assert (new.kv.cached_tokens, chunk.num_tokens) == (num_tokens, 130 - num_tokens)
    blocks = [*new.kv.cached_blocks, *chunk.new_blocks]
    by_position = [blocks[position // 16] for position in range(130)]
    for rank, runner in enumerate(runners):
        seq, mine = runner.running.by_id[1], [block.owner == rank for block in by_position]
        assert (seq.length, seq.local_length) == (130, sum(mine))
        assert runner.running.arena.ids(seq.extent)[0].tolist() == [block.id for block in blocks if block.owner == rank]
        owners = range(3) if new.kv.spread else {block.owner for block in blocks}
        assert seq.holders == set(owners)
        if rank not in owners:
            continue
        attention = runner.model.batches[-1].attention
        rows = slice(-chunk.num_tokens, None)  # the donor's row comes first
        assert attention.limits_t[rows].tolist() == np.cumsum(mine)[num_tokens:].tolist()
        slots = [
            block.id * 16 + position % 16 if block.owner == rank else -1 for position, block in enumerate(by_position)
        ]
        assert attention.views[0].slots_t[rows].tolist() == slots[num_tokens:]


def test_the_penalty_sees_tokens_that_are_cached():
    donor, fork = make_request(0, 40), make_request(1, 41, repetition_penalty=1.7)
    (runner,), _ = run_forked(1, 40, donor, fork)
    assert runner.running.by_id[1].seen.words_W.tolist() == [2**VOCAB - 1, *[0] * 15]


def test_copies_come_before_the_layers_and_are_no_part_of_the_exchange(monkeypatch):
    """What the exchange's counters say is of the exchange; the fingerprint is of all collectives."""
    order = []
    runner = make_runner()
    group, layers = runner.mesh.kvp, runner.layers

    def copy(copies, moved, pool, group):
        assert not moved
        order.append(copies)
        group.count(Traffic(1, 5, 1000))

    monkeypatch.setattr(runner_module, "copy_blocks", copy)
    monkeypatch.setattr(runner, "layers", lambda *inputs: order.append("layers") or layers(*inputs))
    scheduler = Scheduler(scheduler_config(1, 64, 512))
    scheduler.add(make_request(0, 20))
    copies = ((Block(0, 7), Block(0, 9)),)
    result = runner.execute(msgspec.structs.replace(scheduler.schedule(0.0), transfers=BlockTransfers(copies=copies)))
    assert order == [copies, "layers"]
    assert result.measured.exchanged_bytes == 0
    assert result.measured.fingerprint == runner.mesh.fingerprint(since=(Traffic(),) * len(runner.mesh.groups)) != 0
    assert group.exchanged_bytes == 1000
    order.clear()
    scheduler.complete(result)
    runner.execute(scheduler.schedule(0.0))
    assert order == ["layers"]


def test_rows_of_an_image_are_of_all_layers_that_it_is_added_to():
    spec = SimpleNamespace(vision=VisionSpec(1, 2, 3, num_deepstack=1), hidden_size=4)
    model = SimpleNamespace(dtype=torch.float32)
    runner = SimpleNamespace(spec=spec, model=model, device=torch.device("cpu"), _image_rows={})
    states_LXH = torch.arange(24.0).view(2, 3, 4)
    ModelRunner.take_image_rows(runner, 7, 5, states_LXH.numpy().tobytes())
    assert torch.equal(runner._image_rows[7, 5], states_LXH)
    with pytest.raises(RuntimeError):
        ModelRunner.take_image_rows(runner, 7, 5, states_LXH[:, :, 1:].contiguous().numpy().tobytes())
