"""A newcomer's walk: a KV format is its bits, in spec/formats.py, and the way there and back, in
compute/kernels/numbers.py. Everything else asks these two: pool, memory formulas, planner, reference kernels, engine,
saved contexts.

There are two formats here. One is int8 whose scales are powers of two: what it stores are numbers times a shift. The
other one has numbers of 4 bits, two in a byte, and a scale of 8 bits for each 16 channels (block scales).
"""

from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from builtin import builtin
from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.rank_file import RankFile
from longhelix.compute.cache.saved_context import SavedFile
from longhelix.compute.cache.snapshot import Snapshot
from longhelix.compute.kernels import ROWS, KVFormat, numbers, partial_attention, reference, write_kv
from longhelix.compute.kernels.numbers import StoredNumbers
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.rank import new_pool, new_runner
from longhelix.compute.runner.runner import ModelRunner
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import memory
from longhelix.perf.setting import Dtypes, Setting
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import Chunk, InitialKV, NewSequence, SequenceChanges, Step
from longhelix.spec import FORMATS, NumberFormat, Scales, read_hf_config
from longhelix.spec.layout import Layout
from tensors import Tensors

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
NAME, BLOCKED = "int8_shifted", "e2m1_blocks"


class Shifted(StoredNumbers):
    """int8 with the least power of two as scale for which no number of a vector exceeds `largest`."""

    def encode(self, x_TkC: Tensor, scales: Scales) -> tuple[Tensor, Tensor]:
        most_Tk = x_TkC.float().abs().amax(-1) / self.largest
        scales_Tk = torch.where(most_Tk > 0, most_Tk, 1.0).log2().ceil().exp2()
        return (x_TkC.float() / scales_Tk.unsqueeze(-1)).round().to(self.dtype), scales_Tk


