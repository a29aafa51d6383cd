import subprocess
import sys

import msgspec
import pytest
import torch

from builtin import builtin
from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import ROWS, TILES, KVFormat, native, partial_attention, write_kv
from longhelix.compute.machine import host
from longhelix.compute.runner.rank import new_pool
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

CPU, META = torch.device("cpu"), torch.device("meta")
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4, "nvfp4": 4}
NARROW = ["fp8", "int8", "int4"]
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
SIZES = [
    (30, 5, 16, 3, 64, 64),
    (1, 1, 1, 1, 1, 1),
    (2, 7, 16, 2, 128, 64),
    (2, 0, 16, 2, 64, 64),
    (3, 4, 16, 0, 64, 64),
    (0, 4, 16, 2, 64, 64),
]
sizes = pytest.mark.parametrize(
    ("num_layers", "num_blocks", "block_tokens", "kv_heads", "key_size", "value_size"), SIZES, ids=str
)
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shared_values", [False, True])
@sizes
def test_rows_are_a_tensor_of_keys_and_values_with_float32_scales_of_narrow_numbers(
    num_layers, num_blocks, block_tokens, kv_heads, key_size, value_size, shared_values, dtype
):
    if not shared_values:
        value_size = key_size
    format = KVFormat(dtype, block_tokens, kv_heads, key_size, value_size, ROWS, shared_values=shared_values)
    pool = KVPool([{"kv": format}] * num_layers, num_blocks, CPU)
    arrays = 1 if shared_values else 2
    vectors = arrays * block_tokens * kv_heads
    assert format.block_bytes == vectors * (key_size * BITS[dtype] // 8 + (4 if dtype in NARROW else 0))
    assert pool.num_bytes == num_layers * num_blocks * format.block_bytes
    assert len(pool.layers) == num_layers
    for layer in pool.entries():
        assert layer.values.shape == (num_blocks, arrays, block_tokens, kv_heads, key_size)
        assert layer.values.dtype == TORCH_DTYPES[dtype]
        assert layer.values.device.type == "cpu"
        assert layer.values.is_contiguous()
        assert (layer.scales is not None) == (dtype in NARROW)
        if layer.scales is not None:
            assert layer.scales.shape == (num_blocks, arrays, block_tokens, kv_heads)
            assert layer.scales.dtype == torch.float32


@pytest.mark.parametrize("shared_values", [False, True])
def test_rows_of_nvfp4_are_bytes_of_two_codes_with_bytes_of_scales(shared_values):
    format = KVFormat("nvfp4", 4, 3, 80, 64 if shared_values else 80, ROWS, shared_values=shared_values)
    layer, arrays = format.new_layer(5, CPU), 1 if shared_values else 2
    assert layer.values.shape == (5, arrays, 4, 3, 40)
    assert layer.scales.shape == (5, arrays, 4, 3, 6)
    assert layer.values.dtype == layer.scales.dtype == torch.uint8
    assert layer.values.nbytes + layer.scales.nbytes == 5 * format.block_bytes


def test_scale_blocks_take_whole_heads():
    with pytest.raises(
        UserError, match="kv_dtype nvfp4 needs head sizes of a multiple of 16: set kv_dtype to bfloat16"
    ):
        KVFormat.choose("nvfp4", 16, 2, 72, 72, torch.device("cuda"))


@needs_native
@pytest.mark.parametrize(
    ("dtype", "shared_values"),
    [(dtype, shared) for dtype in BITS for shared in (False, True) if not (shared and dtype in NARROW)],
)
@pytest.mark.parametrize(("key_size", "value_size"), [(64, 64), (16, 16), (576, 512), (80, 96)])
@pytest.mark.parametrize(("block_tokens", "kv_heads"), [(16, 3), (128, 1), (32, 8)])
def test_packed_tiles_have_the_bytes_that_the_kernels_step_over(
    block_tokens, kv_heads, key_size, value_size, shared_values, dtype
):
    format = KVFormat(dtype, block_tokens, kv_heads, key_size, value_size, TILES, shared_values=shared_values)
    pool = KVPool([{"kv": format}] * 2, 3, CPU)
    channels = key_size if shared_values else key_size + value_size
    tile_bytes = 16 * channels * BITS[dtype] // 8 + (2 * 16 * 2 if dtype in NARROW else 0)
    if dtype == "nvfp4":  # a byte for each 16 channels, and one for the vector
        tile_bytes += 16 * (channels // 16 + (1 if shared_values else 2))
    assert format.block_bytes == block_tokens // 16 * kv_heads * tile_bytes
    assert pool.num_bytes == 2 * 3 * format.block_bytes
    for layer in pool.entries():
        assert layer.values.shape == (kv_heads, 3, block_tokens // 16, tile_bytes)
        assert layer.values.dtype == torch.uint8
        assert layer.values.is_contiguous()
        assert layer.scales is None
        assert layer.handle.tile_bytes == tile_bytes


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)])
def test_layers_share_no_bytes(packed):
    pool = KVPool([{"kv": KVFormat("float32", 16, 2, 16, 16, TILES if packed else ROWS)}] * 3, 4, CPU)
    for number, layer in enumerate(pool.entries()):
        layer.values.fill_(number)
    assert [layer.values.unique().tolist() for layer in pool.entries()] == [[number] for number in range(3)]


