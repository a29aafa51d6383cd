"""Quantised checkpoints as the engine opens them: formats, options, and a sentence for each tensor that is wrong."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longhelix import UserError
from longhelix.cli.options import describe
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine import places
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.serve.live import server_description
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model

pytestmark = pytest.mark.unit

HIDDEN, COLUMNS, VOCAB, EXPERTS = 64, 96, 32, 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": COLUMNS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": COLUMNS,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ATTENTION = {"q_proj": (64, HIDDEN), "k_proj": (32, HIDDEN), "v_proj": (32, HIDDEN), "o_proj": (HIDDEN, 64)}
MLP = {"gate_proj": (COLUMNS, HIDDEN), "up_proj": (COLUMNS, HIDDEN), "down_proj": (HIDDEN, COLUMNS)}
FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
LINEAR = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
FP8_CHANNEL = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"all": LINEAR},
}  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj"


def integers(targets, group_size):
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": group_size, "symmetric": True}
    return {"targets": targets, "weights": weights}


def compressed(*groups):
    named = {str(index): group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named}


def plain(shape, scale):
    return {"weight": torch.zeros(shape, dtype=torch.bfloat16)}


def fp8_block(shape, scale):
    return {"weight": torch.zeros(shape, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}


def fp8_channel(shape, scale):
    return {"weight": torch.zeros(shape, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(shape[0], 1)}


def pack_quantized(shape, scale, group=32):
    words = torch.zeros(shape[0], shape[1] // 8, dtype=torch.int32)
    return {"weight_packed": words, "weight_scale": torch.ones(shape[0], -(-shape[1] // group), dtype=scale)}


def pack_quantized_64(shape, scale):
    return pack_quantized(shape, scale, 64)


def awq(shape, scale):
    outputs, depth = shape
    return {
        "qweight": torch.zeros(depth, outputs // 8, dtype=torch.int32),
        "qzeros": torch.zeros(depth // 32, outputs // 8, dtype=torch.int32),
        "scales": torch.ones(depth // 32, outputs, dtype=scale),
    }


def gptq(shape, scale):
    outputs, depth = shape
    return awq(shape, scale) | {"qweight": torch.zeros(depth // 8, outputs, dtype=torch.int32)}


def modules(config):
    """Return the shape of each linear module inside of layers."""
    mlps = [f"experts.{expert}." for expert in range(EXPERTS)] if "num_experts" in config else [""]
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(2)
        for part in (
            {f"self_attn.{name}": shape for name, shape in ATTENTION.items()},
            {f"mlp.{mlp}{name}": shape for mlp in mlps for name, shape in MLP.items()},
        )
        for name, shape in part.items()
    }


def tensors_of(config, write, scale=torch.bfloat16):
    """Return the tensors of a checkpoint. write: returns those of a module, or such a function by the module's name."""
    ones = ["model.norm"]
    for layer in range(2):
        ones += [f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention")]
    tensors = {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in ones}
    tensors |= {
        f"{name}.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16) for name in ("model.embed_tokens", "lm_head")
    }
    if "num_experts" in config:
        tensors |= {
            f"model.layers.{layer}.mlp.gate.weight": torch.zeros(EXPERTS, HIDDEN, dtype=torch.bfloat16)
            for layer in range(2)
        }
        tensors |= {
            f"model.layers.{layer}.self_attn.{name}_norm.weight": torch.ones(16, dtype=torch.bfloat16)
            for layer in range(2)
            for name in "qk"
        }
    for module, shape in modules(config).items():
        tensors |= {f"{module}.{name}": tensor for name, tensor in write(module)(shape, scale).items()}
    return tensors


def always(write):
    return lambda module: write


def saved(folder: Path, settings, tensors, config=LLAMA):
    quantised = {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config | quantised))
    save_file(tensors, folder / "model.safetensors")
    return folder


def resolved(folder, kvp=2, **options):
    options = EngineOptions.of({"kv_cache_tokens": 1024, "device": "cpu"} | options)
    return resolve(open_checkpoint(str(folder)), Layout(kvp=kvp), options)


