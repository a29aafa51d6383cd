"""Saved contexts on disk: what some pools save others load, whatever their shares and arrangements."""

import pytest
import torch
from safetensors import safe_open

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.rank_file import RankFile
from longhelix.compute.cache.saved_context import SavedFile
from longhelix.compute.cache.snapshot import Snapshot, even_turns
from longhelix.compute.kernels import ROWS, TILES, KVFormat, native
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
LAYERS, HEADS, BLOCKS = 2, 5, 9  # of the model, and of the context
TILED = ["float32", "bfloat16", "float16", "fp8", "int8", "nvfp4", "int4"]
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
FORMATS = [
    *(pytest.param(dtype, TILES, shared, marks=needs_native) for dtype in TILED for shared in (False, True)
      if not (shared and dtype in ("fp8", "int8", "int4"))),
    *(pytest.param(dtype, ROWS, shared) for dtype in TILED[:-1] for shared in (False, True)),
]  # fmt: skip
formats = pytest.mark.parametrize(("dtype", "arrangement", "shared"), FORMATS)


def make_snapshot(heads, dtype="float32", arrangement=ROWS, shared=False, num_blocks=12, layers=range(LAYERS)):
    """Of a pool of random bytes."""
    format = KVFormat(dtype, 16, len(heads), 32, 16 if shared else 32, arrangement, shared)
    pool = KVPool([{"kv": format}] * len(layers), num_blocks, CPU)
    for entry in pool.entries():
        for tensor in entry.tensors:
            tensor.view(torch.uint8).random_(0, 256)
    return Snapshot(pool, [heads] * layers.stop, layers, (0,) * layers.stop)


def share(snapshot, heads, num_blocks=12):
    """A pool with some of the heads of another one's."""
    (format,) = snapshot.pool.formats
    made = make_snapshot(heads, format.dtype, format.arrangement, format.shared_values, num_blocks)
    for own, whole in zip(made.pool.entries(), snapshot.pool.entries(), strict=True):
        for mine, all_of_it in zip(own.tensors, whole.tensors, strict=True):
            of_heads = slice(heads.start, heads.stop)
            mine.copy_(all_of_it[of_heads] if made.pool.packed else all_of_it[:, :, :, of_heads])
    return made


def saved_by(folder, snapshot, name, blocks):
    """A file with the blocks of the context that have the ids `blocks`, by index; in two parts."""
    pairs = sorted(blocks.items())
    for first, part in ((0, pairs[:2]), (2, pairs[2:])):
        if part:
            snapshot.save(folder / name, len(pairs), first, *map(list, zip(*part, strict=True)), snapshot.layers)
    file = RankFile(folder / name)
    bounds = [(share.start, share.stop) for share in (snapshot.layers, snapshot.heads[0])]
    return SavedFile(name, *bounds, file.num_bytes, file.checksum)


def contents(snapshot, block, heads):
    """The bytes of one KV block, of some of the model's heads."""
    start, stop = heads.start - snapshot.heads[0].start, heads.stop - snapshot.heads[0].start
    found = []
    for entry in snapshot.pool.entries():
        for tensor in entry.tensors:
            of_heads = tensor[start:stop, block] if snapshot.pool.packed else tensor[block][:, :, start:stop]
            found.append(of_heads.contiguous().view(torch.uint8))
    return torch.cat([bytes.flatten() for bytes in found])


