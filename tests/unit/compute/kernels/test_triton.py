"""The Triton kernels: what holds in Triton's interpreter and on a CUDA device, and what only a device can show."""

import itertools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from block_extents import side_by_side
from launches import Launches
from longhelix.compute.kernels import reference
from longhelix.compute.kernels.triton import attention, latent_attention, merge_states, partial_attention, write_kv
from longhelix.scheduler.kv import splits
from tiers import few
from triton_interpreter import interpret

pytestmark = [
    pytest.mark.unit,
    # Rows that see nothing take the logarithm of 0 and divide by it; what they give is tested.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
]
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device that torch can use"),
    ],
)
on_cuda_alone = pytest.mark.parametrize("device", [CUDA], indirect=True)

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
POOLS = [*FLOATS, *LARGEST]
BITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Half the distance of neighbours at 1: what one rounding may change.
ROUNDING = {dtype: torch.finfo(dtype).eps / 2 for dtype in [*FLOATS, torch.float64]}


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request):
    """Where the kernels run: on the CPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            interpret(patch)
        yield torch.device(request.param)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(values: Tensor) -> Tensor:
    """The bit pattern, so that NaN equals itself and -0 differs from 0."""
    return values.contiguous().view(BITS[values.element_size()])


@contextmanager
def split_at(tokens: int, few_rows: int = attention.FEW_ROWS) -> Iterator[None]:
    """Shorter splits, and chunks of fewer rows, so that small cases reach all that long ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_TOKENS", tokens)
        patch.setattr(attention, "FEW_ROWS", few_rows)
        yield


class Call(NamedTuple):
    """The arguments of `partial_attention`."""

    q_TqC: Tensor
    kv_PADkC: Tensor
    scales_PADk: Tensor | None
    blocks_X: Tensor
    extents_B2: Tensor
    row_starts_B: Tensor
    limits_T: Tensor
    scale: float
    value_size: int
    max_rows: int
    most_tokens: int
    firsts_T: Tensor | None = None
    cap: float | None = None

    def blocks(self, sequence: int) -> Tensor:
        begin, end = self.extents_B2[sequence]
        return self.blocks_X[begin:end]

    def run(self, device: torch.device, **changes: object) -> tuple[Tensor, Tensor]:
        call = self._replace(**changes)
        moved = [value.to(device) if torch.is_tensor(value) else value for value in call]
        out_TqC, lse_Tq = partial_attention(*moved)
        assert (out_TqC.dtype, lse_Tq.dtype) == (self.q_TqC.dtype, torch.float32)
        return out_TqC.cpu(), lse_Tq.cpu()


@dataclass(frozen=True)
class Case:
    """`limits`: for each sequence, the token after the last one that each of its rows sees. `window`: how many tokens
    a row sees, None for all. A is 1 where values are part of the keys."""

    limits: list[list[int]] = field(default_factory=lambda: [[7]])
    kv_heads: int = 2
    group: int = 3
    key_size: int = 64
    value_size: int = 64
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None

    def first(self, limit: int) -> int:
        """The first token that a row sees."""
        return 0 if self.window is None else max(limit - self.window, 0)

    @property
    def lengths(self) -> list[int]:
        return [max(rows, default=0) for rows in self.limits]

    def call(self) -> Call:
        """Blocks lie in shuffled order. Wherever no token is written, and before the first one that a row of the
        sequence sees, the pool holds NaN (int8: its scale does)."""
        generator = seeded(self.seed)
        counts = [math.ceil(length / self.block_tokens) for length in self.lengths]
        num_blocks = sum(counts) + 3
        ids = torch.randperm(num_blocks, generator=generator)
        blocks = ids.split([*counts, 3])[:-1]
        written_PD = torch.zeros(num_blocks, self.block_tokens, dtype=torch.bool)
        for mine, length, limits in zip(blocks, self.lengths, self.limits, strict=True):
            token_S = torch.arange(len(mine) * self.block_tokens)
            lowest = min((self.first(limit) for limit in limits if limit), default=0)
            written_PD[mine] = ((token_S >= lowest) & (token_S < length)).view(len(mine), self.block_tokens)
        arrays = 2 if self.key_size == self.value_size else 1
        size = num_blocks, arrays, self.block_tokens, self.kv_heads
        kv_PADkC = torch.randn(*size, self.key_size, generator=generator)
        hidden_PADk = ~written_PD[:, None, :, None].expand(size)
        scales_PADk = None
        if self.pool_dtype in LARGEST:
            kv_PADkC = (kv_PADkC * 40).clamp(-127, 127)
            scales_PADk = (torch.rand(size, generator=generator) / 50 + 0.01).masked_fill(hidden_PADk, math.nan)
        if self.pool_dtype != torch.int8:
            kv_PADkC = kv_PADkC.masked_fill(hidden_PADk.unsqueeze(-1), math.nan)
        starts = [0, *itertools.accumulate(map(len, self.limits))]
        return Call(
            torch.randn(starts[-1], self.kv_heads * self.group, self.key_size, generator=generator).to(self.dtype),
            kv_PADkC.to(self.pool_dtype),
            scales_PADk,
            *side_by_side(blocks, other=int(ids[-1])),
            torch.tensor(starts),
            torch.tensor([*chain(*self.limits)], dtype=torch.int64),
            self.key_size**-0.5,
            self.value_size,
            max(map(len, self.limits)),
            max(self.lengths),
            None if self.window is None else torch.tensor([self.first(limit) for limit in chain(*self.limits)]),
        )


