"""Whole models on token shards, by the compiler pass and by Flash Comm V1, whose rows are gathered as numbers or as
bytes: the logits and greedy tokens of the same ranks without them."""

import copy
import itertools

import numpy as np
import pytest
import shown
import test_images
from test_equality import deviation, make_case
from test_llm import needs_compiler

from longhelix.compute.kernels import native
from oracle import NATIVE_EXPERTS, NATIVE_LATENTS, NATIVE_SIZES, make_oracle

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]


def wide(config, name):
    """With as many columns as four ranks can cut into sixteens."""
    config = copy.deepcopy(config)
    setattr(config.get_text_config(), name, 192)
    return config


MODELS = {
    "llama": NATIVE_SIZES,
    "qwen3_moe": wide(NATIVE_EXPERTS["native-qwen3_moe"], "moe_intermediate_size"),
    "deepseek_v3": wide(NATIVE_LATENTS, "moe_intermediate_size"),
    "qwen3_vl": wide(shown.PACKED, "intermediate_size"),
    "qwen3_vl_moe": shown.PACKED_EXPERTS,
}
MADE = {}
PASS = {"execution": "compiled", "enable_sp": True}
FLASH, COMPILED_FLASH = {"flash_comm_v1": True}, {"flash_comm_v1": True, "execution": "compiled"}
CELLS = list(itertools.product(MODELS, (PASS, FLASH, COMPILED_FLASH), ({}, {"activation_dtype": "int8"})))
# The number of ranks changes from cell to cell; one rank has nothing to share.
RANKS = [2, 3, 4, 1]


def case_of(name, directory, ranks, **options):
    if name not in MADE:
        make = shown.make_shown_oracle if name in ("qwen3_vl", "qwen3_vl_moe") else make_oracle
        MADE[name] = oracle = make(MODELS[name], directory)
        if make is shown.make_shown_oracle:
            np.savez(oracle.path / "states.npz", **{digest.hex(): states for digest, states in oracle.states.items()})
    oracle, kvp = MADE[name], ranks if ranks == 3 else 1 + (ranks > 1)
    options |= {"block_tokens": 16, "dtype": "float32"}
    if name in ("qwen3_vl", "qwen3_vl_moe"):
        return test_images.make_case(oracle, kvp, ranks // kvp, 13, **options)
    return make_case(oracle, kvp, ranks // kvp, 13, "striped", **options)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "shards", "rows", "ranks"),
    [(*cell, RANKS[(index + index // 6) % 4]) for index, cell in enumerate(CELLS)],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, dict) else str(each),
)
def test_every_cell(worlds, tmp_path_factory, name, shards, rows, ranks):
    if rows and native.module is None:
        pytest.skip("this install has no native kernels, which multiply bytes")
    place = tmp_path_factory.mktemp(name)
    plain, *_ = worlds(ranks).run(case_of(name, place, ranks, **rows))
    others = worlds(ranks).run(case_of(name, place, ranks, **rows, **shards, sp_min_token_num=5), timeout_s=500)
    for index in range(len(MADE[name].prompts)):
        np.testing.assert_array_equal(others[0][f"tokens_{index}"], plain[f"tokens_{index}"])
        assert deviation(others[0][f"logits_{index}"], plain[f"logits_{index}"]) < (1e-3 if rows else 1e-4)
    if shards is PASS and ranks > 1:
        end = "DynamicINT8" if rows and name != "deepseek_v3" else ""
        for rank in others:
            assert rank["before/all_reduce"]
            assert not rank["after/all_reduce"]
            assert rank[f"patterns/MiddleAllReduceRMSNorm{end}"]
