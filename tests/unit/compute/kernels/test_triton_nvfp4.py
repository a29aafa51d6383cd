"""KV in nvfp4 on GPUs: what the Triton kernels store and read, beside the reference in torch."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from block_extents import side_by_side
from longhelix.compute.kernels import ROWS, KVFormat, reference
from longhelix.compute.kernels import partial_attention as op
from longhelix.compute.kernels import write_kv as write_op
from longhelix.compute.kernels.numbers import STORED
from longhelix.compute.kernels.triton import attention, partial_attention, write_kv
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


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request):
    """Where the kernels run: on the CPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            interpret(patch)
        yield torch.device(request.param)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(rows: int, kv_heads: int, channels: int, seed: int) -> Tensor:
    """Vectors of all sizes, some of zeros or with a channel far above the others, and some that are broken."""
    x_TkC = torch.randn(rows, kv_heads, channels, generator=seeded(seed))
    x_TkC *= 10 ** (torch.rand(rows, kv_heads, 1, generator=seeded(seed + 1)) * 8 - 4)
    x_TkC[0], x_TkC[1, 0], x_TkC[2, 0] = 0.0, 1e-42, 3e38
    x_TkC[3, 0, 5], x_TkC[4, 0, 3], x_TkC[5, 0, 7] = math.nan, -math.inf, 1e4
    return x_TkC


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize(("channels", "arrays"), [(64, 2), (80, 2), (48, 1)])
def test_a_write_stores_what_the_reference_does_and_nothing_else(channels, arrays, dtype, device):
    rows, kv_heads, block_tokens = 24, 2, 4
    values_PADkX = torch.full((8, arrays, block_tokens, kv_heads, channels // 2), 0xA5, dtype=torch.uint8)
    scales_PADkG = torch.full((8, arrays, block_tokens, kv_heads, channels // 16 + 1), 0xA5, dtype=torch.uint8)
    slots_T = torch.randperm(8 * block_tokens, generator=seeded(1))[:rows]
    slots_T[7] = -1
    both = [vectors(rows, kv_heads, channels, seed).to(dtype) for seed in (2, 4)][:arrays]
    wanted = values_PADkX.clone(), scales_PADkG.clone()
    for array, x_TkC in enumerate(both):
        for part_PADkX, stored_TkX in zip(wanted, STORED["nvfp4"].encode(x_TkC), strict=True):
            reference.write_rows(stored_TkX, part_PADkX[:, array], slots_T)
    found = values_PADkX.to(device), scales_PADkG.to(device)
    rows_TkC = [x_TkC.to(device) for x_TkC in both]
    write_kv(rows_TkC[0], rows_TkC[1] if arrays == 2 else None, *found, slots_T.to(device))
    for found_part, wanted_part in zip(found, wanted, strict=True):
        assert torch.equal(found_part.cpu(), wanted_part)


@dataclass(frozen=True)
class Case:
    """`limits`: of each sequence's rows. `window`: how many tokens a row sees, None for all."""

    limits: list[list[int]]
    kv_heads: int
    group: int
    key_size: int
    value_size: int
    window: int | None = None

    def run(self, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The kernels' result, and that of the reference over decoded numbers. Tokens that no row sees are NaN."""
        block_tokens, arrays = 16, 2 if self.key_size == self.value_size else 1
        lengths = [max(rows, default=0) for rows in self.limits]
        counts = [-(-length // block_tokens) for length in lengths]
        ids = torch.randperm(sum(counts) + 2, generator=seeded(3))
        blocks = ids.split([*counts, 2])[:-1]
        size = len(ids), arrays, block_tokens, self.kv_heads
        values_PADkX = torch.full((*size, self.key_size // 2), 0xFF, dtype=torch.uint8)
        scales_PADkG = torch.full((*size, self.key_size // 16 + 1), 0xFF, dtype=torch.uint8)
        for mine_J, length in zip(blocks, lengths, strict=True):
            slots_S = (mine_J[:, None] * block_tokens + torch.arange(block_tokens)).flatten()[:length]
            for array in range(arrays):
                x_SkC = torch.randn(length, self.kv_heads, self.key_size, generator=seeded(10 + array + length))
                for part_PADkX, stored_SkX in zip(
                    (values_PADkX, scales_PADkG), STORED["nvfp4"].encode(x_SkC), strict=True
                ):
                    reference.write_rows(stored_SkX, part_PADkX[:, array], slots_S)
        numbers_PADkC = STORED["nvfp4"].decode(values_PADkX, scales_PADkG)
        k_PDkC, v_PDkC = numbers_PADkC[:, 0], numbers_PADkC[:, -1, ..., : self.value_size]
        starts_B = torch.tensor([0, *map(len, self.limits)]).cumsum(0)
        limits_T = torch.tensor([limit for rows in self.limits for limit in rows])
        firsts_T = None if self.window is None else (limits_T - self.window).clamp(min=0)
        q_TqC = torch.randn(len(limits_T), self.kv_heads * self.group, self.key_size, generator=seeded(5)).to(dtype)
        table = *side_by_side(blocks, other=int(ids[-1])), starts_B, limits_T
        on_device = [x.to(device) for x in (q_TqC, values_PADkX, scales_PADkG, *table)]
        launch = self.value_size, max(map(len, self.limits)), max(lengths)
        windows = None if firsts_T is None else firsts_T.to(device)
        out_TqC, lse_Tq = partial_attention(*on_device, 0.2, *launch, windows)
        wanted = reference.partial_attention(q_TqC.float(), k_PDkC, v_PDkC, *table, 0.2, firsts_T)
        return (out_TqC.cpu(), lse_Tq.cpu()), wanted


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case([[140, 141], [*range(1, 24)], [0, 33]], 2, 3, 64, 64),
        Case([[150], [5]], 2, 2, 80, 80, window=40),
        Case([[140], [0, 33]], 1, 20, 48, 32),
    ],
    ids=["heads", "windows", "latents"],
)
def test_attention_equals_the_reference_over_what_is_stored(case, dtype, device):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SPLIT_TOKENS", 128)
        (out_TqC, lse_Tq), (wanted_TqC, wanted_lse_Tq) = case.run(dtype, device)
    torch.testing.assert_close(out_TqC.float(), wanted_TqC, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse_Tq, wanted_lse_Tq, rtol=0, atol=TOLERANCE[dtype])


def test_rotated_keys_give_the_scores_of_keys_as_they_are():
    """Of rows on the CPU, which the reference reads. One channel is large in all keys, as many models have it."""
    table = torch.arange(2), torch.tensor([[0, 2]]), torch.tensor([0, 1]), torch.tensor([20])
    k_TkC, v_TkC = (torch.randn(20, 2, 64, generator=seeded(seed)) for seed in (6, 7))
    k_TkC[..., 3] += 20
    q_TqC, found = torch.randn(1, 4, 64, generator=seeded(8)), []
    for dtype in ("nvfp4", "float32"):
        layer = KVFormat(dtype, 16, 2, 64, 64, ROWS).new_layer(2, torch.device("cpu"))
        write_op(k_TkC, v_TkC, layer, torch.arange(20))
        found.append(op(q_TqC, layer, *table, 0.05))
    (out_TqC, lse_Tq), (wanted_TqC, wanted_lse_Tq) = found
    torch.testing.assert_close(lse_Tq, wanted_lse_Tq, rtol=0, atol=0.1)
    torch.testing.assert_close(out_TqC, wanted_TqC, rtol=0, atol=0.2)
