"""The passes on real ranks: graphs of torch.compile over gloo, of our modules and of transformers' own."""

import pytest
from world import run_ranks

TIMEOUT_S = 400

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("size", [2, 3])
def test_compiled_modules(size):
    run_ranks("passes_rank", [f"modules"], size, TIMEOUT_S)


def test_cache_of_graphs():
    run_ranks("passes_rank", ["cache"], 2, TIMEOUT_S)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_models_of_transformers(name):
    run_ranks("passes_rank", [f"others={name}"], 2, TIMEOUT_S)
