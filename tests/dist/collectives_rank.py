"""One rank of test_collectives: runs the named case over one backend; a failed assert ends it with its traceback."""

import os
import random
import resource
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from longhelix.compute.models import token_shards
from longhelix.compute.models.token_shards import TokenShards
from longhelix.compute.parallel.collectives import is_lost_peer
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.rank import meet
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.errors import PeerLostError
from longhelix.spans import Spans
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout

COUNTS = (1, 7, 576, 8193, 300_001)
HOSTS = {}  # ranks of each host by the size of the world; empty if all are on one host
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def values_of(rank, count, dtype, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randn(count, generator=generator, dtype=torch.float64) * 100
    return values.to(dtype)


def sum_in_rank_order(size, count, dtype, salt=0):
    """With several hosts: the sum of each host's ranks in their order, then of the hosts in their order."""
    hosts = HOSTS.get(size, [range(size)])
    return added([added([values_of(rank, count, dtype, salt) for rank in host]) for host in hosts])


def added(parts):
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = torch.zeros_like(parts[0], dtype=wide)
    for part in parts:
        total += part.to(wide)
    return total.to(parts[0].dtype)


def same(found, expected, backend):
    # Summing in rank order, rounded once, is what the shm backend promises; gloo adds in an order of its own.
    if backend in ("shm", "hosts") or not expected.is_floating_point():
        return torch.equal(found, expected)
    coarse = expected.dtype in (torch.bfloat16, torch.float16)
    return torch.allclose(found, expected, rtol=0.05 if coarse else 1e-4, atol=2.0 if coarse else 1e-3)


def sums(group, backend):
    for dtype in DTYPES:
        for count in COUNTS:
            values = values_of(group.index, count, dtype)
            found = group.all_reduce(values)
            assert found is values
            assert same(values, sum_in_rank_order(group.size, count, dtype), backend), (dtype, count)
    apart = values_of(group.index, 64, torch.float32).view(8, 8).t()
    group.all_reduce(apart)
    assert same(apart.t().reshape(-1), sum_in_rank_order(group.size, 64, torch.float32), backend)


def pieces(group, backend):
    """All-to-all with pieces of every length, none included; and whatever the size, each rank gets its own."""
    for salt, largest in enumerate((3, 50, 3_000, 400_000)):
        lengths = [
            [random.Random(f"{salt} {s} {r}").randrange(largest) for r in range(group.size)] for s in range(group.size)
        ]
        lengths[0][-1] = 0
        sent = [values_of(source, sum(lengths[source]), torch.float32, salt) for source in range(group.size)]
        sizes = [lengths[source][group.index] for source in range(group.size)]
        before = group.exchanged_bytes
        found = group.all_to_all(sent[group.index], lengths[group.index], sizes)
        expected = [sent[source].split(lengths[source])[group.index] for source in range(group.size)]
        assert torch.equal(found, torch.cat(expected)), largest
        own = lengths[group.index][group.index]
        assert group.exchanged_bytes - before == 4 * (sum(lengths[group.index]) - own)


def gathers(group, backend):
    for count in COUNTS:
        found = group.gather(values_of(group.index, count, torch.float32))
        everyone = [values_of(rank, count, torch.float32) for rank in range(group.size)]
        assert len(found) == (group.size if group.index == 0 else 0)
        assert all(torch.equal(part, expected) for part, expected in zip(found, everyone, strict=False))
        copied = group.broadcast(values_of(group.index, count, torch.float32))
        assert torch.equal(copied, everyone[0])


def shards(group, backend):
    """Rows of all ranks, and each rank's rows of their sum, in one piece and in several of unlike sizes. Summed in rank
    order on every backend; counted once however many pieces there are."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for rows, columns in ((1, 1), (1, 300_001), (7, 40_000), (5_000, 77)):
            count = rows * columns
            before = group.traffic.collectives
            whole = group.all_gather(values_of(group.index, count, dtype).view(rows, columns))
            everyone = torch.cat([values_of(rank, count, dtype) for rank in range(group.size)])
            assert torch.equal(whole, everyone.view(-1, columns)), (dtype, rows, columns)
            assert group.traffic.collectives == before + 1
            if dtype is torch.int8:
                continue
            own = group.reduce_scatter(values_of(group.index, group.size * count, dtype).view(-1, columns))
            total = sum_in_rank_order(group.size, group.size * count, dtype).view(-1, columns)
            assert torch.equal(own, total.chunk(group.size)[group.index]), (dtype, rows, columns)
            assert group.traffic.collectives == before + 2


def products(group, backend):
    """Products of gathered rows and sums of products, in pieces and in one; some ranks own no row. Small integers,
    of which all sums are exact."""
    multiplied = []
    weight = whole_numbers(0, 48, 64)

    def multiply(x, *scales):
        multiplied.append(len(x))
        return x @ weight.T if not scales else x @ weight.T * scales[0]

    for tokens in (1, group.size - 1, group.size + 1, 37, 301):
        shards = TokenShards(group, torch.zeros(tokens))
        rows, scales = whole_numbers(0, tokens, 64), whole_numbers(1, tokens, 1)
        total = sum(whole_numbers(rank, tokens, 64) @ weight.T for rank in range(group.size))
        for piece_bytes in (1, 64 * 4 * 13, 2**30):
            token_shards._PIECE_BYTES = piece_bytes
            multiplied.clear()
            found = shards.gathered_product((shards.local_rows(rows), shards.local_rows(scales)), multiply)
            assert torch.equal(found, rows @ weight.T * scales), (tokens, piece_bytes)
            if piece_bytes != 64 * 4 * 13:
                assert len(multiplied) == (min(4, shards.rows) if backend == "gloo" and piece_bytes == 1 else 1)
            found = shards.summed_product(whole_numbers(group.index, tokens, 64), multiply, row_bytes=48 * 4)
            assert torch.equal(found, shards.local_rows(total)), (tokens, piece_bytes)


def whole_numbers(seed, *sizes):
    return torch.randint(-8, 8, sizes, generator=torch.Generator().manual_seed(seed)).float()


class StartedSequence(Spans):
    """Keeps the name and kind of what has begun."""

    def __init__(self):
        self.names = []

    def begin(self, name, kind="compute", part=None):
        self.names.append((name, kind))


def scattered_sums(group, backend):
    """Each rank has its rows, in rank order's bits, and all of it is one reduce-scatter and no exchange."""
    group._spans = begun = StartedSequence()
    for rows in (0, 1, 5):
        shape = group.size * rows, 3, 7
        for dtype in (torch.float32, torch.bfloat16):
            values = values_of(group.index, group.size * rows * 21, dtype).view(shape)
            before = group.traffic
            found = group.reduce_scatter(values if rows % 2 else values.transpose(1, 2).contiguous().transpose(1, 2))
            whole = sum_in_rank_order(group.size, group.size * rows * 21, dtype).view(shape)
            assert torch.equal(found, whole[group.index * rows :][:rows])
            since = group.traffic.since(before)
            assert (since.collectives, since.exchanged_bytes) == (1, 0)
            assert begun.names.pop() == ("reduce-scatter", "collective")
            assert not begun.names


def functional_forms(group, backend):
    """What torch.compile sees: functional collectives, eager and traced into a graph."""
    handle, size = group._handle, group.size

    def collectives(values):
        reduced = functional.all_reduce(values, "sum", handle)
        part = functional.reduce_scatter_tensor(values, "sum", 0, handle)
        whole = functional.all_gather_tensor(part * 1, 0, handle)
        moved = functional.all_to_all_single(values, None, None, handle)
        return reduced * 1, whole * 1, moved * 1

    values = values_of(group.index, 24 * size, torch.float32)
    expected = sum_in_rank_order(size, 24 * size, torch.float32)
    moved = torch.cat([values_of(rank, 24 * size, torch.float32).chunk(size)[group.index] for rank in range(size)])
    for form in (collectives, torch.compile(collectives, backend="aot_eager", fullgraph=True)):
        found = form(values)
        assert same(found[0], expected, backend)
        assert same(found[1], expected, backend)
        assert torch.equal(found[2], moved)


def links(group, backend):
    """The bytes that cross links between hosts are those of the formula, by collective."""
    parts, row_bytes = HOSTS[group.size], 4 * 500
    own = next(part for part in parts if group.index in part)
    others, leads = len(parts) - 1, group.index == own[0]
    values = torch.ones(500)
    by_place = [500 * (place + 1) for place in range(group.size)]
    for call, expected in (
        (lambda: group.all_reduce(values.clone()), leads * others * row_bytes),
        (lambda: group.all_gather(values.view(1, -1)), leads * others * max(map(len, parts)) * row_bytes),
        (lambda: group.reduce_scatter(torch.ones(group.size, 500)), leads * (group.size - len(own)) * row_bytes),
        (lambda: group.broadcast(values.clone()), (group.index == 0) * others * row_bytes),
        (
            lambda: group.all_to_all(torch.ones(sum(by_place)), by_place, [by_place[group.index]] * group.size),
            4 * sum(size for place, size in enumerate(by_place) if place not in own),
        ),
    ):
        before = group.network_bytes
        call()
        assert group.network_bytes - before == expected, (expected, group.network_bytes - before)


def mixture(group, backend):
    """Thousands of calls of random kinds and sizes, with ranks that come late: no slot is reused too early."""
    shared, own = random.Random(7), random.Random(group.index)
    for call in range(1500):
        kind, count = shared.randrange(4), shared.choice((1, 50, 3_000, 90_000 if call % 50 == 0 else 700))
        values = values_of(group.index, count, torch.float32, call)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.002)
        if kind == 0:
            assert same(group.all_reduce(values), sum_in_rank_order(group.size, count, torch.float32, call), backend)
        elif kind == 1:
            assert torch.equal(group.broadcast(values), values_of(0, count, torch.float32, call))
        elif kind == 2:
            found = group.gather(values)
            assert all(torch.equal(p, values_of(r, count, torch.float32, call)) for r, p in enumerate(found))
        else:
            found = group.all_to_all(values.repeat(group.size), [count] * group.size, [count] * group.size)
            assert torch.equal(found, torch.cat([values_of(r, count, torch.float32, call) for r in range(group.size)]))


