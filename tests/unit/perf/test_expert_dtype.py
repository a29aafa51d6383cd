"""Experts in a dtype of their own: their bytes and arithmetic alone, and what a checkpoint says of it."""

from dataclasses import replace

import pytest

from longhelix.cli.planning import PlannedModel
from longhelix.errors import UserError
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import weights_bytes
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_items
from longhelix.plan.deployment import Deployment, runnable
from longhelix.plan.peer_limits import weight_notes
from longhelix.spec import read_hf_config
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from longhelix.spec.weights import Split, embedding, layer_weights

pytestmark = pytest.mark.unit

ONE = Layouts.of([Layout()])
GPT_OSS, GB300 = load_model("gpt-oss-120b"), load_system("gb300")


def setting(expert_dtype: str | None, weight_dtype: str = "bfloat16") -> Setting:
    return Setting(GPT_OSS, GB300, Dtypes(weight_dtype, "bfloat16", experts=expert_dtype))


def matrices(experts: bool) -> int:
    """Numbers of all matrices of experts, or of all others, embedding and head included."""
    layer = [weight for weight in layer_weights(GPT_OSS, GPT_OSS.layers[0]) if weight.columns is not None]
    numbers = sum(
        weight.num_elements * weight.experts.count
        for weight in layer
        if (weight.experts.split is Split.EXPERTS) == experts
    )
    return GPT_OSS.num_layers * numbers + (0 if experts else 2 * embedding(GPT_OSS).num_elements)


def test_each_kind_of_weight_takes_its_own_bytes():
    """MXFP4 takes 4.25 bits of a number."""
    assert weights_bytes(setting("mxfp4"), ONE)[0] == matrices(True) * 4.25 / 8 + matrices(False) * 2
    assert weights_bytes(setting(None), ONE)[0] == 2 * (matrices(True) + matrices(False))
    # A checkpoint of 61 GB (arXiv 2508.10925: 60.8 GiB), of which the table of weights leaves out biases and norms.
    assert weights_bytes(setting("mxfp4"), ONE)[0] == pytest.approx(60.8 * 2**30, rel=0.01)


@pytest.mark.parametrize("degrees", [{}, {"tpa": 8, "tpf": 2, "ep": 4}, {"kvp": 4, "pp": 3}])
def test_a_dtype_that_is_all_others_too_changes_nothing(degrees):
    layouts = Layouts.of([Layout(**degrees)])
    same, none = setting("nvfp4", "nvfp4"), setting(None, "nvfp4")
    assert weights_bytes(same, layouts)[0] == weights_bytes(none, layouts)[0]
    for ours, theirs in zip(*(decode_items(each, layouts, 3.0, 1e5) for each in (same, none)), strict=True):
        assert ours.seconds[0] == theirs.seconds[0]


def test_no_other_item_is_faster_for_it():
    narrow, wide = (
        {item.name: item for item in decode_items(setting(each), ONE, 8.0, 1e4)} for each in ("mxfp4", None)
    )
    assert narrow["experts"].hbm_bytes[0] / wide["experts"].hbm_bytes[0] == pytest.approx(4.25 / 16)
    assert all(narrow[name].seconds[0] == wide[name].seconds[0] for name in wide if name != "experts")


@pytest.mark.parametrize(
    ("model", "dtypes"),
    [
        ("deepseek-r1", ("fp8-block", "fp8-block")),
        ("kimi-k2", ("fp8-block", "fp8-block")),
        ("gpt-oss-120b", ("bfloat16", "mxfp4")),
        ("llama-3-8b", ("bfloat16", "bfloat16")),
    ],
)
def test_plans_take_the_checkpoints_dtypes(model, dtypes):
    planned = PlannedModel(model=model, system="gb300").setting()
    assert (planned.weights_in, planned.experts_in) == dtypes


@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({"weight_dtype": "fp8"}, ("fp8", "fp8")),
        ({"expert_dtype": "nvfp4"}, ("bfloat16", "nvfp4")),
        ({"weight_dtype": "fp8", "expert_dtype": "nvfp4"}, ("fp8", "nvfp4")),
        ({"weight_dtype": "fp8", "expert_dtype": "fp8"}, ("fp8", "fp8")),
    ],
)
def test_options_are_above_the_checkpoint(options, dtypes):
    planned = PlannedModel(model="gpt-oss-120b", system="gb300", **options).setting()
    assert (planned.weights_in, planned.experts_in) == dtypes


def test_checkpoints_are_planned_where_their_format_is_converted():
    assert PlannedModel(model="deepseek-r1", system="a100").setting().weights_in == "fp8-block"


def test_only_models_with_experts_have_a_dtype_of_them():
    with pytest.raises(UserError, match="llama-3-8b has no experts: leave out --expert-dtype"):
        PlannedModel(model="llama-3-8b", system="gb300", expert_dtype="fp8").setting()


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"weight_dtype": "fp8"}, "--weight-dtype"),
        ({"weight_dtype": "bfloat16", "expert_dtype": "fp8"}, "--expert-dtype"),
        ({"weight_dtype": "bfloat16", "kv_dtype": "fp8"}, "--kv-dtype"),
        ({"weight_dtype": "bfloat16", "attention_dtype": "fp8"}, "--attention-dtype"),
    ],
)
def test_what_a_system_cannot_compute_in_names_the_option(options, option):
    with pytest.raises(
        UserError, match=f"a100 has no arithmetic in fp8, .*: set {option} to one of .*bfloat16"
    ) as caught:
        PlannedModel(model="deepseek-r1", system="a100", **options).setting()
    assert caught.value.code == "unsupported_dtype"


@pytest.mark.parametrize(
    ("method", "plain", "dtypes"),
    [
        ({"quant_method": "mxfp4"}, ["lm_head"], ("bfloat16", "mxfp4")),
        ({"quant_method": "fp8"}, ["model.layers.*.self_attn", "lm_head"], ("bfloat16", "fp8-channel")),
        ({"quant_method": "fp8"}, ["lm_head"], ("fp8-channel", "fp8-channel")),
        ({"quant_method": "fp8"}, ["model.layers.0.self_attn"], ("fp8-channel", "fp8-channel")),
    ],
)
def test_experts_are_alone_where_no_attention_is_converted(method, plain, dtypes):
    config = {
        "model_type": "gpt_oss", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 100, "max_position_embeddings": 64,
        "num_local_experts": 4, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
        "quantization_config": method | {"modules_to_not_convert": plain},
    }  # fmt: skip
    planned = Setting(read_hf_config(config), GB300, Dtypes("bfloat16", "bfloat16", packed=True))
    assert (planned.weights_in, planned.experts_in) == dtypes


def test_who_runs_it_is_told():
    layout = {"dp": 1, "kvp": 1, "tpa": 8, "tpf": 8, "ep": 1, "pp": 1, "ffn_replicas": 1, "placement": "striped"}
    mixed = Deployment(GPT_OSS, layout, "bfloat16", "bfloat16", "cuda", 4096, 1, expert_dtype="mxfp4")
    plain = replace(mixed, expert_dtype=None)
    assert any("experts are planned in mxfp4" in sentence for sentence in runnable(mixed).missing)
    assert not any("experts are planned" in sentence for sentence in runnable(plain).missing)
    assert len(list(weight_notes(mixed, ()))) == len(list(weight_notes(plain, ()))) + 1