def test_keys_and_values_of_rows_share_no_bytes_unless_they_are_shared():
    layer = KVFormat("float32", 16, 2, 8, 8, ROWS).new_layer(4, CPU)
    k_PDkC, v_PDkC = layer.keys_and_values()
    k_PDkC.fill_(1), v_PDkC.fill_(2)
    assert k_PDkC.shape == v_PDkC.shape == (4, 16, 2, 8)
    assert k_PDkC.unique().tolist() == [1]
    assert layer.values.unique().tolist() == [1, 2]
    shared = KVFormat("float32", 16, 2, 8, 6, ROWS, shared_values=True).new_layer(4, CPU)
    k_PDkC, v_PDkC = shared.keys_and_values()
    k_PDkC.copy_(torch.arange(8.0))
    assert (v_PDkC == torch.arange(6.0)).all()


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_narrow_rows_are_not_shown_as_plain_tensors(dtype):
    layer = KVFormat(dtype, 16, 2, 8, 8, ROWS).new_layer(4, CPU)
    with pytest.raises(ValueError, match="only unquantised rows"):
        layer.keys_and_values()


def test_the_pool_is_on_the_device_asked_for():
    pool = KVPool([{"kv": KVFormat("bfloat16", 16, 8, 128, 128, ROWS)}], 10**6, META)
    assert [layer.values.device.type for layer in pool.entries()] == ["meta"]
    assert pool.num_bytes == 2 * 10**6 * 16 * 8 * 128 * 2


@pytest.fixture
def config():
    return resolve(builtin(), Layout(kvp=2), EngineOptions(kv_cache_tokens=8192, device="cpu"))


def test_a_pool_has_its_memory_from_the_start(config):
    """The system's count of what a process really has, against the formula; of a new process, which has no memory left
    from before."""
    program = """if True:
        import sys, msgspec, psutil
        from longhelix.compute.runner.config import EngineConfig
        from longhelix.compute.runner.rank import new_pool
        config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
        process = psutil.Process()
        before = process.memory_info().rss
        pool = new_pool(config, 0, config.scheduler.num_blocks)
        print(pool.num_bytes, process.memory_info().rss - before)
        """
    done = subprocess.run(
        [sys.executable, "-c", program], input=msgspec.msgpack.encode(config), capture_output=True, check=True
    )
    pool_bytes, taken = map(int, done.stdout.split())
    assert pool_bytes == 4096 * config.kv_bytes_per_token(0) > 2**26
    assert 0.98 * pool_bytes < taken < 1.1 * pool_bytes


