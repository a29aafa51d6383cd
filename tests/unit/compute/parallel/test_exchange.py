import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from longhelix.compute.kernels import merge_states
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.exchange import exchange
from longhelix.errors import PeerLostError

pytestmark = pytest.mark.unit

ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SPLITS = [[1, 0], [0, 1], [3, 3, 2, 1], [2, 2], [0, 0, 5], [1] * 8]


class Wire:
    """torch's all-to-all among ranks that are threads; `calls` and `bytes_to_others` are what each rank handed over."""

    def __init__(self, size: int) -> None:
        self.calls = [0] * size
        self.bytes_to_others = [0] * size
        self._sent: list[list[Tensor]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=30)

    def handle(self, group: int) -> "Handle":
        return Handle(self, group)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group: int
    ) -> None:
        assert input.dim() == output.dim() == 1
        assert input.is_contiguous()
        pieces = list(input.split(input_split_sizes))
        self.calls[group] += 1
        self.bytes_to_others[group] += sum(piece.nbytes for to, piece in enumerate(pieces) if to != group)
        self._sent[group] = pieces
        self._barrier.wait()
        received = [pieces[group] for pieces in self._sent]
        assert [len(piece) for piece in received] == output_split_sizes
        output.copy_(torch.cat(received))
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()


class Handle:
    """One rank's process group, as far as an exchange needs it."""

    def __init__(self, wire: Wire, group: int) -> None:
        self.wire, self.group = wire, group

    def alltoall_base(self, *arguments) -> "Handle":
        self.wire.all_to_all(*arguments, self.group)
        return self

    def wait(self) -> None:
        pass


def world_ranks(size: int) -> tuple[int, ...]:
    """Ranks of the world that are not the indices in the group."""
    return tuple(range(5, 5 + 3 * size, 3))


def exchange_on_all_ranks(states: list[tuple[Tensor, Tensor]], heads_per_rank: list[int]):
    """What each rank gets, the groups and the wire."""
    size = len(states)
    wire = Wire(size)
    ranks = world_ranks(size)
    groups = [RankGroup(ranks, rank, wire.handle(index)) for index, rank in enumerate(ranks)]

    def run(index: int) -> Tensor:
        try:
            return exchange(*states[index], groups[index], heads_per_rank)
        except BaseException:
            wire.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, index) for index in range(size)]
    broken = [future.exception() for future in futures if future.exception()]
    causes = [error for error in broken if not isinstance(error.__cause__, threading.BrokenBarrierError)]
    for error in causes or broken:
        raise error
    return [future.result() for future in futures], groups, wire


