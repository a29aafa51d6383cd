"""Variants of config.json, as transformers runs them and as longhelix does."""

import json
import random
from dataclasses import dataclass, fields
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from longhelix import LLM, Layout, SamplingParams, UserError
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.resolution import resolve
from oracle import save_tokenizer_files

VOCAB, PROMPT, TOP = 97, [(7 * position + position // 5) % 97 for position in range(24)], 20
MAX_MODEL_LEN = 40
TOLERANCE = 2e-3  # of log-probabilities, two layers in float32

_SIZES = {
    "dtype": "float32", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 1e4, "rope_scaling": None,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_EXPERTS = _EXPERTS | {
    "num_experts": 6, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_GEMMA = _SIZES | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "attention_bias": False}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "attention_bias": False,
}  # fmt: skip
# As published with models of the family, at toy size.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"head_dim": 16, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    "granite": _SIZES | {"attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.2,
                         "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "arcee": _SIZES | {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    "exaone4": _SIZES | {"sliding_window": 8, "sliding_window_pattern": 2},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0},
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 2, "rope_local_base_freq": 1e3},
    "mistral": _SIZES | {"head_dim": 16, "sliding_window": 4096},
    "qwen2": _SIZES | _WINDOW,
    "qwen3": _SIZES | _WINDOW | {"head_dim": 16, "attention_bias": False},
    "mixtral": _SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": _SIZES | _WINDOW | _QWEN_EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": _SIZES | _WINDOW | _QWEN_EXPERTS | {"head_dim": 16, "attention_bias": False},
    "deepseek_v2": _SIZES | _LATENT | {"topk_method": "group_limited_greedy", "scoring_func": "softmax",
                                       "norm_topk_prob": False, "moe_layer_freq": 1},
    "deepseek_v3": _SIZES | _LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
                                       "moe_layer_freq": 1, "rope_interleave": True},
}  # fmt: skip
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"]
_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
_MROPE = {"head_dim": 16, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2],
                                           "mrope_interleaved": True}}  # fmt: skip
_IMAGES = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
VISION = {"qwen3_vl": _SIZES | _MROPE, "qwen3_vl_moe": _SIZES | _MROPE | _QWEN_EXPERTS}

