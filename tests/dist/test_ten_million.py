"""Ten million tokens over two ranks that share memory, against float64: every key, and the rows that read them all."""

import json

import pytest
from world import run_ranks

from longhelix.compute.kernels import native

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(960),
    pytest.mark.skipif(native.module is None, reason="the native module is not built here"),
]
TIMEOUT_S = 900  # beside another test, on two slow cores


@pytest.mark.parametrize("placement", ["growing", "striped"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_ten_million_tokens_equal_float64(kv_dtype, placement):
    for rank, output in enumerate(run_ranks("ten_million_rank", [kv_dtype, placement], 2, TIMEOUT_S)):
        for name, (difference, share) in json.loads(output).items():
            print(f"rank {rank}, {name}: {difference:.2g}, {share:.2g} of the tolerance")
