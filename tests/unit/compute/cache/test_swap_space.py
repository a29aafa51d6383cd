"""Swapped KV blocks come back as they went, from a file that nobody else sees."""

import os
import tempfile

import pytest
import torch

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.kernels import ROWS, TILES, KVFormat
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


def filled_pool(format):
    pool = KVPool([{"kv": format}] * 2, 6, CPU)
    generator = torch.Generator().manual_seed(0)
    for block in range(6):
        pool.write([block], torch.randint(0, 256, (pool.block_bytes(),), dtype=torch.uint8, generator=generator))
    return pool


@pytest.mark.parametrize(
    "format",
    [KVFormat("float32", 16, 2, 8, 8, ROWS), KVFormat("bfloat16", 16, 1, 32, 32, TILES)],
    ids=["rows", "tiles"],
)
def test_a_block_comes_back_into_another_one(format):
    pool = filled_pool(format)
    blocks = [pool.read([block]).clone() for block in range(6)]
    space = SwapSpace(pool, [3])
    space.swap_out(1, 2)
    space.swap_out(4, 0)
    for block in (1, 4):
        pool.write([block], torch.zeros(pool.block_bytes(), dtype=torch.uint8))
    space.swap_in(0, 1)
    space.swap_in(2, 5)
    space.swap_in(2, 3)
    expected = [0, 4, 2, 1, None, 1]
    for block, source in enumerate(expected):
        assert torch.equal(pool.read([block]), torch.zeros_like(blocks[0]) if source is None else blocks[source])
    assert space.swapped_blocks == 5


def test_its_file_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    space = SwapSpace(filled_pool(KVFormat("float32", 16, 2, 8, 8, ROWS)), [3])
    assert not os.listdir(tmp_path)
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) in maps.read()
    space.swap_out(0, 2)


def test_more_than_the_disk_holds_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"need \d+ bytes of .* on a rank.*lower --swap-tokens, or set TMPDIR"):
        SwapSpace(filled_pool(KVFormat("float32", 16, 2, 8, 8, ROWS)), [2**46])
    assert not os.listdir(tmp_path)