def test_memory_that_went_to_others_meanwhile_is_refused_in_words(config, monkeypatch):
    """Of eight parts of thirty layers the sixth finds less than both ranks are about to take."""
    pool_bytes = 4096 * config.kv_bytes_per_token(0)
    part_bytes = pool_bytes // 30 // 8
    free = iter([2 * part_bytes] * 5 + [2 * part_bytes - 1])
    monkeypatch.setattr(host, "available_bytes", lambda: next(free))
    words = f"needs {pool_bytes - 5 * part_bytes} more bytes on a rank, but {2 * part_bytes - 1} bytes are free for 2 "
    with pytest.raises(UserError, match=words) as refused:
        new_pool(config, 0, config.scheduler.num_blocks)
    assert refused.value.code == "out_of_memory"


IN_ROWS = [(dtype, shared, ROWS) for dtype in TORCH_DTYPES for shared in (False, True)]
IN_TILES = [
    pytest.param(dtype, shared, TILES, marks=needs_native)
    for dtype in BITS
    for shared in (False, True)
    if not (shared and dtype in NARROW)
]
formats = pytest.mark.parametrize(("dtype", "shared_values", "arrangement"), [*IN_ROWS, *IN_TILES])


def pool_of_random_bytes(dtype, shared_values, arrangement, kv_heads=3, num_blocks=6):
    sizes = (
        (48, 48) if arrangement is TILES else (5, 3 if shared_values else 5)
    )  # rows may be of an odd number of bytes
    format = KVFormat(dtype, 16, kv_heads, *sizes, arrangement, shared_values)
    pool = KVPool([{"kv": format}] * 2, num_blocks, CPU)
    for entry in pool.entries():
        for values in entry.tensors:
            values.view(torch.uint8).random_(0, 256)
    return pool


def contents(pool):
    """The bytes of each KV block, by layer and tensor."""
    found = [[] for _ in range(pool.num_blocks)]
    for entry in pool.entries():
        for values in entry.tensors:
            for block, of_block in enumerate(values.view(torch.uint8).unbind(1 if pool.packed else 0)):
                found[block].append(of_block.flatten().tolist())
    return found


@formats
def test_views_by_block_are_all_of_a_layer_and_no_copies(dtype, shared_values, arrangement):
    pool = pool_of_random_bytes(dtype, shared_values, arrangement)
    for entry in pool.entries():
        assert [bytes_PX.shape[0] for bytes_PX in entry.by_block] == [6] * (1 + (entry.scales is not None))
        assert {bytes_PX.dtype for bytes_PX in entry.by_block} == {torch.uint8}
        assert sum(bytes_PX[0].numel() for bytes_PX in entry.by_block) == entry.format.block_bytes
    before = contents(pool)
    for entry in pool.entries():
        for bytes_PX in entry.by_block:
            bytes_PX[3] = 7
    after = contents(pool)
    assert after[:3] + after[4:] == before[:3] + before[4:]
    assert {byte for of_tensor in after[3] for byte in of_tensor} == {7}


@formats
def test_a_block_is_copied_in_all_layers_and_no_other_changes(dtype, shared_values, arrangement):
    pool = pool_of_random_bytes(dtype, shared_values, arrangement)
    before = contents(pool)
    assert before[4] != before[1]
    pool.copy(4, 1)
    assert contents(pool) == [before[0], before[4], *before[2:]]


@formats
def test_what_one_pool_reads_another_writes(dtype, shared_values, arrangement):
    """Of as many blocks or not."""
    source, target = (pool_of_random_bytes(dtype, shared_values, arrangement, num_blocks=number) for number in (6, 4))
    before, given = contents(target), contents(source)
    bytes_X = source.read([5, 0])
    assert bytes_X.shape == (2 * source.block_bytes(),)
    assert source.block_bytes() == 2 * source.formats[0].block_bytes
    target.write([1, 3], bytes_X)
    assert contents(target) == [before[0], given[5], before[2], given[0]]
    assert contents(source) == given


