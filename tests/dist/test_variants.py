"""RoPE kinds, dtypes and GGUF, over two ranks, against transformers."""

import copy

import gguf
import numpy as np
import pytest
import torch
from test_equality import TOLERANCE, assert_equal, deviation, make_case
from transformers import AutoModelForCausalLM, LlamaConfig

from longhelix import LLM, Layout, SamplingParams
from longhelix.compute.kernels import native
from oracle import (
    FAMILIES,
    NATIVE_EXPERTS,
    NATIVE_LATENTS,
    NATIVE_SIZES,
    NEW_TOKENS,
    VOCAB,
    make_oracle,
    save_tokenizer_files,
)
from packed_checkpoints import FORMS, make_packed_oracle
from tiers import few

pytestmark = pytest.mark.dist

MAX_POSITIONS = 32  # the longest request has 41 + 32 tokens, so scaling matters
HALF = 16 // 2
ROPE = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 48,
                 "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
                 "long_factor": [1.0 + 0.5 * i for i in range(HALF)]},
}  # fmt: skip


@torch.no_grad()
def logits_with_whole_length(oracle, tokens):
    """Logits of each request in one pass over all of its tokens but the last: the length by which transformers then
    chooses frequencies is the number of tokens that have keys, by which longhelix chooses them once."""
    model = AutoModelForCausalLM.from_pretrained(oracle.path, dtype=torch.float32, attn_implementation="eager").eval()
    lines = [prompt + new[:-1] for prompt, new in zip(oracle.prompts, tokens, strict=True)]
    return [model(torch.tensor([line]), use_cache=False).logits[0].numpy() for line in lines]


@pytest.mark.parametrize("kind", few(ROPE, 3))
def test_rope_kind_equals_transformers(worlds, tmp_path, kind):
    settings = FAMILIES["llama"].to_dict() | {
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_theta": 10_000.0} | ROPE[kind],
    }
    oracle = make_oracle(LlamaConfig(**settings), tmp_path)
    ranks = worlds(2).run(make_case(oracle, 2, 1, 16, "striped", max_model_len=128))
    tokens = [ranks[0][f"tokens_{index}"].tolist() for index in range(len(oracle.prompts))]
    assert all(len(new) == NEW_TOKENS for new in tokens)
    for index, reference in enumerate(logits_with_whole_length(oracle, tokens)):
        assert deviation(ranks[0][f"logits_{index}"], reference) <= TOLERANCE
        assert (reference[-NEW_TOKENS:].argmax(-1) == tokens[index]).mean() > 0.9  # greedy, near ties aside


