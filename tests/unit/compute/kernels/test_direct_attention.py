"""MLA's direct form: keys and values made from latents, attention over them, and which rows of a batch take it.

Attention is compared with the absorbed form, and with a float64 softmax over the latents as the pool stores them.
"""

import math
import random
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from block_extents import side_by_side
from longhelix.compute.kernels import (
    ROWS,
    TILES,
    KVFormat,
    KVLayer,
    can_expand,
    direct,
    direct_attention,
    expand_latents,
    merge_states,
    native,
    partial_attention,
    reference,
    write_kv,
)
from longhelix.scheduler.kv.placement import Striped
from packed_pool import stored

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
HEADS, LATENT, ROPE, NOPE, VALUE = 3, 48, 16, 32, 16
POOLS = [
    pytest.param(
        True, marks=pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
    ),
    False,
]
# max|d| / max|ref|. Of bfloat16: queries, keys, values and weights of the softmax are rounded to it, 2^-8 each.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def error(actual: Tensor, expected: Tensor) -> float:
    """max|d| / max|ref|, NaN if any element is NaN."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def make_up(dtype: torch.dtype, heads: int = HEADS) -> Tensor:
    return (torch.randn(heads, NOPE + VALUE, LATENT, generator=seeded(1)) / LATENT**0.5).to(dtype)


@dataclass
class Shard:
    """One rank's tokens of some sequences: a pool that is NaN elsewhere, and their blocks, out of order."""

    layer: KVLayer
    blocks: list[Tensor]

    @classmethod
    def of(cls, tokens: list[Tensor], kv_dtype: str, packed: bool, block_tokens: int) -> "Shard":
        """tokens: for each sequence latents with rotated keys, latent_SC."""
        counts = [-(-len(latent_SC) // block_tokens) for latent_SC in tokens]
        ids = list(range(sum(counts) + 3))
        random.Random(len(ids)).shuffle(ids)
        arrangement = TILES if packed else ROWS
        format = KVFormat(kv_dtype, block_tokens, 1, LATENT + ROPE, LATENT, arrangement, shared_values=True)
        layer = format.new_layer(len(ids), CPU)
        layer.values.view(torch.uint8).fill_(0xFF)
        blocks = [torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int64) for count in counts]
        for own_J, latent_SC in zip(blocks, tokens, strict=True):
            slots_S = (own_J[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[: len(latent_SC)]
            write_kv(latent_SC.unsqueeze(1), None, layer, slots_S)
        return cls(layer, blocks)

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        return side_by_side(self.blocks)


def make_latents(lengths: list[int], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(length, LATENT + ROPE, generator=seeded(length)).to(dtype) for length in lengths]


@dataclass
class Case:
    """Rows of sequences over one rank's shard; `limits` of each sequence's rows."""

    shard: Shard
    up_qXZ: Tensor
    q_TqC: Tensor
    limits: list[list[int]]

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        starts_B = torch.tensor([0, *map(len, self.limits)]).cumsum(0)
        return starts_B, torch.tensor(list(chain(*self.limits)), dtype=torch.int64)

    def direct(self) -> tuple[Tensor, Tensor]:
        shard = self.shard
        return direct_attention(self.q_TqC, shard.layer, self.up_qXZ, NOPE, *shard.table, *self.rows, 0.2)

    def absorbed(self) -> tuple[Tensor, Tensor]:
        key_up_qCZ, value_up_qCZ = self.up_qXZ.split((NOPE, VALUE), dim=1)
        plain_TqC, rotated_TqC = self.q_TqC.split((NOPE, ROPE), dim=2)
        q_TqX = torch.cat((torch.einsum("tqc,qcz->tqz", plain_TqC, key_up_qCZ), rotated_TqC), dim=2)
        out_TqZ, lse_Tq = partial_attention(q_TqX, self.shard.layer, *self.shard.table, *self.rows, 0.2)
        return torch.einsum("tqz,qcz->tqc", out_TqZ, value_up_qCZ), lse_Tq


def make_case(limits: list[list[int]], kv_dtype: str, packed: bool, block_tokens: int = 16) -> Case:
    dtype = getattr(torch, kv_dtype)
    latents = make_latents([max(rows, default=0) for rows in limits], dtype)
    q_TqC = torch.randn(sum(map(len, limits)), HEADS, NOPE + ROPE, generator=seeded(2)).to(dtype)
    return Case(Shard.of(latents, kv_dtype, packed, block_tokens), make_up(dtype), q_TqC, limits)


def dense(q_TqC: Tensor, latent_SC: Tensor, up_qXZ: Tensor, limits: list[int]) -> tuple[Tensor, Tensor]:
    """Float64 attention of one sequence's rows to keys and values of all its tokens."""
    made_SqX = torch.einsum("sz,qxz->sqx", latent_SC[:, :LATENT].double(), up_qXZ.double())
    rotated_SqC = latent_SC[:, None, LATENT:].double().expand(-1, len(up_qXZ), -1)
    k_SqC = torch.cat((made_SqX[..., :NOPE], rotated_SqC), dim=2)
    scores_TqS = torch.einsum("tqc,sqc->tqs", q_TqC.double(), k_SqC) * 0.2
    hidden_TS = torch.arange(len(latent_SC)) >= torch.tensor(limits)[:, None]
    scores_TqS.masked_fill_(hidden_TS[:, None], -math.inf)
    out_TqC = torch.einsum("tqs,sqc->tqc", scores_TqS.softmax(-1).nan_to_num(), made_SqX[..., NOPE:])
    return out_TqC, scores_TqS.logsumexp(-1)


# ----------------------------------------------------------------------------------------------------------------------
# What is made of latents.
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
@pytest.mark.parametrize("up_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("block_tokens", [16, 48])
@pytest.mark.parametrize(("first_block", "count"), [(0, 1), (0, 16), (2, 17), (1, 96), (1, 305)])
def test_packed_keys_and_values_equal_the_reference(kv_dtype, up_dtype, block_tokens, first_block, count):
    first = first_block * block_tokens
    (latent_SC,) = make_latents([first + count], getattr(torch, kv_dtype))
    shard = Shard.of([latent_SC], kv_dtype, True, block_tokens)
    up_qXZ = make_up(up_dtype)
    made = expand_latents(shard.layer, up_qXZ, NOPE, shard.blocks[0], first, count)
    wanted = reference.expand_latents(latent_SC[first:].double(), up_qXZ.double(), NOPE)
    for found, expected in zip(stored(made).decoded(), wanted, strict=True):
        assert error(torch.from_numpy(found[0, :count]), expected) <= TOLERANCE[kv_dtype]
    keys = torch.from_numpy(stored(made).decoded()[0])
    rotated_SqC = latent_SC[first:, None, LATENT:].expand(-1, HEADS, -1)
    assert torch.equal(keys[0, :count, :, NOPE:], rotated_SqC.double())


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
def test_latents_of_nvfp4_become_keys_and_values_in_bfloat16():
    """Of what is stored, tile by tile; and attention to them equals attention to the latents."""
    (latent_SC,) = make_latents([200], torch.bfloat16)
    shard = Shard.of([latent_SC], "nvfp4", True, 48)
    kept_SC = torch.from_numpy(stored(shard.layer).decoded()[0][shard.blocks[0]]).flatten(0, 2)[:200]
    assert error(kept_SC, latent_SC) <= 0.13
    up_qXZ = make_up(torch.bfloat16)
    made = expand_latents(shard.layer, up_qXZ, NOPE, shard.blocks[0], 48, 152)
    assert made.format.dtype == "bfloat16"
    wanted = reference.expand_latents(kept_SC[48:].double(), up_qXZ.double(), NOPE)
    for found, expected in zip(stored(made).decoded(), wanted, strict=True):
        assert error(torch.from_numpy(found[0, :152]), expected) <= TOLERANCE["bfloat16"]
    q_TqC = torch.randn(9, HEADS, NOPE + ROPE, generator=seeded(2)).bfloat16()
    case = Case(shard, up_qXZ, q_TqC, [[0, 1, 100, *range(195, 201)]])
    expected_TqC, expected_lse_Tq = dense(q_TqC, kept_SC, up_qXZ, case.limits[0])
    for out_TqC, lse_Tq in (case.direct(), case.absorbed()):
        assert error(out_TqC, expected_TqC) <= TOLERANCE["bfloat16"]
        assert error(lse_Tq[1:], expected_lse_Tq[1:]) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
@pytest.mark.parametrize(("first", "count"), [(0, 3), (4, 8), (8, 21)])
def test_rows_of_keys_and_values_equal_the_formula(kv_dtype, first, count):
    """Keys and values of the stored latents; quantised ones, of GPUs, with a scale for each token."""
    format = KVFormat(kv_dtype, 4, 1, LATENT + ROPE, LATENT, ROWS, shared_values=True)
    layer = format.new_layer(9, CPU)
    layer.values.copy_(torch.randint(-9, 9, layer.values.shape, generator=seeded(3)))
    if layer.scales is not None:
        layer.scales.copy_(torch.rand(layer.scales.shape, generator=seeded(4)))
    blocks_J, up_qXZ = torch.tensor([4, 0, 8, 2, 7, 1, 3, 5]), make_up(torch.float32)
    made = expand_latents(layer, up_qXZ, NOPE, blocks_J, first, count)
    scales = 1.0 if layer.scales is None else layer.scales[..., None].double()
    latent_SC = (layer.values.double() * scales)[blocks_J].flatten(0, 3)[first : first + count]
    k_SqC, v_SqC = (part[0] for part in made.keys_and_values())
    made_SqX = torch.einsum("sz,qxz->sqx", latent_SC[:, :LATENT], up_qXZ.double())
    assert made.format.dtype == "float32"
    assert error(k_SqC[..., :NOPE], made_SqX[..., :NOPE]) <= 1e-6
    assert error(k_SqC[..., NOPE:], latent_SC[:, None, LATENT:].expand(-1, HEADS, -1)) <= 1e-6
    assert error(v_SqC[..., :VALUE], made_SqX[..., NOPE:]) <= 1e-6
    assert not v_SqC[..., VALUE:].any()


@pytest.mark.parametrize("packed", POOLS)
def test_tokens_beyond_the_blocks_are_refused(packed):
    shard = Shard.of(make_latents([64], torch.float32), "float32", packed, 16)
    with pytest.raises(ValueError, match=r"64 tokens.*65"):
        expand_latents(shard.layer, make_up(torch.float32), NOPE, shard.blocks[0], 32, 33)


@pytest.mark.parametrize("packed", POOLS)
def test_torch_accepts_the_op_and_its_fake(packed):
    shard = Shard.of(make_latents([50], torch.float32), "float32", packed, 16)
    format = shard.layer.format
    sizes = format.key_size, format.arrangement.name, format.dtype, format.value_size, format.shared_values, False
    arguments = shard.layer.values, None, make_up(torch.float32), NOPE, shard.blocks[0], 16, 34, *sizes
    assert set(opcheck(torch.ops.longhelix.expand_latents.default, arguments).values()) == {"SUCCESS"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.ops.longhelix.expand_latents(*arguments)
    assert made.shape == torch.ops.longhelix.expand_latents(*arguments).shape


# ----------------------------------------------------------------------------------------------------------------------
# Attention.
# ----------------------------------------------------------------------------------------------------------------------

# Chunks after a prefix, whole prompts, decodes, rows that see nothing, a rank without tokens, a sequence without rows.
BATCHES = {
    "prompt": [list(range(1, 41))],
    "prefix": [list(range(101, 141))],
    "pieces": [list(range(230, 270)), list(range(1, 66))],
    "mixed": [[77], list(range(60, 95)), [1], list(range(1, 34))],
    "late": [[0] * 30 + [1] * 3, [0, 0, 5, 5, 64]],
    "empty": [[0] * 20, list(range(1, 21)), []],
    "nothing": [[0] * 3],
}


@pytest.mark.parametrize("packed", POOLS)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("limits", BATCHES.values(), ids=BATCHES)
def test_direct_equals_absorbed_and_the_float64_softmax(monkeypatch, limits, kv_dtype, packed):
    monkeypatch.setattr(direct, "PIECE_TOKENS", 64)
    case = make_case(limits, kv_dtype, packed)
    out_TqC, lse_Tq = case.direct()
    absorbed_TqC, absorbed_lse_Tq = case.absorbed()
    sees_T = case.rows[1] > 0
    assert torch.equal(lse_Tq.isfinite(), sees_T[:, None].expand_as(lse_Tq))
    assert not out_TqC[~sees_T].any()
    if not sees_T.any():
        return
    assert out_TqC.dtype == absorbed_TqC.dtype
    assert error(out_TqC, absorbed_TqC) <= TOLERANCE[kv_dtype]
    assert error(lse_Tq[sees_T], absorbed_lse_Tq[sees_T]) <= TOLERANCE[kv_dtype]
    latents = make_latents([max(rows, default=0) for rows in limits], case.q_TqC.dtype)
    for index, (start, stop) in enumerate(zip(case.rows[0][:-1], case.rows[0][1:], strict=True)):
        if not any(limits[index]):
            continue
        expected = dense(case.q_TqC[start:stop], latents[index], case.up_qXZ, limits[index])
        rows_T = sees_T[start:stop]
        assert error(out_TqC[start:stop], expected[0]) <= TOLERANCE[kv_dtype]
        assert error(lse_Tq[start:stop][rows_T], expected[1][rows_T]) <= TOLERANCE[kv_dtype]


@pytest.mark.parametrize("packed", POOLS)
@pytest.mark.parametrize("kvp", [1, 2, 3])
def test_merged_shards_of_kvp_ranks_equal_one_rank(monkeypatch, kvp, packed):
    """Blocks striped over the ranks; each expands its own tokens. 20 tokens leave the third rank without any."""
    monkeypatch.setattr(direct, "PIECE_TOKENS", 32)
    lengths, prefixes, block_tokens = (150, 20, 97), (100, 0, 60), 16
    latents = make_latents(list(lengths), torch.float32)
    limits = [list(range(prefix + 1, length + 1)) for prefix, length in zip(prefixes, lengths, strict=True)]
    placement = Striped(kvp, block_tokens, 0)
    q_TqC = torch.randn(sum(map(len, limits)), HEADS, NOPE + ROPE, generator=seeded(5))
    states = []
    for rank in range(kvp):
        mine = [
            latent_SC[[token for token in range(len(latent_SC)) if placement.owner(token) == rank]]
            for latent_SC in latents
        ]
        local = [[placement.local_length(rank, limit) for limit in rows] for rows in limits]
        shard = Shard.of(mine, "float32", packed, block_tokens)
        states.append(Case(shard, make_up(torch.float32), q_TqC, local).direct())
    out_TqC, lse_Tq = merge_states(*map(torch.stack, zip(*states, strict=True)))
    wanted = [
        dense(rows_TqC, latent_SC, make_up(torch.float32), rows)
        for rows_TqC, latent_SC, rows in zip(q_TqC.split(list(map(len, limits))), latents, limits, strict=True)
    ]
    expected_TqC, expected_lse_Tq = map(torch.cat, zip(*wanted, strict=True))
    assert error(out_TqC, expected_TqC) <= 1e-5
    assert error(lse_Tq, expected_lse_Tq) <= 1e-5
    assert kvp == 1 or any(not bool(lse_Tq.isfinite().all()) for _, lse_Tq in states)


@pytest.mark.parametrize("packed", POOLS)
def test_pieces_hold_no_more_than_their_tokens(monkeypatch, packed):
    monkeypatch.setattr(direct, "PIECE_TOKENS", 40)  # of 16-token blocks: 48
    made = []
    monkeypatch.setattr(direct, "expand_latents", lambda *args: made.append(args[-2:]) or expand_latents(*args))
    make_case([list(range(90, 131)), [10]], "float32", packed).direct()
    assert made == [(0, 48), (48, 48), (96, 34), (0, 10)]


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
def test_a_rows_bits_do_not_depend_on_its_chunk(monkeypatch):
    monkeypatch.setattr(direct, "PIECE_TOKENS", 64)
    whole = make_case([list(range(1, 201))], "bfloat16", True)
    out_TqC, lse_Tq = whole.direct()
    for start, stop in ((0, 70), (70, 71), (71, 200)):
        part = Case(whole.shard, whole.up_qXZ, whole.q_TqC[start:stop], [whole.limits[0][start:stop]])
        assert torch.equal(part.direct()[0], out_TqC[start:stop])
        assert torch.equal(part.direct()[1], lse_Tq[start:stop])


@pytest.mark.parametrize("packed", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_merged_onto_a_state_equals_the_merge(packed, dtype):
    format = KVFormat("float32", 16, 2, 32, 32, TILES if packed else ROWS)
    layer, table = format.new_layer(40, CPU), (torch.arange(40), torch.tensor([[0, 40]]))
    write_kv(*torch.randn(2, 640, 2, 32, generator=seeded(6)), layer, torch.arange(640))
    q_TqC = torch.randn(7, 6, 32, generator=seeded(7)).to(dtype)
    rows = torch.tensor([0, 7]), torch.tensor([640, 0, 17, 600, 0, 1, 256])
    held_TqC, held_lse_Tq = torch.randn(7, 6, 32, generator=seeded(8)).to(dtype), torch.randn(7, 6) * 3
    held_TqC[3:5], held_lse_Tq[3:5] = math.nan, -math.inf
    own = partial_attention(q_TqC, layer, *table, *rows, 0.2)
    expected_TqC, expected_lse_Tq = merge_states(
        torch.stack((own[0], held_TqC)).float(), torch.stack((own[1], held_lse_Tq))
    )
    out_TqC, lse_Tq = partial_attention(q_TqC, layer, *table, *rows, 0.2, 7, onto=(held_TqC, held_lse_Tq))
    assert out_TqC.dtype == dtype
    assert error(out_TqC, expected_TqC) <= (1e-6 if dtype == torch.float32 else 2**-7)
    torch.testing.assert_close(lse_Tq, expected_lse_Tq, rtol=1e-6, atol=1e-6)


def test_packed_pools_make_heads_of_whole_panels_alone():
    packed, rows = (KVFormat("float32", 16, 1, 64, 48, lies, shared_values=True) for lies in (TILES, ROWS))
    assert can_expand(packed, 32, 16)
    assert not can_expand(packed, 24, 16)
    assert not can_expand(packed, 32, 12)
    assert can_expand(rows, 24, 12)
