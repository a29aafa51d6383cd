"""The planner's bytes of packed weights against those that the engine's ranks declare, to the byte."""

from collections import defaultdict
from dataclasses import replace

import pytest

from builtin import builtin
from longhelix.cli.planning import PlannedModel
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.parameters import stored_bytes as engine_bytes
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.perf import weights as perf_weights
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import weights_bytes
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import step_items
from longhelix.scheduler.work import Work
from longhelix.spec import FORMATS, gguf_quantisation, read_hf_config
from longhelix.spec.gguf_quantisation import GGUF_FORMATS
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system
from longhelix.spec.weights import WeightDtype
from packed_checkpoints import FORMS
from tiers import few

pytestmark = pytest.mark.unit

ONE = Layouts.of([Layout()])
H100 = load_system("h100")


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def groups(size, symmetric=True):
    return compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=size, symmetric=symmetric)


def floats(form, bits, **weights):
    return compressed(form, num_bits=bits, type="float", **weights)


# Every packed format, and settings that store it.
SETTINGS = {
    "fp8-block": FORMS["fp8-block"].settings,
    "fp8-channel": floats("float-quantized", 8, strategy="channel"),
    "int8-channel": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "nvfp4": floats("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
    "mxfp4": floats("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
    "mxfp8": floats("mxfp8-quantized", 8, strategy="group", group_size=32),
    "int4-g32": groups(32),
    "int4-g64": groups(64),
    "int4-g128": groups(128),
    "int4-g32-zero": groups(32, symmetric=False),
    "int4-g64-zero": groups(64, symmetric=False),
    "int4-g128-zero": groups(128, symmetric=False),
    "int4-g32-float16": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    "int4-g64-float16": {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
    "int4-g128-float16": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "lm_head": True},
    "int4-g32-float16-zero": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
    "int4-g64-float16-zero": {"quant_method": "awq", "bits": 4, "group_size": 64},
    "int4-g128-float16-zero": {"quant_method": "awq", "bits": 4, "group_size": 128},
}

# With act-order, where experts become numbers.
ORDERED = {
    f"int4-g{size}-float16{'' if symmetric else '-zero'}, ordered": {
        "quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric, "desc_act": True,
    }
    for size, symmetric in ((32, True), (64, False), (128, True))
}  # fmt: skip

# Formats of GGUF files, and the kinds of tensors that are kept in them.
GGUF = {format: kind for kind, format in GGUF_FORMATS.items() if format not in SETTINGS} | {"any_k": "mixed"}
# Numbers of GGUF files. The last one keeps weights that lie together in memory in float32.
NUMBERS = {"float16": "F16", "float32": "F32", "float16 beside q8_0": "F16 mixed"}

COMMON = {
    "hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16", "vocab_size": 101, "rope_theta": 1e4,
}  # fmt: skip
# Heads of 24 and 20 and FFNs of 176 and 304 columns: ranks split blocks of all sizes.
FAMILIES = {
    "llama": COMMON | {
        "model_type": "llama", "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 304,
        "tie_word_embeddings": False,
    },
    "tied llama": COMMON | {
        "model_type": "llama", "num_key_value_heads": 8, "head_dim": 24, "intermediate_size": 304,
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
    "qwen3_moe": COMMON | {
        "model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 24, "intermediate_size": 304,
        "moe_intermediate_size": 176, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "tie_word_embeddings": False, "decoder_sparse_step": 1,
    },
    "deepseek_v3": COMMON | {
        "model_type": "deepseek_v3", "num_key_value_heads": 8, "intermediate_size": 304, "moe_intermediate_size": 176,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "q_lora_rank": 48,
        "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
LAYOUTS = {
    "one rank": Layout(),
    "kvp": Layout(kvp=3),
    "tpa": Layout(tpa=2),
    "helix": Layout(kvp=3, tpa=2),
    "experts": Layout(kvp=3, tpa=2, ep=2),
    "tied": Layout(kvp=2, tpa=2, ffn_replicas=2),
    "more ranks than heads": Layout(kvp=5, tpa=4, ep=2),
    "stages": Layout(kvp=2, pp=3),
}


def model_of(family, format, **changes):
    if format in GGUF | NUMBERS:
        spec = read_hf_config(FAMILIES[family] | changes)
        return spec.quantised_by(gguf_quantisation(kinds_of(spec, (GGUF | NUMBERS)[format])))
    return read_hf_config(FAMILIES[family] | {"quantization_config": (SETTINGS | ORDERED)[format]} | changes)


def kinds_of(spec, kind):
    """Return the kinds of a GGUF file's matrices. "mixed": as llama.cpp mixes Q4_K and Q6_K, or like that."""
    parameters = [each for each in declare(spec, Layout(), 0) if each.stored is WeightDtype.PRODUCT]
    modules = [source.module for each in parameters for source in each.sources]
    longer = ("v_proj", "down_proj", "head")
    most, others = {"mixed": ("Q4_K", "Q6_K"), "F16 mixed": ("F16", "Q8_0")}.get(kind, (kind, kind))
    return {module: others if module.endswith(longer) else most for module in ["model.embed_tokens", *modules]}


def setting_of(spec):
    return Setting(spec, H100, Dtypes(spec.checkpoint.dtype, "bfloat16", packed=True))


def by_weight(spec, layout):
    """Return the most bytes that a rank declares of each weight, all experts of a layer together."""
    most = defaultdict(int)
    for rank in range(layout.world_size):
        own = defaultdict(int)
        for parameter in declare(spec, layout, rank):
            name = ".".join("{}" if part.isdigit() and number > 1 else part
                            for number, part in enumerate(parameter.name.split(".")))  # fmt: skip
            own[name] += parameter.stored_bytes("bfloat16", "bfloat16")
        for name, size in own.items():
            most[name] = max(most[name], size)
    return dict(most)


def planned(setting, layout):
    """Return the same of the planner."""
    layouts, stored = Layouts.of([layout]), setting.stored
    ends = [("", stored.embedding), ("", stored.head), ("", stored.last_norm)]
    sizes = defaultdict(int)
    for prefix, weights in [*ends, *((f"layers.{i}.", layer.weights) for i, layer in enumerate(stored.layers))]:
        for weight in weights:
            (amount,) = perf_weights.all_of(setting, layouts, [weight])
            sizes[prefix + weight.spec.name] += amount.bytes[0]
    return dict(sizes)


def test_every_packed_format_is_tried():
    assert {*SETTINGS, *GGUF} == {name for name, format in FORMATS.items() if format.codes is not None}


@pytest.mark.parametrize("format", SETTINGS | ORDERED | GGUF | NUMBERS)
@pytest.mark.parametrize("family", few(FAMILIES, 2))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_weight_takes_the_engines_bytes_on_the_fullest_rank(family, format, layout):
    spec = model_of(family, format)
    found, declared = planned(setting_of(spec), layout), by_weight(spec, layout)
    if spec.vocabulary.tied_embeddings and layout.pp == 1 and format not in GGUF:
        del found["head"]
    assert found == declared
    assert any(weight.packed for layer in setting_of(spec).stored.layers for weight in layer.weights)


@pytest.mark.parametrize("format", SETTINGS | ORDERED | GGUF | NUMBERS)
@pytest.mark.parametrize("family", few(FAMILIES, 2))
def test_memory_is_the_engines_where_one_rank_has_most_of_all(family, format):
    spec = model_of(family, format)
    for layout in (Layout(), Layout(tpa=2), Layout(tpa=2, kvp=2, tpf=4), Layout(kvp=2, ffn_replicas=2)):
        ranks = [
            sum(engine_bytes(spec, layout, rank, "bfloat16", "bfloat16").values()) for rank in range(layout.num_ranks)
        ]
        sizes = [
            {p.name: p.stored_bytes("bfloat16", "bfloat16") for p in declare(spec, layout, rank)}
            for rank in range(layout.num_ranks)
        ]
        fullest = [rank for rank in sizes if all(rank[name] >= other[name] for other in sizes for name in rank)]
        held = weights_bytes(setting_of(spec), Layouts.of([layout]))[0]
        assert held == max(ranks) if fullest else held > max(ranks)


@pytest.mark.parametrize("family", few(FAMILIES, 2))
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_int8_weights_of_products_that_round_their_inputs_take_the_engines_bytes(family, layout):
    spec = model_of(family, "int8-channel")
    rounding = replace(spec.checkpoint, quantisation=spec.checkpoint.quantisation.rounding_inputs("int8"))
    setting = setting_of(replace(spec, checkpoint=rounding))
    found, declared = planned(setting, layout), by_weight(setting.model, layout)
    if spec.vocabulary.tied_embeddings and layout.pp == 1:
        del found["head"]
    assert found == declared
    assert "w8a8" in {weight.dtype for layer in setting.stored.layers for weight in layer.weights}


@pytest.mark.parametrize("format", SETTINGS | GGUF)
def test_shapes_that_split_blocks_repeat_their_scales(format):
    """Two ranks of 88 columns: the second begins inside of a block, unless the scales are those of a whole output."""
    spec, scales = model_of("qwen3_moe", format), FORMATS[format].weight_scales
    whole, halves = (planned(setting_of(spec), layout) for layout in (Layout(), Layout(kvp=2)))
    name = "layers.2.experts.{}.down"
    rows = 6 * 160
    blocks = 1 if scales.numbers is None else -(-(88 % scales.numbers + 88) // scales.numbers)
    bits = 88 * FORMATS[format].bits + blocks * scales.bits + scales.vector_bits + scales.superblock_bits
    assert halves[name] == rows * bits // 8
    assert 2 * halves[name] > whole[name]


def test_layers_that_a_checkpoint_leaves_plain_are_priced_plain():
    settings = SETTINGS["nvfp4"] | {"ignore": ["lm_head", "re:.*layers.1.*", "re:.*down_proj"]}
    spec = model_of("llama", "nvfp4", quantization_config=settings)
    setting = setting_of(spec)
    assert len(setting.layers.kinds) == 2
    found = planned(setting, LAYOUTS["helix"])
    assert found == by_weight(spec, LAYOUTS["helix"])
    assert found["layers.1.qkv"] > 3 * found["layers.0.qkv"]
    read = {item.name: item.hbm_bytes[0] for item in step_items(setting, ONE, Work.decode(1.0, 10.0))}
    whole = planned(setting, Layout())
    for name, weights in {"QKV": ["qkv"], "output projection": ["output"], "dense FFN": ["gate_up", "down"]}.items():
        assert read[name] == sum(whole[f"layers.{layer}.{weight}"] for layer in range(3) for weight in weights)


def test_products_compute_in_the_formats_of_their_weights():
    """Gate and up in FP4, down in bfloat16."""
    settings = SETTINGS["nvfp4"] | {"ignore": ["lm_head", "re:.*down_proj"]}
    spec, system = model_of("llama", "nvfp4", quantization_config=settings), load_system("gb300")
    setting, rows = replace(setting_of(spec), system=system), 2.0**20
    found = next(item for item in step_items(setting, ONE, Work.chunk(rows, 0.0)) if item.name == "dense FFN")
    seconds = sum(
        2 * rows * matrices * 304 * 160 / (system.rate(dtype) * system.arithmetic.efficiency)
        for matrices, dtype in ((2, "nvfp4"), (1, "bfloat16"))
    )
    assert found.compute_bound
    assert found.seconds[0] - found.fixed_s[0] == pytest.approx(3 * seconds, rel=1e-12)


def test_tensors_that_are_stacked_are_packed_only_together():
    settings = SETTINGS["int4-g32"] | {"ignore": ["lm_head", "re:.*k_proj"]}
    spec = model_of("llama", "int4-g32", quantization_config=settings)
    assert planned(setting_of(spec), Layout()) == by_weight(spec, Layout())
    assert planned(setting_of(spec), Layout())["layers.0.qkv"] == 2 * 160 * 24 * (8 + 2 + 2)


def test_a_plan_for_the_built_in_model_has_the_engines_bytes():
    """Without the model's file, which need not be installed."""
    setting = PlannedModel(model="builtin", system="cpu").setting()
    layout = Layout(tpa=2)
    config = resolve(builtin(), layout, EngineOptions.of({"device": "cpu", "kv_cache_tokens": 1024}))
    held = max(config.weight_bytes(rank) for rank in range(layout.num_ranks))
    assert weights_bytes(setting, Layouts.of([layout]))[0] == held
    on_gpu = PlannedModel(model="builtin", system="h100").setting()
    assert {weight.dtype for layer in on_gpu.stored.layers for weight in layer.weights} == {"bfloat16", "q4_1"}


def test_an_option_is_above_the_checkpoint():
    setting = PlannedModel(model="deepseek-r1", system="gb300", weight_dtype="bfloat16").setting()
    assert {weight.dtype for layer in setting.stored.layers for weight in layer.weights} == {"bfloat16"}
    setting = PlannedModel(model="deepseek-r1", system="gb300", expert_dtype="nvfp4").setting()
    assert (setting.weights_in, setting.experts_in) == ("fp8-block", "nvfp4")