def refused(folder, code="invalid_checkpoint", **options):
    with pytest.raises(UserError) as caught:
        resolved(folder, **options)
    assert caught.value.code == code
    return str(caught.value)


INTEGERS = {
    "pack-quantized": (compressed(integers(["Linear"], 32)) | {"ignore": ["lm_head"]}, pack_quantized, ""),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq, "-zero"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq, ""),
}


@pytest.mark.parametrize("model_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_scales_of_integers_have_the_dtype_of_the_tensors(name, scale, model_dtype, tmp_path):
    settings, write, zero = INTEGERS[name]
    saved(tmp_path, settings, tensors_of(LLAMA, always(write), scale), LLAMA | {"torch_dtype": model_dtype})
    checkpoint = resolved(tmp_path).spec.checkpoint
    expected = f"int4-g32{'-float16' if scale == torch.float16 else ''}{zero}"
    assert checkpoint.quantisation.formats == expected


def test_each_rule_has_the_scales_of_its_own_weights(tmp_path):
    settings = compressed(integers(["re:.*self_attn.*"], 32), integers(["re:.*mlp.*"], 64))
    mlp = tensors_of(LLAMA, always(pack_quantized_64), torch.float16)
    attention = tensors_of(LLAMA, always(pack_quantized), torch.bfloat16)
    tensors = {name: (mlp if ".mlp." in name else attention)[name] for name in mlp}
    saved(tmp_path, settings, tensors)
    assert resolved(tmp_path).spec.checkpoint.quantisation.formats == "int4-g32 and int4-g64-float16"


WRONG = {
    "missing": (None, "the checkpoint has no tensor {!r}, which the model's config requires: check that all files"),
    "misshapen": (
        torch.ones(2, 2),
        "tensor {!r} has dtype float32 and shape [2, 2], but a weight of 64 rows and 96 columns in fp8-block needs "
        "float32, bfloat16, float16, float8_e8m0fnu or uint8 of shape [1, 1] or [1, 1, 1, 1]: the config and the "
        "weights do not belong together",
    ),
    "of another dtype": (torch.ones(1, 1, dtype=torch.int32), "tensor {!r} has dtype int32 and shape [1, 1], but a"),
    "of a dtype that is not read": (
        torch.ones(1, 1, dtype=torch.float64),
        "tensor {!r} has dtype F64 and shape [1, 1]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_scale_is_named(wrong, tmp_path):
    scale, words = WRONG[wrong]
    name = f"{DOWN}.weight_scale_inv"
    tensors = tensors_of(LLAMA, always(fp8_block))
    if scale is None:
        del tensors[name]
    else:
        tensors[name] = scale
    assert refused(saved(tmp_path, FP8_BLOCK, tensors)).startswith(words.format(name))


def test_a_packed_weight_of_another_dtype_is_named(tmp_path):
    tensors = tensors_of(LLAMA, always(fp8_block))
    tensors[f"{DOWN}.weight"] = torch.zeros(HIDDEN, COLUMNS, dtype=torch.bfloat16)
    assert "needs float8_e4m3fn of shape [64, 96]" in refused(saved(tmp_path, FP8_BLOCK, tensors))


@pytest.mark.parametrize("listed", [False, True])
def test_a_missing_shard_is_refused_with_a_tensor_of_it(listed, tmp_path):
    """The index places its tensors, or not even that."""
    tensors = tensors_of(LLAMA, always(fp8_block))
    shards = {name: "b.safetensors" if name.startswith(DOWN) else "a.safetensors" for name in tensors}
    saved(tmp_path, FP8_BLOCK, tensors)
    (tmp_path / "model.safetensors").unlink()
    save_file({name: tensors[name] for name in tensors if shards[name] == "a.safetensors"}, tmp_path / "a.safetensors")
    places = {name: shard for name, shard in shards.items() if listed or shard == "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    message = refused(tmp_path)
    assert f"{DOWN}.weight" in message
    assert ("b.safetensors is missing" if listed else "has no tensor") in message


def test_experts_of_a_layer_have_one_format(tmp_path):
    odd = "model.layers.1.mlp.experts.2.down_proj"
    settings = FP8_BLOCK | {"modules_to_not_convert": [odd]}
    tensors = tensors_of(MOE, lambda module: plain if module == odd else fp8_block)
    message = refused(saved(tmp_path, settings, tensors, MOE), "unsupported_model")
    assert message == (
        f"the checkpoint stores '{odd}.weight' as bfloat16, but 'model.layers.1.mlp.experts.0.gate_proj.weight' as "
        "fp8-block: use a checkpoint whose experts of a layer have one format"
    )
    other_layer = FP8_BLOCK | {"modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    tensors = tensors_of(MOE, lambda module: plain if module.startswith("model.layers.1.mlp") else fp8_block)
    assert resolved(saved(tmp_path, other_layer, tensors, MOE)).weight_formats == "fp8-block and bfloat16"


CACHE_SCALES = [
    "k_scale", "v_scale", "kv_scale", "q_scale", "prob_output_scale", "attn.k_scale", "attn.v_scale", "k_proj.k_scale",
    "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale", "k_proj.output_zero_point", "mla_attn.k_scale",
]  # fmt: skip


def test_scales_of_the_kv_cache_are_not_needed(tmp_path):
    tensors = tensors_of(LLAMA, always(fp8_block))
    tensors |= {f"model.layers.0.self_attn.{name}": torch.tensor(0.5) for name in CACHE_SCALES}
    with pytest.warns(UserWarning, match=f"^{len(CACHE_SCALES)} tensors of the checkpoint, such as .*are not read"):
        resolved(saved(tmp_path, FP8_BLOCK, tensors))
    tensors["model.layers.0.self_attn.k_scales"] = torch.tensor(0.5)
    assert "'model.layers.0.self_attn.k_scales'" in refused(saved(tmp_path, FP8_BLOCK, tensors))


def test_scales_of_inputs_are_known_and_checked(tmp_path, recwarn):
    tensors = tensors_of(LLAMA, always(fp8_block))
    tensors |= {f"{DOWN}.activation_scale": torch.ones(())}
    resolved(saved(tmp_path, FP8_BLOCK, tensors))
    assert not [each for each in recwarn.list if "not read" in str(each.message)]
    tensors |= {f"{DOWN}.activation_scale": torch.ones(2)}
    assert "needs float32, bfloat16 or float16 of shape [] or [1]" in refused(saved(tmp_path, FP8_BLOCK, tensors))


def test_the_engine_reads_the_file_beside_the_config_as_the_planner_does(tmp_path):
    saved(tmp_path, None, tensors_of(LLAMA, always(fp8_channel)))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    checkpoint = resolved(tmp_path).spec.checkpoint
    assert checkpoint == load_model(str(tmp_path)).checkpoint
    assert checkpoint.quantisation.formats == "fp8-channel"
    (tmp_path / "hf_quant_config.json").write_text("[]")
    assert "hf_quant_config.json must hold a JSON object" in refused(tmp_path, "invalid_model")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("settings", "write"), [(FP8_CHANNEL, fp8_channel), (compressed(integers(["Linear"], 32)), pack_quantized)]
)
def test_a_packed_head_is_read_even_if_the_config_ties_it(settings, write, tied, tmp_path):
    tensors = tensors_of(LLAMA, always(write))
    del tensors["lm_head.weight"]
    tensors |= {f"lm_head.{name}": tensor for name, tensor in write((VOCAB, HIDDEN), torch.bfloat16).items()}
    saved(tmp_path, settings, tensors, LLAMA | {"tie_word_embeddings": tied})
    if tied:
        with pytest.warns(
            UserWarning, match="ties its head to its embedding, but the checkpoint has a different lm_head"
        ):
            spec = resolved(tmp_path).spec
    else:
        spec = resolved(tmp_path).spec
    assert not spec.vocabulary.tied_embeddings
    assert spec.checkpoint.quantisation.storage_of("lm_head") is not None


def test_a_packed_embedding_is_refused(tmp_path):
    tensors = tensors_of(LLAMA, always(fp8_channel))
    tensors |= {f"lm_head.{name}": tensor for name, tensor in fp8_channel((VOCAB, HIDDEN), None).items()}
    tensors["model.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN, dtype=torch.float8_e4m3fn)
    assert refused(saved(tmp_path, FP8_CHANNEL, tensors)).startswith(
        "tensor 'model.embed_tokens.weight' has dtype float8_e4m3fn: longhelix reads float32"
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"weight_dtype": "int8"}, "weight_dtype"),
        ({"weight_dtype": "int4"}, "weight_dtype"),
    ],
)
def test_quantised_weights_are_not_quantised_again(options, name, tmp_path):
    saved(tmp_path, FP8_BLOCK, tensors_of(LLAMA, always(fp8_block)))
    message = refused(tmp_path, "invalid_argument", **options)
    assert message == f"the checkpoint's weights are already quantised (fp8-block): leave out {name}"


def test_projections_in_different_formats_are_named(tmp_path):
    """They become numbers together."""
    settings = compressed(integers(["Linear"], 32)) | {"ignore": ["lm_head", "re:.*k_proj"]}

    def storing(name):
        return plain if name.endswith("k_proj") else pack_quantized

    with pytest.warns(UserWarning, match="self_attn.q_proj and .* in different formats.* become bfloat16 in memory"):
        resolved(saved(tmp_path, settings, tensors_of(LLAMA, storing)))


def test_experts_with_act_order_are_named(tmp_path):
    """They become numbers."""
    settings = INTEGERS["gptq"][0] | {"desc_act": True}
    with pytest.warns(UserWarning, match="experts with act-order.* become bfloat16 in memory"):
        resolved(saved(tmp_path, settings, tensors_of(MOE, always(gptq), torch.float16), MOE))


def test_bytes_need_sixteens_of_inputs(tmp_path):
    saved(tmp_path, INT8, tensors_of(LLAMA, always(int8_channel)))
    assert refused(tmp_path, "invalid_argument", kvp=4, activation_dtype="int8") == (
        "activation_dtype int8 needs weights with a multiple of 16 inputs on each rank, but rank 0 has 24 of "
        "model.layers.0.mlp.down_proj: choose another layout, or leave activation_dtype out"
    )


def test_inputs_that_kernels_do_not_read_are_named(tmp_path):
    """Four ranks have 24 of 96 columns each."""
    saved(tmp_path, FP8_CHANNEL | {"ignore": ["lm_head"]}, tensors_of(LLAMA, always(fp8_channel)))
    with pytest.warns(UserWarning, match=r"rank 0 has the inputs 0 to 23 of model\.layers\.0\.mlp\.down_proj"):
        resolved(tmp_path, kvp=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rank . has the inputs")
        resolved(tmp_path, kvp=2)


def int8_channel(shape, scale):
    return {"weight": torch.zeros(shape, dtype=torch.int8), "weight_scale": torch.ones(shape[0], 1)}


INT8_LINEAR = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}
INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": INT8_LINEAR},
    "ignore": ["lm_head"],
}  # fmt: skip


def test_inputs_of_products_are_rounded_only_with_int8_weights(tmp_path):
    plain = resolved(saved(tmp_path, INT8, tensors_of(LLAMA, always(int8_channel))))
    rounding = resolved(tmp_path, activation_dtype="int8", device="cpu")
    packed = [config.spec.checkpoint.quantisation.storage_of(DOWN) for config in (plain, rounding)]
    assert [storage.kept for storage in packed] == ["int8-channel", "w8a8"]
    # The head is not quantised by the checkpoint, and stays so.
    assert rounding.formats.product_dtype == plain.formats.product_dtype == "bfloat16"
    saved(tmp_path, FP8_BLOCK, tensors_of(LLAMA, always(fp8_block)))
    assert refused(tmp_path, "invalid_argument", activation_dtype="int8") == (
        "activation_dtype int8 needs int8 weights, but those of the checkpoint are quantised otherwise (fp8-block): "
        "leave out activation_dtype"
    )


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that gives this machine GPUs of some compute capabilities."""

    def have(*capabilities):
        monkeypatch.setattr(places, "free_gpu_bytes", lambda: [2**34] * len(capabilities))
        monkeypatch.setattr(places, "gpu_capabilities", lambda: list(capabilities))

    return have


@pytest.mark.parametrize(("settings", "write"), [(FP8_BLOCK, fp8_block), (FP8_CHANNEL, fp8_channel)])
def test_inputs_of_products_are_rounded_to_fp8_on_gpus(settings, write, gpus, tmp_path):
    saved(tmp_path, settings | {"ignore": ["lm_head"]}, tensors_of(LLAMA, always(write)))
    gpus((9, 0), (8, 9))
    plain = resolved(tmp_path, device="cuda")
    rounding = resolved(tmp_path, activation_dtype="fp8", device="auto")
    storages = [config.spec.checkpoint.quantisation.storage_of(DOWN) for config in (plain, rounding)]
    assert [storage.input_dtype for storage in storages] == [None, "fp8"]
    # Weights stay as they are.
    assert len({storage.kept for storage in storages}) == 1
    assert rounding.weight_bytes(0) == plain.weight_bytes(0)
    assert rounding.formats.product_dtype == plain.formats.product_dtype == "bfloat16"
    assert ", activations fp8" in describe(rounding)[0]


def test_fp8_inputs_need_fp8_weights_and_gpus_that_multiply_fp8(gpus, tmp_path):
    asked = {"activation_dtype": "fp8", "device": "cuda"}
    saved(tmp_path, FP8_BLOCK, tensors_of(LLAMA, always(fp8_block)))
    gpus((8, 6), (9, 0))
    assert refused(tmp_path, "invalid_argument", **asked) == (
        "activation_dtype fp8 needs GPUs of compute capability 8.9 or later, but a rank has one of 8.6: leave "
        "activation_dtype out"
    )
    assert "kv_dtype fp8 needs GPUs" in refused(tmp_path, "invalid_argument", kv_dtype="fp8", device="cuda")
    assert resolved(tmp_path, device="cuda").machines.device == "cuda"
    gpus((9, 0), (9, 0), (8, 6))
    assert resolved(tmp_path, kv_dtype="fp8", **asked).formats.activation_dtype == "fp8"
    for device in ("cpu", "auto"):
        gpus(*[(9, 0)] * (device == "cpu"))
        assert refused(tmp_path, "invalid_argument", activation_dtype="fp8", device=device) == (
            "activation_dtype fp8 runs only on GPUs, but the device is cpu: set device to cuda, or leave "
            "activation_dtype out"
        )
    gpus((9, 0), (9, 0))
    saved(tmp_path, INT8, tensors_of(LLAMA, always(int8_channel)))
    assert refused(tmp_path, "invalid_argument", **asked) == (
        "activation_dtype fp8 needs fp8 weights, but those of the checkpoint are quantised otherwise (int8-channel): "
        "leave out activation_dtype"
    )
    saved(tmp_path, None, tensors_of(LLAMA, always(plain)))
    for weight_dtype in (None, "fp8-block", "int8"):
        assert refused(tmp_path, "invalid_argument", weight_dtype=weight_dtype, **asked) == (
            "activation_dtype fp8 needs a checkpoint with fp8 weights, but this one is not quantised: leave out "
            "activation_dtype"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_weights_have_the_dtype_of_activations(dtype, tmp_path):
    config = resolved(saved(tmp_path, FP8_BLOCK, tensors_of(LLAMA, always(fp8_block))), dtype=dtype)
    assert (config.formats.dtype, config.formats.weight_dtype) == (dtype, dtype)
    assert config.weight_formats == f"fp8-block and {dtype}"
    assert resolved(tmp_path, dtype=dtype, weight_dtype=dtype) == config
    assert f"; {dtype}, weights fp8-block and {dtype}, KV {dtype}" in describe(config)[0]
    assert server_description("x", config).weight_dtype == config.weight_formats


def test_formats_of_plain_weights_are_shown_as_they_are(tmp_path):
    config = resolved(saved(tmp_path, None, tensors_of(LLAMA, always(plain))), weight_dtype="int8")
    assert config.weight_formats == "int8"
