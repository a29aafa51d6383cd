"""A model whose layers differ in heads, head size, rotation, what rows see, and FFN: its tokens are those of a forward
pass in float64."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from float64_layers import EPS, logits_of, random_weights
from longhelix import LLM, SamplingParams, UserError
from longhelix.spec import (
    FAMILIES,
    MLP,
    Activation,
    GroupedQueryAttention,
    HeadNorms,
    LayerSpec,
    MoE,
    Norms,
    Projections,
    RopeSpec,
    Scores,
    Visibility,
)
from longhelix.spec.hf_config import read_hf_config
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.rope import RopeScaling
from oracle import VOCAB, greedy_of, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

HIDDEN, NEW_TOKENS = 96, 16
NEAR, FAR = RopeSpec(theta=10_000.0), RopeSpec(1_000_000.0, RopeScaling("linear", 4.0))
EXPERTS = MoE(5, 2, 48, shared_size=32)
LAYERS = tuple(
    LayerSpec((GroupedQueryAttention(heads=heads, head_size=size, rotated_size=rotated, rope=rope, **more),), (ffn,))
    for heads, size, rotated, rope, more, ffn in (
        (HeadShape(6, 2), 16, 16, NEAR, {"visibility": Visibility(window_tokens=40)}, MLP(80)),
        (HeadShape(4, 4), 32, 8, FAR, {"norms": HeadNorms(qk=True)}, EXPERTS),
        (
            HeadShape(6, 3),
            20,
            0,
            NEAR,
            {"projections": Projections(qkv_bias=True)},
            MLP(112),
        ),  # which packed kernels do not take
        (HeadShape(5, 1), 16, 16, FAR, {"visibility": Visibility(chunk_tokens=48)}, EXPERTS),
        (HeadShape(6, 2), 16, 16, NEAR, {"visibility": Visibility(window_tokens=40)}, MLP(80)),
    )
)
# Norms after parts besides and in place of those before, stored minus one or whole, and activations.
OTHER_PARTS = (
    LayerSpec(
        (
            GroupedQueryAttention(
                heads=HeadShape(6, 2),
                head_size=16,
                rotated_size=16,
                rope=NEAR,
                visibility=Visibility(window_tokens=40),
                norms=HeadNorms(qk=True, value=True),
                scores=Scores(scale=0.3, cap=5.0),
            ),
        ),
        (MLP(80, activation=Activation("gelu_tanh")),),
        residual_scale=0.7,
        norms=Norms(after=True, plus_one=True),
    ),
    LayerSpec(
        (
            GroupedQueryAttention(
                heads=HeadShape(4, 4), head_size=32, rotated_size=32, rope=NEAR, scores=Scores(cap=3.0)
            ),
        ),
        (MoE(5, 2, 48, shared_size=32, activation=Activation("clamped_swiglu")),),
        residual_scale=0.6,
        norms=Norms(before=False, after=True),
    ),
    LayerSpec(
        (GroupedQueryAttention(heads=HeadShape(6, 3), head_size=16, rotated_size=16, rope=NEAR),),
        (MLP(112, activation=Activation("gelu")),),
        norms=Norms(after=True),
    ),
    LayerSpec(
        (
            GroupedQueryAttention(
                heads=HeadShape(6, 2), head_size=16, rotated_size=16, rope=NEAR, norms=HeadNorms(value=True)
            ),
        ),
        (MoE(5, 2, 48, shared_size=32, activation=Activation("relu_squared", gated=False)),),
        residual_scale=0.8,
        norms=Norms(plus_one=True),
    ),
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
        self.folder = folder
        config = CONFIG | {"num_hidden_layers": len(layers)}
        generator = torch.Generator().manual_seed(5)
        weights = random_weights(read_hf_config(config), generator)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        save_tokenizer_files(folder)
        self.prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
        logits = partial(logits_of, layers, weights)
        self.tokens = [greedy_of(logits, prompt, NEW_TOKENS)[0] for prompt in self.prompts]

    def engine(self, layout, **settings):
        return LLM(self.folder, layout, **{"dtype": "float32", "device": "cpu", "max_model_len": 400} | settings)


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


@pytest.mark.parametrize(
    ("layout", "settings"),
    few(
        [
            (Layout(kvp=2, tpa=2, ep=2), {"chunk_tokens": 48}),
            (Layout(), {"chunk_tokens": 300, "execution": "eager"}),
            (TWO, {"chunk_tokens": 48, "execution": "compiled"}),
            (TWO, {"chunk_tokens": 64, "enable_sp": True, "sp_min_token_num": 9, "execution": "compiled"}),
            (Layout(pp=2), {"chunk_tokens": 48, "batch_invariant": True}),
            (Layout(kvp=2, pp=2), {"chunk_tokens": 48}),
            (TIED, {"chunk_tokens": 64, "placement": "auto", "kvp_threshold_tokens": 64}),
        ]
    ),
)
def test_other_norms_activations_and_scores_give_the_tokens_of_float64(tmp_path, family, layout, settings):
    model = Model(OTHER_PARTS, tmp_path, family)
    with model.engine(layout, **settings) as llm:
        found = llm.generate(model.prompts, GREEDY)
    assert [result.token_ids for result in found] == model.tokens


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    few([(Layout(tpa=2), Layout(kvp=2, tpa=3)), (TWO, Layout(tpa=4)), (Layout(kvp=2, pp=3), TWO)]),
)
def test_a_saved_context_has_the_heads_of_each_layer(tmp_path, family, saved_by, loaded_by):
    """Layers with a window have two KV heads, those with chunks one, and of the others one has four and one three."""
    model = Model(LAYERS, tmp_path, family)
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
    with pytest.raises(UserError, match="attention flashinfer"):
        model.engine(TWO, attention="flashinfer")