class Truth(NamedTuple):
    """Float64, and how far each number may be from it."""

    out_TqC: Tensor
    lse_Tq: Tensor
    out_error_TqV: Tensor
    lse_error_Tq: Tensor


def softmax_attention(call: Call, case: Case) -> Truth:
    """Errors: a score is off by 16 roundings of the largest sum of magnitudes it may be part of, a weight likewise and
    by its rounding to the dtype of the product (float16 ends at 2 ** -24), an output by its rounding to its own."""
    kv_PADkC = call.kv_PADkC.double()
    if call.scales_PADk is not None:
        kv_PADkC = kv_PADkC * call.scales_PADk.unsqueeze(-1).double()
    product_dtype = case.dtype if case.pool_dtype in LARGEST else torch.promote_types(case.dtype, case.pool_dtype)
    weight_error = 0 if product_dtype == torch.float32 else ROUNDING[product_dtype]
    least_error = 2**-25 * LARGEST.get(case.pool_dtype, 1) if product_dtype == torch.float16 else 0
    rows = []
    for index, length in enumerate(case.lengths):
        k_SkC, v_SkC = kv_PADkC[call.blocks(index), [[0], [-1]]].flatten(1, 2)[:, :length]
        k_kSC, v_kSV = k_SkC.transpose(0, 1), v_SkC[..., : call.value_size].transpose(0, 1)
        for row in range(call.row_starts_B[index], call.row_starts_B[index + 1]):
            limit = int(call.limits_T[row])
            seen = slice(case.first(limit), limit)
            q_kgC = call.q_TqC[row].double().unflatten(0, (case.kv_heads, case.group)) * call.scale
            scores_kgS = q_kgC @ k_kSC[:, seen].mT
            lse_kg = scores_kgS.logsumexp(-1)
            weights_kgS = (scores_kgS - lse_kg.unsqueeze(-1)).exp()
            out_kgV, spread_kgV = weights_kgS @ v_kSV[:, seen], weights_kgS @ v_kSV[:, seen].abs()
            sizes_kgS = q_kgC.abs() @ k_kSC[:, seen].abs().mT
            lse_error_kg = 2**-20 * (1 + sizes_kgS.amax(-1) if limit else torch.ones_like(lse_kg))
            out_error_kgV = (weight_error + 2 * lse_error_kg.unsqueeze(-1)) * spread_kgV
            out_error_kgV += ROUNDING[case.dtype] * out_kgV.abs() + least_error * limit
            rows.append([value.flatten(0, 1) for value in (out_kgV, lse_kg, out_error_kgV, lse_error_kg)])
    return Truth(*map(torch.stack, zip(*rows, strict=True)))


def assert_within(actual: Tensor, expected: Tensor, error: Tensor) -> None:
    actual = actual.double()
    same = (actual - expected).abs() <= error
    same |= actual == expected  # infinities
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ: {actual[~same][:4]} for {expected[~same][:4]}"


def assert_equals_softmax(case: Case, device: torch.device) -> None:
    call = case.call()
    out_TqC, lse_Tq = call.run(device)
    if not len(out_TqC):
        return
    truth = softmax_attention(call, case)
    assert_within(out_TqC, truth.out_TqC, truth.out_error_TqV)
    assert_within(lse_Tq, truth.lse_Tq, truth.lse_error_Tq)
    unseeing_T = call.limits_T == 0
    assert (out_TqC[unseeing_T] == 0).all()
    assert (lse_Tq[unseeing_T] == -math.inf).all()


