"""Whatever the layout, a row's token is the one that sorting its logits would give, whatever the filters."""

import pytest
import torch
from test_equality import make_case

import sorted_rows
from longhelix.scheduler.request import SamplingParams
from oracle import FAMILIES, NEW_TOKENS, VOCAB, make_oracle

pytestmark = pytest.mark.dist

# Of toy logits, which are nearly equal: a low temperature makes a few tokens likely.
SAMPLING = [
    {},
    {"repetition_penalty": 1.5},
    {"temperature": 0.02},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 0.02, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 0.05, "min_p": 0.05},
    {"temperature": 1.0},
    {"temperature": 5.0, "top_p": 0.99, "repetition_penalty": 0.8},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.5, "min_p": 0.001},
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2), "tied"], ids=lambda layout: str(layout))
def test_tokens_are_those_of_sorted_rows(worlds, oracle, layout):
    kvp, tpa = (2, 2) if layout == "tied" else layout
    prompts = [[1 + (7 * index + step) % (VOCAB - 1) for step in range(3 + index)] for index in range(len(SAMPLING))]
    more = {"prompts": prompts, "sampling": SAMPLING, "tied": layout == "tied"}
    ranks = worlds(kvp * tpa).run(make_case(oracle, kvp, tpa, 16, "striped", **more))
    for index, (prompt, choice) in enumerate(zip(prompts, SAMPLING, strict=True)):
        params, tokens = SamplingParams(**choice), ranks[0][f"tokens_{index}"].tolist()
        logits_TV = torch.from_numpy(ranks[0][f"logits_{index}"])[len(prompt) - 1 :]
        assert len(tokens) == NEW_TOKENS
        for count, token in enumerate(tokens):
            seen_V = torch.zeros(VOCAB, dtype=torch.bool)
            seen_V[[*prompt, *tokens[:count]]] = True
            position = len(prompt) + count
            assert token == sorted_rows.sample(logits_TV[count], params, index, position, seen_V), (choice, count)
        assert all(rank[f"tokens_{index}"].tolist() == tokens for rank in ranks)
