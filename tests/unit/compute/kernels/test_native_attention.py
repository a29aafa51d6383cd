"""The native CPU kernels of the packed pool: what they store, and attention over what is stored.

Attention is compared with a float64 softmax over the stored numbers, decoded, so that quantisation and arithmetic are
judged apart.
"""

import itertools
import math
import mmap
import random
from dataclasses import dataclass, replace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from block_extents import side_by_side
from longhelix.compute.kernels import (
    ROWS,
    TILES,
    KVFormat,
    KVLayer,
    merge_states,
    native,
    partial_attention,
    reference,
    rotate_and_write,
    write_kv,
)
from longhelix.compute.kernels.numbers import STORED
from packed_pool import (
    BITS,
    LARGEST,
    ROTATED,
    fp8_numbers,
    int4_numbers,
    int4_scales,
    numbers,
    rotated,
    stored,
)

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels"),
]

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Multiplied as integers: queries and weights are, too.
WHOLE = ["int8", "int4"] if native.module is not None and native.module.instruction_set() == "avx512" else []
# Multiplied as pairs of bfloat16: queries and weights are rounded to it.
PAIRS = [name for name in ("bfloat16", "nvfp4", *LARGEST) if name not in WHOLE]
UNIT = 2.0**-24  # half the distance of float32 neighbours at 1: what one rounding may change
PAIR_UNIT = 2.0**-8  # the same of bfloat16
STRIP = 256  # tokens whose weights have one largest


@dataclass(frozen=True)
class Shape:
    """k KV heads, query heads per KV head, channels of keys and values, D tokens of a KV block, and the KV dtype."""

    kv_heads: int = 2
    group: int = 3
    key_size: int = 32
    value_size: int = 32
    block_tokens: int = 16
    kv_dtype: str = "float32"
    shared: bool = False
    rounded: bool = False

    def format(self, packed: bool = True) -> KVFormat:
        sizes = self.block_tokens, self.kv_heads, self.key_size, self.value_size
        return KVFormat(self.kv_dtype, *sizes, TILES if packed else ROWS, self.shared, self.rounded)

    @property
    def whole_step(self) -> float:
        """How far rounding to an integer moves a number, where the row's largest is 1; 0 where none is rounded so. Half
        a step of the integers, and the float32 roundings on the way to it."""
        return 0.51 / (127 if self.rounded else 127 * 128) if self.kv_dtype in WHOLE else 0.0

    def poisoned(self, num_blocks: int) -> KVLayer:
        """A pool whose every float, and every scale, is NaN."""
        layer = self.format().new_layer(num_blocks, CPU)
        layer.values.fill_(0xFF)
        return layer


def bits(values: Tensor) -> Tensor:
    """The bit pattern, so that NaN equals itself and -0 differs from 0."""
    return values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------------------------------------
# What is stored.
# ----------------------------------------------------------------------------------------------------------------------

head_sizes = st.sampled_from(range(16, native.LONGEST_HEAD + 1, 16))
block_sizes = st.sampled_from([16, 32, 128])
kv_dtypes = st.sampled_from([*BITS])
dtypes = st.sampled_from(DTYPES)


def vectors(rows: int, heads: int, size: int, seed: int) -> Tensor:
    """Vectors of sizes from 2^-12 to 2^6, some of them zeros, some of one large number among small ones."""
    generator = seeded(seed)
    values_TkC = torch.randn(rows, heads, size, generator=generator)
    values_TkC *= 2.0 ** torch.randint(-12, 7, (rows, heads, 1), generator=generator)
    kind_Tk = torch.randint(0, 8, (rows, heads), generator=generator)
    values_TkC[..., 0] *= 1 + 99 * (kind_Tk == 0)
    return values_TkC.masked_fill_((kind_Tk == 1).unsqueeze(-1), 0.0)


def assert_stored(kept: np.ndarray, scale: np.ndarray | None, given_TkC: Tensor, kv_dtype: str) -> None:
    """`kept` (T, k, C): the numbers of one array that stand for the rows, before their scales (T, k, 1)."""
    wanted = given_TkC.double().numpy()
    if scale is None:
        exact = given_TkC.to(getattr(torch, kv_dtype)).double().numpy()
        np.testing.assert_array_equal(kept, exact)
        return
    most = np.abs(wanted).max(-1, keepdims=True)
    # The scale is the quotient, rounded up to one of bfloat16's 256 steps between powers of two.
    assert (scale * LARGEST[kv_dtype] >= most * (1 - UNIT)).all()
    assert (scale * LARGEST[kv_dtype] <= most * (1 + 2.0**-7 + UNIT)).all()
    assert (np.abs(kept) <= LARGEST[kv_dtype]).all()
    # To nearest: half a step of integers; of fp8, half of 1/8 of the power of two below, and of 2^-9 near zero.
    half = 0.5 * scale if kv_dtype != "fp8" else np.maximum(np.abs(wanted) / 16, scale * 2.0**-10)
    # Dividing by the scale is two roundings of float32.
    assert (np.abs(kept * scale - wanted) <= half * (1 + 2 * UNIT) + 2 * UNIT * np.abs(wanted)).all()


def assert_stored_as_int4(kept: np.ndarray, scale: np.ndarray, given_TkC: Tensor) -> None:
    """The nearest numbers, by the scale of three that has the smallest squared error."""
    given = given_TkC.float().numpy()
    allowed = int4_scales(given)
    assert (scale == allowed).any(0).all()
    quotients = np.divide(given, scale, out=np.zeros_like(kept), where=scale != 0)
    # Dividing by the scale is two roundings of float32.
    assert (np.abs(kept - quotients.clip(-8, 7)) <= 0.5 + 16 * UNIT).all()
    errors = np.square(int4_numbers(given.astype(np.float64), allowed) * allowed - given).sum(-1)
    error = np.square(kept * scale - given).sum(-1)
    # Sums of float32: of scales that are as good, another may be chosen.
    size = np.square(given.astype(np.float64)).sum(-1)
    assert (error <= errors.min(0) + 2.0**-18 * size).all()


def assert_stored_as_nvfp4(codes_TkC: np.ndarray, scales_TkG: np.ndarray, given_TkC: Tensor) -> None:
    """What rows of a GPU hold, bit for bit; and to half a step between 4 and 6, or to what is cut off above 6."""
    elements_TkX, sides_TkG = STORED["nvfp4"].encode(given_TkC)
    blocks = *codes_TkC.shape[:2], codes_TkC.shape[2] // 16, 16
    np.testing.assert_array_equal(scales_TkG, sides_TkG.numpy())
    low_TkGB, high_TkGB = np.split(codes_TkC.reshape(blocks), 2, axis=-1)
    np.testing.assert_array_equal((low_TkGB | high_TkGB << 4).reshape(elements_TkX.shape), elements_TkX.numpy())
    wanted_TkGB = given_TkC.double().numpy().reshape(blocks)
    found_TkC = STORED["nvfp4"].decode(elements_TkX, sides_TkG).double().numpy()
    most_TkG1 = np.abs(wanted_TkGB).max(-1, keepdims=True)
    # A scale is rounded by 1/16. Where it is one of the smallest, 2^-9 of at least 128, it is rounded by half of that.
    least_Tk11 = np.abs(wanted_TkGB).max((-2, -1), keepdims=True) * 2.0**-16
    assert (np.abs(found_TkC.reshape(wanted_TkGB.shape) - wanted_TkGB) <= most_TkG1 / 6 * 17 / 16 + least_Tk11).all()


