"""The quantisation settings that people publish: read as a format, or kept by the name of their method."""

import json

import pytest
from hypothesis import given
from transformers.utils.quantization_config import QuantizationMethod

from anything import VALUES
from longhelix.cli.planning import PlannedModel
from longhelix.errors import UserError
from longhelix.spec import FORMATS, read_hf_config
from longhelix.spec.presets import load_model
from longhelix.spec.quantisation import stored_dtype, stores_experts_alone

pytestmark = pytest.mark.unit

MIXTRAL = {
    "model_type": "mixtral", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def groups(*weights):
    return {"quant_method": "compressed-tensors",
            "config_groups": {f"group_{index}": {"targets": ["Linear"], "weights": one}
                              for index, one in enumerate(weights)}}  # fmt: skip


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
READ = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "fbgemm_fp8"}, "fp8"),
    (groups(FLOAT8), "fp8"),
    (groups(INT4), "int4"),
    (groups({"num_bits": 8, "type": "int"}), "int8"),
    (groups({"num_bits": 4, "type": "float", "group_size": 16}), "nvfp4"),
    (groups({"num_bits": 4, "type": "float", "group_size": 32}), "mxfp4"),
    (groups(INT4, INT4), "int4"),
    ({"config_groups": groups(INT4)["config_groups"]}, "int4"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int4"),
    ({"quant_method": "bitsandbytes", "_load_in_8bit": True, "load_in_4bit": False}, "int8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
    ({"quant_method": "gptq", "bits": 8}, "int8"),
    ({"quant_method": "awq", "w_bit": 4}, "int4"),
    ({"quant_method": "auto-round", "bits": 4}, "int4"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "int4"),
    ({"quant_method": "modelopt", "config_groups": groups(FLOAT8)["config_groups"]}, "fp8"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, "fp8"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, "mxfp4"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "int4"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "int8"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, "fp8"),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8DynamicActivationInt4WeightConfig"}}},
     "int4"),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "int4"),
    ({"quant_method": "quanto", "weights": "float8"}, "fp8"),
    ({"quant_method": "eetq"}, "int8"),
    ({"quant_method": "fp_quant", "forward_dtype": "nvfp4"}, "nvfp4"),
]  # fmt: skip
NAMED = [
    ({"quant_method": "gptq", "bits": 3}, "gptq (3 bits)"),
    (groups(INT4, FLOAT8), "compressed-tensors (2 formats)"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt (MIXED_PRECISION)"),
    ({"quant_method": "aqlm", "in_group_size": 8}, "aqlm"),
    ({"quant_method": "quip_of_tomorrow"}, "quip_of_tomorrow"),
    ({"bits": 2}, "None"),
]


@pytest.mark.parametrize(("settings", "name"), READ)
def test_published_settings_are_read(settings, name):
    assert stored_dtype({"quantization_config": settings}) == name
    assert read_hf_config(MIXTRAL | {"quantization_config": settings}).checkpoint_dtypes == (name, name)
    assert stored_dtype({"compression_config": settings, "quantization_config": None}) == name


@pytest.mark.parametrize(("settings", "name"), NAMED)
def test_what_has_no_format_is_refused_by_name_where_it_is_priced(settings, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"quantization_config": settings}))
    assert stored_dtype({"quantization_config": settings}) == name
    with pytest.raises(UserError) as caught:
        PlannedModel(model=str(tmp_path), system="gb200").setting()
    assert f"quantised as {name}, which has no performance model: set --weight-dtype" in str(caught.value)
    assert PlannedModel(model=str(tmp_path), system="gb200", weight_dtype="int4").setting().weight_dtype == "int4"


@pytest.mark.parametrize("method", [method.value for method in QuantizationMethod])
def test_no_method_that_transformers_knows_is_priced_as_if_it_were_none(method):
    name = stored_dtype({"quantization_config": {"quant_method": method}})
    assert name in FORMATS or name.startswith(method)


def test_nothing_quantised_has_no_name():
    for config in ({}, {"quantization_config": None}, {"quantization_config": {}}):
        assert stored_dtype(config) == ""
        assert not stores_experts_alone(config)


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}, True),
        ({"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, True),
        ({"exclude_modules": ["*.self_attn*"]}, True),
        ({"ignore": ["lm_head"]}, False),
        ({"ignore": ["model.layers.0.self_attn.q_proj", "re:.*self_attn.kv_b_proj"]}, False),
    ],
)
def test_experts_alone_are_quantised_where_attention_is_not(settings, alone):
    assert stores_experts_alone({"quantization_config": settings | {"quant_method": "fp8"}}) is alone


def test_a_file_beside_the_config_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert load_model(str(tmp_path)).stored_dtype == ""
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}))
    assert load_model(str(tmp_path)).stored_dtype == "nvfp4"
    path.write_text("[]")
    with pytest.raises(UserError, match=r"hf_quant_config.json must hold a JSON object"):
        load_model(str(tmp_path))


@given(value=VALUES, inner=VALUES)
def test_any_settings_are_read_or_refused(value, inner):
    for settings in (value, {"quant_method": value}, {"quant_method": "torchao", "quant_type": inner},
                     {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": inner}}},
                     {"quant_method": "quark", "global_quant_config": {"weight": inner}}):  # fmt: skip
        config = {"quantization_config": settings}
        if settings is None or isinstance(settings, dict):
            assert isinstance(stored_dtype(config), str)
        else:
            with pytest.raises(UserError, match="quantization_config"):
                stored_dtype(config)