@formats
def test_any_split_of_blocks_and_heads_comes_back_under_another_one(tmp_path, dtype, arrangement, shared):
    """Saved over KVP 2 x TPA 2 with its heads 3 + 2; loaded over KVP 3 x TPA 3 with 2 + 2 + 1, to any blocks."""
    whole = make_snapshot(range(HEADS), dtype, arrangement, shared)
    files = []
    for heads in (range(3), range(3, 5)):
        for kvp_rank in range(2):
            blocks = {index: 11 - index for index in range(kvp_rank, BLOCKS, 2)}
            files.append(saved_by(tmp_path, share(whole, heads), f"{heads.start}-{kvp_rank}", blocks))
    for heads in (range(2), range(2, 4), range(4, 5)):
        for kvp_rank in range(3):
            target = make_snapshot(heads, dtype, arrangement, shared, num_blocks=7)
            before = [contents(target, block, heads) for block in range(7)]
            ids = dict(zip(range(kvp_rank, BLOCKS, 3), (1, 3, 2), strict=True))
            target.load(tmp_path, files, [ids])
            for index, block in ids.items():
                assert torch.equal(contents(target, block, heads), contents(whole, 11 - index, heads))
            for block in {0, 4, 5, 6}:
                assert torch.equal(contents(target, block, heads), before[block])


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8", "int8", "nvfp4"])
def test_tiles_and_rows_hold_the_same_numbers(tmp_path, dtype):
    """From CPUs to GPUs nothing changes but the width of scales; the other way these would be rounded."""
    tiles = make_snapshot(range(2), dtype, TILES)
    file = saved_by(tmp_path, tiles, "tiles", {0: 4, 1: 7})
    rows = make_snapshot(range(2), dtype, ROWS)
    rows.load(tmp_path, [file], [{0: 3, 1: 1}])
    back = saved_by(tmp_path, rows, "rows", {0: 3, 1: 1})
    again = make_snapshot(range(2), dtype, TILES)
    if dtype in ("fp8", "int8"):
        with pytest.raises(UserError, match="saved on GPUs with float32 scales") as refused:
            again.load(tmp_path, [back], [{0: 0, 1: 1}])
        assert refused.value.code == "context_mismatch"
        for name in ("kv.keys", "kv.values"):
            with safe_open(tmp_path / "tiles", "pt") as one, safe_open(tmp_path / "rows", "pt") as other:
                assert one.get_tensor(name).view(torch.uint8).equal(other.get_tensor(name).view(torch.uint8))
                scales = one.get_tensor(f"{name}_scales").float(), other.get_tensor(f"{name}_scales")
                assert torch.equal(*(found.nan_to_num(1.0) for found in scales))
    else:
        again.load(tmp_path, [back], [{0: 0, 1: 1}])
        for block, of_tiles in ((0, 4), (1, 7)):
            assert torch.equal(contents(again, block, range(2)), contents(tiles, of_tiles, range(2)))


def test_the_file_is_safetensors_with_what_the_pool_holds(tmp_path):
    snapshot = make_snapshot(range(3))
    saved_by(tmp_path, snapshot, "file", {0: 5, 2: 1, 3: 8})
    with safe_open(tmp_path / "file", "pt") as file:
        assert set(file.keys()) == {"blocks", "checksums", "kv.keys", "kv.values"}
        assert file.get_tensor("blocks").tolist() == [0, 2, 3]
        keys_JkLCD = file.get_tensor("kv.keys")
        for layer, entry in enumerate(snapshot.pool.entries()):
            k_PDkC, v_PDkC = entry.keys_and_values()
            bits_JDkC, values_JDkC = (kept_PDkC[[5, 1, 8]].view(torch.int32) for kept_PDkC in (k_PDkC, v_PDkC))
            assert torch.equal(keys_JkLCD[:, :, layer].view(torch.int32), bits_JDkC.permute(0, 2, 3, 1))
            values_Jk2D16 = file.get_tensor("kv.values")[:, :, layer].view(torch.int32)
            assert torch.equal(values_Jk2D16, values_JDkC.unflatten(3, (2, 16)).permute(0, 2, 3, 1, 4))
    assert (keys_JkLCD.dtype, keys_JkLCD.shape) == (torch.float32, (3, 3, LAYERS, 32, 16))


