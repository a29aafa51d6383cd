"""The readers of the table of weights against each other: what ranks load, what the cost model counts, all there is."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.compute.models.parameters import declare
from longhelix.perf import weights as perf_weights
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import weights_bytes
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import MLA, MoE, MultiHeadLatentAttention, Routing
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system
from longhelix.spec.weights import (
    Split,
    embedding,
    head,
    last_norm,
    layer_weights,
    num_active_parameters,
    num_parameters,
)
from toy_model import attention_of, moe_of, toy_model

pytestmark = pytest.mark.unit

H100 = load_system("h100")


@st.composite
def specs(draw):
    """GQA or MLA, dense or with experts, biased or normed or neither."""
    num_kv_heads, group, flags = draw(st.integers(1, 6)), draw(st.integers(1, 5)), st.booleans()
    num_layers, changes = draw(st.integers(1, 5)), {}
    if draw(flags):
        mla = MLA(draw(st.sampled_from([None, 12])), draw(st.integers(1, 20)), 6, 4, draw(st.integers(1, 9)))
        changes |= {"architecture": "deepseek_v3", "mla": mla}
    ffn_bias = draw(flags)
    if draw(flags):
        num_experts = draw(st.integers(1, 9))
        moe = MoE(
            num_experts,
            draw(st.integers(1, num_experts)),
            draw(st.integers(1, 40)),
            shared_size=draw(st.sampled_from([0, 17])),
            shared_bias=ffn_bias,
            routing=Routing(bias=draw(flags), shared_gate=draw(flags)),
        )
        changes |= {"moe": moe, "num_dense_layers": draw(st.integers(0, num_layers))}
    return toy_model(
        num_layers=num_layers,
        hidden_size=8 * draw(st.integers(1, 6)),
        num_query_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_size=8,
        ffn_size=draw(st.integers(1, 90)),
        vocab_size=draw(st.integers(1, 200)),
        max_positions=64,
        tied_embeddings=draw(flags),
        qkv_bias=draw(flags),
        attention_output_bias=draw(flags),
        ffn_bias=ffn_bias,
        qk_norm=draw(flags),
        **changes,
    )


@st.composite
def placed(draw):
    """A model, and a layout that can have it: one copy of the FFN, or one for each KVP rank."""
    spec = draw(specs())
    tpa, kvp = draw(st.integers(1, min(attention_of(spec).heads.num_query_heads, 7))), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return spec, Layout(kvp, tpa, ffn_replicas=kvp)
    most = moe_of(spec).num_experts if moe_of(spec) else 1
    ep = draw(st.sampled_from([ep for ep in range(1, kvp * tpa + 1) if kvp * tpa % ep == 0 and ep <= most]))
    return spec, Layout(kvp, tpa, ep=ep)


def elements(spec, layout, rank, layer, *names):
    """Numbers of a rank in the matrices whose names end like this, in one layer."""
    found = [p for p in declare(spec, layout, rank) if p.name.startswith(f"layers.{layer}.")]
    chosen = [p for p in found if ".".join(p.name.split(".")[2:]) in names]
    return sum(prod(source.local_shape) for p in chosen for source in p.sources if len(source.shape) == 2)


def fullest(spec, layout, layer, *names):
    return max(elements(spec, layout, rank, layer, *names) for rank in range(layout.num_ranks))


@given(specs())
def test_one_rank_declares_as_many_parameters_as_the_model_has(spec):
    assert num_parameters(spec) == sum(parameter.num_elements for parameter in declare(spec, Layout(), 0))


@given(specs())
def test_a_token_meets_all_but_the_embedding_and_the_experts_that_it_does_not_take(spec):
    parameters = declare(spec, Layout(), 0)
    unmet = sum(p.num_elements for p in parameters if p.name == "embedding" and not spec.vocabulary.tied_embeddings)
    if moe_of(spec) is not None:
        taken = range(moe_of(spec).experts_per_token)
        unmet += sum(
            p.num_elements for p in parameters if ".experts." in p.name and int(p.name.split(".")[3]) not in taken
        )
    assert num_active_parameters(spec) == num_parameters(spec) - unmet


@given(placed())
def test_the_cost_models_fullest_rank_is_the_one_that_declares_most(drawn):
    spec, layout = drawn
    how, layouts = Setting(spec, H100, Dtypes("bfloat16", "bfloat16")), Layouts.of([layout])
    last, attention = spec.num_layers - 1, spec.layers[0].attention

    stored = how.stored.layers
    (mixer,), (ffn,) = stored[0].mixers, stored[last].ffns

    def assert_fullest(amounts, layer, *names):
        assert sum(amount.numbers[0] for amount in amounts) == fullest(spec, layout, layer, *names), names

    assert_fullest(perf_weights.qkv(how, layouts, mixer.weights), 0, "qkv", "latent_down", "query_up")
    assert_fullest(perf_weights.output_projection(how, layouts, mixer.weights), 0, "output")
    if isinstance(attention, MultiHeadLatentAttention):
        num_heads = layouts.query_heads(attention.heads)
        up = perf_weights.key_absorption(how, layouts, attention, mixer.weights)
        up += perf_weights.value_projection(attention, mixer.weights, num_heads)
        assert_fullest(up, 0, "latent_up")
    if spec.layers[0].dense is not None:
        assert_fullest(perf_weights.dense_ffn(how, layouts, stored[0].ffns[0].weights), 0, "gate_up", "down")
    moe = spec.layers[last].moe
    if moe is not None:
        names = [f"experts.{i}.{name}" for i in range(moe.num_experts) for name in ("gate_up", "down")]
        num_experts = perf_weights.num_experts(how, layouts, moe)
        held = [each.times(num_experts) for each in perf_weights.expert(how, layouts, moe, ffn.weights)]
        assert_fullest(held, last, *names)
        shared = perf_weights.shared_experts(how, layouts, ffn.weights)
        assert_fullest(shared, last, "shared.gate_up", "shared.down")
        assert_fullest(perf_weights.router(how, layouts, ffn.weights), last, "router")
    shares = [len(layout.vocabulary(spec.vocabulary.size, rank)) for rank in range(layout.num_ranks)]
    (logits,) = perf_weights.all_of(how, layouts, how.stored.head)
    assert logits.numbers[0] == max(shares) * spec.hidden_size


@given(placed())
def test_the_cost_models_memory_is_that_of_the_matrices_and_no_rank_has_more(drawn):
    spec, layout = drawn
    held = weights_bytes(Setting(spec, H100, Dtypes("bfloat16", "bfloat16")), Layouts.of([layout]))[0] / 2
    ranks = [
        sum(prod(s.local_shape) for p in declare(spec, layout, rank) for s in p.sources if len(s.shape) == 2)
        for rank in range(layout.num_ranks)
    ]
    assert max(ranks) <= held
    if layout.num_ranks == 1:
        assert ranks == [held]


@given(placed())
def test_ranks_together_have_what_is_shared_once_and_the_rest_each(drawn):
    """With one KVP rank and no more TPA ranks than KV heads, where nothing that is shared is doubled."""
    spec, layout = drawn
    layout = Layout(1, min(layout.tpa, attention_of(spec).heads.num_kv_heads), ep=1)
    tables = {index: layer_weights(spec, layer) for index, layer in enumerate(spec.layers)}
    ends = [embedding(spec), last_norm(spec), *([] if spec.vocabulary.tied_embeddings else [head(spec)])]
    total = 0
    for weight in [*ends, *(weight for table in tables.values() for weight in table)]:
        is_shared = any(dim.split is not Split.WHOLE for dim in (*weight.dims, weight.experts))
        total += weight.num_elements * weight.experts.count * (1 if is_shared else layout.num_ranks)
    declared = [sum(p.num_elements for p in declare(spec, layout, rank)) for rank in range(layout.num_ranks)]
    assert sum(declared) == total