sizes = st.sampled_from([(16, 16), (24, 24), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (48, 32), (80, 64)])
cases = st.builds(
    lambda size, **rest: Case(key_size=size[0], value_size=size[1], **rest),
    size=sizes,
    limits=st.lists(st.lists(st.integers(0, 300), max_size=4), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7, 8]),
    block_tokens=st.sampled_from([1, 7, 16, 32]),
    dtype=st.sampled_from(FLOATS),
    pool_dtype=st.sampled_from(POOLS),
    seed=st.integers(0, 2**31),
    window=st.sampled_from([None, None, 1, 40, 130]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(case=cases, few_rows=st.sampled_from([1, 3, 16]), split_tokens=st.sampled_from([128, 256, 4096]))
def test_attention_equals_softmax_for_any_shape_and_no_unseen_token_leaks(case, few_rows, split_tokens, device):
    with split_at(split_tokens, few_rows):
        assert_equals_softmax(case, device)


@pytest.mark.parametrize("window", few([300, 1, 127, 128, 129]))
def test_windows_skip_splits_and_meet_at_their_positions(window, device):
    limits = [[700], [*range(500, 524)], [0, 5, 690], [1]]
    for few_rows in (1, 16):
        with split_at(128, few_rows):
            assert_equals_softmax(Case(limits, 2, 3, window=window), device)


@pytest.mark.parametrize("pool_dtype", few(POOLS, 2), ids=str)
def test_mla_equals_softmax_where_values_are_the_first_channels_of_keys(pool_dtype, device):
    dtype = torch.bfloat16 if pool_dtype in LARGEST else pool_dtype
    case = Case([[140], [0, 33]], 1, 20, 576, 512, dtype=dtype, pool_dtype=pool_dtype)
    for few_rows in (1, 16):
        with split_at(128, few_rows):
            assert_equals_softmax(case, device)


LATENTS = [
    Case([[length] for length in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500)], 1, 128, 576, 512),
    Case([[0], [5], [0]], 1, 64, 576, 512),
    Case([[3, 4, 5], [60, 61], [130]], 1, 128, 576, 512, block_tokens=32),
    Case([[*range(1, 40)], [7]], 1, 192, 576, 512, block_tokens=64),
]


