"""What is kept of layers that ran: as long as it is used."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longhelix.compute.kernels import native, take_rows
from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowSharding, RowView, StepShape
from longhelix.compute.parallel.holders import Holders
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import graphed_layers, taped_layers
from longhelix.compute.runner.graphed_layers import Bucket, GraphedLayers, _Inputs, most_graph_rows
from longhelix.compute.runner.taped_layers import TapedLayers
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model

pytestmark = pytest.mark.unit


def decode(rows):
    """A decode step of `rows` sequences that have a token each."""
    ints = torch.zeros(rows, dtype=torch.int64)
    return Batch(
        token_ids_T=ints,
        shape=StepShape(num_sequences=rows, most_tokens=1),
        attention=AttentionRows(
            row_starts_b=torch.arange(rows + 1),
            limits_t=ints + 1,
            extents_b2=torch.zeros(rows, 2, dtype=torch.int64),
            max_rows=1,
            rotations=(RowRotation(torch.ones(rows, 2), torch.zeros(rows, 2)),),
            views=(RowView(ints, torch.zeros(1, dtype=torch.int64)),),
        ),
    )


def graphed(layers):
    return GraphedLayers(layers, Mesh.build(Layout(), 0), 2**20, capture=lambda call: (call(), lambda: None))


@pytest.mark.parametrize("kind", ["tapes", "graphs"])
def test_what_was_used_last_stays(monkeypatch, kind):
    if kind == "tapes" and native.module is None:
        pytest.skip("no native kernels")
    monkeypatch.setattr(taped_layers, "_MOST_TAPES", 2)
    monkeypatch.setattr(graphed_layers, "_MOST_GRAPHS", 2)
    made = []

    def layers(hidden_TH, batch):
        made.append(len(hidden_TH))
        return hidden_TH.view(-1, 4)

    run = TapedLayers(layers) if kind == "tapes" else graphed(layers)
    for rows in (1, 2, 1, 4, 1, 4, 2):
        run(torch.ones(rows, 4), decode(rows))
    assert made == [1, 2, 4, 2]


def step_batch(rows_per_sequence, held_NB, rank, parts):
    """A step as `rank` sees it: every row has a limit and a slot of its own, and every sequence an extent."""
    held_NT = held_NB.repeat(rows_per_sequence, axis=1)
    mine_b, mine_t = held_NB[rank].nonzero()[0], torch.from_numpy(held_NT[rank].nonzero()[0])
    counts_b = torch.tensor([rows_per_sequence[sequence] for sequence in mine_b], dtype=torch.int64)
    return Batch(
        token_ids_T=torch.zeros(held_NT.shape[1], dtype=torch.int64),
        shape=StepShape(num_sequences=len(rows_per_sequence), most_tokens=100, parts=parts),
        attention=AttentionRows(
            row_starts_b=torch.nn.functional.pad(counts_b.cumsum(0), (1, 0)),
            limits_t=mine_t + 1,
            extents_b2=torch.from_numpy(mine_b)[:, None] * 2 + torch.tensor([1, 3]),
            max_rows=int(counts_b.max()) if len(counts_b) else 0,
            rotations=(RowRotation(mine_t[:, None] + 0.25, mine_t[:, None] + 0.5),),
            views=(RowView(mine_t + 1000, torch.arange(10)),),
        ),
        sharding=RowSharding(holders=None if held_NT.all() else Holders.of(held_NT, rank, torch.device("cpu"))),
    )


def attended(batch):
    """What its parts attend to, row by row: extent, limit, slot, rotation; without rows that see nothing."""
    found, rows, (view,) = [], batch.attention, batch.attention.views
    for part in batch.cut():
        starts = part.row_starts_b.tolist()
        assert starts[0] == 0
        assert starts[-1] == len(part.limits_t) == part.rows.stop - part.rows.start
        for extent, first, last in zip(part.extents_b2.tolist(), starts[:-1], starts[1:], strict=True):
            assert 0 <= last - first <= part.max_rows
            for row in range(part.rows.start + first, part.rows.start + last):
                if rows.limits_t[row]:
                    rotation = rows.rotations[0].cos_tR[row].item(), rows.rotations[0].sin_tR[row].item()
                    found.append((extent, rows.limits_t[row].item(), view.slots_t[row].item(), rotation))
                else:
                    assert view.slots_t[row] == -1
    return found


@given(
    rows=st.lists(st.integers(1, 1), min_size=1, max_size=9) | st.lists(st.integers(1, 7), min_size=1, max_size=5),
    parts=st.integers(1, 3),
    everywhere=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_padded_step_attends_to_the_same_on_every_rank(rows, parts, everywhere, seed):
    """Ranks own some of the rows, all, or none; a graph's memory holds another step of the bucket first."""
    chance = np.random.default_rng(seed)
    held_NB = np.ones((3, len(rows)), dtype=bool)
    if not everywhere:
        held_NB = chance.random(held_NB.shape) < 0.3
        held_NB[chance.integers(0, 2, len(rows)), np.arange(len(rows))] = True  # the last rank often holds nothing
    batches = [step_batch(rows, held_NB, rank, parts) for rank in range(3)]
    (bucket,) = {Bucket.of(batch) for batch in batches}
    for batch in batches:
        hidden_TH = torch.arange(sum(rows)).view(-1, 1).float()
        inputs = _Inputs.new(bucket, hidden_TH, batch)
        (view,) = batch.attention.views
        moved = replace(batch.attention, views=(RowView(view.slots_t + 7, view.blocks_X),))
        for step in (replace(batch, attention=moved), batch):
            inputs.fill(hidden_TH, step)
        assert attended(inputs.batch) == attended(replace(batch, shape=replace(batch.shape, parts=1)))
        assert len(inputs.batch.attention.limits_t) == bucket.attention_rows
        assert inputs.batch.padding_T.tolist() == [row >= sum(rows) for row in range(bucket.rows)]
        own_tH = inputs.batch.local_rows(inputs.hidden_TH)
        real_t = inputs.batch.attention.limits_t > 0
        assert torch.equal(own_tH[real_t], batch.local_rows(hidden_TH))


