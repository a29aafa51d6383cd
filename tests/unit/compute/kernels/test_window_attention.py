"""Attention of rows that see neither the first tokens nor the last ones: windows, over pools in rows and in tiles."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longhelix.compute.kernels import ROWS, TILES, KVFormat, native, partial_attention, write_kv

pytestmark = pytest.mark.unit

HEAD_SIZE = 16
ARRANGEMENTS = [ROWS, pytest.param(TILES, marks=pytest.mark.skipif(native.module is None, reason="not built"))]


class Case:
    """Sequences whose rows see the tokens [first, limit). What no row of a sequence sees may hold NaN.

    Args:
        sights: of each row of each sequence.
        kv_dtype: dtype of the pool.
        arrangement: ROWS or TILES.
        block_tokens: tokens of a KV block.
    """

    def __init__(self, sights, kv_dtype="float32", arrangement=ROWS, block_tokens=16, kv_heads=2, group=3, seed=0):
        self.sights, self.kv_heads, self.group = sights, kv_heads, group
        generator = torch.Generator().manual_seed(seed)
        format = KVFormat(kv_dtype, block_tokens, kv_heads, HEAD_SIZE, HEAD_SIZE, arrangement)
        lengths = [max((limit for _, limit in rows), default=0) for rows in sights]
        counts = [-(-length // block_tokens) for length in lengths]
        ids = torch.randperm(sum(counts) + 2, generator=generator)
        self.layer = format.new_layer(len(ids), torch.device("cpu"))
        self._write(torch.arange(len(ids) * block_tokens), torch.full((1, kv_heads, HEAD_SIZE), math.nan))
        self.keys, self.values, blocks = [], [], []
        for mine_J, length, rows in zip(ids.split([*counts, 2])[:-1], lengths, sights, strict=True):
            k_SkC, v_SkC = torch.randn(2, length, kv_heads, HEAD_SIZE, generator=generator)
            token_S = torch.arange(length)
            # Blocks that end before the first token that any row sees belong to somebody else.
            lowest = min((first for first, limit in rows if first < limit), default=length) // block_tokens
            kept_S = token_S >= lowest * block_tokens
            slots_S = mine_J[token_S // block_tokens] * block_tokens + token_S % block_tokens
            self._write(slots_S[kept_S], k_SkC[kept_S], v_SkC[kept_S])
            self.keys.append(k_SkC)
            self.values.append(v_SkC)
            blocks.append(mine_J)
        self.blocks_X = torch.cat([*blocks, ids[-2:]])
        ends = [*itertools.accumulate(map(len, blocks), initial=0)]
        self.extents_B2 = torch.tensor([*itertools.pairwise(ends)], dtype=torch.int64).view(-1, 2)
        rows = sum(map(len, sights))
        self.q_TqC = torch.randn(rows, kv_heads * group, HEAD_SIZE, generator=generator)

    def _write(self, slots_T, k_TkC, v_TkC=None):
        k_TkC = k_TkC.expand(len(slots_T), -1, -1)
        write_kv(k_TkC, k_TkC if v_TkC is None else v_TkC, self.layer, slots_T)

    def run(self, sequences=None, firsts=True):
        """Of some sequences, or all."""
        chosen = range(len(self.sights)) if sequences is None else sequences
        starts = [*itertools.accumulate(map(len, self.sights), initial=0)]
        sights = [sight for sequence in chosen for sight in self.sights[sequence]]
        rows = [row for sequence in chosen for row in range(starts[sequence], starts[sequence + 1])]
        own_starts = [*itertools.accumulate((len(self.sights[sequence]) for sequence in chosen), initial=0)]
        firsts_T, limits_T = torch.tensor(sights, dtype=torch.int64).view(-1, 2).T.contiguous()
        return partial_attention(
            self.q_TqC[rows],
            self.layer,
            self.blocks_X,
            self.extents_B2[list(chosen)],
            torch.tensor(own_starts),
            limits_T,
            0.25,
            firsts_T=firsts_T if firsts else None,
        )

    def exact(self):
        """Float64 softmax, row by row."""
        outs, lses = [], []
        row = 0
        for rows, k_SkC, v_SkC in zip(self.sights, self.keys, self.values, strict=True):
            for first, limit in rows:
                for head, q_C in enumerate(self.q_TqC[row].double()):
                    k_SC, v_SC = (side[first:limit, head // self.group].double() for side in (k_SkC, v_SkC))
                    scores_S = k_SC @ q_C * 0.25
                    lses.append(torch.logsumexp(scores_S, 0))
                    outs.append(torch.softmax(scores_S, 0) @ v_SC)
                row += 1
        heads = self.kv_heads * self.group
        return torch.stack(outs).view(-1, heads, HEAD_SIZE), torch.stack(lses).view(-1, heads)


def windowed(length, rows, window):
    """The sights of a sequence's last rows."""
    return [(max(position + 1 - window, 0), position + 1) for position in range(length - rows, length)]