class PackedFours(StoredNumbers):
    """Floats of a sign, two bits of exponent and one of mantissa, two in a byte: of each pair the first one is low."""

    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def rounded(self, kept_TkC: Tensor) -> Tensor:
        codes_TkC = (kept_TkC.abs().unsqueeze(-1) - self.magnitudes).abs().argmin(-1) + 8 * kept_TkC.signbit()
        low_TkX, high_TkX = codes_TkC.unflatten(-1, (-1, 2)).unbind(-1)
        return (low_TkX + 16 * high_TkX).to(torch.uint8)

    def numbers(self, stored: Tensor) -> Tensor:
        codes = torch.stack((stored % 16, stored // 16), dim=-1).flatten(-2).long()
        return self.magnitudes[codes % 8] * torch.where(codes < 8, 1.0, -1.0)


@pytest.fixture
def shifted(monkeypatch):
    """The two lines that a new format takes, which would be in the tables themselves."""
    monkeypatch.setitem(FORMATS, NAME, NumberFormat(NAME, 8, kv={"rows": Scales(scale_bits=32)}))
    monkeypatch.setitem(numbers.STORED, NAME, Shifted(torch.int8, largest=127.0))
    monkeypatch.setitem(FORMATS, BLOCKED, NumberFormat(BLOCKED, 4, kv={"rows": Scales(scale_bits=8, numbers=16)}))
    monkeypatch.setitem(numbers.STORED, BLOCKED, PackedFours(torch.uint8, largest=6.0))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [NAME, BLOCKED, "int8", "fp8"])
@pytest.mark.parametrize("shared_values", [False, True])
def test_the_reference_attends_to_what_is_stored(shifted, dtype, shared_values):
    """Rows of a pool with scales, in two sequences, one of which has tokens beyond what its rows see."""
    format = KVFormat(dtype, 4, 2, 24, 16 if shared_values else 24, ROWS, shared_values)
    layer = format.new_layer(9, CPU)
    layer.values.view(torch.uint8).fill_(127)
    layer.scales.copy_(torch.full_like(layer.scales, torch.nan, dtype=torch.float32))  # of what nobody wrote
    k_SkC, v_SkC = torch.randn(2, 15, 2, 24, generator=seeded(1)) * 3
    blocks_X, extents_B2 = torch.tensor([0, 7, 2, 5, 0, 8, 1]), torch.tensor([[1, 4], [5, 7]])
    slots_S = torch.cat([blocks_X[1:4, None] * 4 + torch.arange(4), blocks_X[5:7, None] * 4 + torch.arange(4)]).view(-1)
    write_kv(k_SkC, None if shared_values else v_SkC, layer, torch.cat((slots_S[:11], slots_S[12:16])))
    q_TqC = torch.randn(4, 6, 24, generator=seeded(2))
    rows = torch.tensor([0, 3, 4]), torch.tensor([9, 10, 11, 4])
    out_TqC, lse_Tq = partial_attention(q_TqC, layer, blocks_X, extents_B2, *rows, 0.2)
    stored, scales = numbers.STORED[dtype], format.scales
    k_SkC, v_SkC = (stored.decode(*stored.encode(x_SkC, scales), scales.numbers) for x_SkC in (k_SkC, v_SkC))
    v_SkC = k_SkC[..., :16] if shared_values else v_SkC
    plain = (torch.cat((x[:11], torch.zeros(1, *x.shape[1:]), x[11:])).unflatten(0, (4, 4)) for x in (k_SkC, v_SkC))
    expected = reference.partial_attention(q_TqC, *plain, torch.arange(4), torch.tensor([[0, 3], [3, 4]]), *rows, 0.2)
    torch.testing.assert_close(out_TqC, expected[0])
    torch.testing.assert_close(lse_Tq, expected[1])


@pytest.mark.parametrize(("dtype", "error"), [(NAME, 1 / 127), ("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_stored_numbers_are_near_those_that_were_given(shifted, dtype, error):
    """Relative to a vector's largest magnitude. Zeros come back as zeros."""
    x_TkC = torch.randn(50, 2, 64, generator=seeded(3)) * torch.logspace(-30, 30, 50)[:, None, None]
    x_TkC[7, 1] = 0
    stored, scales = numbers.STORED[dtype].encode(x_TkC, Scales(32))
    assert (stored.dtype.itemsize, scales.shape, scales.dtype) == (1, (50, 2), torch.float32)
    deviation_TkC = (numbers.STORED[dtype].decode(stored, scales) - x_TkC).abs()
    assert (deviation_TkC <= x_TkC.abs().amax(-1, keepdim=True) * error * 1.001).all()


TINY = read_hf_config(
    {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)  # fmt: skip


def run(config: EngineConfig) -> tuple[ModelRunner, Tensor]:
    """The hidden states of a prompt's last row, in the second of two chunks, which sees the first through the pool."""
    group = RankGroup((0,), 0, None)
    weights = Weights(Tensors.of(TINY), declare(TINY, Layout(), 0), torch.float32, "float32", CPU)
    model = Decoder(TINY, Mesh(Layout(), 0, group, group, group), weights)
    runner = new_runner(config, model.mesh, model, new_pool(config, 0, 4))
    new = NewSequence(0, SamplingParams(), seed=0, capacity_tokens=40, kv=InitialKV((3,), spread=True))
    tokens = array("i", [5, 3, 8, 1] * 5).tobytes()
    runner.execute(
        Step(
            1, changes=SequenceChanges(new=(new,)), chunks=(Chunk(0, tokens, (Block(0, 0), Block(0, 2)), sample=False),)
        )
    )
    return runner, runner.forward(Step(2, chunks=(Chunk(0, tokens[:16], (), sample=False),)))[-1]


@pytest.mark.parametrize(("dtype", "bytes_per_vector", "error"), [(NAME, 16 + 4, 0.05), (BLOCKED, 8 + 1, 0.2)])
def test_the_engine_runs_it_and_everyone_counts_its_bytes(shifted, dtype, bytes_per_vector, error):
    plain = resolve(builtin(), Layout(), EngineOptions(kv_cache_tokens=64, device="cpu", dtype="float32"))
    plain = replace(plain, spec=TINY)
    config = replace(plain, formats=replace(plain.formats, kv_dtype=dtype))
    runner, hidden_H = run(config)
    _, expected_H = run(plain)
    assert 0 < (hidden_H - expected_H).norm() < error * expected_H.norm()
    system = config.machines.system.replaced({f"flops_per_s.{dtype}": 1e12}, "assumed")
    setting = Setting(TINY, system, Dtypes(config.formats.weight_dtype, dtype))
    assert runner.pool.num_bytes == 64 * config.kv_bytes_per_token(0) == 64 * 2 * 2 * bytes_per_vector
    assert memory(setting, Layouts.of([Layout()]), 1.0, 64.0).kv_bytes[0] == runner.pool.num_bytes


def test_scale_blocks_are_parts_of_a_vector(shifted):
    """40 channels are two whole blocks and a half. Each has numbers of its own size, and keeps them apart."""
    x_TkC = torch.randn(30, 2, 40, generator=seeded(4))
    x_TkC[..., 16:32] *= 100
    x_TkC[3, 1, 32:] = 0
    scales = FORMATS[BLOCKED].kv["rows"]
    stored, scales_TkG = numbers.STORED[BLOCKED].encode(x_TkC, scales)
    assert (stored.shape, stored.dtype) == ((30, 2, 20), torch.uint8)
    assert (scales_TkG.shape, scales_TkG.dtype) == ((30, 2, 3), torch.float8_e4m3fn)
    deviation_TkC = (numbers.STORED[BLOCKED].decode(stored, scales_TkG, 16) - x_TkC).abs()
    assert (deviation_TkC[3, 1, 32:] == 0).all()
    for block_TkB, own_TkB in zip(deviation_TkC.split(16, -1), x_TkC.split(16, -1), strict=True):
        # Between 4 and 6 the numbers are 2 apart; a scale has three bits of mantissa.
        assert (block_TkB <= own_TkB.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16)).all()


@pytest.mark.parametrize("dtype", [NAME, BLOCKED])
def test_a_saved_context_has_what_is_stored(shifted, tmp_path, dtype):
    """Two heads of three go to another pool, bit for bit."""
    format = KVFormat(dtype, 4, 3, 48, 48, ROWS)
    pool, other = (KVPool([{"kv": replace(format, num_kv_heads=heads)}] * 2, 6, CPU) for heads in (3, 2))
    for tensor in (tensor for layer in pool.entries() for tensor in layer.tensors):
        tensor.view(torch.uint8).random_(0, 256)
    whole = Snapshot(pool, [range(3)] * 2, range(2), (0, 0))
    whole.save(tmp_path / "file", 2, 0, [0, 1], [5, 2], range(2))
    file = RankFile(tmp_path / "file")
    saved = SavedFile("file", (0, 2), (0, 3), file.num_bytes, file.checksum)
    Snapshot(other, [range(1, 3)] * 2, range(2), (0, 0)).load(tmp_path, [saved], [{0: 1, 1: 4}])
    for layer, copied in zip(pool.entries(), other.entries(), strict=True):
        for tensor, found in zip(layer.tensors, copied.tensors, strict=True):
            expected = tensor[[5, 2]][:, :, :, 1:].contiguous()
            assert torch.equal(found[[1, 4]].view(torch.uint8), expected.view(torch.uint8))