def test_experts_are_told_of_padding_and_have_no_rows_while_a_graph_is_captured():
    seen = []

    def layers(hidden_TH, batch):
        seen.append(batch.padding_T.tolist())
        return hidden_TH

    def capture(call):
        result = call()
        return result, call

    run = GraphedLayers(layers, Mesh.build(Layout(), 0), 2**20, capture=capture)
    for rows in (5, 6):
        run(torch.ones(rows, 4), decode(rows))
    assert seen == [[True] * 6, [False] * 5 + [True], [False] * 6]


def test_decodes_are_captured_at_once_chunks_the_second_time_and_long_steps_never():
    captured = []

    def capture(call):
        captured.append(len(call()))
        return call(), lambda: None

    run = GraphedLayers(lambda hidden_TH, batch: hidden_TH, Mesh.build(Layout(), 0), 6, capture=capture)
    one, two, long = (step_batch(rows, np.ones((1, len(rows)), dtype=bool), 0, 1) for rows in ([3], [3, 1], [7]))
    for batch, expected in ((one, []), (two, []), (one, [3]), (two, [3, 4]), (long, [3, 4]), (long, [3, 4])):
        hidden_TH = torch.rand(len(batch.token_ids_T), 4)
        assert torch.equal(run(hidden_TH, batch), hidden_TH)
        assert captured == expected
    run(torch.ones(2, 4), decode(2))
    assert captured == [3, 4, 2]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_graphs_are_for_steps_that_compute_for_less_time_than_they_take_to_launch(num_ranks):
    """Of Llama 3 8B, and a layer's share of its head: 1 ms at 600 TFLOP/s."""
    parameters = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 4096 * 128256 / 32
    rows = 1e-3 * 600e12 / (2 * parameters / num_ranks)
    assert most_graph_rows(load_model("llama-3-8b"), num_ranks) == pytest.approx(rows, rel=0.001)


@pytest.mark.skipif(native.module is None, reason="no native kernels")
def test_tapes_read_what_batches_that_stay_have_now_and_who_holds_what():
    recorded = []

    def layers(hidden_TH, batch):
        recorded.append(batch)
        return take_rows(batch.attention.rotations[0].cos_tR, batch.sharding.holders.rows_t)

    run, hidden_TH = TapedLayers(layers), torch.zeros(3, 4)
    held = [
        Holders.of(np.array(held_NT) == 1, 0, hidden_TH.device)
        for held_NT in ([[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [0, 1, 1]])
    ]
    batch = decode(3)
    stays = replace(batch, attention=replace(batch.attention, is_reused=True))
    rotations = (RowRotation(torch.full((3, 2), 7.0), torch.zeros(3, 2)),)
    once = replace(batch, attention=replace(batch.attention, rotations=rotations))
    for batch, holders in [(stays, 0), (stays, 0), (stays, 1), (stays, 0), (once, 1), (stays, 0)]:
        stays.attention.rotations[0].cos_tR.copy_(torch.rand(3, 2))
        before, expected = held[holders].rows_t.clone(), batch.attention.rotations[0].cos_tR[held[holders].rows_t]
        step = replace(batch, sharding=RowSharding(holders=held[holders]))
        assert torch.equal(run(hidden_TH, step), expected)
        assert torch.equal(held[holders].rows_t, before)
    assert len(recorded) == 1