def death(group, backend):
    """The last rank dies in the middle; the others learn of it within seconds, by an error that names it."""
    group.all_reduce(torch.ones(4))
    if group.index == group.size - 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=f"rank {group.size - 1}" if backend == "shm" else None):
        [group.all_reduce(torch.ones(4)) for _ in range(3)]
    assert time.monotonic() - start < 30
    os._exit(0)  # a group that lost a peer cannot be taken down in order


def death_in_a_graph(group, backend):
    """As above, for a graph of the compiler, whose collectives no RankGroup sees: it can be told from other errors."""
    graph = torch.compile(lambda values: group.all_reduce(values) * 1, backend="aot_eager", fullgraph=True)
    graph(torch.ones(4))
    if group.index == group.size - 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as raised:
        [graph(torch.ones(4)) for _ in range(3)]
    assert isinstance(raised.value, PeerLostError) or is_lost_peer(raised.value)
    os._exit(0)


def idle(group, backend):
    """Who waits for a late peer does not burn a core."""
    group.all_reduce(torch.ones(4))
    if group.index == group.size - 1:
        time.sleep(2)
        group.all_reduce(torch.ones(4))
        return
    before = resource.getrusage(resource.RUSAGE_SELF)
    group.all_reduce(torch.ones(4))
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < 0.3, used_s


def refusals(group, backend):
    """What the backend does not do is said in words."""
    for call in (
        lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX, group=group._handle),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.uint8), group=group._handle),
    ):
        with pytest.raises(ValueError, match="the shm backend"):
            call()


def main():
    started = StartedRank.from_command_line()
    rank, (size, case, backend) = started.rank, started.arguments
    size = int(size)
    torch.set_num_threads(1)
    meet(size, rank, started.directory)
    if backend == "hosts":
        HOSTS.update({2: [(0,), (1,)], 3: [(0, 2), (1,)], 4: [(0, 1, 2), (3,)], 5: [(0, 3), (1, 2), (4,)]})
    hosts = Hosts(tuple(HOSTS[size])) if backend == "hosts" else None
    mesh = Mesh.build(Layout(kvp=size, tpa=1), rank, backend if backend in ("gloo", "shm") else None, hosts=hosts)
    assert dist.get_backend(mesh.kvp._handle) == ("shm" if backend == "auto" else backend)
    for name in case.split(","):
        globals()[name](mesh.kvp, dist.get_backend(mesh.kvp._handle))
    dist.destroy_process_group()
    return 0