def random_states(size: int, rows: int, heads: int, head_size: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Partial attention of each rank; a third of the (row, head) pairs see no key there, with NaN for output."""
    generator = torch.Generator().manual_seed(size + rows)
    states = []
    for _ in range(size):
        out_TqC = torch.randn(rows, heads, head_size, generator=generator)
        lse_Tq = torch.randn(rows, heads, generator=generator) * 4
        empty_Tq = torch.rand(rows, heads, generator=generator) < 0.3
        out_TqC = out_TqC.masked_fill(empty_Tq.unsqueeze(-1), math.nan).to(dtype)
        states.append((out_TqC, lse_Tq.masked_fill(empty_Tq, -math.inf)))
    return states


def merged_in_float64(states: list[tuple[Tensor, Tensor]]) -> Tensor:
    """All heads, merged without any exchange."""
    lse_NTq = torch.stack([lse_Tq for _, lse_Tq in states]).double()
    out_NTqC = torch.stack([out_TqC for out_TqC, _ in states]).double()
    weight_NTq = torch.exp(lse_NTq - lse_NTq.max(dim=0).values).nan_to_num(0.0)
    seen_NTqC = torch.where(weight_NTq.unsqueeze(-1) > 0, out_NTqC, 0.0)
    total_Tq = weight_NTq.sum(0)
    return (weight_NTq.unsqueeze(-1) * seen_NTqC).sum(0) / torch.where(total_Tq > 0, total_Tq, 1.0).unsqueeze(-1)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("rows", [0, 1, 17])
@pytest.mark.parametrize("heads_per_rank", SPLITS, ids=str)
def test_each_rank_gets_its_heads_of_the_unsharded_merge_for_one_message(heads_per_rank, rows, dtype):
    size, heads, head_size = len(heads_per_rank), sum(heads_per_rank), 10
    states = random_states(size, rows, heads, head_size, dtype)
    results, groups, wire = exchange_on_all_ranks(states, heads_per_rank)
    expected_TqC = merged_in_float64(states)
    unsharded_TqC, _ = merge_states(torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states]))
    first = 0
    for own_heads, result_TnC in zip(heads_per_rank, results, strict=True):
        own = slice(first, first + own_heads)
        first += own_heads
        assert result_TnC.shape == (rows, own_heads, head_size)
        assert result_TnC.dtype == dtype
        tolerance = ROUNDING[dtype]
        torch.testing.assert_close(result_TnC.double(), expected_TqC[:, own], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result_TnC, unsharded_TqC[:, own], rtol=tolerance, atol=tolerance)
    head_bytes = rows * (head_size * ITEM_BYTES[dtype] + 4)
    sent_bytes = [sum(heads_per_rank[:rank] + heads_per_rank[rank + 1 :]) * head_bytes for rank in range(size)]
    assert wire.calls == [1] * size
    assert wire.bytes_to_others == sent_bytes
    assert [group.exchanged_bytes for group in groups] == sent_bytes


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_permuted_inputs_give_the_same_bits(dtype):
    states = random_states(4, 7, 9, 16, dtype)
    expected, *_ = exchange_on_all_ranks(states, [3, 3, 2, 1])
    permuted = [
        (out_TqC.transpose(0, 1).contiguous().transpose(0, 1), lse_Tq.t().contiguous().t())
        for out_TqC, lse_Tq in states
    ]
    assert not permuted[0][0].is_contiguous()
    results, *_ = exchange_on_all_ranks(permuted, [3, 3, 2, 1])
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_a_head_that_no_rank_has_keys_for_is_zero():
    states = random_states(3, 4, 5, 8, torch.float32)
    for out_TqC, lse_Tq in states:
        out_TqC[2, 3], lse_Tq[2, 3] = math.nan, -math.inf
    results, *_ = exchange_on_all_ranks(states, [2, 2, 1])
    assert torch.equal(results[1][2, 1], torch.zeros(8))
    assert all(result.isfinite().all() for result in results)


def test_one_rank_holds_all_keys_and_every_rank_gets_its_outputs_bit_by_bit():
    states = [(torch.full((6, 4, 8), math.nan), torch.full((6, 4), -math.inf)) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    states[1] = torch.randn(6, 4, 8, generator=generator), torch.randn(6, 4, generator=generator)
    results, *_ = exchange_on_all_ranks(states, [2, 1, 1])
    assert torch.equal(torch.cat(results, dim=1), states[1][0])


def test_exchanged_bytes_add_up_over_calls():
    states = random_states(2, 5, 3, 8, torch.float32)
    wire = Wire(2)
    groups = [RankGroup((0, 1), rank, wire.handle(rank)) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            list(threads.map(exchange, *zip(*states, strict=True), groups, [[2, 1]] * 2))
    assert [group.exchanged_bytes for group in groups] == [3 * 5 * (8 * 4 + 4), 3 * 2 * 5 * (8 * 4 + 4)]


def test_a_group_of_one_returns_its_input_and_sends_nothing():
    group = RankGroup((7,), 7, None)
    out_TqC, lse_Tq = torch.randn(5, 3, 8), torch.randn(5, 3)
    before = out_TqC.clone()
    assert exchange(out_TqC, lse_Tq, group, [3]) is out_TqC
    assert torch.equal(out_TqC, before)
    assert group.exchanged_bytes == 0


def test_a_failed_message_names_the_group_and_is_not_counted():
    group = RankGroup((4, 9), 9, Failing("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    with pytest.raises(PeerLostError, match=r"all-to-all 1 over ranks \(4, 9\): .* Connection closed by peer"):
        exchange(torch.randn(5, 3, 8), torch.randn(5, 3), group, [2, 1])
    assert group.exchanged_bytes == 0
    assert group.progress() == (1, "")


def test_an_error_that_is_not_the_transports_stays_what_it_is():
    group = RankGroup((4, 9), 9, Failing("ProcessGroupGloo::alltoall_base: invalid tensor size"))
    with pytest.raises(RuntimeError, match="invalid tensor size") as raised:
        exchange(torch.randn(5, 3, 8), torch.randn(5, 3), group, [2, 1])
    assert not isinstance(raised.value, PeerLostError)


def test_what_a_rank_waits_in_shows_while_it_waits():
    class Looking(Failing):
        def alltoall_base(self, *arguments):
            self.seen = group.progress()
            super().alltoall_base()

    handle = Looking("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    group = RankGroup((4, 9), 9, handle)
    with pytest.raises(PeerLostError):
        exchange(torch.randn(5, 3, 8), torch.randn(5, 3), group, [2, 1])
    assert handle.seen == (1, "all-to-all 1 over ranks (4, 9)")


class Failing:
    def __init__(self, message):
        self._message = message

    def alltoall_base(self, *arguments):
        raise RuntimeError(self._message)


def test_heads_swapped_between_ranks_would_be_seen():
    states = random_states(2, 5, 4, 8, torch.float32)
    results, *_ = exchange_on_all_ranks(states, [2, 2])
    expected_TqC = merged_in_float64(states).float()
    assert torch.allclose(results[0], expected_TqC[:, :2], atol=1e-5)
    assert not torch.allclose(results[0], expected_TqC[:, 2:], atol=1e-2)