@given(
    shape=st.builds(Shape, st.integers(1, 4), st.just(1), head_sizes, head_sizes, block_sizes, kv_dtypes),
    dtype=dtypes,
    owned=st.lists(st.booleans(), max_size=40),
    seed=st.integers(0, 2**31),
)
def test_rows_are_stored_at_their_slots_to_half_a_step_and_nothing_else_is_touched(shape, dtype, owned, seed):
    layer = shape.poisoned(3)
    places = random.Random(seed).sample(range(3 * shape.block_tokens), sum(owned))
    slots = [places.pop() if mine else -1 for mine in owned]
    # Rows are slices of a fused projection, as in the models.
    width = shape.kv_heads * (shape.key_size + shape.value_size)
    fused_TX = torch.full((len(slots), 7 + width), math.nan, dtype=dtype)
    k_TkC, v_TkC = fused_TX[:, 7:].split((shape.kv_heads * shape.key_size, shape.kv_heads * shape.value_size), dim=1)
    k_TkC, v_TkC = k_TkC.unflatten(1, (shape.kv_heads, -1)), v_TkC.unflatten(1, (shape.kv_heads, -1))
    k_TkC.copy_(vectors(*k_TkC.shape, seed))
    v_TkC.copy_(vectors(*v_TkC.shape, seed + 1))
    write_kv(k_TkC, v_TkC, layer, torch.tensor(slots, dtype=torch.int64))
    pool = stored(layer)
    rows = [row for row, slot in enumerate(slots) if slot >= 0]
    block, offset = np.divmod([slots[row] for row in rows], shape.block_tokens) if rows else (np.zeros(0, int),) * 2
    narrow = shape.kv_dtype in (*LARGEST, "nvfp4")
    for codes, scales, given_TkC in (
        (pool.keys, pool.key_scales, k_TkC),
        (pool.values, pool.value_scales, v_TkC),
    ):
        vectors_TkC = given_TkC[rows].float()
        if shape.kv_dtype in ROTATED and given_TkC is k_TkC:
            vectors_TkC = torch.from_numpy(rotated(vectors_TkC.numpy()))
        if shape.kv_dtype == "nvfp4":
            assert_stored_as_nvfp4(codes[block, offset], scales[block, offset], vectors_TkC)
            continue
        kept = numbers(codes[block, offset], shape.kv_dtype)
        if shape.kv_dtype == "int4":
            assert_stored_as_int4(kept, pool.scales(scales[block, offset]), vectors_TkC)
            continue
        assert_stored(kept, pool.scales(scales[block, offset]) if narrow else None, given_TkC[rows], shape.kv_dtype)
    untouched_PD = np.ones((3, shape.block_tokens), bool)
    untouched_PD[block, offset] = False
    for part in pool.parts()[: 4 if narrow else 2]:
        codes_of_four_bits = BITS[shape.kv_dtype] == 4 and (part is pool.keys or part is pool.values)
        ones = 15 if codes_of_four_bits else np.iinfo(part.dtype).max
        assert (part[untouched_PD] == ones).all()


def test_blocks_of_nvfp4_that_are_far_below_the_vector_are_stored_as_the_reference_stores_them():
    """Their scales are 0 if the largest number becomes 6, and the smallest one if it becomes 4, or 0 as well."""
    layer, v_TkC = Shape(1, 1, 32, 32, 16, "nvfp4").poisoned(1), torch.zeros(4, 1, 32)
    v_TkC[:, 0, 0] = 1000.0
    v_TkC[:, 0, 16] = torch.tensor([0.005, 0.0055, 0.003, 0.01])
    write_kv(torch.zeros(4, 1, 32), v_TkC, layer, torch.arange(4))
    pool = stored(layer)
    assert_stored_as_nvfp4(pool.values[0, :4], pool.value_scales[0, :4], v_TkC)


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_every_code_of_narrow_numbers_is_stored_and_read_as_what_it_stands_for(kv_dtype):
    """Vectors whose scale is exactly 1, of every number that the dtype has; each is read back as a score."""
    shape = Shape(kv_heads=1, group=1, key_size=16, value_size=16, kv_dtype=kv_dtype)
    every = {
        "int8": np.arange(-127.0, 128.0),
        "int4": np.arange(-8.0, 8.0),
        "fp8": np.unique(fp8_numbers(np.delete(np.arange(256), [127, 255]))),
    }[kv_dtype]
    for number in every:
        rows_TkC = torch.zeros(1, 1, 16)
        rows_TkC[0, 0, :2] = torch.tensor([LARGEST[kv_dtype], number])
        q_TqC = torch.zeros(1, 1, 16)
        q_TqC[0, 0, 1] = 1
        k_TkC = rows_TkC
        if kv_dtype in ROTATED:  # the rotation is its own inverse, and of 16 channels exact
            k_TkC, q_TqC = (torch.from_numpy(rotated(vectors.numpy())) for vectors in (rows_TkC, q_TqC))
        layer = shape.poisoned(1)
        write_kv(k_TkC, rows_TkC, layer, torch.tensor([5]))
        keys, values = (side[0, 5, 0, :2].tolist() for side in stored(layer).decoded())
        assert keys == values == [LARGEST[kv_dtype], number]
        write_kv(k_TkC, rows_TkC, layer, torch.tensor([0]))
        table = torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, 1]), torch.tensor([1])
        result = partial_attention(q_TqC, layer, *table, scale=1.0)
        # A weight that is an integer has a scale, which is two roundings of float32, and times that integer a third.
        few = 3 * UNIT if kv_dtype in WHOLE else 0.0
        assert result[0][0, 0, :2].tolist() == pytest.approx([LARGEST[kv_dtype], number], rel=few, abs=0)
        # The score times log2(e) and back again: a few roundings of float32.
        assert float(result[1]) == pytest.approx(number, rel=8 * UNIT)


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-133, 2.0**-127, 2.0**-126])
@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_vectors_whose_scale_would_be_below_the_normal_numbers_are_zeros(kv_dtype, scale):
    shape = Shape(kv_heads=1, key_size=16, value_size=16, kv_dtype=kv_dtype)
    rows_TkC = torch.zeros(1, 1, 16)
    rows_TkC[0, 0, :3] = torch.tensor([LARGEST[kv_dtype], -3, 1]) * scale
    layer = shape.poisoned(1)
    k_TkC = torch.from_numpy(rotated(rows_TkC.numpy())) if kv_dtype in ROTATED else rows_TkC  # of 16 channels, exact
    write_kv(k_TkC, rows_TkC, layer, torch.tensor([5]))
    kept_TkC = rows_TkC if scale >= 2.0**-126 else torch.zeros(1, 1, 16)
    for side in stored(layer).decoded():
        np.testing.assert_array_equal(side[0, 5], kept_TkC[0].numpy())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_broken_numbers_are_seen_and_not_rounded_away(kv_dtype, poison):
    """A key or value that is no number makes what attends to it no number either, and nothing beside it."""
    shape = Shape(kv_heads=2, group=3, key_size=16, value_size=16, kv_dtype=kv_dtype)
    for broken_key in (False, True):
        if broken_key and kv_dtype not in LARGEST and not math.isnan(poison):
            continue  # an infinite key's score is infinite: its weight may well be 0
        layer = shape.poisoned(2)
        k_TkC, v_TkC = torch.ones(20, 2, 16), torch.ones(20, 2, 16)
        (k_TkC if broken_key else v_TkC)[7, 1, 3] = poison
        write_kv(k_TkC, v_TkC, layer, torch.arange(20))
        table = torch.tensor([0, 1]), torch.tensor([[0, 2]]), torch.tensor([0, 1]), torch.tensor([20])
        out_TqC, lse_Tq = partial_attention(torch.ones(1, 6, 16), layer, *table, 0.25)
        # A scale is rounded up by a step of bfloat16 at most.
        torch.testing.assert_close(out_TqC[:, :3], torch.ones(1, 3, 16), rtol=2 * PAIR_UNIT, atol=0)
        channels = slice(None) if broken_key or kv_dtype in LARGEST else 3
        assert not out_TqC[:, 3:, channels].isfinite().any()
        assert lse_Tq[:, :3].isfinite().all()
        assert lse_Tq[:, 3:].isfinite().all() != broken_key


def test_pools_of_numbers_that_the_kernels_do_not_know_are_refused():
    with pytest.raises(ValueError, match="a pool does not hold numbers of this type"):
        native.module.Pool(0, native.module.Number.int64, 1, 1, 1, 16, 16, False, False)


