"""Requests that take more ranks while they run, as they grow and as their blocks move away from a full rank, give
transformers' logits and greedy tokens."""

import numpy as np
import pytest
from test_cached_prefix import layer_block_bytes
from test_equality import assert_equal, make_case

from longhelix import LLM, SamplingParams
from longhelix.scheduler.kv.placement import Growing
from longhelix.spec.layout import Layout
from oracle import FAMILIES, NATIVE_SIZES, NEW_TOKENS, WITH_EXPERTS, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

KVP, BLOCK_TOKENS = 3, 4
MODELS = {"gqa-rows": FAMILIES["llama"], "mla-rows": WITH_EXPERTS["deepseek_v3"], "gqa-packed": NATIVE_SIZES}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made = {}

    def oracle(model, *prompt_lengths):
        if (model, prompt_lengths) not in made:
            folder = tmp_path_factory.mktemp(model)
            made[model, prompt_lengths] = make_oracle(MODELS[model], folder, prompt_lengths=prompt_lengths)
        return made[model, prompt_lengths]

    return oracle


def run(worlds, oracle, kvp=KVP, tpa=1, placement="growing", chunk_tokens=4096, block_tokens=BLOCK_TOKENS, **more):
    """All ranks' arrays. Every request has transformers' tokens, and nothing is left on the ranks."""
    ranks = worlds(kvp * tpa).run(
        make_case(oracle, kvp, tpa, chunk_tokens, placement, block_tokens=block_tokens, **more)
    )
    assert_equal(oracle, ranks)
    assert all(int(rank["sequences_left"]) == 0 for rank in ranks)
    return ranks


def lengths_by_step(ranks, request=0):
    """How many tokens of a request each rank has after every step that it ran in."""
    return np.stack([rank["history"][:, request] for rank in ranks], axis=1).tolist()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("prompt_tokens", "chunk_tokens"), [(27, 3), (27, 11), (6, 64)], ids=["prefill", "two in a chunk", "decode"]
)
def test_a_request_takes_the_next_rank_at_its_limit(worlds, oracles, prompt_tokens, chunk_tokens, depth):
    """Tokens on each rank follow the rule in every step."""
    oracle, limit_tokens = oracles("gqa-rows", prompt_tokens), 8
    ranks = run(worlds, oracle, chunk_tokens=chunk_tokens, growth_limit_tokens=limit_tokens, depth=depth)
    chunks = [*range(chunk_tokens, prompt_tokens, chunk_tokens), prompt_tokens]
    lengths = chunks + [prompt_tokens + more for more in range(1, NEW_TOKENS)]
    rule = Growing(KVP, BLOCK_TOKENS, limit_tokens)
    expected = [[rule.local_length(rank, length) for rank in range(KVP)] for length in lengths]
    assert lengths_by_step(ranks) == expected
    assert 0 < expected[-1][2] < expected[-1][0] or prompt_tokens > 8


def test_a_neighbours_load_changes_which_rank_is_taken(worlds, oracles):
    """Alone it takes rank 1, beside a request that has begun there rank 2."""
    held = {}
    for lengths in ((14,), (14, 13)):
        ranks = run(worlds, oracles("gqa-rows", *lengths), growth_limit_tokens=16, depth=2)
        held[len(lengths)] = ranks[0]["held_0"].tolist()
    assert held == {1: [16, 13, 0], 2: [16, 0, 13]}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_of_a_request_that_decodes_move_from_one_rank_to_three(worlds, oracles, model, depth):
    """Local requests: the first and the last are on rank 0, where there is no block left for both to grow to their
    ends. The first one's blocks move, and all go on with their tokens."""
    scale = 4 if "packed" in model else 1  # blocks are as much larger
    oracle = oracles(model, *(scale * length for length in (24, 26, 27, 14)))
    more = {"block_tokens": scale * BLOCK_TOKENS, "depth": depth}
    undisturbed = run(worlds, oracle, placement="local", **more)
    needed = sum(-(-(scale * length + NEW_TOKENS - 1) // (scale * BLOCK_TOKENS)) for length in (24, 14))
    ranks = run(worlds, oracle, placement="local", pool_blocks=needed - 1, **more)
    assert [rank["held_0"].tolist() for rank in undisturbed] == [[scale * 24 + NEW_TOKENS - 1, 0, 0]] * KVP
    moves = ranks[0]["moves"].tolist()
    assert all(rank["moves"].tolist() == moves for rank in ranks)
    assert {source for source, _ in moves} == {0}
    assert {target for _, target in moves} == {1, 2}
    assert int(ranks[0]["moved_0"]) == len(moves) * scale * BLOCK_TOKENS
    assert [int(ranks[0][f"moved_{request}"]) for request in (1, 2, 3)] == [0, 0, 0]
    assert not any(int(ranks[0][f"preemptions_{request}"]) for request in range(4))
    assert_bytes_of_moves(model, ranks, moves, Layout(kvp=KVP), scale)
    # Step by step: what left rank 0 has come to the others, and nothing else has changed.
    before, after = lengths_by_step(undisturbed), lengths_by_step(ranks)
    assert [sum(lengths) for lengths in after] == [sum(lengths) for lengths in before]
    moved = next(step for step, lengths in enumerate(after) if lengths != before[step])
    come = [sum(target == rank for _, target in moves) * scale * BLOCK_TOKENS for rank in range(KVP)]
    assert after[moved] == [before[moved][0] - sum(come), come[1], come[2]]


def assert_bytes_of_moves(model, ranks, moves, layout, scale):
    """Bytes handed to the transport are those of the blocks that changed their owner, in all layers."""
    layers = MODELS[model].num_hidden_layers
    for rank, found in enumerate(ranks):
        left = sum(source == layout.kvp_rank(rank) for source, _ in moves)
        assert int(found["copied_bytes"]) == left * layers * layer_block_bytes(model, layout, rank)


def test_results_say_what_has_moved(oracles):
    """Two requests of one rank, and one of the other with room to spare."""
    oracle = oracles("gqa-rows", 24, 26, 14)
    save_tokenizer_files(oracle.path)
    settings = {"placement": "local", "dtype": "float32", "block_tokens": BLOCK_TOKENS, "max_model_len": 48}
    with LLM(str(oracle.path), Layout(kvp=2), kv_cache_tokens=2 * 17 * BLOCK_TOKENS, **settings) as llm:
        results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
        token_bytes = sum(llm.config.kv_bytes_per_token(rank) for rank in (0, 1)) // 2
    assert [result.token_ids for result in results] == oracle.tokens
    first, *others = results
    assert first.moved_tokens == first.kv_tokens_per_rank[1] > 0
    assert first.moved_bytes == first.moved_tokens * token_bytes
    assert 0 < first.moved_s < sum(first.tbt_s)
    assert all((other.moved_tokens, other.moved_bytes, other.moved_s) == (0, 0, 0) for other in others)
    assert not any(result.preemptions for result in results)
