"""HOP-B: which parts a batch has, and that a part attends while the one before is exchanged."""

from dataclasses import replace

import pytest
import torch

from longhelix.compute.kernels import ROWS, KVFormat, partial_attention, write_kv
from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowView, StepShape
from longhelix.compute.models.overlap import attend_and_exchange
from longhelix.compute.runner.graphed_layers import Bucket, _Inputs

pytestmark = pytest.mark.unit

HEADS, SIZE, BLOCK = 4, 16, 4
CPU = torch.device("cpu")


def batch_of(rows_per_sequence, local_length, parts=1):
    """A batch whose sequences keep `local_length` tokens each, in blocks of their own."""
    rows, sequences = sum(rows_per_sequence), len(rows_per_sequence)
    blocks = -(-local_length // BLOCK)
    starts_b = torch.tensor([0, *rows_per_sequence]).cumsum(0)
    nothing = torch.zeros(rows, 1)
    return Batch(
        token_ids_T=torch.zeros(rows, dtype=torch.int64),
        shape=StepShape(num_sequences=len(rows_per_sequence), most_tokens=blocks * BLOCK, parts=parts),
        attention=AttentionRows(
            row_starts_b=starts_b,
            limits_t=torch.full((rows,), local_length) - torch.arange(rows) % 3,
            extents_b2=torch.arange(0, (sequences + 1) * blocks, blocks).unfold(0, 2, 1),
            max_rows=max(rows_per_sequence),
            rotations=(RowRotation(nothing, nothing),),
            views=(RowView(torch.full((rows,), -1), torch.arange(sequences * blocks)),),
        ),
    )


@pytest.mark.parametrize(
    ("rows_per_sequence", "parts", "expected"),
    [
        ([1, 1, 1, 1, 1], 2, [3, 2]),
        ([1, 1], 2, [1, 1]),
        ([1], 1, [1]),
        ([300], 4, [75, 75, 75, 75]),
        ([150], 2, [75, 75]),
        ([1, 1, 1, 90, 106], 3, [67, 66, 66]),
        ([128, 1], 2, [65, 64]),
    ],
)
def test_a_batch_is_cut_evenly_in_the_order_of_its_rows(rows_per_sequence, parts, expected):
    batch = batch_of(rows_per_sequence, 10, parts=parts)
    pieces = batch.cut()
    sequences = [
        number
        for piece in pieces
        for extent, rows in zip(piece.extents_b2.tolist(), piece.row_starts_b.diff().tolist(), strict=True)
        for number in [batch.attention.extents_b2.tolist().index(extent)] * rows
    ]
    assert sequences == [number for number, rows in enumerate(rows_per_sequence) for _ in range(rows)]
    assert all(piece.row_starts_b.diff().max() <= piece.max_rows for piece in pieces)
    assert [piece.rows.stop - piece.rows.start for piece in pieces] == expected
    assert torch.equal(torch.cat([piece.limits_t for piece in pieces]), batch.attention.limits_t)
    for piece in pieces:
        assert len(piece.row_starts_b) == len(piece.extents_b2) + 1
        assert piece.row_starts_b.tolist()[0] == 0
        assert piece.row_starts_b.tolist()[-1] == len(piece.limits_t)


def test_padding_with_as_many_sequences_as_rows_is_not_taken_for_decodes():
    """127 decodes and a chunk of two rows, padded to 192 of both."""
    batch = batch_of([1] * 127 + [2], 10, parts=2)
    padded = _Inputs.new(Bucket(192, 192, 192, batch.shape.most_tokens, 2), torch.zeros(129, 4), batch)
    padded.fill(torch.zeros(129, 4), batch)
    rows = [piece.row_starts_b.diff() for piece in padded.batch.cut()]
    whole = padded.batch.attention.row_starts_b.diff()
    assert torch.equal(sum(rows), whole)
    assert whole[:129].tolist() == [1] * 127 + [2, 63]


class LateGroup:
    """Two ranks, of which the other has no KV; what is sent arrives when it is waited for."""

    size, index = 2, 0

    def __init__(self, events):
        self.events = events
        self.started = 0

    def merges(self, head_size):
        return False

    def start_all_to_all(self, send, send_sizes, receive_sizes):
        number = self.started
        self.started += 1
        self.events.append(f"send {number}")
        own = send[: send_sizes[0]]
        other = torch.zeros(receive_sizes[1], dtype=torch.uint8)
        heads_rows = own.view(-1, SIZE * 4 + 4)
        other.view(-1, SIZE * 4 + 4)[: len(heads_rows), SIZE * 4 :] = torch.tensor([-torch.inf]).view(torch.uint8)

        def finish():
            self.events.append(f"receive {number}")
            return torch.cat((own, other))

        return finish

    def all_to_all(self, *arguments):
        return self.start_all_to_all(*arguments)()


@pytest.mark.parametrize("rows_per_sequence", [[1, 1, 1, 1, 1], [200], [1, 1, 1, 70, 60]])
def test_later_parts_attend_before_the_first_is_received(rows_per_sequence):
    torch.manual_seed(0)
    batch = batch_of(rows_per_sequence, 10, parts=2)
    (view,) = batch.attention.views
    layer = KVFormat("float32", BLOCK, 2, SIZE, SIZE, ROWS).new_layer(len(view.blocks_X), CPU)
    tokens = len(view.blocks_X) * BLOCK
    write_kv(torch.randn(tokens, 2, SIZE), torch.randn(tokens, 2, SIZE), layer, torch.arange(tokens))
    q_TqC = torch.randn(len(batch.attention.limits_t), HEADS, SIZE)
    events = []

    def attend(*arguments):
        events.append("attend")
        return partial_attention(*arguments)

    group = LateGroup(events)
    parted = attend_and_exchange(q_TqC, layer, batch, SIZE**-0.5, group, [2, 2], attend=attend)
    assert events == ["attend", "send 0", "attend", "send 1", "receive 0", "receive 1"]
    events.clear()
    one_part = replace(batch, shape=replace(batch.shape, parts=1))
    whole = attend_and_exchange(q_TqC, layer, one_part, SIZE**-0.5, group, [2, 2], attend=attend)
    assert events == ["attend", "send 2", "receive 2"]
    assert torch.equal(parted, whole)
    rows = batch.attention
    table = view.blocks_X, rows.extents_b2, rows.row_starts_b, rows.limits_t
    alone, _ = partial_attention(q_TqC, layer, *table, SIZE**-0.5)
    assert torch.allclose(whole, alone[:, :2], atol=1e-6)
