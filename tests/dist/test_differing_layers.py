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
        (HeadShape(6, 3), 20, 0, NEAR, {"qkv_bias": True}, GatedFFN(112)),  # which packed kernels do not take
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
TWO, TIED = Layout(kvp=2), Layout(kvp=2, tpa=1, tpf=1, ep=1, ffn_replicas=2)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
LENGTHS = (210, 47, 90)
CASES = [
    (Layout(kvp=3, tpa=2), {"chunk_tokens": 31}),
    (TWO, {"chunk_tokens": 48}),
    (Layout(), {"chunk_tokens": 300, "execution": "eager"}),
    (Layout(tpa=4), {"chunk_tokens": 64}),
    (TWO, {"chunk_tokens": 48, "execution": "compiled"}),
    (TWO, {"chunk_tokens": 48, "placement": "growing", "growth_limit_tokens": 64}),
    (TWO, {"chunk_tokens": 17, "kv_cache_tokens": 300}),
    (TWO, {"chunk_tokens": 48, "swap_tokens": 512, "kv_cache_tokens": 300}),
    (Layout(kvp=2, pp=3), {"chunk_tokens": 48}),
    (Layout(kvp=2, tpa=2, ep=4), {"chunk_tokens": 48, "hop_b": 2}),
    (TIED, {"chunk_tokens": 64, "placement": "auto", "kvp_threshold_tokens": 64}),
]
# One kind of layer in each KV group.
SAVED_LAYERS = LAYERS[0], LAYERS[2], LAYERS[3], LAYERS[4]


@pytest.fixture
def family(monkeypatch):
    """Return a function that makes models of the family have some layers, whatever a config says."""

    def use(layers):
        monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], layers=lambda config, rope: layers))

    return use


class Model:
    """A model with some layers, prompts, and the tokens that follow them."""

    def __init__(self, layers, folder, family):
        family(layers)
        self.layers, self.folder = layers, folder
        config = CONFIG | {"num_hidden_layers": len(layers)}
        generator, self.weights = torch.Generator().manual_seed(5), {}
        for parameter in declare(read_hf_config(config), Layout(), 0):
            for source in parameter.sources:
                mean = 1.0 if "norm" in source.name else 0.0
                self.weights[source.name] = mean + 0.2 * torch.randn(source.shape, generator=generator)
        save_file(self.weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        save_tokenizer_files(folder)
        self.weights = {name: tensor.double() for name, tensor in self.weights.items()}
        self.prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
        self.tokens = [greedy_of(self.logits, prompt, NEW_TOKENS)[0] for prompt in self.prompts]

    def logits(self, ids):
        """logits_SV in float64."""
        x_SH = self.weights["model.embed_tokens.weight"][ids]
        for index, layer in enumerate(self.layers):
            own = {name.removeprefix(f"model.layers.{index}."): weight for name, weight in self.weights.items()}
            x_SH = x_SH + attended(norm(x_SH, own["input_layernorm.weight"]), layer.attention, own)
            y_SH = norm(x_SH, own["post_attention_layernorm.weight"])
            x_SH = x_SH + (swiglu(y_SH, own, "mlp.") if layer.moe is None else mixed(y_SH, layer.moe, own))
        return norm(x_SH, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T

    def engine(self, layout, **settings):
        return LLM(self.folder, layout, **{"dtype": "float32", "device": "cpu", "max_model_len": 400} | settings)


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


@pytest.mark.parametrize(("layout", "settings"), few(CASES))
def test_tokens_equal_those_of_float64(tmp_path, family, layout, settings):
    model, shared_steps = Model(LAYERS, tmp_path, family), 0
    with model.engine(layout, **settings) as llm:
        assert len(llm.config.spec.rotations) == 4
        for _ in range(2):
            requests, results = [llm.add(prompt, GREEDY) for prompt in model.prompts], {}
            while llm.has_work:
                deltas = llm.step()
                results |= {delta.request_id: delta.result.token_ids for delta in deltas if delta.result is not None}
                shared_steps += any(len(seq.schedule.instances) > 1 for seq in llm._core._scheduler.running)
            assert [results[request] for request in requests] == model.tokens
    assert (shared_steps > 0) == (layout == TIED), "instances share the longest request"


@pytest.mark.parametrize(("saved_by", "loaded_by"), few([(Layout(tpa=2), Layout(kvp=2, tpa=3)), (TWO, Layout(tpa=5))]))
def test_a_saved_context_has_the_heads_of_each_group(tmp_path, family, saved_by, loaded_by):
    """Layers with a window have two KV heads, those with chunks one, and the others three."""
    model = Model(SAVED_LAYERS, tmp_path, family)
    prompt, contexts = model.prompts[0], tmp_path / "contexts"
    with model.engine(saved_by, contexts_dir=contexts) as llm:
        llm.save_context("document", prompt[:200])
        while llm.has_work:
            llm.step()
    with model.engine(loaded_by, contexts_dir=contexts) as llm:
        assert llm.load_context("document").loaded_blocks == 12
        (result,) = llm.generate([prompt[200:]], GREEDY, context="document")
        assert (result.cached_tokens, result.token_ids) == (192, model.tokens[0])


def test_what_needs_equal_layers_is_refused(tmp_path, family):
    model = Model(LAYERS, tmp_path, family)
    with (
        model.engine(TWO, contexts_dir=tmp_path) as llm,
        pytest.raises(UserError, match="keys and values of different sizes"),
    ):
        llm.save_context("document", model.prompts[0])
    with pytest.raises(UserError, match="attention flashinfer"):
        model.engine(TWO, attention="flashinfer")
