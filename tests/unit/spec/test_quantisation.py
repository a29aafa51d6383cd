"""The quantisation settings that people publish: which modules are quantised, and how. Anything else is refused."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.quantization_config import QuantizationMethod

from anything import VALUES
from longhelix.cli.planning import PlannedModel
from longhelix.errors import UserError
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import FORMATS, read_hf_config
from longhelix.spec.presets import load_model, load_system
from longhelix.spec.quantisation import Quantisation, Storage, read_quantisation

pytestmark = pytest.mark.unit

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
QUERY, OUTPUT = "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.o_proj"
GATE, DOWN, EXPERT = (
    "model.layers.3.mlp.gate_proj",
    "model.layers.3.mlp.down_proj",
    "model.layers.3.mlp.experts.7.up_proj",
)
HEAD = "lm_head"


def settings_of(method, **settings):
    return {"quant_method": method, **settings}


def compressed(weights, form, targets=("Linear",), ignore=("lm_head",), **group):
    one = {"targets": list(targets), "weights": weights, **group}
    return settings_of("compressed-tensors", format=form, config_groups={"group_0": one}, ignore=list(ignore))


def integers(bits=4, **more):
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128} | more


def floats(bits=8, strategy="channel", **more):
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy} | more


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def read(settings, **config) -> Quantisation:
    quantisation = read_quantisation({"dtype": "bfloat16", "quantization_config": settings} | config)
    assert quantisation is not None
    return quantisation


READ = {
    "DeepSeek-R1": (settings_of("fp8", **BLOCKS), "fp8_block", "fp8-block"),
    "DeepSeek-V3.1": (settings_of("fp8", scale_fmt="ue8m0", **BLOCKS), "fp8_block", "fp8-block"),
    "AutoFP8": (settings_of("fp8", activation_scheme="static", ignored_layers=["lm_head"]), "fp8", "fp8-channel"),
    "transformers FP8 of tensors": (
        settings_of("fp8", activation_scheme="static", weight_block_size=None), "fp8_inverse", "fp8-channel"
    ),
    "FP8_DYNAMIC": (compressed(floats(), "float-quantized", input_activations=DYNAMIC), "fp8", "fp8-channel"),
    "FP8": (compressed(floats(strategy="tensor"), "float-quantized"), "fp8", "fp8-channel"),
    "FP8 W8A16": (compressed(floats(strategy="tensor"), "naive-quantized"), "fp8", "fp8-channel"),
    "FP8_BLOCK": (
        compressed(floats(strategy="block", block_structure=[128, 128]), "float-quantized"),
        "float_quantized_block", "fp8-block",
    ),
    "INT8": (
        compressed(integers(8, strategy="channel", group_size=None), "int-quantized"), "int_quantized", "int8-channel"
    ),
    "INT8 of tensors": (
        compressed({"num_bits": 8, "type": "int"}, "naive-quantized"), "int_quantized", "int8-channel"
    ),
    "INT8 W8A16": (
        compressed(integers(8, strategy="channel", group_size=-1), "pack-quantized"), "pack_quantized", "int8-channel"
    ),
    "Kimi K2.5": (compressed(integers(group_size=32), "pack-quantized"), "pack_quantized", "int4-g32"),
    "W4A16": (compressed(integers(actorder="static"), "pack-quantized"), "pack_quantized", "int4-g128"),
    "W4A16_ASYM": (compressed(integers(symmetric=False), "pack-quantized"), "pack_quantized", "int4-g128-zero"),
    "format of the group": (
        compressed(integers(group_size=64), "mixed-precision", format="pack-quantized"), "pack_quantized", "int4-g64"
    ),
    "NVFP4": (
        compressed(floats(4, "tensor_group", group_size=16), "nvfp4-pack-quantized",
                   input_activations=floats(4, "tensor_group", group_size=16, dynamic="local")),
        "nvfp4_pack_quantized", "nvfp4",
    ),
    "MXFP4": (
        compressed(floats(4, "group", group_size=32, scale_dtype="torch.uint8"), "mxfp4-pack-quantized"),
        "mxfp4_pack_quantized", "mxfp4",
    ),
    "MXFP8": (compressed(floats(8, "group", group_size=32), "mxfp8-quantized"), "mxfp8_quantized", "mxfp8"),
    "modelopt FP8": (settings_of("modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8"), "fp8", "fp8-channel"),
    "modelopt FP8 of outputs": (
        settings_of("modelopt", quant_algo="FP8_PER_CHANNEL_PER_TOKEN"), "fp8", "fp8-channel"
    ),
    "modelopt FP8 blocks": (settings_of("modelopt", quant_algo="fp8_pb_wo"), "float_quantized_block", "fp8-block"),
    "modelopt NVFP4": (settings_of("modelopt", quant_algo="NVFP4", group_size=16), "modelopt_nvfp4", "nvfp4"),
    "modelopt NVFP4 weights": (settings_of("modelopt_fp4", quant_algo="W4A16_NVFP4"), "modelopt_nvfp4", "nvfp4"),
    "modelopt MXFP8": (settings_of("modelopt", quant_algo="MXFP8", group_size=32), "mxfp8_quantized", "mxfp8"),
    "hf_quant_config.json": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}},
        "modelopt_nvfp4", "nvfp4",
    ),
    "config.json of modelopt": (
        {"quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        "fp8", "fp8-channel",
    ),
    "AWQ": (
        settings_of("awq", bits=4, group_size=128, zero_point=True, version="gemm"), "awq", "int4-g128-float16-zero"
    ),
    "AWQ, older": (settings_of("awq", w_bit=4, q_group_size=64, version="GEMM"), "awq", "int4-g64-float16-zero"),
    "AWQ, symmetric": (settings_of("awq", zero_point=False), "awq", "int4-g128-float16"),
    "GPTQ": (settings_of("gptq", bits=4, group_size=128, sym=True, desc_act=False), "gptq", "int4-g128-float16"),
    "GPTQ, asymmetric": (
        settings_of("gptq", bits=4, group_size=32, sym=False), "gptq", "int4-g32-float16-zero"
    ),
    "GPTQ, second version": (
        settings_of("gptq", bits=4, group_size=64, checkpoint_format="gptq_v2"), "gptq_v2", "int4-g64-float16"
    ),
}  # fmt: skip


ORDERED = {
    "GPTQ": (settings_of("gptq", bits=4, group_size=32, desc_act=True), Storage("gptq", "int4-g32-float16", True)),
    **{
        f"compressed-tensors, {order}": (
            compressed(integers(actorder=order), "pack-quantized"), Storage("pack_quantized", "int4-g128", True)
        )
        for order in ("group", "dynamic", True)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_settings_say_that_inputs_are_ordered(name):
    """Experts then become numbers."""
    settings, storage = ORDERED[name]
    assert read(settings).storage_of(QUERY) == storage
    assert formats({"quantization_config": settings, "dtype": "bfloat16"}) == (storage.format, "bfloat16")


def formats(config):
    """The formats of most weights, and of experts, in a plan."""
    dtypes = Dtypes("bfloat16", "bfloat16", packed=True)
    setting = Setting(read_hf_config(MIXTRAL | config), load_system("gb300"), dtypes)
    return setting.weights_in, setting.experts_in


@pytest.mark.parametrize("name", sorted(READ))
def test_published_settings_are_read(name):
    settings, scheme, format = READ[name]
    for module in (QUERY, DOWN, EXPERT):
        assert read(settings).storage_of(module) == Storage(scheme, format)
    assert format in FORMATS
    config = {"quantization_config": settings, "dtype": "bfloat16"}
    assert formats(config) == (format, format)
    assert formats({"compression_config": settings, "quantization_config": None, "dtype": "bfloat16"}) == (
        format,
        format,
    )


@pytest.mark.parametrize("name", sorted(READ))
def test_embeddings_norms_and_routers_are_never_quantised(name):
    quantisation = read(READ[name][0])
    for module in ("model.embed_tokens", "model.norm", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate",
                   "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.shared_expert_gate",
                   "model.layers.0.mlp.router", "model.layers.0.feed_forward.router",
                   "model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.q_a_layernorm",
                   "model.layers.0.linear_attn.conv1d", "model.layers.0.self_attn.indexer.weights_proj"):  # fmt: skip
        assert quantisation.storage_of(module) is None
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.kv_b_proj",
                   "model.layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.0.self_attn.indexer.wq_b",
                   "model.layers.0.mlp.shared_experts.up_proj",
                   "model.layers.0.block_sparse_moe.experts.1.w1"):  # fmt: skip
        assert quantisation.storage_of(module) is not None


@pytest.mark.parametrize(
    ("settings", "is_quantised"),
    [
        (settings_of("fp8", **BLOCKS), False),
        (settings_of("fp8", modules_to_not_convert=[], **BLOCKS), False),
        (settings_of("awq"), False),
        (settings_of("gptq"), False),
        (settings_of("gptq", lm_head=False), False),
        (settings_of("gptq", lm_head=True), True),
        (compressed(integers(), "pack-quantized", ignore=[]), True),
        (compressed(integers(), "pack-quantized"), False),
        (settings_of("modelopt", quant_algo="FP8"), True),
        (settings_of("modelopt", quant_algo="FP8", exclude_modules=["lm_head"]), False),
        (settings_of("modelopt", quant_algo="FP8", ignore=["lm_head*"]), False),
    ],
)
def test_heads_are_quantised_where_the_method_says_so(settings, is_quantised):
    assert (read(settings).storage_of(HEAD) is not None) == is_quantised


@pytest.mark.parametrize("half", ["float16", "torch.float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_scales_of_groups_have_the_dtype_of_the_model(key, half):
    settings = compressed(integers(group_size=32, symmetric=False), "pack-quantized")
    quantisation = read(settings, **({"dtype": None} | {key: half}))
    assert quantisation.storage_of(DOWN).format == "int4-g32-float16-zero"


def plain_in(settings) -> set[str]:
    quantisation = read(settings)
    return {module for module in (QUERY, OUTPUT, GATE, DOWN, EXPERT, HEAD) if quantisation.storage_of(module) is None}


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        ([QUERY], {QUERY}),
        (["model.language_model.layers.3.self_attn.q_proj"], {QUERY}),
        (["language_model.model.layers.3.self_attn.q_proj"], {QUERY}),
        (["layers.3.self_attn.q_proj"], {QUERY}),
        (["model.layers.3.self_attn.qkv_proj"], {QUERY}),
        (["model.layers.3.mlp.gate_up_proj"], {GATE}),
        (["model.layers.3.mlp"], {GATE, DOWN, EXPERT}),
        (["model.layers.3.mlp.experts"], {EXPERT}),
        (["model.layers.33.self_attn.q_proj", "self_attn.q_proj", "model.layers.3.self_attn.q"], set()),
        (["re:.*self_attn.*"], {QUERY, OUTPUT}),
        (["re:.*qkv_proj"], {QUERY}),
        (["re:model\\.layers\\.3\\.self_attn.*"], {QUERY, OUTPUT}),
        (["re:language_model\\.model\\.layers\\.3\\.self_attn.*"], {QUERY, OUTPUT}),
        (["re:model.language_model.*(q|o)_proj$"], {QUERY, OUTPUT}),
        (["re:self_attn.*", "re:.*(gate|up)$"], set()),
        (["re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head"], {GATE, DOWN, HEAD}),
        (["re:visual.*", "re:mm_projector.*"], set()),
    ],
)  # fmt: skip
def test_names_and_patterns_of_compressed_tensors(ignored, plain):
    assert plain_in(compressed(integers(), "pack-quantized", ignore=ignored)) == plain
    if ignored[0].startswith(("re:", "model.layers.3.mlp")):  # of modules that may have no weight themselves
        targeted = compressed(integers(), "pack-quantized", targets=ignored, ignore=[])
        assert plain_in(targeted) == {QUERY, OUTPUT, GATE, DOWN, EXPERT, HEAD} - plain


@pytest.mark.parametrize(
    ("listed", "plain"),
    [
        (["lm_head", "model.layers.3.self_attn"], {QUERY, OUTPUT}),
        (["model.layers.*.self_attn"], {QUERY, OUTPUT}),
        (["model.language_model.layers.3.self_attn.o_proj"], {OUTPUT}),
        (["o_proj"], {OUTPUT}),
        (["mlp.experts"], {EXPERT}),
        (["gate", "e_score_correction_bias"], set()),
        (["model.layers.1", "model.layers.30", "mlp.gate", "self_attn"], set()),
    ],
)
def test_names_of_transformers(listed, plain):
    assert plain_in(settings_of("fp8", modules_to_not_convert=listed, **BLOCKS)) == plain | {HEAD}
    assert plain_in(settings_of("fp8", ignored_layers=listed)) == plain | {HEAD}
    assert plain_in(settings_of("gptq", modules_to_not_convert=listed)) == plain | {HEAD}
    assert plain_in(settings_of("mxfp4", modules_to_not_convert=listed)) == plain | {QUERY, OUTPUT, GATE, DOWN, HEAD}


@pytest.mark.parametrize(
    ("listed", "plain"),
    [
        (["lm_head", "*.self_attn*"], {QUERY, OUTPUT, HEAD}),
        (["model.layers.3.self_attn*"], {QUERY, OUTPUT}),
        (["language_model.model.layers.3.self_attn*"], {QUERY, OUTPUT}),
        (["*qkv_proj"], {QUERY}),
        (["model.layers.3.self_attn"], {QUERY, OUTPUT}),
        (["model.layers.?.mlp.experts.*"], {EXPERT}),
        (["model.layers.[0-2]*", "model.layers.1", "*.self_attn", "self_attn*"], set()),
    ],
)
def test_wildcards_of_modelopt(listed, plain):
    for key in ("exclude_modules", "ignore"):
        assert plain_in(settings_of("modelopt", quant_algo="NVFP4", **{key: listed})) == plain
    nested = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": listed}}
    assert plain_in(nested) == plain


def test_parts_of_names_of_awq():
    assert plain_in(settings_of("awq", modules_to_not_convert=["self_attn", "experts"])) == {
        QUERY,
        OUTPUT,
        EXPERT,
        HEAD,
    }


def test_exceptions_and_choices_of_gptq():
    dynamic = {"-:.*attn.*": {}, "-:.*mlp\\.experts": {}}
    assert plain_in(settings_of("gptq", dynamic=dynamic)) == {QUERY, OUTPUT, EXPERT, HEAD}
    for inside in (["self_attn.q_proj", "mlp.down_proj"], [["self_attn.q_proj"], ["mlp.down_proj"]]):
        assert plain_in(settings_of("gptq", modules_in_block_to_quantize=inside)) == {OUTPUT, GATE, EXPERT, HEAD}


def test_groups_differ_by_module():
    """Names come before patterns, and patterns before classes."""
    groups = {
        "linear": {"targets": ["Linear"], "weights": integers(), "format": "pack-quantized"},
        "attention": {"targets": ["re:.*self_attn.*"], "weights": floats(), "format": "float-quantized"},
        "output": {"targets": [OUTPUT, "Linear"], "weights": integers(group_size=32), "format": "pack-quantized"},
        "cache": {"targets": ["LlamaAttention"], "weights": None, "input_activations": floats(strategy="tensor")},
    }
    quantisation = read(
        settings_of("compressed-tensors", format="mixed-precision", config_groups=groups, ignore=[GATE])
    )
    modules = (QUERY, OUTPUT, GATE, DOWN)
    formats = [storage and storage.format for storage in map(quantisation.storage_of, modules)]
    assert formats == ["fp8-channel", "int4-g32", None, "int4-g128"]


def test_layers_of_modelopt_differ_by_module():
    layers = {
        QUERY: {"quant_algo": "FP8"},
        "model.language_model.layers.3.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    quantisation = read(settings_of("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers))
    assert quantisation.storage_of(QUERY) == Storage("fp8", "fp8-channel")
    assert quantisation.storage_of(DOWN) == Storage("modelopt_nvfp4", "nvfp4")
    assert quantisation.storage_of(OUTPUT) is None


def test_what_is_read_travels_in_messages():
    for settings, _, _ in READ.values():
        quantisation = read(settings)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(quantisation), type=Quantisation) == quantisation
        assert hash(quantisation) == hash(read(settings))


REFUSED = [
    (settings_of("bitsandbytes", load_in_4bit=True), "quant_method 'bitsandbytes'"),
    (settings_of("quip_of_tomorrow"), "quant_method 'quip_of_tomorrow'"),
    ({"bits": 4}, "quant_method None"),
    (settings_of(["fp8"]), "quant_method ['fp8']"),
    (settings_of("fp8", weight_block_size=[64, 128]), "fp8 and weight_block_size [64, 128]"),
    (settings_of("fp8", weight_block_size=[1, 32]), "fp8 and weight_block_size [1, 32]"),
    (settings_of("fp8", weight_block_size=[True, 128]), "fp8 and weight_block_size [True, 128]"),
    (settings_of("fp8", fmt="e5m2"), "fp8 and fmt 'e5m2'"),
    (settings_of("fp8", scale_fmt="ue4m3"), "fp8 and scale_fmt 'ue4m3'"),
    (settings_of("fp8", expert_dtype="fp4", **BLOCKS), "fp8 and expert_dtype 'fp4'"),
    (settings_of("fp8", modules_to_convert=["embed"]), "fp8 and modules_to_convert ['embed']"),
    (settings_of("awq", bits=8), "awq and 8 bits"),
    (settings_of("awq", group_size=48), "awq and group_size 48"),
    (settings_of("awq", group_size=-1), "awq and group_size -1"),
    (settings_of("awq", version="gemv"), "awq and version 'gemv'"),
    (settings_of("gptq", bits=3), "gptq and 3 bits"),
    (settings_of("gptq", group_size=-1), "gptq and group_size -1"),
    (settings_of("gptq", checkpoint_format="marlin"), "gptq and checkpoint_format 'marlin'"),
    (settings_of("gptq", is_marlin_format=True), "gptq and is_marlin_format True"),
    (settings_of("gptq", dynamic={"+:.*down_proj": {"bits": 8}}), "dynamic settings {'bits': 8} for '+:.*down_proj'"),
    (settings_of("modelopt", quant_algo="W4A8_AWQ"), "modelopt and quant_algo 'W4A8_AWQ'"),
    (settings_of("modelopt", quant_algo="NVFP4_AWQ"), "modelopt and quant_algo 'NVFP4_AWQ'"),
    (settings_of("modelopt"), "modelopt and quant_algo None"),
    (settings_of("modelopt", quant_algo="NVFP4", group_size=32), "modelopt, NVFP4 and group_size 32"),
    (compressed(integers(group_size=256), "pack-quantized"), "compressed-tensors and group_size 256"),
    (compressed(integers(strategy="channel", group_size=-1), "pack-quantized"), "strategy 'channel', group_size -1"),
    (compressed(integers(3), "pack-quantized"), "'int', 3 bits, strategy 'group', group_size 128"),
    (compressed(integers(8), "pack-quantized"), "'int', 8 bits, strategy 'group', group_size 128"),
    (compressed(integers(8, symmetric=False, strategy="channel", group_size=None), "int-quantized"),
     "asymmetric weights of type 'int', 8 bits"),
    (compressed(integers(actorder="other"), "pack-quantized"), "actorder 'other'"),
    (compressed(integers(8, strategy="channel", group_size=-1, actorder="group"), "pack-quantized"),
     "actorder 'group'"),
    (compressed(integers(dynamic=True), "pack-quantized"), "dynamic weights True"),
    (compressed(floats(4, "group", group_size=16), "mxfp4-pack-quantized"), "4 bits, strategy 'group', group_size 16"),
    (compressed(floats(4, "group", group_size=32), "nvfp4-pack-quantized"), "4 bits, strategy 'group', group_size 32"),
    (compressed(floats(6, "group", group_size=32), "mxfp6-pack-quantized"), "format 'mxfp6-pack-quantized'"),
    (compressed(floats(strategy="block", block_structure=[64, 64]), "float-quantized"), "block_structure [64, 64]"),
    (compressed(integers(), "marlin-24"), "format 'marlin-24'"),
    (compressed(integers(), "mixed-precision"), "format 'mixed-precision'"),
    (compressed(integers(), None), "format None"),
    (compressed(integers(), "pack-quantized", targets=["Embedding"]), "compressed-tensors and the target 'Embedding'"),
    (compressed(None, "pack-quantized"), "config_groups without weights"),
    (compressed(integers(), "pack-quantized") | {"sparsity_config": {"format": "marlin-24"}}, "sparsity_config"),
    (compressed(integers(), "pack-quantized") | {"transform_config": {"config_groups": {}}}, "transform_config"),
]  # fmt: skip
MALFORMED = [
    (settings_of("fp8", modules_to_not_convert="lm_head"), "modules_to_not_convert"),
    (settings_of("fp8", modules_to_not_convert=[1, None]), "modules_to_not_convert"),
    (settings_of("fp8", modules_to_not_convert=["model.(layers"]), "the pattern '(?:model.(layers)"),
    (compressed(integers(), "pack-quantized", ignore=["re:*gate"]), "the pattern '*gate'"),
    (compressed(integers(symmetric="yes"), "pack-quantized"), "symmetric"),
    (compressed(integers(), "pack-quantized", input_activations={"type": "complex"}), "input_activations"),
    (compressed(integers(), "pack-quantized") | {"kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
    (settings_of("compressed-tensors"), "config_groups"),
    (settings_of("compressed-tensors", config_groups={"W4A16": ["Linear"]}), "a group of config_groups"),
    (settings_of("gptq", sym=1), "sym"),
    (settings_of("gptq", dynamic=["x"]), "dynamic"),
    (settings_of("modelopt", quant_algo="MIXED_PRECISION"), "quantized_layers"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_is_not_read_is_named_beside_what_is(settings, words, tmp_path):
    with pytest.raises(UserError) as caught:
        read_quantisation({"quantization_config": settings})
    assert caught.value.code == "invalid_model"
    assert words in str(caught.value)
    assert "which longhelix does not read: use a checkpoint of fp8 (per tensor, or in blocks" in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"quantization_config": settings}))
    for weight_dtype in (None, "int4"):  # of another checkpoint, for which the config would differ
        with pytest.raises(UserError) as planned:
            PlannedModel(model=str(tmp_path), system="gb200", weight_dtype=weight_dtype).setting()
        assert str(planned.value) == str(caught.value)


@pytest.mark.parametrize(("settings", "words"), MALFORMED)
def test_settings_without_sense_are_named(settings, words):
    with pytest.raises(UserError) as caught:
        read_quantisation({"quantization_config": settings})
    assert caught.value.code == "invalid_model"
    assert words in str(caught.value)


@pytest.mark.parametrize("method", [method.value for method in QuantizationMethod])
def test_no_method_that_transformers_knows_is_taken_for_another(method):
    config = {"quantization_config": {"quant_method": method}}
    if method in ("fp8", "mxfp4", "gptq", "awq"):
        assert read_quantisation(config) is not None
    else:
        with pytest.raises(UserError, match=r"quantised with|config_groups"):
            read_quantisation(config)


def test_nothing_quantised_has_no_format():
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert read_quantisation(config) is None


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        (compressed(integers(), "pack-quantized", ignore=["re:.*self_attn.*", "re:.*shared_experts.*"]), True),
        (settings_of("fp8", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]), True),
        (settings_of("modelopt", quant_algo="NVFP4", exclude_modules=["*.self_attn*"]), True),
        (compressed(integers(), "pack-quantized"), False),
        (settings_of("fp8", modules_to_not_convert=["model.layers.0.self_attn"]), False),
        (compressed(integers(), "pack-quantized", ignore=[QUERY, "re:.*self_attn.kv_b_proj"]), False),
    ],
)
def test_experts_alone_are_quantised_where_attention_is_not(settings, alone):
    weights, experts = formats({"quantization_config": settings, "dtype": "bfloat16", "num_hidden_layers": 5})
    assert experts in FORMATS
    assert experts != "bfloat16"
    assert weights == ("bfloat16" if alone else experts)


def test_a_file_beside_the_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert load_model(str(tmp_path)).checkpoint.quantisation is None
    path = Path(tmp_path, "hf_quant_config.json")
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    assert load_model(str(tmp_path)).checkpoint.quantisation.rules[0].storage.format == "nvfp4"
    path.write_text("[]")
    with pytest.raises(UserError, match=r"hf_quant_config.json must hold a JSON object"):
        load_model(str(tmp_path))


def damaged(value, path, other):
    """Return a copy of nested settings with `other` at a path."""
    if not path:
        return other
    if isinstance(value, dict):
        return value | {path[0]: damaged(value[path[0]], path[1:], other)}
    return [damaged(each, path[1:], other) if index == path[0] else each for index, each in enumerate(value)]


def paths(value):
    """Yield the paths of all values inside nested settings."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield ()
    for key, each in inside:
        yield from ((key, *path) for path in paths(each))


PLACES = [(name, path) for name in sorted(READ) for path in paths(READ[name][0])]


@given(place=st.sampled_from(PLACES), value=VALUES)
def test_damaged_settings_are_read_or_refused(place, value):
    name, path = place
    config = {"quantization_config": damaged(READ[name][0], path, value)}
    try:
        quantisation = read_quantisation(config)
    except UserError as error:
        code = error.code
    else:
        code = None
        for module in (QUERY, EXPERT, HEAD) if quantisation is not None else ():
            storage = quantisation.storage_of(module)
            assert storage is None or storage.format in FORMATS
    assert code in (None, "invalid_model")


@given(
    name=st.sampled_from(sorted(READ)),
    key=st.sampled_from(["ignore", "targets", "modules_to_not_convert"]),
    text=st.text(),
)
def test_any_name_of_a_module_is_read_or_refused(name, key, text):
    settings = dict(READ[name][0])
    if key == "targets" and "config_groups" in settings:
        settings["config_groups"] = {"a": settings["config_groups"]["group_0"] | {"targets": [text, f"re:{text}"]}}
    else:
        settings[key] = [text, f"re:{text}"]
    try:
        quantisation = read(settings)
    except UserError:
        return
    quantisation.storage_of(QUERY)