def assert_exact(case, tolerance):
    out_TqC, lse_Tq = case.run()
    expected_out, expected_lse = case.exact()
    torch.testing.assert_close(out_TqC.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse_Tq.double(), expected_lse, rtol=tolerance, atol=tolerance)


sights = st.tuples(st.integers(0, 700), st.integers(0, 60)).map(lambda sight: (sight[0], sight[0] + sight[1]))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@given(
    rows=st.lists(st.lists(sights, max_size=5), min_size=1, max_size=4).filter(any),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 7]),
    block_tokens=st.sampled_from([16, 32, 48]),
    seed=st.integers(0, 2**31),
)
def test_equals_softmax_for_any_sights_and_blocks_of_others_are_not_read(
    arrangement, rows, kv_heads, group, block_tokens, seed
):
    assert_exact(Case(rows, "float32", arrangement, block_tokens, kv_heads, group, seed), 1e-5)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("window", [1, 40, 255, 256, 257, 4096])
@pytest.mark.parametrize(("length", "rows"), [(1, 1), (300, 200), (3000, 1), (3000, 5), (20_000, 1), (20_000, 150)])
def test_windows_of_prompts_and_decodes(arrangement, window, length, rows):
    assert_exact(Case([windowed(length, rows, window), windowed(70, 3, window)], "float32", arrangement), 2e-5)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8", "int4", "nvfp4"])
@pytest.mark.skipif(native.module is None, reason="not built")
def test_windows_over_narrow_numbers(kv_dtype):
    """Equal to calls without windows for the blocks from the first token on."""
    sights = [(16 * first, 16 * first + tokens) for first, tokens in ((0, 5), (1, 300), (20, 16), (40, 1000), (70, 1))]
    case = Case([sights], kv_dtype, TILES)
    out_TqC, lse_Tq = case.run()
    for row, (first, limit) in enumerate(sights):
        table = case.blocks_X, case.extents_B2 + torch.tensor([[first // 16, 0]]), torch.tensor([0, 1])
        out_1qC, lse_1q = partial_attention(case.q_TqC[[row]], case.layer, *table, torch.tensor([limit - first]), 0.25)
        # Strips begin elsewhere, and weights of 16 bits and less are rounded.
        torch.testing.assert_close(out_TqC[[row]], out_1qC, rtol=5e-3, atol=5e-3)
        torch.testing.assert_close(lse_Tq[[row]], lse_1q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_window_of_everything_has_the_same_bits_as_none(arrangement):
    case = Case([[(0, limit) for limit in range(600, 640)], [(0, 3000)], [(0, 0)]], "float32", arrangement)
    for windowed_one, plain in zip(case.run(), case.run(firsts=False), strict=True):
        assert torch.equal(windowed_one, plain)


@pytest.mark.skipif(native.module is None, reason="not built")
def test_a_rows_bits_do_not_depend_on_its_batch():
    sequences = [windowed(900, 1, 300), windowed(900, 120, 70), windowed(20_000, 2, 700), windowed(33, 33, 5)]
    case = Case(sequences, "float32", TILES)
    starts = [*itertools.accumulate(map(len, sequences), initial=0)]
    together = case.run()
    for sequence in range(4):
        for all_rows, alone in zip(together, case.run([sequence]), strict=True):
            assert torch.equal(all_rows[starts[sequence] : starts[sequence + 1]], alone)


@pytest.mark.skipif(native.module is None, reason="not built")
def test_work_is_that_of_the_strips_in_the_window():
    """Strips have 256 tokens, and begin at multiples of that."""
    case = Case([windowed(100_000, 1, 1000)], "float32", TILES)
    _, before = native.module.work()
    case.run()
    _, after = native.module.work()
    strips_from = (100_000 - 1000) // 256 * 256
    assert after - before == 6 * (100_000 - strips_from)