def test_layers_of_other_stages_are_left_where_they_are(tmp_path):
    whole = make_snapshot(range(2))
    file = saved_by(tmp_path, whole, "file", {0: 5, 1: 1})
    second = make_snapshot(range(2), layers=range(1, 2))
    second.load(tmp_path, [file], [{0: 2, 1: 4}])
    for block, of_whole in ((2, 5), (4, 1)):
        found, kept = contents(second, block, range(2)), contents(whole, of_whole, range(2))
        assert torch.equal(found, kept[len(kept) // LAYERS :])


class Damaged:
    """A context of two files, in which something can be changed."""

    def __init__(self, folder):
        self.folder, self.source = folder, make_snapshot(range(2))
        self.target = make_snapshot(range(2))
        self.files = [saved_by(folder, self.source, f"rank-{rank}", {rank: 3, rank + 2: 4}) for rank in range(2)]

    def load(self):
        self.target.load(self.folder, self.files, [{0: 0, 1: 1, 2: 2, 3: 3}])

    def words(self):
        with pytest.raises(UserError) as refused:
            self.load()
        assert refused.value.code == "invalid_context"
        assert str(refused.value).count("\n") == 0
        return str(refused.value)


@pytest.fixture
def damaged(tmp_path):
    context = Damaged(tmp_path)
    context.load()
    return context


def test_a_missing_file_is_named(damaged):
    (damaged.folder / "rank-1").unlink()
    assert "(file rank-1: it is missing)" in damaged.words()


@pytest.mark.parametrize("left", [0, 7, 100, 5000])
def test_a_truncated_file_is_refused(damaged, left):
    path = damaged.folder / "rank-0"
    with path.open("r+b") as file:
        file.truncate(left)
    assert f"it has {left} bytes, but {damaged.files[0].num_bytes} were saved" in damaged.words()
    with pytest.raises(UserError, match="header"):
        RankFile(path)


@pytest.mark.parametrize("at", [0, 8, 30, 0.02, 0.3, 0.5, 0.9, -1])
def test_one_byte_that_has_changed_anywhere_is_found(damaged, at):
    path = damaged.folder / "rank-1"
    content = bytearray(path.read_bytes())
    content[int(at * len(content)) if isinstance(at, float) else at] ^= 1
    path.write_bytes(content)
    assert "has changed since it was saved" in damaged.words() or "header" in damaged.words()


def test_what_is_not_read_is_not_checked_and_what_is_read_is(damaged):
    """A rank that needs one block of a file does not read the others."""
    path = damaged.folder / "rank-1"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last block, which is the context's fourth
    path.write_bytes(content)
    damaged.target.load(damaged.folder, damaged.files, [{0: 0, 1: 1, 2: 2}])
    assert "KV block 3 has changed" in damaged.words()


def test_files_that_do_not_hold_all_blocks_once_are_refused(damaged):
    damaged.files.append(damaged.files[0])
    assert "do not contain each of its KV blocks exactly once" in damaged.words()
    del damaged.files[1:]
    assert "do not contain each of its KV blocks exactly once" in damaged.words()


def test_tensors_of_another_model_are_refused(damaged):
    damaged.target = make_snapshot(range(2), "bfloat16")
    assert "kv.keys is F32 instead of BF16" in damaged.words()
    damaged.target = make_snapshot(range(2), shared=True)
    assert "do not have the sizes" in damaged.words()


def test_turns_go_up_in_even_steps():
    def turns(rows, ids, most=100):
        found = list(even_turns(rows, ids, most))
        pairs = [(range(100)[one], range(100)[other]) for one, other in found]
        assert [row for one, _ in pairs for row in one] == rows
        assert [block for _, other in pairs for block in other] == ids
        return len(found)

    assert turns([], []) == 0
    assert turns([0, 1, 2, 3], [0, 2, 4, 6]) == 1
    assert turns([0, 3, 6, 9], [5, 6, 7, 8]) == 1
    assert turns([0, 1, 2, 3], [9, 8, 7, 6]) == 4
    assert turns([0, 1, 2, 5, 8], [4, 5, 6, 9, 12]) == 2
    assert turns(list(range(10)), list(range(10)), most=4) == 3
    assert turns([4], [7]) == 1