def test_rows_of_numbers_that_the_kernels_do_not_know_are_refused():
    layer = Shape(kv_heads=1, group=1, key_size=16, value_size=16).poisoned(1)
    rows_TkC = torch.ones(1, 1, 16, dtype=torch.float64)
    table = torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        write_kv(rows_TkC, rows_TkC, layer, torch.tensor([0]))
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        partial_attention(rows_TkC, layer, *table, scale=1.0)


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_numbers_in_the_middle_of_two_codes_go_to_the_even_one(kv_dtype):
    shape = Shape(kv_heads=1, key_size=16, value_size=16, kv_dtype=kv_dtype)
    if kv_dtype == "fp8":
        every = np.unique(fp8_numbers(np.arange(127)))
        middles_N = torch.from_numpy((every[1:] + every[:-1]) / 2).float()
        expected_N = middles_N.to(torch.float8_e4m3fn).float()
    else:
        middles_N = torch.arange(LARGEST[kv_dtype]) + 0.5
        expected_N = middles_N.round()
    count = len(middles_N)
    rows_TkC = torch.zeros(count, 1, 16)
    # The largest number makes the scale exactly 1.
    rows_TkC[:, 0, 0], rows_TkC[:, 0, 3], rows_TkC[:, 0, 14] = LARGEST[kv_dtype], middles_N, -middles_N
    layer = shape.poisoned(-(-count // 16))
    write_kv(rows_TkC, rows_TkC, layer, torch.arange(count))
    for side in stored(layer).decoded():
        kept_TC = side.reshape(-1, 16)[:count]
        np.testing.assert_array_equal(kept_TC[:, 3], expected_N.numpy())
        np.testing.assert_array_equal(kept_TC[:, 14], -expected_N.numpy())


@pytest.mark.parametrize("kv_dtype", BITS)
def test_tokens_that_share_a_tile_are_written_one_by_one_as_if_at_once(kv_dtype):
    shape = Shape(kv_heads=2, key_size=48, value_size=80, kv_dtype=kv_dtype, block_tokens=32)
    k_TkC, v_TkC = vectors(64, 2, 48, 1), vectors(64, 2, 80, 2)
    slots_T = torch.randperm(64, generator=seeded(3))
    at_once, singly = shape.poisoned(2), shape.poisoned(2)
    write_kv(k_TkC, v_TkC, at_once, slots_T)
    for row in range(64):
        write_kv(k_TkC[row : row + 1], v_TkC[row : row + 1], singly, slots_T[row : row + 1])
    assert torch.equal(singly.values, at_once.values)
    write_kv(k_TkC.flip(0), v_TkC.flip(0), singly, slots_T.flip(0))
    assert torch.equal(singly.values, at_once.values)


# ----------------------------------------------------------------------------------------------------------------------
# Rotation and write in one.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Rotation:
    """The arguments of `rotate_and_write` but for the layer."""

    qkv_TX: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    angles_TR: Tensor
    slots_T: Tensor
    norm_eps: float = 1e-3

    def run(self, layer: KVLayer) -> Tensor:
        tables = self.angles_TR.cos(), self.angles_TR.sin()
        return rotate_and_write(self.qkv_TX, self.q_norm, self.k_norm, self.norm_eps, *tables, layer, self.slots_T)


def make_rotation(
    rows: int,
    query_heads: int,
    kv_heads: int,
    size: int,
    norms: tuple[bool, bool],
    dtype: torch.dtype,
    seed: int,
    share: float = 1.0,
) -> Rotation:
    """Rows are the right part of wider ones; every third belongs to another rank. share: of the channels, rotated."""
    generator = seeded(seed)
    wide_TX = torch.full((rows, 5 + (query_heads + 2 * kv_heads) * size), math.nan, dtype=dtype)
    qkv_TX = wide_TX[:, 5:]
    qkv_TX.copy_(torch.randn(qkv_TX.shape, generator=generator))
    weights = [(1 + torch.randn(size, generator=generator) / 4).to(dtype) if norm else None for norm in norms]
    slots_T = torch.randperm(3 * 16, generator=generator)[:rows]
    slots_T[::3] = -1
    pairs = int(size // 2 * share)
    return Rotation(qkv_TX, *weights, (torch.rand(rows, pairs, generator=generator) - 0.5) * 6.25, slots_T)


def turned(heads_TXC: Tensor, norm_C: Tensor | None, eps: float, angles_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Float64: heads after their norm and their rotation, and the length of each rotated pair, or other channel."""
    heads_TXC = heads_TXC.double()
    if norm_C is not None:
        heads_TXC = heads_TXC * (heads_TXC.square().mean(-1, keepdim=True) + eps) ** -0.5 * norm_C.double()
    turning_TXC, others_TXC = heads_TXC.tensor_split([2 * angles_TR.shape[1]], dim=-1)
    pairs_TXR = torch.complex(*turning_TXC.chunk(2, dim=-1))
    result_TXR = pairs_TXR * torch.exp(1j * angles_TR.double()).unsqueeze(1)
    result_TXC = torch.cat((result_TXR.real, result_TXR.imag, others_TXC), dim=-1)
    return result_TXC, torch.cat((pairs_TXR.abs().repeat(1, 1, 2), others_TXC.abs()), dim=-1)


rotations = given(
    heads=st.tuples(st.integers(1, 9), st.integers(1, 4)),
    size=head_sizes,
    norms=st.tuples(st.booleans(), st.booleans()),
    dtype=dtypes,
    kv_dtype=kv_dtypes,
    rows=st.integers(0, 40),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([1.0, 0.5, 0.25, 0.0]),
)


@rotations
def test_queries_are_normalised_and_rotated(heads, size, norms, dtype, kv_dtype, rows, seed, share):
    query_heads, kv_heads = heads
    rotation = make_rotation(rows, query_heads, kv_heads, size, norms, dtype, seed, share)
    layer = Shape(kv_heads, 1, size, size, 16, kv_dtype).poisoned(3)
    source = rotation.qkv_TX.clone()
    q_TqC = rotation.run(layer)
    assert torch.equal(rotation.qkv_TX, source)
    assert (q_TqC.shape, q_TqC.dtype) == ((rows, query_heads, size), dtype)
    raw_TqC = source[:, : query_heads * size].unflatten(1, (query_heads, size))
    expected_TqC, length_TqC = turned(raw_TqC, rotation.q_norm, rotation.norm_eps, rotation.angles_TR)
    # A norm rounds before and after its weight, the rotation once; each moves a pair by half a unit of its length.
    # Inside, float32: sine, cosine, products and their sum, and a norm's sum of `size` squares in sixteen lanes.
    bound = (3 if norms[0] else 1) * torch.finfo(dtype).eps / 2 + (16 + size / 16) * UNIT
    # Half a unit of float16 near zero is 2^-25, whatever the number; the others have no such floor here.
    assert bool(((q_TqC.double() - expected_TqC).abs() <= bound * length_TqC + 2 * 2.0**-25).all())
    *_, k_TkC, v_TkC = tables = reference.rotate(
        source, kv_heads, size, rotation.q_norm, rotation.k_norm, rotation.norm_eps,
        rotation.angles_TR.cos(), rotation.angles_TR.sin(),
    )  # fmt: skip
    assert bool(((q_TqC - tables[0]).double().abs() <= 2 * (bound * length_TqC + 2 * 2.0**-25)).all())
    assert k_TkC.shape == v_TkC.shape == (rows, kv_heads, size)


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.99), (torch.float16, 0.95)])
def test_a_rotation_rounds_at_the_same_steps_as_the_reference(dtype, least):
    """Sums in another order differ by some 2^-22, which moves one rounding in 2^14, or of float16 in 2^11, to the other
    side; a step rounded elsewhere would change half of all results."""
    rotation = make_rotation(40, 6, 2, 64, (True, True), dtype, 28)
    shape = Shape(2, 1, 64, 64, 16, "float32")
    layer = shape.poisoned(3)
    q_TqC = rotation.run(layer)
    tables = rotation.angles_TR.cos(), rotation.angles_TR.sin()
    expected_q_TqC, k_TkC, _ = reference.rotate(rotation.qkv_TX, 2, 64, rotation.q_norm, rotation.k_norm, 1e-3, *tables)
    assert (q_TqC == expected_q_TqC).float().mean() > least
    mine_T = rotation.slots_T >= 0
    kept_TkC = stored(layer).decoded()[0].reshape(-1, 2, 64)[rotation.slots_T[mine_T]]
    assert (kept_TkC == k_TkC[mine_T].double().numpy()).mean() > least


@rotations
def test_keys_are_rotated_as_queries_are_and_written_as_by_a_write(
    heads, size, norms, dtype, kv_dtype, rows, seed, share
):
    """The key heads once more as queries: what comes back, written, makes the same pool bit for bit."""
    _, kv_heads = heads
    shape = Shape(kv_heads, 1, size, size, 16, kv_dtype)
    rotation = make_rotation(rows, kv_heads, kv_heads, size, (norms[1], norms[1]), dtype, seed, share)
    width = kv_heads * size
    rotation.qkv_TX[:, :width] = rotation.qkv_TX[:, width : 2 * width]
    rotation.q_norm = rotation.k_norm
    fused, separate = shape.poisoned(3), shape.poisoned(3)
    q_TqC = rotation.run(fused)
    v_TkC = rotation.qkv_TX[:, 2 * width :].unflatten(1, (kv_heads, size))
    write_kv(q_TqC, v_TkC, separate, rotation.slots_T)
    assert torch.equal(fused.values, separate.values)
    assert rows < 2 or not torch.equal(fused.values, shape.poisoned(3).values)


# ----------------------------------------------------------------------------------------------------------------------
# Attention.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A call, and what its pool holds: `keys[i]`, `values[i]` (S, k, C) of sequence i, decoded, in float64."""

    shape: Shape
    q_TqC: Tensor
    layer: KVLayer
    blocks_X: Tensor
    extents_B2: Tensor
    limits: list[list[int]]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    value_scales: list[np.ndarray]
    scale: float

    def blocks(self, sequence: int) -> Tensor:
        begin, end = self.extents_B2[sequence]
        return self.blocks_X[begin:end]

    @property
    def queries(self) -> Tensor:
        """What keys are multiplied by, before any rounding: rotated where keys are stored rotated."""
        if self.shape.kv_dtype not in ROTATED or self.shape.shared:
            return self.q_TqC
        return torch.from_numpy(rotated(self.q_TqC.float().numpy()))

    def rows(self) -> tuple[Tensor, Tensor]:
        """row_starts_B and limits_T."""
        starts = [0, *itertools.accumulate(map(len, self.limits))]
        return torch.tensor(starts), torch.tensor([*itertools.chain(*self.limits)], dtype=torch.int64)

    def run(self) -> tuple[Tensor, Tensor]:
        return partial_attention(self.q_TqC, self.layer, self.blocks_X, self.extents_B2, *self.rows(), self.scale)

    def part(self, pieces: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
        """Of the same pool, rows [first, last) of some sequences in this order, as one call."""
        starts = self.rows()[0].tolist()
        limits = [self.limits[sequence][first:last] for sequence, first, last in pieces]
        q_TqC = torch.cat([self.q_TqC[starts[at] + first : starts[at] + last] for at, first, last in pieces])
        extents_B2 = self.extents_B2[[sequence for sequence, _, _ in pieces]]
        return replace(self, q_TqC=q_TqC, extents_B2=extents_B2, limits=limits).run()


def make_case(
    shape: Shape,
    limits: list[list[int]],
    seed: int,
    dtype: torch.dtype = torch.float32,
    sharpness: float = 1.0,
    lengths: list[int] | None = None,
) -> Case:
    """Blocks lie in shuffled order; what no key was written to is NaN, and so is what lies between the extents."""
    generator = seeded(seed)
    lengths = [max(rows, default=0) for rows in limits] if lengths is None else lengths
    counts = [-(-length // shape.block_tokens) for length in lengths]
    ids = torch.randperm(sum(counts) + 3, generator=generator)
    layer = shape.poisoned(len(ids))
    table = side_by_side(ids.split([*counts, 3])[:-1], other=int(ids[-1]))
    for mine_J, length in zip(ids.split([*counts, 3]), lengths, strict=False):
        token_S = torch.arange(length)
        slots_S = mine_J[token_S // shape.block_tokens] * shape.block_tokens + token_S % shape.block_tokens
        k_SkC = torch.randn(length, shape.kv_heads, shape.key_size, generator=generator).to(dtype)
        v_SkC = torch.randn(length, shape.kv_heads, shape.value_size, generator=generator).to(dtype)
        write_kv(k_SkC, None if shape.shared else v_SkC, layer, slots_S)
    kept = stored(layer)
    sides = [[], [], []]
    for side, pool in zip(sides, [*kept.decoded(), kept.scales(kept.value_scales)], strict=True):
        for mine_J, length in zip(ids.split([*counts, 3]), lengths, strict=False):
            side.append(pool[mine_J.numpy()].reshape(-1, *pool.shape[2:])[:length])
    rows, heads = sum(map(len, limits)), shape.kv_heads * shape.group
    q_TqC = (torch.randn(rows, heads, shape.key_size, generator=generator) * sharpness).to(dtype)
    return Case(shape, q_TqC, layer, *table, limits, *sides, shape.key_size**-0.5)


@dataclass
class Exact:
    """Float64 attention, and how far arithmetic may be from it."""

    out_TqC: np.ndarray
    lse_Tq: np.ndarray
    size_Tq: np.ndarray  # the largest sum of |q k| * scale over the keys that a row sees
    spread_TqC: np.ndarray  # the weighted mean of |v|
    seen_Tq: np.ndarray
    moved_Tq: np.ndarray  # how far rounding queries to integers moves a score
    coarse_TqC: np.ndarray  # how far rounding weights to integers moves an output


def exact_attention(case: Case, q_TqC: np.ndarray, strip: int = STRIP) -> Exact:
    """Softmax attention row by row, over the decoded keys and values. `strip`: tokens whose weights are rounded by the
    largest of them."""
    rows, heads, _ = q_TqC.shape
    shape = case.shape
    out_TqC, spread_TqC, coarse_TqC = np.zeros((3, rows, heads, shape.value_size))
    lse_Tq, seen_Tq = np.full((rows, heads), -np.inf), np.zeros((rows, heads), int)
    size_Tq, moved_Tq = np.zeros((2, rows, heads))
    row = 0
    for limits, k_SkC, v_SkC, scale_Sk1 in zip(case.limits, case.keys, case.values, case.value_scales, strict=True):
        for limit in limits:
            seen_Tq[row] = limit
            for head in range(heads) if limit else ():
                k_SC, v_SC = k_SkC[:limit, head // shape.group], v_SkC[:limit, head // shape.group]
                score_S = k_SC @ q_TqC[row, head] * case.scale
                weight_S = np.exp(score_S - score_S.max())
                total = weight_S.sum()
                out_TqC[row, head] = weight_S @ v_SC / total
                spread_TqC[row, head] = weight_S @ np.abs(v_SC) / total
                lse_Tq[row, head] = score_S.max() + np.log(total)
                size_Tq[row, head] = (np.abs(k_SC) @ np.abs(q_TqC[row, head])).max() * case.scale
                if not shape.whole_step:
                    continue
                largest = np.abs(q_TqC[row, head]).max()
                moved_Tq[row, head] = np.abs(k_SC).sum(1).max() * largest * case.scale * shape.whole_step
                scale_S1 = np.abs(scale_Sk1[:limit, head // shape.group])
                code_SC = np.divide(np.abs(v_SC), scale_S1, out=np.zeros_like(v_SC), where=scale_S1 != 0)
                for at in range(0, limit, strip):
                    most = (weight_S * scale_S1[:, 0])[at : at + strip].max() * shape.whole_step
                    coarse_TqC[row, head] += most * code_SC[at : at + strip].sum(0) / total
            row += 1
    return Exact(out_TqC, lse_Tq, size_Tq, spread_TqC, seen_Tq, moved_Tq, coarse_TqC)


def chain(length: np.ndarray | int) -> np.ndarray:
    """Relative error of a float32 sum of so many random numbers: at most all roundings one way, and beyond 64 numbers
    eight standard deviations of their sum (Higham and Mary, SIAM J. Sci. Comput. 41, 2019)."""
    return np.minimum(length, 8 * np.sqrt(length)) * UNIT


def tolerances(
    exact: Exact, key_size: int, dtype: torch.dtype, query_rounding: float, weight_rounding: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of outputs and LSEs; the roundings are of queries, and of weights before they multiply values."""
    # A score: the products of its channels, then scale, log2(e), a key's scale and the base: ten roundings at most.
    score = exact.size_Tq * (query_rounding + chain(key_size) + 10 * UNIT) + exact.moved_Tq
    # A weight: 2^x to two units, relative to which the sum over tokens loses.
    weight = np.expm1(score) + 4 * UNIT + chain(exact.seen_Tq)
    out = (2 * weight + weight_rounding + 4 * UNIT)[..., None] * exact.spread_TqC
    out += exact.coarse_TqC * np.exp(2 * score)[..., None]
    # The one rounding to the dtype of q; near zero, float16's unit is no longer in proportion.
    out += torch.finfo(dtype).eps / 2 * (np.abs(exact.out_TqC) + out) + 2.0**-25
    return out, weight + 8 * UNIT * np.abs(np.where(exact.seen_Tq > 0, exact.lse_Tq, 0)) + 2 * UNIT


def assert_near(actual: Tensor, expected: np.ndarray, tolerance: np.ndarray) -> None:
    difference = np.abs(actual.double().numpy() - expected)
    worst = (difference / tolerance).max(initial=0)
    assert bool((difference <= tolerance).all()), f"{worst:.3g} times the tolerance"


def assert_exact(case: Case, result: tuple[Tensor, Tensor]) -> None:
    """Against the float64 softmax, and against the reference over the same numbers in rows."""
    shape, dtype = case.shape, case.q_TqC.dtype
    out_TqC, lse_Tq = result
    assert (out_TqC.dtype, lse_Tq.dtype) == (dtype, torch.float32)
    paired = shape.kv_dtype in PAIRS
    rounded_TqC = case.queries.bfloat16() if paired else case.queries
    exact = exact_attention(case, rounded_TqC.double().numpy())
    assert out_TqC.shape == exact.out_TqC.shape
    unseeing_Tq = exact.seen_Tq == 0
    assert (out_TqC.float().numpy()[unseeing_Tq] == 0).all()
    assert (lse_Tq.numpy()[unseeing_Tq] == -np.inf).all()
    assert out_TqC.isfinite().all()
    out_tolerance, lse_tolerance = tolerances(exact, shape.key_size, dtype, 0.0, PAIR_UNIT if paired else 0.0)
    assert_near(out_TqC, exact.out_TqC, out_tolerance)
    seeing_Tq = ~unseeing_Tq
    assert_near(lse_Tq[torch.from_numpy(seeing_Tq)], exact.lse_Tq[seeing_Tq], lse_tolerance[seeing_Tq])
    expected = reference_over_decoded(case)
    # The reference rounds its own way, and queries only where the native kernels do.
    more = tolerances(exact, shape.key_size, dtype, PAIR_UNIT if paired else 0.0, 0.0)
    assert_near(out_TqC, expected[0].double().numpy(), out_tolerance + more[0])
    expected_lse_Tq = expected[1].double().numpy()
    assert (expected_lse_Tq[unseeing_Tq] == -np.inf).all()
    assert_near(lse_Tq[torch.from_numpy(seeing_Tq)], expected_lse_Tq[seeing_Tq], (lse_tolerance + more[1])[seeing_Tq])


def reference_over_decoded(case: Case) -> tuple[Tensor, Tensor]:
    """The reference over float32 rows that hold what the pool holds, which float32 has exactly."""
    k_PDkC, v_PDkC = (torch.from_numpy(side.astype(np.float32)) for side in stored(case.layer).decoded())
    return reference.partial_attention(
        case.queries, k_PDkC, v_PDkC, case.blocks_X, case.extents_B2, *case.rows(), case.scale
    )


# Around tiles (16), strips (256) and spans (512), where one more or one less is another path.
edges = st.sampled_from([at + more for at in (16, 128, 256, 512, 768, 1024) for more in (-1, 0, 1)])
counts = st.one_of(st.integers(1, 40), edges, st.integers(1, 1100))


@st.composite
def sequences(draw) -> list[int]:
    """How many tokens each row of a sequence sees: a decode, a prefill chunk, or anything."""
    kind = draw(st.sampled_from(["decode", "chunk", "any", "none"]))
    if kind == "decode":
        return [draw(counts)]
    if kind == "chunk":
        rows = draw(st.integers(2, 24))
        last = max(draw(counts), rows)
        return [*range(last - rows + 1, last + 1)]
    return draw(st.lists(st.one_of(st.just(0), counts), max_size=6)) if kind == "any" else []


shapes = st.builds(
    lambda kv_heads, group, key_size, value_size, block_tokens, kv_dtype, rounded: Shape(
        kv_heads, group, key_size, value_size or key_size, block_tokens, kv_dtype, rounded=rounded
    ),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 16]),
    head_sizes,
    st.one_of(st.none(), st.none(), head_sizes),
    block_sizes,
    kv_dtypes,
    st.booleans(),
)


@given(
    shape=shapes,
    limits=st.lists(sequences(), min_size=1, max_size=4),
    dtype=dtypes,
    sharpness=st.sampled_from([1.0, 1.0, 4.0]),
    seed=st.integers(0, 2**31),
)
@example(Shape(1, 16, 80, 80, 16, "bfloat16"), [[*range(500, 521)]], torch.bfloat16, 1.0, 1)
@example(Shape(2, 9, 112, 96, 32, "int8"), [[*range(250, 264)], [], [0, 513, 0], [1]], torch.float32, 4.0, 2)
@example(Shape(4, 7, 96, 96, 128, "int4"), [[*range(1, 20)], [0]], torch.float16, 1.0, 3)
@example(Shape(1, 1, 256, 256, 16, "fp8"), [[1025], [1024], [1023]], torch.bfloat16, 1.0, 4)
def test_equals_softmax_and_the_reference_for_any_shape(shape, limits, dtype, sharpness, seed):
    case = make_case(shape, limits, seed, dtype, sharpness)
    assert_exact(case, case.run())


MANY_ROWS = [  # group, rows: a row block has 96 rows times heads
    (1, [*range(5, 305)]),
    (9, [*range(490, 521)]),
    (16, [0, 0, *range(250, 280), 3, 600]),
    (3, [*range(40, 0, -1), *[0] * 40, *[700] * 3]),
    (128, [17, 18, 300]),
]


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize(("group", "limits"), MANY_ROWS, ids=lambda value: str(value) if isinstance(value, int) else "")
def test_rows_of_several_row_blocks_equal_softmax(group, limits, kv_dtype):
    shape = Shape(2, group, 32, 48, 32, kv_dtype)
    case = make_case(shape, [[7], limits, limits[-1:]], 1)
    assert_exact(case, case.run())


LONG = [16383, 16384, 16385, 16640, 18431, 18433, 20481]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", BITS)
def test_long_sequences_equal_softmax(kv_dtype, dtype):
    case = make_case(Shape(1, 2, 16, 32, 128, kv_dtype), [LONG[-1:], LONG[2:4], [*LONG, 0, 600]], 2, dtype)
    assert_exact(case, case.run())


EDGES = [1, 15, 16, 17, 31, 33, 255, 256, 257, 272, 511, 512, 513, 767, 769, 1023, 1024, 1025, *LONG]
LONGEST = [131071, 131072, 131073, 131328, 139264, 139265]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("kv_dtype", "edges"),
    [*((kv_dtype, EDGES) for kv_dtype in BITS), ("float32", LONGEST), ("int4", LONGEST)],
    ids=lambda value: value if isinstance(value, str) else f"to_{value[-1]}",
)
def test_every_token_below_the_limit_counts_once(kv_dtype, edges, alone):
    """Queries of zero weigh all tokens alike; values are one-hot, so that outputs count tokens."""
    shape = Shape(1, 2, 16, 16, 128, kv_dtype)
    length = edges[-1]
    case = make_case(shape, [edges], 3)
    v_SkC = torch.eye(16)[torch.arange(length) % 16].unsqueeze(1)
    slots_S = (case.blocks(0)[:, None] * 128 + torch.arange(128)).flatten()[:length]
    write_kv(torch.randn(length, 1, 16, generator=seeded(4)), v_SkC, case.layer, slots_S)
    one = stored(case.layer).decoded()[1][case.blocks(0)[0], 0, 0, 0]
    assert one == pytest.approx(1, rel=0.01)
    case.q_TqC.zero_()
    calls = [case.part([(0, row, row + 1)]) for row in range(len(edges))] if alone else [case.run()]
    out_TqC, lse_Tq = (torch.cat(parts).double() for parts in zip(*calls, strict=True))
    counts_TC = np.array([[(limit + 15 - channel) // 16 for channel in range(16)] for limit in edges])
    wanted_TqC = np.repeat(counts_TC[:, None], 2, axis=1) * one / np.array(edges)[:, None, None]
    # Weights are exactly 1 and their sums exact; sums of a scale times counts may lose a bit or two, as quotients do.
    np.testing.assert_allclose(out_TqC.numpy(), wanted_TqC, rtol=2.0**-20, atol=0)
    np.testing.assert_allclose(lse_Tq.numpy(), np.log(edges)[:, None].repeat(2, 1), rtol=8 * UNIT, atol=0)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_one_token_beyond_the_limit_would_be_seen(kv_dtype):
    case = make_case(Shape(kv_dtype=kv_dtype), [[5], [20]], 5)
    case.limits[0] = [6]
    out_TqC, lse_Tq = case.run()
    assert out_TqC[0].isnan().all()
    assert lse_Tq[0].isnan().all()
    assert out_TqC[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("size", [math.nan, math.inf])
def test_a_query_that_overflowed_is_not_hidden(size, kv_dtype):
    case = make_case(Shape(kv_dtype=kv_dtype), [[40, 41, 300]], 27)
    expected = case.run()
    case.q_TqC[1, 2, 3] = size
    for expected_part, part in zip(expected, case.run(), strict=True):
        assert part[1, 2].isnan().all()
        untouched_Tq = torch.ones(3, 6, dtype=torch.bool)
        untouched_Tq[1, 2] = False
        assert torch.equal(part[untouched_Tq], expected_part[untouched_Tq])


@pytest.mark.parametrize("kv_dtype", BITS)
def test_rows_that_see_nothing_are_zero_beside_any_value(kv_dtype):
    """Beside rows that see a value without bounds, where one can be stored, and where there are no blocks at all."""
    shape = Shape(kv_heads=1, group=2, kv_dtype=kv_dtype)
    case = make_case(shape, [[0, 4, 0], [0]], 6)
    if kv_dtype not in LARGEST:
        infinite_TkC = torch.full((4, 1, 32), math.inf)
        write_kv(torch.ones(4, 1, 32), infinite_TkC, case.layer, case.blocks(0)[0] * 16 + torch.arange(4))
    empty = make_case(shape, [[0, 0], [], [0]], 7)
    empty.blocks_X = empty.blocks_X[:0]
    for out_TqC, lse_Tq in ([part[[0, 2, 3]] for part in case.run()], empty.run()):
        assert torch.equal(out_TqC, torch.zeros(3, 2, 32))
        assert torch.equal(lse_Tq, torch.full((3, 2), -math.inf))


@pytest.mark.parametrize("limits", [[[]], [[], []], []], ids=str)
def test_a_call_without_rows_gives_none(limits):
    case = make_case(Shape(), [[9]], 8)
    case.limits, case.q_TqC, case.extents_B2 = limits, case.q_TqC[:0], case.extents_B2[:1].repeat(len(limits), 1)
    out_TqC, lse_Tq = case.run()
    assert (out_TqC.shape, lse_Tq.shape) == ((0, 6, 32), (0, 6))


def test_a_limit_beyond_the_blocks_is_refused():
    case = make_case(Shape(), [[20], [3]], 9)
    case.limits[1] = [33]
    with pytest.raises(ValueError, match=r"a row sees .* KV blocks"):
        case.run()


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_large_scores_do_not_overflow(kv_dtype, size):
    """Powers of two and signs: scores are exact, so that only the softmax is seen."""
    shape = Shape(1, 2, 16, 16, 16, kv_dtype)
    case = make_case(shape, [[600, 601]], 10)
    k_SkC = torch.randn(601, 1, 16, generator=seeded(11)).sign()
    case.q_TqC = case.q_TqC.sign() * 2.0 ** round(math.log2(size))
    k_SkC[300] = case.q_TqC[0, 0].sign()  # the one best key of row 0, head 0
    v_SkC = torch.randn(601, 1, 16, generator=seeded(12))
    slots_S = (case.blocks(0)[:, None] * 16 + torch.arange(16)).flatten()[:601]
    write_kv(k_SkC, v_SkC, case.layer, slots_S)
    pool = stored(case.layer).decoded()
    case.keys[0], case.values[0] = (side[case.blocks(0)].reshape(-1, 1, 16)[:601] for side in pool)
    exact = exact_attention(case, case.q_TqC.double().numpy())
    out_TqC, lse_Tq = case.run()
    assert torch.equal(out_TqC[0, 0].double(), torch.from_numpy(case.values[0][300, 0]))
    assert out_TqC.isfinite().all()
    np.testing.assert_allclose(lse_Tq.double().numpy(), exact.lse_Tq, rtol=16 * UNIT, atol=0)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_weights_of_any_distance_are_exact_to_a_few_units(kv_dtype):
    """Two tokens, of score 0 and of one below it, whose values tell their weights."""
    below_T = torch.linspace(0, 100, 6401)
    shape = Shape(1, 1, 16, 16, 16, kv_dtype)
    k_SkC, v_SkC = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    k_SkC[1, 0, 0], v_SkC[0, 0, 1], v_SkC[1, 0, 2] = -1, 1, 1
    layer = shape.poisoned(1)
    write_kv(k_SkC, v_SkC, layer, torch.tensor([0, 1]))
    q_TqC = torch.zeros(len(below_T), 1, 16)
    q_TqC[:, 0, 0] = below_T
    table = torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, len(below_T)]), torch.full((len(below_T),), 2)
    out_TqC, lse_Tq = partial_attention(q_TqC, layer, *table, 1.0)
    ratio_T = torch.exp(-below_T.double())
    expected_T3 = torch.stack((0 * ratio_T, 1 / (1 + ratio_T), ratio_T / (1 + ratio_T)), dim=1)
    # log2(e) and the product with it: two roundings of a score of up to 100. 2^x to two units, the sum, the quotient;
    # below 2^-126 a weight may be 0.
    tolerance_T1 = ((2 * below_T.double() + 10) * UNIT).unsqueeze(1)
    assert bool(((out_TqC[:, 0, :3] - expected_T3).abs() <= tolerance_T1 * expected_T3 + 2.0**-126).all())
    # Near 0 the logarithm's argument, near 1, is known to a unit of 1.
    assert bool(((lse_Tq[:, 0] - torch.log1p(ratio_T)).abs() <= 8 * UNIT).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "nvfp4"])
def test_values_that_are_the_first_channels_of_the_keys(kv_dtype, dtype):
    """Multi-head latent attention, absorbed: one key of 576 channels for sixteen heads, of which 512 are the value."""
    shape = Shape(1, 16, 576, 512, 16, kv_dtype, shared=True)
    case = make_case(shape, [[40], [*range(505, 520)], [], [0, 3]], 13, dtype)
    result = case.run()
    assert result[0].shape == (18, 16, 512)
    assert_exact(case, result)
    alone = case.part([(1, 7, 8)])
    assert torch.equal(alone[0], result[0][8:9])
    assert torch.equal(alone[1], result[1][8:9])


@pytest.fixture
def threads():
    """native.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield native.set_num_threads
    native.set_num_threads(before)


def pieces_of(limits: list[list[int]], size: int) -> list[tuple[int, int, int]]:
    return [
        (sequence, first, min(first + size, len(rows)))
        for sequence, rows in enumerate(limits)
        for first in range(0, len(rows), size)
    ]


@pytest.mark.parametrize("kv_dtype", BITS)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 16])
def test_a_rows_bits_depend_on_nothing_but_its_keys(group, kv_dtype, threads):
    """Alone, in chunks of 7 and 64, in batches in two orders, and with one thread and two."""
    dtype = DTYPES[group % 3]
    limits = [[*range(1240, 1304)], [16500, 0], [300], [], [0, 1303, 17]]
    case = make_case(Shape(2, group, 32, 48, 16, kv_dtype), limits, 14, dtype)
    threads(1)
    out_TqC, lse_Tq = case.run()
    assert len(torch.unique(lse_Tq)) > 60 * group
    starts = case.rows()[0].tolist()
    for count in (1, 2):
        threads(count)
        batches = [[piece] for size in (1, 7, 64) for piece in pieces_of(limits, size)]
        batches += [pieces_of(limits, 64), pieces_of(limits, 64)[::-1], pieces_of(limits, 7)[::-1]]
        for pieces in batches:
            again = case.part(pieces)
            rows = [row for at, first, last in pieces for row in range(starts[at] + first, starts[at] + last)]
            assert torch.equal(again[0], out_TqC[rows]), (count, pieces)
            assert torch.equal(again[1], lse_Tq[rows]), (count, pieces)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_the_pools_bytes_do_not_depend_on_the_number_of_threads(kv_dtype, threads):
    shape = Shape(2, 1, 48, 48, 16, kv_dtype)
    rotation = make_rotation(40, 2, 2, 48, (True, True), torch.bfloat16, 15)
    pools, queries = [], []
    for count in (1, 2):
        threads(count)
        pools.append(shape.poisoned(3))
        queries.append(rotation.run(pools[-1]))
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(pools[0].values, pools[1].values)


def test_threads_never_write_to_the_same_byte(threads):
    """Values of tokens four apart share bytes of int4: here they are neighbours in every call."""
    shape = Shape(kv_heads=1, key_size=16, value_size=128, kv_dtype="int4")
    slots_T = (torch.arange(0, 2048, 8).unsqueeze(1) + torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])).flatten()
    k_TkC, v_TkC = vectors(2048, 1, 16, 29), vectors(2048, 1, 128, 30)
    expected = shape.poisoned(128)
    threads(1)
    write_kv(k_TkC, v_TkC, expected, slots_T)
    threads(3)
    for _ in range(1000):
        layer = shape.poisoned(128)
        write_kv(k_TkC, v_TkC, layer, slots_T)
        assert torch.equal(layer.values, expected.values)


@given(
    group=st.integers(1, 5),
    kv_dtype=kv_dtypes,
    block_tokens=st.sampled_from([16, 32]),
    limits=st.lists(st.lists(st.integers(0, 1100), min_size=1, max_size=3), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
)
def test_states_of_two_halves_of_the_blocks_merge_to_the_whole(group, kv_dtype, block_tokens, limits, seed):
    case = make_case(Shape(2, group, 32, 32, block_tokens, kv_dtype), limits, seed)
    states = []
    for rank in range(2):
        mine = [
            [
                sum(min(limit - at, block_tokens) for at in range(rank * block_tokens, limit, 2 * block_tokens))
                for limit in rows
            ]
            for rows in limits
        ]
        blocks_X, extents_B2 = side_by_side(case.blocks(sequence)[rank::2] for sequence in range(len(limits)))
        states.append(replace(case, blocks_X=blocks_X, extents_B2=extents_B2, limits=mine).run())
    merged = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    paired = kv_dtype in PAIRS
    rounded_TqC = case.queries.bfloat16() if paired else case.queries
    exact = exact_attention(case, rounded_TqC.double().numpy(), strip=max(map(max, limits)) + 1)
    out_tolerance, lse_tolerance = tolerances(exact, 32, torch.float32, 0.0, PAIR_UNIT if paired else 0.0)
    # Parts are as exact as the whole; the merge itself adds a few roundings of float32.
    seeing_Tq = exact.seen_Tq > 0
    assert (merged[1].numpy()[~seeing_Tq] == -np.inf).all()
    assert_near(merged[0], exact.out_TqC, out_tolerance + 8 * UNIT * exact.spread_TqC)
    lse_more = 8 * UNIT * (1 + np.abs(exact.lse_Tq[seeing_Tq]))
    assert_near(merged[1][torch.from_numpy(seeing_Tq)], exact.lse_Tq[seeing_Tq], lse_tolerance[seeing_Tq] + lse_more)
    unsplit = case.run()
    assert_near(merged[0], unsplit[0].double().numpy(), 2 * out_tolerance + 8 * UNIT * exact.spread_TqC)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_large_value_of_no_weight_takes_nothing_from_the_others(kv_dtype, rounded):
    """And neither does a token that has most of the weight and next to no value."""
    shape = Shape(1, 2, 16, 16, 16, kv_dtype, rounded=rounded)
    case = make_case(shape, [[40], [300]], 21)
    k_SkC, v_SkC = (torch.randn(300, 1, 16, generator=seeded(seed)) for seed in (22, 23))
    case.q_TqC = torch.ones(2, 2, 16)
    k_SkC[7], k_SkC[20] = -7.5, 1.5  # scores of -30 and 6
    v_SkC[7] *= 1e5
    v_SkC[20] /= 100
    for sequence, length in enumerate((40, 300)):
        slots_S = (case.blocks(sequence)[:, None] * 16 + torch.arange(16)).flatten()[:length]
        write_kv(k_SkC[:length], v_SkC[:length], case.layer, slots_S)
        kept = stored(case.layer)
        for side, pool in zip(
            (case.keys, case.values, case.value_scales), [*kept.decoded(), kept.scales(kept.value_scales)], strict=True
        ):
            side[sequence] = pool[case.blocks(sequence)].reshape(-1, *pool.shape[2:])[:length]
    assert_exact(case, case.run())


@pytest.mark.parametrize("kv_dtype", BITS)
def test_a_row_that_sees_nothing_is_nothing_whatever_its_query(kv_dtype):
    case = make_case(Shape(1, 2, 16, 16, 16, kv_dtype), [[0, 9]], 24)
    case.q_TqC[0] = math.nan
    out_TqC, lse_Tq = case.run()
    assert (out_TqC[0] == 0).all()
    assert (lse_Tq[0] == -math.inf).all()
    assert out_TqC[1].isfinite().all()


# ----------------------------------------------------------------------------------------------------------------------
# Pools beyond 32 bits.
# ----------------------------------------------------------------------------------------------------------------------


def sparse_layer(format: KVFormat, num_blocks: int) -> KVLayer:
    """Zeros that take memory only where they are written, whatever the size of the pool."""
    shaped = format.new_layer(num_blocks, torch.device("meta")).values
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return KVLayer(
        format, torch.frombuffer(mmap.mmap(-1, shaped.nbytes, flags), dtype=shaped.dtype).view(shaped.shape), None
    )


HUGE = 9 * 2**30  # bytes: of float32, the narrowest case, more than 2^31 numbers


@pytest.mark.parametrize(
    ("shape", "packed", "num_blocks"),
    [
        *((Shape(2, 3, 128, 128, 32, kv_dtype), True, None) for kv_dtype in BITS),
        *((Shape(2, 3, 128, 128, 32, kv_dtype), False, None) for kv_dtype in ("float32", "bfloat16")),
        (Shape(1, 16, 576, 512, 16, "bfloat16", shared=True), True, None),
        (Shape(1, 3, 16, 16, 16, "int4"), True, 2**27 + 40),  # slots beyond 2^31, too
    ],
    ids=lambda value: value.kv_dtype + "-shared" * value.shared if isinstance(value, Shape) else str(value),
)
def test_tokens_beyond_32_bits_are_where_they_belong(shape, packed, num_blocks):
    """The same tokens around the limits of 32 bits and at the end of a huge pool, and in a small one."""
    format = shape.format(packed)
    head_bytes = format.block_bytes // (shape.kv_heads if packed else 1)  # of a block, in one run
    num_blocks = num_blocks or HUGE // head_bytes
    around = [at // head_bytes + more for at in (2**31, 2**32, 2**33) for more in (-1, 0, 1)]
    ids_J = torch.tensor([num_blocks - 1, *around, num_blocks // 2, num_blocks - 7])
    count = len(ids_J) * shape.block_tokens
    k_SkC, v_SkC = (
        vectors(count, shape.kv_heads, shape.key_size, 31),
        vectors(count, shape.kv_heads, shape.value_size, 32),
    )
    q_TqC = torch.randn(3, shape.kv_heads * shape.group, shape.key_size, generator=seeded(33))
    far, near = sparse_layer(format, num_blocks), sparse_layer(format, len(ids_J))
    results, blocks = [], []
    for layer, mine_J in ((far, ids_J), (near, torch.arange(len(ids_J)))):
        slots_S = (mine_J.unsqueeze(1) * shape.block_tokens + torch.arange(shape.block_tokens)).flatten()
        write_kv(k_SkC, None if shape.shared else v_SkC, layer, slots_S)
        rows = torch.tensor([0, 3]), torch.tensor([count, count - 5, 20])
        results.append(partial_attention(q_TqC, layer, mine_J, torch.tensor([[0, len(mine_J)]]), *rows, 0.1))
        blocks.append(layer.values.index_select(int(packed), mine_J))
    assert blocks[0].any()
    assert torch.equal(bits(blocks[0]), bits(blocks[1]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def views_of(tensor: Tensor) -> list[Tensor]:
    """The same numbers as a slice of wider rows, with heads outermost, and as every second channel."""
    rows, heads, size = tensor.shape
    wide_TXC = torch.full((rows, heads + 3, size), math.nan, dtype=tensor.dtype)
    wide_TXC[:, 2:-1] = tensor
    sparse_TqX = torch.full((rows, heads, 2 * size), math.nan, dtype=tensor.dtype)
    sparse_TqX[..., ::2] = tensor
    return [wide_TXC[:, 2:-1], tensor.transpose(0, 1).contiguous().transpose(0, 1), sparse_TqX[..., ::2]]


@pytest.mark.parametrize("view", range(3), ids=["slice", "turned", "sparse"])
def test_queries_may_be_any_view(view):
    case = make_case(Shape(), [[30, 31, 32], [600]], 16, torch.bfloat16)
    expected = case.run()
    case.q_TqC = views_of(case.q_TqC)[view]
    assert not case.q_TqC.is_contiguous()
    result = case.run()
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("view", range(3), ids=["slice", "turned", "sparse"])
def test_keys_and_values_may_be_any_view(view, kv_heads):
    shape = Shape(kv_heads=kv_heads, kv_dtype="bfloat16")
    k_TkC, v_TkC = torch.randn(2, 20, kv_heads, 32, generator=seeded(17))
    plain, other = shape.poisoned(2), shape.poisoned(2)
    slots_T = torch.arange(20)
    write_kv(k_TkC, v_TkC, plain, slots_T)
    write_kv(views_of(k_TkC)[view], views_of(v_TkC)[view], other, slots_T)
    assert torch.equal(plain.values, other.values)


def test_tables_of_indices_may_be_any_view():
    case = make_case(Shape(), [[30, 31, 32], [600]], 18)
    expected = case.run()
    starts_B, limits_T = (torch.stack((part, part * 0), dim=1)[:, 0] for part in case.rows())
    table = (torch.stack((part, part * 0), dim=-1)[..., 0] for part in (case.blocks_X, case.extents_B2))
    result = partial_attention(case.q_TqC, case.layer, *table, starts_B, limits_T, case.scale)
    assert torch.equal(result[0], expected[0])
    assert torch.equal(result[1], expected[1])


def test_rows_and_tables_of_a_rotation_may_be_any_view():
    rotation = make_rotation(20, 3, 2, 32, (True, True), torch.float32, 19)
    shape = Shape(2, 1, 32, 32)
    plain, other = shape.poisoned(3), shape.poisoned(3)
    expected_TqC = rotation.run(plain)
    cos_TR, sin_TR = torch.cat((rotation.angles_TR.cos(), rotation.angles_TR.sin()), dim=1).chunk(2, dim=1)
    qkv_TX = rotation.qkv_TX.repeat_interleave(2, dim=1)[:, ::2]
    slots_T = rotation.slots_T.repeat_interleave(2)[::2]
    norms = (norm.repeat_interleave(2)[::2] for norm in (rotation.q_norm, rotation.k_norm))
    q_TqC = rotate_and_write(qkv_TX, *norms, rotation.norm_eps, cos_TR, sin_TR, other, slots_T)
    assert torch.equal(q_TqC, expected_TqC)
    assert torch.equal(plain.values, other.values)


# ----------------------------------------------------------------------------------------------------------------------
# Registration and memory.
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", BITS)
def test_torch_accepts_the_ops_on_packed_pools_and_their_fakes(kv_dtype):
    case = make_case(Shape(kv_dtype=kv_dtype), [[30, 31], [0], [600]], 20)
    format = "tiles", kv_dtype, 32, False, False
    pool = case.layer.values, None
    ops = torch.ops.longhelix
    k_TkC, v_TkC = torch.randn(5, 7, 32, generator=seeded(21)).split((2, 5), dim=1)
    rotation = make_rotation(5, 6, 2, 32, (True, False), torch.float32, 22)
    table, tables = (case.blocks_X, case.extents_B2), (rotation.angles_TR.cos(), rotation.angles_TR.sin())
    calls = [
        (ops.partial_attention, (case.q_TqC, *pool, *table, *case.rows(), case.scale, 2, 600, None, None, *format)),
        (ops.write_kv, (k_TkC, v_TkC[:, :2], *pool, torch.tensor([3, -1, 0, 40, 9]), *format)),
        (
            ops.rotate_and_write,
            (rotation.qkv_TX, rotation.q_norm, None, 1e-3, *tables, *pool, rotation.slots_T, 2, *format),
        ),
    ]
    for op, arguments in calls:
        assert set(opcheck(op.default, arguments).values()) == {"SUCCESS"}


INT8 = Shape(kv_dtype="int8")


def rotate_write_attend(qkv_TX, cos_TR, sin_TR, values, slots_T, k_TkC, old_slots_T, *reads):
    layer = KVLayer(INT8.format(), values, None)
    write_kv(k_TkC, k_TkC, layer, old_slots_T)
    q_TqC = rotate_and_write(qkv_TX, None, None, 0.0, cos_TR, sin_TR, layer, slots_T)
    out_TqC, lse_Tq = partial_attention(q_TqC * 2, layer, *reads, 0.25)
    return out_TqC + 1, lse_Tq


def layer_inputs() -> list[Tensor]:
    """A rank that owns the tokens 0 to 3 (written before, in truth) and two of the three new ones."""
    rotation = make_rotation(3, 6, 2, 32, (False, False), torch.float32, 23)
    k_TkC = torch.randn(4, 2, 32, generator=seeded(24))
    tables = rotation.angles_TR.cos(), rotation.angles_TR.sin()
    slots = torch.tensor([4, -1, 5]), k_TkC, torch.arange(4)
    reads = torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, 3]), torch.tensor([5, 5, 6])
    return [rotation.qkv_TX, *tables, INT8.poisoned(1).values, *slots, *reads]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break_gives_the_same_bits_and_writes_the_pool(backend):
    torch._dynamo.reset()
    expected_inputs, inputs = layer_inputs(), layer_inputs()
    expected = rotate_write_attend(*expected_inputs)
    result = torch.compile(rotate_write_attend, fullgraph=True, backend=backend)(*inputs)
    assert expected[0].isfinite().all()
    for actual, wanted in zip((*result, *inputs), (*expected, *expected_inputs), strict=True):
        assert torch.equal(bits(actual), bits(wanted))
    assert not torch.equal(inputs[3], layer_inputs()[3])


def test_decoding_takes_no_more_memory_from_call_to_call():
    case = make_case(Shape(kv_dtype="int8"), [[900], [33]], 25)
    rotation = make_rotation(2, 6, 2, 32, (True, True), torch.float32, 26)
    tables = rotation.angles_TR.cos(), rotation.angles_TR.sin()
    rotation.slots_T.fill_(int(case.blocks(1)[0]) * 16)
    calls = case.rows()
    process = psutil.Process()

    def decode(times: int) -> int:
        for _ in range(times):
            q_TqC = rotate_and_write(rotation.qkv_TX, None, None, 0.0, *tables, case.layer, rotation.slots_T)
            partial_attention(q_TqC, case.layer, case.blocks_X, case.extents_B2, *calls, case.scale)
        return process.memory_info().rss

    before = decode(200)
    # Sixteen bytes a call, the least that could be kept of one, would be seven pages.
    assert decode(1800) - before < 1800 * 16
