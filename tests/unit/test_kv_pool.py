import pytest
import torch

from longhelix.cache.pool import KVPool

pytestmark = pytest.mark.unit

ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.float8_e4m3fn: 1}


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "block_tokens", "kv_heads", "head_size"),
    [(30, 5, 16, 3, 64), (1, 1, 1, 1, 1), (2, 7, 16, 2, 128), (2, 0, 16, 2, 64), (3, 4, 16, 0, 64), (0, 4, 16, 2, 64)],
)
def test_bytes_are_those_of_keys_and_values_of_every_layer(
    num_layers, num_blocks, block_tokens, kv_heads, head_size, dtype
):
    pool = KVPool(num_layers, num_blocks, block_tokens, kv_heads, head_size, dtype, torch.device("cpu"))
    assert pool.num_bytes == 2 * num_layers * num_blocks * block_tokens * kv_heads * head_size * ITEM_BYTES[dtype]
    assert len(pool.k) == len(pool.v) == num_layers
    for layer in (*pool.k, *pool.v):
        assert layer.shape == (num_blocks, block_tokens, kv_heads, head_size)
        assert layer.dtype == dtype
        assert layer.device.type == "cpu"
        assert layer.is_contiguous()


def test_layers_keys_and_values_share_no_bytes():
    pool = KVPool(3, 4, 16, 2, 8, torch.float32, torch.device("cpu"))
    layers = [*pool.k, *pool.v]
    for number, layer in enumerate(layers):
        layer.fill_(number)
    assert [layer.unique().tolist() for layer in layers] == [[number] for number in range(6)]


def test_the_pool_is_on_the_device_asked_for():
    pool = KVPool(1, 10**6, 16, 8, 128, torch.bfloat16, torch.device("meta"))
    assert {layer.device.type for layer in (*pool.k, *pool.v)} == {"meta"}
    assert pool.num_bytes == 2 * 10**6 * 16 * 8 * 128 * 2
