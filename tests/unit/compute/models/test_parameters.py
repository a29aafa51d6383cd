import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import product
from math import prod

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from longhelix.compute.models.parameter import Source
from longhelix.compute.models.parameters import check, declare
from longhelix.errors import UserError
from longhelix.spec import MLP, ModelSpec, MoE, gguf_quantisation, read_hf_config
from longhelix.spec.layout import HeadShape, Layout
from toy_model import attention_of, with_ffns

pytestmark = pytest.mark.unit

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "intermediate_size": 50,
    "vocab_size": 101,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
LAYOUTS = [
    Layout(),
    Layout(kvp=2, tpa=2),
    Layout(kvp=3, tpa=1),
    Layout(kvp=1, tpa=3),
    Layout(kvp=4, tpa=3),
    Layout(kvp=2, tpa=5),
    Layout(kvp=1, tpa=9),
    Layout(kvp=16, tpa=1),
]


def config_of(family: str, **changes):
    return FAMILIES[family](**SIZES | changes)


def spec_of(family: str, **changes) -> ModelSpec:
    return read_hf_config(config_of(family, **changes).to_dict())


def state_of(family: str, **changes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes of the tensors that transformers' own model has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    return {name: (tuple(tensor.shape), "float32") for name, tensor in model.state_dict().items()}


def sources_of(spec: ModelSpec, layout: Layout, rank: int) -> dict[str, Source]:
    return {source.name: source for parameter in declare(spec, layout, rank) for source in parameter.sources}


def owned_elements(sources: list[Source]) -> Counter:
    return Counter(index for source in sources for index in product(*source.slices))


def refused(spec: ModelSpec, tensors, *words: str, gguf: bool = False) -> None:
    with pytest.raises(UserError) as caught:
        check(spec, tensors, gguf=gguf)
    assert caught.value.code == "invalid_checkpoint"
    for word in words:
        assert word in str(caught.value)
    assert "config.json" not in str(caught.value)  # GGUF files have none


def test_the_engines_front_checks_tensors_without_torch():
    code = (
        "import sys, longhelix.engine.resolution; from longhelix.engine.settings import model as front; front.check; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def layout_id(layout: Layout) -> str:
    return f"kvp{layout.kvp}-tpa{layout.tpa}"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("family", "changes"), [*((family, {}) for family in FAMILIES), ("llama", BIASES)])
def test_the_table_is_transformers_state_dict(family, changes, tied):
    changes = changes | {"tie_word_embeddings": tied}
    spec, state = spec_of(family, **changes), state_of(family, **changes)
    check(spec, state, gguf=False)
    if tied:
        del state["lm_head.weight"]
        check(spec, state, gguf=False)
    declared = {name: source.shape for name, source in sources_of(spec, Layout(), 0).items()}
    assert declared == {name: shape for name, (shape, _) in state.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_slices_lie_in_their_tensors_and_shapes_do_not_depend_on_the_rank(layout, family):
    spec = spec_of(family, **(BIASES if family == "llama" else {}))
    whole = sources_of(spec, Layout(), 0)
    for rank in range(layout.world_size):
        for name, source in sources_of(spec, layout, rank).items():
            assert source.shape == whole[name].shape
            assert len(source.slices) == len(source.shape)
            for items, size in zip(source.slices, source.shape, strict=True):
                assert items.step == 1
                assert 0 <= items.start <= items.stop <= size


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_what_is_sharded_over_all_ranks_is_tiled(layout):
    spec = spec_of("llama", **BIASES)
    ranks = [sources_of(spec, layout, rank) for rank in range(layout.world_size)]
    at = "model.layers.1."
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        at + "self_attn.o_proj.weight",
        at + "mlp.gate_proj.weight",
        at + "mlp.up_proj.weight",
        at + "mlp.down_proj.weight",
        at + "mlp.gate_proj.bias",
    ):
        shape = ranks[0][name].shape
        owned = owned_elements([sources[name] for sources in ranks])
        assert set(owned.values()) == {1}, name
        assert len(owned) == prod(shape), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_projections_are_tiled_over_tpa_and_the_same_over_kvp(layout):
    spec = spec_of("llama", **BIASES)
    heads = HeadShape(attention_of(spec).heads.num_query_heads, attention_of(spec).heads.num_kv_heads)
    ranks = [sources_of(spec, layout, rank) for rank in range(layout.world_size)]
    for projection, kind in product(("q_proj", "k_proj", "v_proj"), ("weight", "bias")):
        name = f"model.layers.0.self_attn.{projection}.{kind}"
        for group in layout.tpa_groups():
            owned = owned_elements([ranks[rank][name] for rank in group])
            assert len(owned) == prod(ranks[0][name].shape)
            if projection == "q_proj" or not layout.duplicates_kv(heads):
                assert set(owned.values()) == {1}
        for group in layout.kvp_groups():
            assert len({ranks[rank][name].slices for rank in group}) == 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_norms_and_biases_after_the_sum_are_whole_on_every_rank(layout):
    llama, qwen3 = spec_of("llama", **BIASES), spec_of("qwen3")
    at = "model.layers.0."
    names = {
        "model.norm.weight": llama,
        at + "input_layernorm.weight": llama,
        at + "post_attention_layernorm.weight": llama,
        at + "self_attn.o_proj.bias": llama,
        at + "mlp.down_proj.bias": llama,
        at + "self_attn.q_norm.weight": qwen3,
        at + "self_attn.k_norm.weight": qwen3,
    }
    for name, spec in names.items():
        for rank in range(layout.world_size):
            source = sources_of(spec, layout, rank)[name]
            assert source.local_shape == source.shape


def test_the_designs_uneven_split_reaches_the_weights():
    spec = spec_of("llama")
    sources = [sources_of(spec, Layout(kvp=2, tpa=2), rank) for rank in range(4)]
    at = "model.layers.0.self_attn."
    assert [rank[at + "q_proj.weight"].local_shape for rank in sources] == [(24, 36), (12, 36), (24, 36), (12, 36)]
    assert [rank[at + "k_proj.weight"].local_shape for rank in sources] == [(8, 36), (4, 36), (8, 36), (4, 36)]
    assert [rank[at + "o_proj.weight"].local_shape for rank in sources] == [(36, 12), (36, 8), (36, 12), (36, 4)]
    assert [rank["lm_head.weight"].local_shape for rank in sources] == [(26, 36), (25, 36), (25, 36), (25, 36)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_a_parameter_counts_the_elements_of_its_sources(layout):
    spec = spec_of("qwen2")
    for rank in range(layout.world_size):
        for parameter in declare(spec, layout, rank):
            assert parameter.num_elements == sum(prod(source.local_shape) for source in parameter.sources)


def test_names_are_unique_and_every_rank_has_the_same():
    spec, layout = spec_of("llama", **BIASES), Layout(kvp=2, tpa=2)
    names = [[parameter.name for parameter in declare(spec, layout, rank)] for rank in range(4)]
    assert len(set(names[0])) == len(names[0])
    assert names[1:] == names[:1] * 3
    sources = [source.name for parameter in declare(spec, layout, 0) for source in parameter.sources]
    assert len(set(sources)) == len(sources)


def test_queries_keys_and_values_are_stacked_in_that_order():
    spec = spec_of("llama")
    stacked = next(parameter for parameter in declare(spec, Layout(), 0) if parameter.name == "layers.0.qkv")
    assert [source.name.split(".")[-2] for source in stacked.sources] == ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_refused_by_name(family):
    spec, state = spec_of(family), state_of(family)
    for name in state:
        refused(spec, {other: info for other, info in state.items() if other != name}, repr(name), "has no tensor")


@pytest.mark.parametrize(
    ("ffns", "name"),
    [
        ([MLP(50)] * 4096, "model.layers.2.input_layernorm.weight"),
        ([MoE(10**9, 2, 8)], "model.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_more_layers_or_experts_than_memory_has_room_for_are_refused_at_the_first(ffns, name):
    spec, state = with_ffns(spec_of("llama"), *ffns), state_of("llama")
    state |= {f"model.layers.{layer}.mlp.gate.weight": ((10**9, 36), "float32") for layer in range(2)}
    tracemalloc.start()
    try:
        refused(spec, state, repr(name), "has no tensor")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_wrong_shape_is_refused_with_both_shapes():
    spec, state = spec_of("llama"), state_of("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    refused(spec, state | {name: ((50, 36), "float32")}, repr(name), "[50, 36]", "[36, 50]")
    refused(spec, state | {name: ((36, 50, 1), "float32")}, repr(name))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_an_unused_tensor_is_refused_by_name(name):
    refused(spec_of("llama"), state_of("llama") | {name: ((36,), "float32")}, repr(name), "does not use")


def test_a_name_of_an_unused_tensor_is_cut_where_it_is_long():
    with pytest.raises(UserError) as caught:
        check(spec_of("llama"), state_of("llama") | {f"model.layers.{'9' * 1000}": ((36,), "float32")}, gguf=False)
    assert len(str(caught.value)) < 300


def test_tensors_that_the_model_derives_may_be_there():
    state = state_of("llama") | {"model.layers.0.self_attn.rotary_emb.inv_freq": ((2,), "float32")}
    check(spec_of("llama"), state, gguf=False)


def test_heads_that_look_further_ahead_may_be_there_in_layers_after_the_last_alone():
    spec, state = spec_of("llama"), state_of("llama")
    ahead, other = ((36, 72), "float32"), {"model.layers.2.mlp.up_proj.weight": ((5, 36), "float32")}
    check(spec, state | {"model.layers.2.eh_proj.weight": ahead} | other, gguf=False)
    refused(spec, state | other, "does not use")
    for layer in ("1", "3", "²", "9" * 5000):  # the third is a digit, but no number
        refused(spec, state | {f"model.layers.{layer}.eh_proj.weight": ahead} | other, "does not use")


def test_a_head_of_its_own_is_needed_only_where_embeddings_are_not_tied():
    state = state_of("llama")
    check(spec_of("llama", tie_word_embeddings=True), state, gguf=False)
    del state["lm_head.weight"]
    check(spec_of("llama", tie_word_embeddings=True), state, gguf=False)
    refused(spec_of("llama"), state, "'lm_head.weight'")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "float8_e4m3fn", "float64", "bool"])
def test_a_dtype_that_is_no_usable_float_is_refused_unless_the_format_dequantises(dtype):
    spec, state = spec_of("llama"), state_of("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    changed = state | {name: (state[name][0], dtype)}
    refused(spec, changed, repr(name), dtype, "float32, bfloat16, float16")
    check(spec, changed, gguf=True)


def test_what_does_not_fit_a_gguf_file_is_said_of_its_metadata():
    spec, state = spec_of("llama"), state_of("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rows, columns = state[name][0]
    words = f"{name!r} has shape [{rows}, 7], but the file's metadata requires [{rows}, {columns}]: convert the model"
    refused(spec, state | {name: ((rows, 7), "float32")}, words, gguf=True)
    refused(spec, state | {"x": ((7,), "float32")}, "'x'): convert the model again", gguf=True)
    del state[name]
    refused(spec, state, f"no tensor {name!r}, which the file's metadata requires", gguf=True)
    packed = spec.quantised_by(gguf_quantisation({name.removesuffix(".weight"): "Q8_0"}))
    refused(packed, state, f"no tensor {name!r}, which the file's metadata requires", gguf=True)
    words = f"{name!r} has dtype Q8_0 and shape [{rows}, 7], but a weight of {rows} rows and {columns} columns in q8_0"
    refused(packed, state | {name: ((rows, 7), "Q8_0")}, words, ": convert the model again", gguf=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_float_dtypes_are_accepted(dtype):
    check(spec_of("llama"), {name: (shape, dtype) for name, (shape, _) in state_of("llama").items()}, gguf=False)