@formats
def test_no_blocks_have_no_bytes(dtype, shared_values, arrangement):
    pool = pool_of_random_bytes(dtype, shared_values, arrangement)
    before = contents(pool)
    pool.write([], pool.read([]))
    assert contents(pool) == before


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_blocks_without_heads_have_no_bytes(dtype):
    pool = pool_of_random_bytes(dtype, shared_values=False, arrangement=ROWS, kv_heads=0)
    bytes_X = pool.read([1, 2])
    assert bytes_X.numel() == 0
    pool.write([3, 4], bytes_X)
    pool.copy(0, 1)


@needs_native
@pytest.mark.parametrize("dtype", BITS)
def test_attention_over_copied_blocks_gives_the_same_bits(dtype):
    """Written by the kernels, copied within a pool and to another one, read by the kernels."""
    pools = [KVPool([{"kv": KVFormat(dtype, 16, 2, 32, 32, TILES)}], 8, CPU) for _ in range(2)]
    k_TkC, v_TkC, q_TqC = torch.randn(40, 2, 32), torch.randn(40, 2, 32), torch.randn(1, 4, 32)
    write_kv(k_TkC, v_TkC, pools[0].layers[0]["kv"], torch.arange(40))
    for source, target in ((0, 7), (1, 4), (2, 5)):
        pools[0].copy(source, target)
    pools[1].write([3, 1, 6], pools[0].read([7, 4, 5]))

    def attend(pool, blocks):
        tables = (torch.tensor(blocks), torch.tensor([[0, 3]]), torch.tensor([0, 1]), torch.tensor([40]))
        return partial_attention(q_TqC, pool.layers[0]["kv"], *tables, 32**-0.5, 1, 48)

    expected = attend(pools[0], [0, 1, 2])
    for found in (attend(pools[0], [7, 4, 5]), attend(pools[1], [3, 1, 6])):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_layer_of_two_entries_keeps_both_apart():
    """Of different sizes and formats: what is written into one entry comes back from it, in every layer."""
    formats = {
        "kv": KVFormat.choose("float32", 16, 2, 32, 32, CPU),
        "index": KVFormat("int8", 16, 1, 24, 24, ROWS, shared_values=True),
    }
    pool = KVPool([formats, formats], 3, CPU)
    assert pool.num_bytes == 2 * 3 * (formats["kv"].block_bytes + formats["index"].block_bytes)
    assert not pool.packed
    slots_T, mine, generator = torch.tensor([32, 0, -1, 16]), [0, 1, 3], torch.Generator().manual_seed(1)
    written = []
    for layer in pool.layers:
        assert list(layer) == ["kv", "index"]
        k_TkC, v_TkC = torch.randn(2, 4, 2, 32, generator=generator)
        index_T1C = torch.randn(4, 1, 24, generator=generator)
        write_kv(k_TkC, v_TkC, layer["kv"], slots_T)
        write_kv(index_T1C, None, layer["index"], slots_T)
        written.append((k_TkC, v_TkC, index_T1C))
    for layer, (k_TkC, v_TkC, index_T1C) in zip(pool.layers, written, strict=True):
        # A row that sees one token gets its value.
        blocks_X, sees_one = torch.tensor([2, 0, 1]), torch.ones(3, dtype=torch.int64)
        extents_32, row_starts_B = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.arange(4)
        out_TqC, lse_Tq = partial_attention(k_TkC[mine], layer["kv"], blocks_X, extents_32, row_starts_B, sees_one, 1.0)
        torch.testing.assert_close(out_TqC, v_TkC[mine])
        torch.testing.assert_close(lse_Tq, k_TkC[mine].square().sum(-1))
        index_PDkC, _ = layer["index"].decoded(blocks_X)
        torch.testing.assert_close(index_PDkC[:, 0], index_T1C[mine], rtol=0, atol=0.03)