@pytest.mark.parametrize(("kind", "longest"), [("dynamic", MAX_POSITIONS), ("longrope", 48)])
@torch.no_grad()
def test_frequencies_change_at_the_length_at_which_those_of_transformers_do(tmp_path, kind, longest):
    """Whether a prompt is only scored or gets one new token, whose key nobody needs."""
    rope = {"rope_parameters": {"rope_theta": 10_000.0} | ROPE[kind], "max_position_embeddings": MAX_POSITIONS}
    oracle = make_oracle(LlamaConfig(**FAMILIES["llama"].to_dict() | rope), tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(oracle.path)
    model = AutoModelForCausalLM.from_pretrained(oracle.path, dtype=torch.float32, attn_implementation="eager").eval()
    with LLM(str(oracle.path), Layout(kvp=2), dtype="float32", max_model_len=64) as llm:
        for length in (longest, longest + 1):
            prompt = [(7 * place + 3) % VOCAB for place in range(length)]
            logits_TV = model(torch.tensor([prompt]), use_cache=False).logits[0]
            expected = logits_TV.double().log_softmax(-1)[range(length - 1), prompt[1:]].tolist()
            for new_tokens in (0, 1):
                asked = SamplingParams(max_new_tokens=new_tokens, prompt_logprobs=0, ignore_eos=True)
                (result,) = llm.generate([prompt], asked)
                found = [entry[token] for token, entry in zip(prompt[1:], result.prompt_logprobs[1:], strict=True)]
                assert found == pytest.approx(expected, abs=1e-3)


def test_rope_scaling_given_by_the_user_replaces_the_models_own(worlds, tmp_path):
    """A model saved without scaling and run with it equals one saved with it."""
    plain = FAMILIES["llama"].to_dict() | {"max_position_embeddings": MAX_POSITIONS}
    saved = make_oracle(LlamaConfig(**plain), tmp_path / "plain")
    yarn = plain | {"rope_parameters": {"rope_theta": 1e4} | ROPE["yarn"]}
    scaled = make_oracle(LlamaConfig(**yarn), tmp_path / "yarn")
    case = make_case(saved, 2, 1, 16, "striped", max_model_len=128, rope_scaling=ROPE["yarn"])
    assert_equal(scaled, worlds(2).run(case))


# max|d| / max|ref| of logits against float32 transformers on the same (rounded) weights, two layers.
HALF_TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3}


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_half_precision_stays_near_float32(worlds, tmp_path, dtype):
    oracle = make_oracle(FAMILIES["qwen3"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(oracle.path, dtype=getattr(torch, dtype)).float().eval()
    ranks = worlds(2).run(make_case(oracle, 2, 1, 16, "striped", dtype=dtype))
    for index, prompt in enumerate(oracle.prompts):
        with torch.no_grad():
            reference = model(torch.tensor([prompt])).logits[0].numpy()
        assert deviation(ranks[0][f"logits_{index}"][: len(prompt)], reference) <= HALF_TOLERANCE[dtype]


def test_kv_cache_may_have_its_own_dtype(worlds, tmp_path):
    oracle = make_oracle(FAMILIES["qwen3"], tmp_path)
    (exact, _), (rounded, _) = (
        worlds(2).run(make_case(oracle, 2, 1, 16, "striped", dtype="float32", kv_dtype=kv_dtype))
        for kv_dtype in ("float32", "bfloat16")
    )
    prompt = len(oracle.prompts[3])
    difference = deviation(rounded["logits_3"][:prompt], exact["logits_3"][:prompt])
    assert 0 < difference < HALF_TOLERANCE["bfloat16"]


def test_attention_may_round_queries_and_weights_to_bytes(worlds, tmp_path):
    """Integers of 15 bits stay much nearer to the reference over the same KV, which is decoded, than bytes."""
    if native.module is None or native.module.instruction_set() != "avx512":
        pytest.skip("this processor does not attend in integers")
    oracle = make_oracle(FAMILIES["qwen3"], tmp_path)
    prompt = len(oracle.prompts[3])
    (plain, _), (whole, _), (rounded, _) = (
        worlds(2).run(make_case(oracle, 2, 1, 16, "striped", dtype="float32", block_tokens=16, **options))
        for options in ({}, {"kv_dtype": "int8"}, {"kv_dtype": "int8", "attention_dtype": "int8"})
    )
    of_kv, of_bytes = (deviation(run["logits_3"][:prompt], plain["logits_3"][:prompt]) for run in (whole, rounded))
    assert 0 < deviation(rounded["logits_3"][:prompt], whole["logits_3"][:prompt]) < 0.1
    assert of_kv < of_bytes < 0.1


WIDER_LATENTS = copy.deepcopy(NATIVE_LATENTS)  # whose experts have sixteens of columns on two ranks
WIDER_LATENTS.moe_intermediate_size = 64
INT8 = {"activation_dtype": "int8"}
IN_BYTES = {"dense": NATIVE_SIZES, "experts": NATIVE_EXPERTS["native-mixtral"], "latent": WIDER_LATENTS}


@pytest.mark.parametrize("kind", IN_BYTES)
def test_products_may_round_their_inputs_to_bytes(worlds, tmp_path, kind):
    """A row's bits then depend neither on its chunk nor on what runs beside it, as without."""
    if native.module is None:
        pytest.skip("this install has no native kernels, which multiply bytes")
    oracle = make_oracle(IN_BYTES[kind], tmp_path)
    prompt = len(oracle.prompts[3])
    exact, rounded, in_small_chunks = (
        worlds(2).run(make_case(oracle, 2, 1, chunk_tokens, "striped", dtype="float32", block_tokens=16, **options))[0]
        for chunk_tokens, options in ((16, {}), (16, {"activation_dtype": "int8"}), (5, {"activation_dtype": "int8"}))
    )
    wanted = exact["logits_3"][:prompt]
    errors = np.linalg.norm(rounded["logits_3"][:prompt] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    # Random weights lose more than trained ones; and rows whose scores are near take other experts.
    assert 0 < np.median(errors) < 0.15
    flash = {"activation_dtype": "int8", "flash_comm_v1": True, "sp_min_token_num": 5}
    gathered = worlds(2).run(make_case(oracle, 2, 1, 13, "striped", dtype="float32", block_tokens=16, **flash))[0]
    np.testing.assert_array_equal(gathered["logits_3"][:prompt], rounded["logits_3"][:prompt])
    if kind != "latent":  # of which torch makes queries
        np.testing.assert_array_equal(rounded["logits_3"], in_small_chunks["logits_3"])


@pytest.mark.parametrize("kind", IN_BYTES)
def test_int8_checkpoints_may_round_the_inputs_of_their_products(worlds, tmp_path, kind):
    """W8A8: weights and scales stay what they are, and modules that the checkpoint does not quantise as well."""
    if native.module is None:
        pytest.skip("this install has no native kernels, which multiply bytes")
    configs = IN_BYTES | {"experts": NATIVE_EXPERTS["native-qwen3_moe"]}
    oracle = make_packed_oracle(configs[kind], FORMS["int8"], tmp_path)
    prompt = len(oracle.prompts[3])
    exact, rounded, again = (
        worlds(kvp).run(make_case(oracle, kvp, 1, chunk, "striped", dtype="float32", block_tokens=16, **options))[0]
        for kvp, chunk, options in ((2, 16, {}), (2, 16, INT8), (1, 5, INT8))
    )
    wanted = exact["logits_3"][:prompt]
    for run in (rounded, again):
        errors = np.linalg.norm(run["logits_3"][:prompt] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert 0 < np.median(errors) < 0.15
    gathered = INT8 | {"flash_comm_v1": True, "sp_min_token_num": 5}
    case = make_case(oracle, 2, 1, 13, "striped", dtype="float32", block_tokens=16, **gathered)
    np.testing.assert_array_equal(worlds(2).run(case)[0]["logits_3"][:prompt], rounded["logits_3"][:prompt])


def write_gguf(path, model, config):
    """A llama GGUF of a tiny model: float32 tensors, the rows of q and k permuted as the format has them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        stem = name.removesuffix(".weight").replace("model.layers.", "blk.")
        for ours, theirs in names.items():
            stem = stem.replace(ours, theirs)
        writer.add_tensor(f"{stem}.weight", np.ascontiguousarray(tensor.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_of_the_same_weights_equals_transformers(worlds, tmp_path):
    oracle = make_oracle(FAMILIES["llama"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(oracle.path, dtype=torch.float32)
    write_gguf(tmp_path / "tiny.gguf", model, FAMILIES["llama"])
    case = make_case(oracle, 2, 2, 16, "striped", model=str(tmp_path / "tiny.gguf"), dtype="float32")
    assert_equal(oracle, worlds(4).run(case))