_LINEAR = {"type": "linear", "factor": 2.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_DEEP_YARN = _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
_ROPES = [
    None, {}, _LINEAR, _YARN, _DEEP_YARN, _YARN | {"attn_factor": 0.8, "finetuned": True}, _YARN | {"rope_theta": 5e4},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": None},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16}, _YARN | {"truncate": False}, _YARN | {"truncate": None},
    _YARN | {"attention_factor": 1.3}, _YARN | {"attention_factor": None, "beta_fast": None}, _YARN | {"factor": None},
    _YARN | {"beta_fast": 4, "beta_slow": 2}, _LINEAR | {"mscale_all_dim": 1.0}, {"type": "yarn", "factor": 4.0},
    _LINEAR | {"partial_rotary_factor": 1.0}, {"type": "su", "factor": 2.0}, "linear",
]  # fmt: skip
# Fields that no config class has, and values that are drawn for those that need one of a few.
_VALUES: dict[str, list[Any]] = {
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "rope_theta": [None, 1e3, 5e5, 1e6, 10000],
    "partial_rotary_factor": [None, 1.0, 0.5],
    "original_max_position_embeddings": [8, 32],
    "head_dim": [None, 16, 32],
    "num_key_value_heads": [None, 1, 2, 4],
    "layer_types": [None, ["full_attention"] * 2, ["full_attention", "sliding_attention"], ["full_attention"]],
    "sliding_window": [None, 64, 4096, 8],
    "max_window_layers": [0, 1, 2, 28],
    "mlp_only_layers": [None, [], [0]],
    "decoder_sparse_step": [1, 2],
    "q_lora_rank": [None, 16],
    "v_head_dim": [None, 8],  # its double is more than the latent's, which the cost model does not take yet
    "qk_nope_head_dim": [None, 8],
    "n_group": [None, 1, 2, 4],
    "topk_group": [None, 1, 2],
    "topk_method": [None, "greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "norm_topk_prob": [None, True, False],
    "num_experts": [4, 6],
    "num_local_experts": [4, 6],
    "n_routed_experts": [4, 8],
    "n_shared_experts": [1, 2],
    "first_k_dense_replace": [0, 1, 2],
    "moe_layer_freq": [1, 2],
    "rope_interleave": [True, False, None],
    "is_causal": [True, False],
    "hidden_act": ["silu", "swish", "gelu", None],
    "dtype": [None, "float32"],
    "torch_dtype": [None, "float32"],
    "eos_token_id": [None, 5, [5, 6], -1],
    "per_layer_config": [None, {}],
    "is_encoder_decoder": [False],
    "id2label": [None, {"0": "a"}],
    "label2id": [None, {"a": 0}],
    "problem_type": [None],
    "chunk_size_feed_forward": [0, 4],
    "max_position_embeddings": [64, 128, 16],
    "attention_multiplier": [0.1, 1, 1.0, None],
    "residual_multiplier": [0.3, 1, 2.0],
    "embedding_multiplier": [0.5, 12, 1.0],
    "logits_scaling": [0.5, 8, 1.0],
    "attn_logit_softcapping": [None, 4.0, 50],
    "final_logit_softcapping": [None, 4.0, 30],
    "query_pre_attn_scalar": [None, 8, 256],
    "hidden_activation": [None, "gelu", "gelu_pytorch_tanh", "silu"],
    "sliding_window_pattern": [None, 1, 2],
    "rope_local_base_freq": [None, 1e3, 1e4],
}
_LARGE = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
_NOT_DRAWN = {"text_config", "vision_config", "architectures", "transformers_version", "output_hidden_states"}


@dataclass(frozen=True)
class Outcome:
    """What became of a variant. kind: "equal", "unequal", "refused" (by longhelix alone), "impossible" (to
    transformers, whatever longhelix says)."""

    kind: str
    message: str = ""


def with_changes(family: str, changes: dict[str, Any], absent: tuple[str, ...] = ()) -> dict[str, Any]:
    """The family's config with some fields changed and some left out; those of the decoder of a vision model."""
    config = {key: value for key, value in ({**CONFIGS, **VISION}[family] | changes).items() if key not in absent}
    if family in VISION:
        return {"model_type": family, "text_config": config, "vision_config": _TOWER, **_IMAGES}
    return {"model_type": family} | config


def draw(family: str, chance: random.Random) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Changes and absent fields: one to three, of transformers' fields, their second names, and older spellings."""
    config_class = _config_class(family)
    names = {field.name for field in fields(config_class)} | config_class.attribute_map.keys() | _VALUES.keys()
    changes, absent = {}, []
    for name in chance.sample(sorted(names - _LARGE - _NOT_DRAWN), chance.randint(1, 3)):
        if chance.random() < 0.3:
            absent.append(name)
        else:
            changes[name] = chance.choice(_values(name, config_class))
    return changes, tuple(absent)


def _config_class(family: str) -> type:
    config_class = CONFIG_MAPPING["deepseek_v3" if family == "kimi_k2" else family]
    if family in VISION:
        config_class = config_class.sub_configs["text_config"]
    return config_class


def _values(name: str, config_class: type) -> list[Any]:
    if name in _VALUES:
        return _VALUES[name]
    default = getattr(config_class, name, None)
    if isinstance(default, bool):
        return [True, False, None]
    if isinstance(default, (int, float)):
        return [default, None, default * 2]
    return [None]


def compare(folder, config: dict[str, Any], seed: int = 0, rope_scaling: dict[str, Any] | None = None) -> Outcome:
    """Run a config's model with random weights in both. The folder must be empty.

    `rope_scaling`: the option that longhelix gets; transformers gets it in place of the config's own.
    """
    try:
        model = _save_model(folder, config, seed, {} if rope_scaling is None else {"rope_scaling": rope_scaling})
    except Exception as error:  # whatever transformers says to a config that it does not run
        return Outcome("impossible", _read_alone(folder, config) or f"{type(error).__name__}: {error}")
    try:
        options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "rope_scaling": rope_scaling}
        with LLM(str(folder), Layout(), **options) as llm:
            (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=1, prompt_logprobs=TOP, logprobs=TOP))
    except UserError as error:
        return Outcome("refused", str(error))
    # The length by which transformers chooses frequencies is that by which longhelix does, the request's capacity.
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + result.token_ids]), use_cache=False, return_dict=True).logits[0]
    reference = logits.log_softmax(-1)
    rows = [row for row in [*result.prompt_logprobs[1:], *result.logprobs] if row is not None]
    worst = max(
        abs(value - float(reference[place, token])) for place, row in enumerate(rows) for token, value in row.items()
    )
    return Outcome("equal" if worst <= TOLERANCE else "unequal", f"log-probabilities differ by {worst:.2g}")


def _read_alone(folder, config: dict[str, Any]) -> str:
    """What longhelix says to a config without a model: it may refuse it in words, and must not fail otherwise."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"norm": torch.ones(8)}, folder / "model.safetensors")
    try:
        resolve(open_checkpoint(str(folder)), Layout())
    except UserError as error:
        return str(error)
    return ""


def _save_model(folder, config: dict[str, Any], seed: int, changes: dict[str, Any]):
    """transformers' model of the changed config, with weights that are seen where they are missing. The folder gets
    the config as it is."""
    torch.manual_seed(seed)
    kind = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    given = json.loads(json.dumps(config | {"model_type": kind} | changes))
    made = CONFIG_MAPPING[kind].from_dict(given)
    auto = AutoModelForImageTextToText if kind in VISION else AutoModelForCausalLM
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = auto.from_config(made, dtype=torch.float32, **forms).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "bias"))
            mean = float("norm" in name and name.endswith("weight"))
            torch.nn.init.normal_(parameter, mean=mean if small else 0.0, std=0.2 if small else 0.15)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(bias, std=0.2)
        model(torch.tensor([PROMPT]), use_cache=False)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_tokenizer_files(folder)
    return model
