"""A model whose layers differ in heads, head size, rotation, what rows see, and FFN: the tokens of a forward pass in
float64 that is written out here."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from longhelix import LLM, SamplingParams, UserError
from longhelix.compute.models.parameters import declare
from longhelix.spec import FAMILIES, GatedFFN, GroupedQueryAttention, LayerSpec, MoE, RopeSpec, Visibility
from longhelix.spec.hf_config import read_hf_config
from longhelix.spec.layout import HeadShape, Layout
from oracle import VOCAB, greedy_of, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

HIDDEN, EPS, NEW_TOKENS = 96, 1e-6, 16
NEAR, FAR = RopeSpec(theta=10_000.0), RopeSpec(kind="linear", theta=1_000_000.0, factor=4.0)
EXPERTS = MoE(5, 2, 48, shared_size=32)
LAYERS = tuple(
    LayerSpec((GroupedQueryAttention(heads=heads, head_size=size, rotated_size=rotated, rope=rope, **more),), (ffn,))
    for heads, size, rotated, rope, more, ffn in (
        (HeadShape(6, 2), 16, 16, NEAR, {"visibility": Visibility(window_tokens=40)}, GatedFFN(80)),
        (HeadShape(4, 4), 32, 8, FAR, {"qk_norm": True}, EXPERTS),
        (HeadShape(6, 3), 16, 0, NEAR, {"qkv_bias": True}, GatedFFN(112)),
        (HeadShape(5, 1), 16, 16, FAR, {"visibility": Visibility(chunk_tokens=48)}, EXPERTS),
        (HeadShape(6, 2), 16, 16, NEAR, {"visibility": Visibility(window_tokens=40)}, GatedFFN(80)),
    )
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "torch_dtype": "float32",
}
TWO = Layout(kvp=2)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (210, 47, 90)
CASES = [
    (TWO, {"chunk_tokens": 48}),
    (Layout(kvp=3, tpa=2), {"chunk_tokens": 31}),
    (Layout(), {"chunk_tokens": 300, "execution": "eager"}),
    (Layout(tpa=4), {"chunk_tokens": 64}),
    (TWO, {"chunk_tokens": 48, "execution": "compiled"}),
    (TWO, {"chunk_tokens": 48, "placement": "growing", "growth_limit_tokens": 64}),
    (TWO, {"chunk_tokens": 17, "kv_cache_tokens": 300}),
    (TWO, {"chunk_tokens": 48, "swap_tokens": 512, "kv_cache_tokens": 300}),
    (Layout(kvp=2, pp=3), {"chunk_tokens": 48}),
    (Layout(kvp=2, tpa=2, ep=4), {"chunk_tokens": 48, "hop_b": 2}),
    (Layout(kvp=2, tpa=1, tpf=1, ep=1, ffn_replicas=2), {"chunk_tokens": 64, "placement": "auto"}),
]


@pytest.fixture(autouse=True)
def family(monkeypatch):
    """These layers, whatever a config says."""
    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], layers=lambda config, rope: LAYERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], layers=lambda config, rope: LAYERS))
        spec = read_hf_config(CONFIG)
    generator, tensors = torch.Generator().manual_seed(5), {}
    for source in (source for parameter in declare(spec, Layout(), 0) for source in parameter.sources):
        numbers = torch.randn(source.shape, generator=generator)
        mean, size = (1.0, 0.2) if "norm" in source.name else (0.0, 0.2)
        tensors[source.name] = mean + size * numbers
    folder = tmp_path_factory.mktemp("differing")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer_files(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """Prompts, and the tokens that follow them."""
    from safetensors.torch import load_file

    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return prompts, [greedy_of(lambda ids: logits(weights, ids), prompt, NEW_TOKENS)[0] for prompt in prompts]


def logits(weights, ids):
    """logits_SV in float64."""
    x_SH = weights["model.embed_tokens.weight"][ids]
    for index, layer in enumerate(LAYERS):
        own = {name.removeprefix(f"model.layers.{index}."): weight for name, weight in weights.items()}
        x_SH = x_SH + attended(norm(x_SH, own["input_layernorm.weight"]), layer.attention, own)
        y_SH = norm(x_SH, own["post_attention_layernorm.weight"])
        x_SH = x_SH + (swiglu(y_SH, own, "mlp.") if layer.moe is None else mixed(y_SH, layer.moe, own))
    return norm(x_SH, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def norm(x_SX, weight_X):
    return x_SX * (x_SX.square().mean(-1, keepdim=True) + EPS) ** -0.5 * weight_X


def swiglu(x_SH, own, name):
    gate_Sf, up_Sf = (x_SH @ own[f"{name}{part}_proj.weight"].T for part in ("gate", "up"))
    return (silu(gate_Sf) * up_Sf) @ own[f"{name}down_proj.weight"].T


def mixed(x_SH, moe, own):
    """Experts with softmax scores, normalised, and a shared one."""
    scores_SE = (x_SH @ own["mlp.gate.weight"].T).softmax(-1)
    best_SY, experts_SY = scores_SE.topk(moe.experts_per_token)
    out_SH = swiglu(x_SH, own, "mlp.shared_experts.")
    for expert in range(moe.num_experts):
        weight_S = (best_SY / best_SY.sum(-1, keepdim=True) * (experts_SY == expert)).sum(-1)
        out_SH = out_SH + weight_S[:, None] * swiglu(x_SH, own, f"mlp.experts.{expert}.")
    return out_SH


def attended(x_SH, attention, own):
    def heads(name, count):
        bias = own[f"self_attn.{name}_proj.bias"] if attention.qkv_bias else 0.0
        return (x_SH @ own[f"self_attn.{name}_proj.weight"].T + bias).unflatten(1, (count, -1)).transpose(0, 1)

    shape, positions_S = attention.heads, torch.arange(len(x_SH))
    q_qSC = heads("q", shape.num_query_heads)
    k_kSC, v_kSC = heads("k", shape.num_kv_heads), heads("v", shape.num_kv_heads)
    if attention.qk_norm:
        q_qSC, k_kSC = norm(q_qSC, own["self_attn.q_norm.weight"]), norm(k_kSC, own["self_attn.k_norm.weight"])
    q_qSC, k_qSC = rotated(q_qSC, attention), rotated(k_kSC, attention).repeat_interleave(shape.group_size, 0)
    scores_qSS = q_qSC @ k_qSC.transpose(1, 2) * attention.head_size**-0.5
    first_S1 = torch.tensor([attention.visibility.first_seen(position) for position in positions_S.tolist()])[:, None]
    seen_SS = (positions_S <= positions_S[:, None]) & (positions_S >= first_S1)
    weights_qSS = scores_qSS.masked_fill(~seen_SS, -torch.inf).softmax(-1)
    out_SX = (weights_qSS @ v_kSC.repeat_interleave(shape.group_size, 0)).transpose(0, 1).flatten(1)
    return out_SX @ own["self_attn.o_proj.weight"].T


def rotated(x_nSC, attention):
    size, rope = attention.rotated_size, attention.rope
    frequencies_R = rope.theta ** (-torch.arange(0, size, 2).double() / max(size, 1)) / rope.factor
    turns_SR = torch.exp(1j * torch.arange(x_nSC.shape[1])[:, None] * frequencies_R)
    pairs_nSR = torch.complex(x_nSC[..., : size // 2], x_nSC[..., size // 2 : size]) * turns_SR
    return torch.cat((pairs_nSR.real, pairs_nSR.imag, x_nSC[..., size:]), dim=-1)


def engine(folder, layout, **settings):
    return LLM(folder, layout, **{"dtype": "float32", "device": "cpu", "max_model_len": 400} | settings)


@pytest.mark.parametrize(("layout", "settings"), few(CASES, 2))
def test_tokens_equal_those_of_float64(folder, expected, layout, settings):
    prompts, tokens = expected
    with engine(folder, layout, **settings) as llm:
        assert len(llm.config.spec.rotations) == 4
        for _ in range(2):
            assert [result.token_ids for result in llm.generate(prompts, GREEDY)] == tokens


def test_contexts_are_refused_where_layers_of_a_group_differ(folder, expected, tmp_path):
    with (
        engine(folder, TWO, contexts_dir=tmp_path) as llm,
        pytest.raises(UserError, match="keys and values of different sizes"),
    ):
        llm.save_context("document", expected[0][0])


def test_flashinfer_is_refused(folder):
    with pytest.raises(UserError, match="attention flashinfer"):
        engine(folder, TWO, attention="flashinfer")