@on_cuda_alone
@pytest.mark.parametrize("split_tokens", [128, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_hoppers_kernel_of_latents_equals_softmax(case, dtype, split_tokens, device):
    case = replace(case, dtype=dtype, pool_dtype=dtype)
    call = case.call()
    taken = latent_attention.takes(call.q_TqC.to(device), call.kv_PADkC.to(device), 512)
    assert taken == (torch.cuda.get_device_capability()[0] == 9)
    with split_at(split_tokens):
        assert_equals_softmax(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("few_rows", [16, 1])
def test_the_heads_of_one_row_may_fill_several_tiles(few_rows, device):
    with split_at(128, few_rows):
        assert_equals_softmax(Case([[20], [140, 9]], 1, 72, 48, 32, dtype=torch.float16), device)
        assert_equals_softmax(Case([[20], [140, 9]], 1, 72, dtype=torch.float16, pool_dtype=torch.float16), device)


@pytest.mark.parametrize("pool_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_equals_the_reference(dtype, pool_dtype, device):
    case = Case([[*range(60, 80)], [33], [], [0, 7, 8]], 3, 3, dtype=dtype, pool_dtype=pool_dtype)
    call = case.call()
    out_TqC, lse_Tq = call.run(device)
    truth = softmax_attention(call, case)
    k_PDkC, v_PDkC = call.kv_PADkC.unbind(1)
    expected_TqV, expected_lse_Tq = reference.partial_attention(call.q_TqC, k_PDkC, v_PDkC, *call[3:8])
    # The reference is off by as little, and rounds its output too.
    assert_within(out_TqC, expected_TqV.double(), truth.out_error_TqV + ROUNDING[dtype] * truth.out_TqC.abs())
    assert_within(lse_Tq, expected_lse_Tq.double(), 2 * truth.lse_error_Tq)


@pytest.mark.parametrize("cap", [0.5, 3.0])
def test_scores_are_capped_as_those_of_the_reference(cap, device):
    case = Case([[*range(60, 80)], [33], [], [0, 7, 8]], 3, 3)
    call = case.call()
    out_TqC, lse_Tq = call.run(device, cap=cap)
    k_PDkC, v_PDkC = call.kv_PADkC.unbind(1)
    expected = reference.partial_attention(call.q_TqC, k_PDkC, v_PDkC, *call[3:8], cap=cap)
    torch.testing.assert_close((out_TqC, lse_Tq), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out_TqC, call.run(device)[0], atol=1e-3)


@pytest.mark.parametrize("length", few([8193, 4095, 4096, 4097]))
def test_splits_meet_at_their_positions(length, device):
    assert attention.SPLIT_TOKENS == 4096
    assert_equals_softmax(Case([[length, length - 1, 1]], 1, 2, 16, 16, block_tokens=32), device)


@pytest.mark.parametrize("few_rows", [1, 16])
def test_a_tile_full_of_rows_ends_with_its_split(few_rows, device):
    """No row of it is padding, and all of them see tokens of later splits."""
    with split_at(64, few_rows):
        assert_equals_softmax(Case([[*range(300, 308)], [200]], 1, 16, 64, 64), device)


def test_more_splits_than_are_merged_at_once(device):
    with split_at(32):
        assert_equals_softmax(Case([[600, 5]], 1, 1, 520, 512), device)


@pytest.mark.parametrize(
    ("limits", "states_bytes", "turns"),
    few(
        [
            ([[600, 700]], 3 * 2**15, 1),
            ([[600], [0, 700], [], [5], [900, 1, 2], [300]], 3 * 2**15, 2),  # room for 7 rows, which is a tile of 5
            ([[600], [0, 700], [], [5], [900, 1, 2], [300]], 0, 8),  # a row at a time
            ([[400], [*range(300, 320)], [600]], 10 * 7800 - 1, 5),  # a chunk; room for 9 rows
            ([[400], [*range(300, 320)], [600]], 10 * 7800, 3),
            ([[*range(580, 600)]], 2**20, 1),
        ]
    ),
    ids=str,
)
def test_splits_of_few_rows_at_a_time_give_the_same_bits_in_bounded_memory(
    limits, states_bytes, turns, monkeypatch, device
):
    call = Case(limits).call()
    allocated = []
    new_empty = Tensor.new_empty

    def recorded(tensor, *size, **options):
        made = new_empty(tensor, *size, **options)
        if made.nbytes:  # the interpreter makes empty ones
            allocated.append(made.nbytes)
        return made

    with split_at(128):
        expected = call.run(device)
        monkeypatch.setattr(splits, "STATES_BYTES", states_bytes)
        monkeypatch.setattr(splits, "SPLIT_TOKENS", 128)
        monkeypatch.setattr(Tensor, "new_empty", recorded)
        found = call.run(device)
    assert torch.equal(bits(found[0]), bits(expected[0]))
    assert torch.equal(bits(found[1]), bits(expected[1]))
    _, *pairs = map(sum, zip(allocated[::2], allocated[1::2], strict=True))  # the results, then states
    assert len(pairs) == turns
    assert max(pairs) <= splits.most_state_bytes(call.most_tokens, call.q_TqC.shape[1], call.value_size)


@pytest.mark.parametrize(("tokens", "programs"), [(4096, 32), (4097, 64), (65_536, 512)])
def test_a_chunk_is_split_over_its_keys_where_its_rows_are_few_tiles(tokens, programs, monkeypatch, device):
    """512 rows of one KV head with a group of 8, as a rank of TPA 8 has it: 32 tiles, and a GPU runs 132 at a time."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *values, **named: grids.append((grid, named["MOST_ROWS"]))

    monkeypatch.setattr(attention, "_attend", Recorder())
    monkeypatch.setattr(attention, "merge_splits", lambda *values: None)
    call = Case([[1] * 512], 1, 8, 128, 128, dtype=torch.bfloat16, pool_dtype=torch.bfloat16).call()
    call.run(device, most_tokens=tokens)
    assert [math.prod(grid) for grid, most_rows in grids if most_rows > attention.FEW_ROWS] == [programs]


@pytest.mark.slow
def test_a_chunk_whose_states_would_take_many_turns_is_not_split(monkeypatch, device):
    case = Case([[*range(300, 340)], [600]])
    moved = [value.to(device) if torch.is_tensor(value) else value for value in case.call()]
    with split_at(128):
        monkeypatch.setattr(splits, "STATES_BYTES", 0)  # a row at a time
        with monkeypatch.context() as patch, Launches(patch) as counted:
            partial_attention(*moved)
        assert_equals_softmax(case, device)
    if device.type == "cpu":
        assert counted.kernels == {"_attend": 2}


@pytest.mark.slow
def test_states_of_one_turn_are_gone_when_the_next_begins(monkeypatch, device):
    made, most_bytes = [], 0
    new_empty = Tensor.new_empty

    def recorded(tensor, *size, **options):
        nonlocal most_bytes
        found = new_empty(tensor, *size, **options)
        if found.nbytes:  # the interpreter makes empty ones
            made.append(weakref.ref(found))
        alive = (each() for each in made)
        most_bytes = max(most_bytes, sum(one.nbytes for one in alive if one is not None))
        return found

    call = Case([[400], [*range(300, 320)], [600]]).call()
    with split_at(128):
        monkeypatch.setattr(splits, "STATES_BYTES", 10 * 7800)
        monkeypatch.setattr(Tensor, "new_empty", recorded)
        results = call.run(device)
    assert len(made) == 2 + 2 * 3  # results, and the states of three turns
    assert most_bytes <= sum(result.nbytes for result in results) + 10 * 7800


@pytest.mark.parametrize(
    ("limits", "launches"),
    [
        ([[60], [7]], {"_attend": 1}),
        ([[*range(30)], [7]], {"_attend": 2}),
        ([[600], [7]], {"_attend": 1, "_merge_splits": 1}),
        ([[*range(300, 320)], [7]], {"_attend": 2, "_merge_splits": 1}),
    ],
    ids=["a split", "a chunk in a split", "splits", "a chunk in splits"],
)
def test_attention_is_a_few_launches_and_waits_for_nothing(limits, launches, device, monkeypatch):
    moved = [value.to(device) if torch.is_tensor(value) else value for value in Case(limits).call()]
    with split_at(128), monkeypatch.context() as patch, Launches(patch) as counted:
        partial_attention(*moved)
    assert not counted.waits
    assert not counted.operators
    if device.type == "cpu":
        assert counted.kernels == launches


@pytest.mark.parametrize("limits", [[[]], [[], []], [[0, 0]], [[0], [], [0]]], ids=str)
def test_a_rank_without_tokens_or_rows_needs_no_blocks(limits, device):
    case = Case(limits)
    assert not case.call().extents_B2.diff().any()
    assert_equals_softmax(case, device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_token_gives_its_value(dtype, device):
    call = Case([[1]], dtype=dtype, pool_dtype=dtype).call()
    out_TqC, _ = call.run(device)
    assert torch.equal(out_TqC[0], call.kv_PADkC[call.blocks(0)[0], 1, 0].repeat_interleave(3, 0))


@pytest.mark.parametrize("few_rows", [1, 16])
def test_one_token_beyond_the_limit_would_be_seen(few_rows, device):
    call = Case([[5, 5], [4, 4]]).call()
    with split_at(4096, few_rows):
        out_TqC, _ = call.run(device, limits_T=torch.tensor([5, 6, 4, 4]))
    assert out_TqC[1].isnan().all()
    assert out_TqC[2:].isfinite().all()


@pytest.mark.parametrize("few_rows", [1, 16])
def test_a_limit_hides_later_tokens_that_another_row_of_the_tile_sees(few_rows, device):
    call = Case([[13, 6]]).call()
    changed_PADkC = call.kv_PADkC.clone()
    changed_PADkC[call.blocks(0)[0], :, 6:13] = 1e4
    with split_at(4096, few_rows):
        out_TqC, lse_Tq = call.run(device)
        changed_TqV, changed_lse_Tq = call.run(device, kv_PADkC=changed_PADkC)
    assert torch.equal(changed_TqV[1], out_TqC[1])
    assert torch.equal(changed_lse_Tq[1], lse_Tq[1])
    assert not torch.equal(changed_TqV[0], out_TqC[0])


@pytest.mark.parametrize("few_rows", [1, 16])
def test_a_row_that_sees_nothing_is_0_beside_one_that_sees_infinities(few_rows, device):
    call = Case([[9, 0]]).call()
    call.kv_PADkC[call.blocks(0)[0], 1, 3] = math.inf
    with split_at(4096, few_rows):
        out_TqC, lse_Tq = call.run(device)
    assert (out_TqC[0] == math.inf).all()
    assert (out_TqC[1] == 0).all()
    assert (lse_Tq[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", few(FLOATS), ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(dtype, device):
    limits = [[200], [300, 301, 302, 303], [10, 0], [*range(100, 140)], [1000]]
    call = Case(limits, dtype=dtype, pool_dtype=dtype).call()
    with split_at(256):
        out_TqC, lse_Tq = call.run(device)
        for index, (start, rows) in enumerate(zip(call.row_starts_B.tolist(), map(len, limits), strict=False)):
            row_slice = slice(start, start + rows)
            alone_TqV, alone_lse_Tq = call.run(
                device,
                q_TqC=call.q_TqC[row_slice],
                extents_B2=call.extents_B2[index : index + 1],
                row_starts_B=torch.tensor([0, rows]),
                limits_T=call.limits_T[row_slice],
                max_rows=rows,
                most_tokens=max(limits[index]),
            )
            assert torch.equal(bits(alone_TqV), bits(out_TqC[row_slice]))
            assert torch.equal(bits(alone_lse_Tq), bits(lse_Tq[row_slice]))


def test_a_row_has_the_same_bits_alone_and_beside_other_rows_of_its_sequence(device):
    call = Case([[290, 300, 1000]], dtype=torch.bfloat16, pool_dtype=torch.bfloat16).call()
    with split_at(256):
        out_TqC, _ = call.run(device)
        for row in range(3):
            one = slice(row, row + 1)
            alone_TqV, _ = call.run(
                device, q_TqC=call.q_TqC[one], row_starts_B=torch.tensor([0, 1]), limits_T=call.limits_T[one]
            )
            assert torch.equal(bits(alone_TqV), bits(out_TqC[one]))


def test_which_blocks_hold_the_tokens_changes_no_bit(device):
    call = Case([[40], [90, 91]], block_tokens=7).call()
    order_P = torch.randperm(len(call.kv_PADkC), generator=seeded(1))
    moved_PADkC = torch.empty_like(call.kv_PADkC)
    moved_PADkC[order_P] = call.kv_PADkC
    first, second = call.run(device), call.run(device, kv_PADkC=moved_PADkC, blocks_X=order_P[call.blocks_X])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_queries_may_be_a_slice_of_a_fused_projection(device):
    call = Case([[9, 10], [11]]).call()
    fused_TXC = torch.full((3, 10, 64), math.nan)
    fused_TXC[:, 2:8] = call.q_TqC
    turned_qTC = call.q_TqC.transpose(0, 1).contiguous()
    for view_TqC in (fused_TXC[:, 2:8], turned_qTC.transpose(0, 1)):
        assert not view_TqC.is_contiguous()
        assert torch.equal(call.run(device, q_TqC=view_TqC)[0], call.run(device)[0])


@pytest.mark.parametrize("size", [1.0, 1e4, 1e9, 1e15])
def test_large_scores_do_not_overflow_and_weights_sum_to_one(size, device):
    call = Case([[39], [300]]).call()
    ones = call._replace(q_TqC=call.q_TqC.sign() * size, kv_PADkC=call.kv_PADkC.sign())
    ones.kv_PADkC[:, 1] = 1
    with split_at(128):
        out_TqC, _ = ones.run(device)
    torch.testing.assert_close(out_TqC, torch.ones_like(out_TqC), rtol=1e-6, atol=0)


def test_pools_of_more_than_2_to_the_31_elements_are_read_and_written(device):
    block_elements = 2 * 16 * 64
    kv_PADkC = torch.empty(2**31 // block_elements + 2, 2, 16, 1, 64, dtype=torch.int8, device=device)
    scales_PADk = torch.empty(kv_PADkC.shape[:4], device=device)
    last = len(kv_PADkC) - 1
    rows_TkC = torch.randn(2, 2, 1, 64, generator=seeded(1)).to(device)
    slots_T = torch.tensor([last * 16, last * 16 + 1], device=device)
    write_kv(*rows_TkC, kv_PADkC, scales_PADk, slots_T)
    out_TqC, _ = partial_attention(
        torch.zeros(1, 1, 64, device=device),
        kv_PADkC,
        scales_PADk,
        torch.tensor([last], device=device),
        torch.tensor([[0, 1]], device=device),
        torch.tensor([0, 1], device=device),
        torch.tensor([2], device=device),
        1.0,
        64,
        max_rows=1,
        most_tokens=2,
    )
    torch.testing.assert_close(out_TqC[0, 0], rows_TkC[1].mean(0)[0], rtol=0, atol=0.02)


def random_states(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """out_NTQC and lse_NTQ, of which some shards are empty: NaN and -inf. The first row has no other."""
    generator = seeded(seed)
    out_NTQC, lse_NTQ = torch.randn(shape, generator=generator), torch.randn(shape[:3], generator=generator) * 4
    empty_NTQ = torch.rand(shape[:3], generator=generator) < 0.4
    empty_NTQ[:, :1] = True
    return out_NTQC.masked_fill(empty_NTQ.unsqueeze(-1), math.nan).to(dtype), lse_NTQ.masked_fill(empty_NTQ, -math.inf)


def merged(out_NTQC: Tensor, lse_NTQ: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    out_TQC, lse_TQ = merge_states(out_NTQC.to(device), lse_NTQ.to(device))
    assert (out_TQC.dtype, lse_TQ.dtype) == (out_NTQC.dtype, lse_NTQ.dtype)
    return out_TQC.cpu(), lse_TQ.cpu()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 2, 8), (4, 7, 3, 24), (8, 5, 4, 128), (33, 2, 3, 512), (3, 0, 2, 8)], ids=str)
def test_merge_equals_the_reference(shape, dtype, device):
    out_NTQC, lse_NTQ = random_states(shape, dtype)
    out_TQC, lse_TQ = merged(out_NTQC, lse_NTQ, device)
    expected_TQC, expected_lse_TQ = reference.merge_states(out_NTQC.double(), lse_NTQ.double())
    # Sums of at most 33 terms and two roundings of the weights in float32, then one rounding to the dtype.
    spread_TQC, _ = reference.merge_states(out_NTQC.double().abs(), lse_NTQ.double())
    assert_within(out_TQC, expected_TQC, 2**-20 * spread_TQC + ROUNDING[dtype] * expected_TQC.abs())
    assert_within(lse_TQ, expected_lse_TQ, 2**-22 * (1 + expected_lse_TQ.abs().nan_to_num(posinf=0)))
    assert torch.equal(out_TQC[:1], torch.zeros_like(out_TQC[:1]))


@pytest.mark.parametrize("lse_dtype", FLOATS, ids=str)
def test_merge_takes_any_dtype_of_lse_and_strided_states(lse_dtype, device):
    out_NTQC, lse_NTQ = random_states((4, 6, 2, 32), torch.float32)
    lse_NTQ = lse_NTQ.to(lse_dtype)
    expected_TQC, expected_lse_TQ = reference.merge_states(out_NTQC, lse_NTQ)
    out_NQTC, lse_NQT = out_NTQC.transpose(1, 2).contiguous(), lse_NTQ.transpose(1, 2).contiguous()
    out_TQC, lse_TQ = merged(out_NQTC.transpose(1, 2), lse_NQT.transpose(1, 2), device)
    torch.testing.assert_close(out_TQC, expected_TQC, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse_TQ, expected_lse_TQ, rtol=torch.finfo(lse_dtype).eps, atol=1e-6)


def test_a_merge_that_read_an_empty_shard_would_see_its_poison(device):
    out_NTQC, lse_NTQ = torch.randn(4, 5, 2, 32, generator=seeded(3)), torch.zeros(4, 5, 2)
    lse_NTQ[2] = -math.inf
    out_NTQC[2] = math.nan
    assert (lse_NTQ.softmax(0).unsqueeze(-1) * out_NTQC).sum(0).isnan().all()
    assert merged(out_NTQC, lse_NTQ, device)[0].isfinite().all()
    lse_NTQ[2] = -100.0
    assert merged(out_NTQC, lse_NTQ, device)[0].isnan().all()


def test_merge_sums_in_rank_order(device):
    out_NTQC = torch.randn(16, 9, 4, 64, generator=seeded(4))
    sums = [torch.zeros(9, 4, 64), torch.zeros(9, 4, 64)]
    for rank in range(16):
        sums[0] += out_NTQC[rank]
        sums[1] += out_NTQC[15 - rank]
    # Weights of equal LSEs are 1 and their sum is 16, exactly: what remains is the order of a sum of float32.
    out_TQC, lse_TQ = merged(out_NTQC, torch.full((16, 9, 4), 3.0), device)
    assert torch.equal(out_TQC, sums[0] / 16)
    assert not torch.equal(out_TQC, sums[1] / 16)
    torch.testing.assert_close(lse_TQ, torch.full((9, 4), 3 + math.log(16)))


@pytest.mark.parametrize("shift", [1e4, -1e4, 3e38, -3e38])
def test_merge_of_huge_and_tiny_lse_stays_finite(shift, device):
    out_NTQC, lse_NTQ = torch.randn(4, 3, 2, 32, generator=seeded(5)), torch.randn(4, 3, 2, generator=seeded(6))
    lse_NTQ = lse_NTQ.round() + shift
    expected_TQC, expected_lse_TQ = reference.merge_states(out_NTQC, lse_NTQ)
    out_TQC, lse_TQ = merged(out_NTQC, lse_NTQ, device)
    torch.testing.assert_close(out_TQC, expected_TQC, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse_TQ, expected_lse_TQ, rtol=1e-6, atol=0)


def written(
    k_TkC: Tensor, v_TkC: Tensor | None, pool_dtype: torch.dtype, slots: list[int], block_tokens: int, device
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The pool after the write, its scales, and which of (P, D) changed: no bit of the others may."""
    size = 5, 1 if v_TkC is None else 2, block_tokens, k_TkC.shape[1]
    kv_PADkC = torch.randint(0, 256, (*size, k_TkC.shape[2] * pool_dtype.itemsize), generator=seeded(9))
    kv_PADkC = kv_PADkC.to(torch.uint8).view(pool_dtype)
    scales_PADk = torch.full(size, math.nan) if pool_dtype in LARGEST else None
    before_PADkC = kv_PADkC.clone()
    after_PADkC = kv_PADkC.to(device)
    after_scales_PADk = None if scales_PADk is None else scales_PADk.to(device)
    rows = [None if rows_TkC is None else rows_TkC.to(device) for rows_TkC in (k_TkC, v_TkC)]
    write_kv(*rows, after_PADkC, after_scales_PADk, torch.tensor(slots, device=device))
    owned_PD = torch.zeros(5 * block_tokens, dtype=torch.bool)
    owned_PD[[slot for slot in slots if slot >= 0]] = True
    owned_PD = owned_PD.view(5, block_tokens)
    untouched_PADkC = ~owned_PD[:, None, :, None, None]
    after_PADkC = after_PADkC.cpu()
    assert ((bits(after_PADkC) == bits(before_PADkC)) | ~untouched_PADkC.expand(*size, 1)).all()
    if after_scales_PADk is not None:
        after_scales_PADk = after_scales_PADk.cpu()
        assert torch.equal(after_scales_PADk.isfinite(), owned_PD[:, None, :, None].expand(size))
    return after_PADkC, after_scales_PADk, owned_PD


def fused_rows(rows: int, kv_heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k_TkC and v_TkC as slices of a fused projection, sizes from 1e-4 to 1e4."""
    fused_TXC = torch.randn(rows, 2 * kv_heads + 1, channels, generator=seeded(7))
    sizes_TX1 = 10 ** (torch.rand(rows, 2 * kv_heads + 1, 1, generator=seeded(8)) * 8 - 4)
    return (fused_TXC * sizes_TX1).to(dtype).split((1, kv_heads, kv_heads), dim=1)[1:]


SLOTS = [3, -1, 11, 0, -1, 19, 7]


@pytest.mark.parametrize("pool_dtype", POOLS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("channels", "arrays"), [(24, 2), (64, 2), (80, 1)])
def test_write_stores_owned_rows_and_nothing_else(dtype, pool_dtype, channels, arrays, device):
    k_TkC, v_TkC = fused_rows(7, 2, channels, dtype)
    kv_PADkC, scales_PADk, _ = written(k_TkC, v_TkC if arrays == 2 else None, pool_dtype, SLOTS, 4, device)
    for array, rows_TkC in zip(range(arrays), (k_TkC, v_TkC), strict=False):
        for row, slot in enumerate(SLOTS):
            if slot < 0:
                continue
            place = slot // 4, array, slot % 4
            if scales_PADk is None:
                assert torch.equal(bits(kv_PADkC[place]), bits(rows_TkC[row].to(pool_dtype)))
                continue
            row_kC = rows_TkC[row].float()
            scale_k1 = row_kC.abs().amax(-1, keepdim=True) / LARGEST[pool_dtype]
            assert torch.equal(scales_PADk[place], scale_k1[:, 0])
            quotient_kC = row_kC / scale_k1
            rounded_kC = quotient_kC.round() if pool_dtype == torch.int8 else quotient_kC
            assert torch.equal(bits(kv_PADkC[place]), bits(rounded_kC.to(pool_dtype)))
            # int8: half a step. float8_e4m3fn: four bits of significand, of which half the last, and steps of 2 ** -9.
            error_kC = (kv_PADkC[place].double() * scale_k1.double() - row_kC).abs()
            bound_kC = scale_k1 / 2 if pool_dtype == torch.int8 else (row_kC.abs() / 16).maximum(scale_k1 / 1024)
            assert (error_kC <= bound_kC * (1 + 1e-5)).all()


def test_int8_halves_go_to_even_and_the_largest_value_to_127(device):
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5]).view(1, 1, 8)
    kv_PADkC, scales_PADk, _ = written(row, -row, torch.int8, [2], 4, device)
    assert kv_PADkC[0, 0, 2, 0].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]
    assert kv_PADkC[0, 1, 2, 0].tolist() == [-127, 0, -2, -2, 0, 2, 126, -126]
    assert scales_PADk[0, :, 2, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pool_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-44, 8e-43, 1e-38, 3e38])
def test_rows_of_zeros_and_of_extreme_values_stay_finite(size, pool_dtype, device):
    row = torch.tensor([1.0, -1.0, 0.5, 0.0]).view(1, 1, 4) * size
    kv_PADkC, scales_PADk, _ = written(row, row, pool_dtype, [2], 4, device)
    stored_C = kv_PADkC[0, 0, 2, 0].float()
    assert stored_C.isfinite().all()
    assert scales_PADk[0, 0, 2, 0].isfinite()
    assert (stored_C * row.view(4).sign() >= 0).all()
    if size == 0:
        assert (stored_C == 0).all()
        assert scales_PADk[0, 0, 2, 0] == 0
    if size > 1e-40:
        torch.testing.assert_close(stored_C * scales_PADk[0, 0, 2, 0], row.view(4), rtol=0, atol=size / 127)


@pytest.mark.parametrize("rows", [0, 4])
def test_a_rank_that_owns_no_row_writes_nothing(rows, device):
    k_TkC, v_TkC = fused_rows(rows, 2, 16, torch.float32)
    written(k_TkC, v_TkC, torch.int8, [-1] * rows, 4, device)


# What only a device can show


def on_device(call: Call) -> Call:
    return Call(*[value.to("cuda") if torch.is_tensor(value) else value for value in call])


def mixed_call(limits: list[list[int]], seed: int = 0) -> Call:
    dtype = torch.bfloat16
    return on_device(Case(limits, 2, 8, 128, 128, dtype=dtype, pool_dtype=dtype, seed=seed).call())


@on_cuda_alone
def test_nothing_is_read_back_from_the_device(device):
    call = mixed_call([[300], [*range(40)], [500, 501]])
    with split_at(256):
        partial_attention(*call)  # compiles and loads
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            partial_attention(*call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_cuda_alone
def test_a_graph_replays_with_other_tokens_rows_and_limits(device):
    """Captured over two decodes and a chunk; replayed where the chunk is a decode and the decodes see less."""
    captured = mixed_call([[300], [*range(460, 500)], [500, 501]])
    inputs = Call(*[value.clone() if torch.is_tensor(value) else value for value in captured])
    other = captured._replace(
        row_starts_B=torch.tensor([0, 3, 4, 43], device="cuda"),
        limits_T=torch.tensor([1, 0, 299, 77, *range(261, 300)], device="cuda"),  # of 500, 501 and 300 tokens
        extents_B2=captured.extents_B2.flip(0).contiguous(),
        q_TqC=captured.q_TqC.flip(0).contiguous(),
        kv_PADkC=captured.kv_PADkC.nan_to_num(),
    )
    with split_at(256):
        partial_attention(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TqC, lse_Tq = partial_attention(*inputs)
        for call in (captured, other, captured):
            for mine, value in zip(inputs, call, strict=True):
                if torch.is_tensor(mine):
                    mine.copy_(value)
            out_TqC.fill_(torch.nan)
            graph.replay()
            expected_TqV, expected_lse_Tq = partial_attention(*call)
            assert torch.equal(bits(out_TqC), bits(expected_TqV))
            assert torch.equal(bits(lse_Tq), bits(expected_lse_Tq))
            assert not out_TqC.isnan().any()


@on_cuda_alone
@pytest.mark.parametrize("repeat", range(3))
def test_the_same_inputs_give_the_same_bits(repeat, device):
    call = mixed_call([[9000], [*range(3000, 3100)], [5000, 5001]], seed=repeat)
    first = partial_attention(*call)
    for _ in range(5):
        again = partial_attention(*call)
        assert torch.equal(bits(again[0]), bits(first[0]))
        assert torch.equal(bits(again[1]), bits(first[1]))
