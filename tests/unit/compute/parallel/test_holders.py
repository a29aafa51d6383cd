"""Holders of rows padded to sizes that all ranks know: the same merges as without padding, and messages of one size."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exchange import Wire, random_states, world_ranks

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.exchange import exchange, start_exchange
from longhelix.compute.parallel.holders import Holders, PaddedHolders

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
HEADS = [2, 0, 1, 3]


def random_holding(ranks, rows, seed, idle):
    """Every row has a holder; the ranks of `idle` hold nothing, where another can."""
    chance = np.random.default_rng(seed)
    held_NT = chance.random((ranks, rows)) < 0.4
    held_NT[list(idle)] = False
    busy = [rank for rank in range(ranks) if rank not in idle] or [0]
    held_NT[chance.choice(busy, rows), np.arange(rows)] = True
    return held_NT


@given(
    ranks=st.integers(2, 4),
    rows=st.integers(1, 13),
    more_rows=st.integers(0, 5),
    parts=st.integers(1, 3),
    more_held=st.integers(0, 3),
    idle=st.sets(st.integers(0, 1)),
    seed=st.integers(0, 2**31),
)
def test_padded_exchanges_merge_the_same_bits_in_messages_of_one_size(
    ranks, rows, more_rows, parts, more_held, idle, seed
):
    held_NT = random_holding(ranks, rows, seed, idle)
    states, heads = random_states(ranks, rows, sum(HEADS[:ranks]), 4, torch.float32), HEADS[:ranks]
    size = Holders.of(held_NT, 0, CPU).most_rows(rows + more_rows, parts) + more_held
    wires = Wire(ranks), Wire(ranks)
    groups = [[RankGroup(world_ranks(ranks), rank, wire.handle(i)) for i, rank in enumerate(world_ranks(ranks))]
              for wire in wires]  # fmt: skip

    def run(index):
        holders = Holders.of(held_NT, index, CPU)
        out_TqC, lse_Tq = states[index]
        plain = exchange(out_TqC[holders.rows_t], lse_Tq[holders.rows_t], groups[0][index], heads, holders)
        padded = PaddedHolders.new(ranks, rows + more_rows, parts, size, CPU)
        padded.fill(Holders.of(random_holding(ranks, rows, seed + 1, ()), index, CPU)) if size >= rows else None
        at_t = padded.fill(holders)
        assert torch.equal(padded.rows_t[at_t], holders.rows_t)
        out_tqC = torch.full((parts * size, *out_TqC.shape[1:]), torch.nan)  # what padding attended to is anything
        lse_tq = torch.zeros(parts * size, out_TqC.shape[1])
        out_tqC[at_t], lse_tq[at_t] = out_TqC[holders.rows_t], lse_Tq[holders.rows_t]
        pieces = [
            start_exchange(out_tqC[own], lse_tq[own], groups[1][index], heads, piece)()
            for own, piece in padded.cut(parts)
        ]
        return plain, torch.cat(pieces)

    with ThreadPoolExecutor(ranks) as threads:
        for index, (plain, padded) in enumerate(threads.map(run, range(ranks))):
            assert plain.shape == (rows, heads[index], 4)
            assert torch.equal(padded[:rows], plain)
            assert torch.equal(padded[rows:], torch.zeros(more_rows, heads[index], 4))
    row_bytes = 4 * 4 + 4
    for index in range(ranks):
        others = sum(heads) - heads[index]
        assert wires[0].bytes_to_others[index] == held_NT[index].sum() * others * row_bytes
        assert wires[1].bytes_to_others[index] == parts * size * others * row_bytes
        assert groups[1][index].exchanged_bytes == wires[1].bytes_to_others[index]


def test_parts_hold_what_lies_in_their_ranges():
    held_NT = np.array([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 0, 1, 1, 0]], dtype=bool)
    holders = Holders.of(held_NT, 1, CPU)
    assert (holders.counts, holders.rows_t.tolist()) == ((4, 4), [1, 2, 4, 5])
    assert holders.places_NT.tolist() == [[0, -1, 1, 2, -1, -1, 3], [-1, 0, 1, -1, 2, 3, -1]]
    pieces = holders.cut(2)  # rows 0 to 3, and 4 to 6
    assert [rows for rows, _ in pieces] == [slice(0, 2), slice(2, 4)]
    assert [piece.counts for _, piece in pieces] == [(3, 2), (1, 2)]
    assert holders.most_rows(7, 2) == 3
    assert holders.most_rows(12, 2) == 4  # rows 0 to 5, and 6 with padding
    padded = PaddedHolders.new(2, 12, 2, 5, CPU)
    assert padded.fill(holders).tolist() == [0, 1, 2, 3]
    assert padded.rows_t.tolist() == [1, 2, 4, 5, 0, 0, 0, 0, 0, 0]
    assert padded.places_NT.tolist() == [
        [0, -1, 1, 2, -1, -1, 0, -1, -1, -1, -1, -1],
        [-1, 0, 1, -1, 2, 3, -1, -1, -1, -1, -1, -1],
    ]
    assert [(rows, piece.counts) for rows, piece in padded.cut(2)] == [
        (slice(0, 5), (5, 5)),
        (slice(5, 10), (5, 5)),
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_an_exchange_among_holders_waits_for_nothing(padded, monkeypatch):
    launches = pytest.importorskip("launches", reason="Triton is not installed, whose launches are counted")
    monkeypatch.setattr("longhelix.compute.kernels.native.module", None)
    held_NT = random_holding(2, 9, 3, ())
    holders = Holders.of(held_NT, 0, CPU)
    if padded:
        own = PaddedHolders.new(2, 12, 1, 9, CPU)
        own.fill(holders)
        holders = own
    rows, heads = holders.counts[0], [2, 1]
    received = torch.randn(sum(holders.counts) * heads[0] * (4 + 1)).view(torch.uint8)

    class Group:
        size, index = 2, 0

        def start_all_to_all(self, send, send_sizes, receive_sizes):
            assert sum(receive_sizes) == len(received)
            return lambda: received

    out_tqC, lse_tq = torch.randn(rows, 3, 4), torch.randn(rows, 3)
    with monkeypatch.context() as patch, launches.Launches(patch) as counted:
        start_exchange(out_tqC, lse_tq, Group(), heads, holders)()
    assert not counted.waits
    assert sum(counted.operators.values()) > 5
