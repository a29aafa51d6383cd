"""The fields of config.json: required, read, supported with one value only, and unable to change results.

`unread_fields` reports a field that is in none of these groups.
"""

from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import rope_mapping
from longhelix.spec.families import FAMILIES
from longhelix.spec.family import ConfigFields, Neutral
from longhelix.spec.rope import UNREAD_ROPE_KEYS
from longhelix.values import refused, shown

REQUIRED = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    }
)

# Read where they are present; absent and any default would differ.
OPTIONAL = frozenset(
    {"original_max_position_embeddings", "quantization_config", "compression_config", "rope_interleave"}
)

_ONE_STACK = "a decoder-only model"
_SAME_LAYERS = "identical layers"
_UNSCALED = "no scaling or capping of values"
NEUTRAL: Mapping[str, Neutral] = {
    "hidden_act": Neutral(("silu", "swish"), "SwiGLU"),
    "is_causal": Neutral((True,), "attention to earlier tokens only"),
    "use_bidirectional_attention": Neutral((False, None), "attention to earlier tokens only"),
    "is_encoder_decoder": Neutral((False, None), _ONE_STACK),
    "add_cross_attention": Neutral((False, None), _ONE_STACK),
    "fusion_config": Neutral((None, {}), _ONE_STACK),
    "per_layer_config": Neutral((None, {}), _SAME_LAYERS),
    "pruned_heads": Neutral((None, {}), _SAME_LAYERS),
    "kv_sharing_modes": Neutral((None,), "separate keys and values in each layer"),
    "transformers_weights": Neutral((None,), "weights in model.safetensors"),
    "attn_logit_softcapping": Neutral((None,), _UNSCALED),
    "final_logit_softcapping": Neutral((None,), _UNSCALED),
    "attention_multiplier": Neutral((None, 1, 1.0), _UNSCALED),
    "embedding_multiplier": Neutral((None, 1, 1.0), _UNSCALED),
    "residual_multiplier": Neutral((None, 1, 1.0), _UNSCALED),
    "logits_scaling": Neutral((None, 1, 1.0), _UNSCALED),
    "logit_scale": Neutral((None, 1, 1.0), _UNSCALED),
    "query_pre_attn_scalar": Neutral((None,), _UNSCALED),
}

# Fields that cannot change results, by the reason why they cannot.
HARMLESS: Mapping[str, frozenset[str]] = {
    "it names the model, its files or the program that wrote them": frozenset(
        {"architectures", "auto_map", "finetuning_task", "longhelix_note", "model_type", "name_or_path", "prefix",
         "tokenizer_class", "transformers_version", "_commit_hash", "_name_or_path", "unsloth_fixed",
         "unsloth_version"}
    ),
    "only training reads it": frozenset(
        {"attention_dropout", "attn_pdrop", "aux_loss_alpha", "embd_pdrop", "embedding_dropout", "ffn_dropout",
         "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "initializer_factor", "initializer_range",
         "output_router_logits", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
         "z_loss_coefficient"}
    ),
    "it chooses what a call returns, or which kernels compute it": frozenset(
        {"attn_implementation", "chunk_size_feed_forward", "experts_implementation", "output_attentions",
         "output_hidden_states", "return_dict", "tie_last_hidden_states", "torchscript", "use_bfloat16", "use_cache",
         "use_flash_attn", "use_return_dict", "_attn_implementation", "_attn_implementation_autoset",
         "_flash_attn_2_enabled"}
    ),
    "it says how products were split over devices": frozenset({"distributed_config", "ep_size", "pretraining_tp"}),
    "classifiers read it, and longhelix runs language models": frozenset(
        {"classifier_dropout", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"}
    ),
    "prompts come as tokens, which have no padding": frozenset(
        {"bos_token_id", "cls_token_id", "decoder_start_token_id", "mask_token_id", "pad_token_id", "sep_token_id",
         "unk_token_id"}
    ),
    "encoders read it": frozenset(
        {"cross_attention_hidden_size", "is_decoder", "tie_encoder_decoder", "type_vocab_size"}
    ),
    "longhelix does not run the layers that predict further tokens": frozenset(
        {"mtp_layer_types", "num_mtp_layers", "num_nextn_predict_layers"}
    ),
    "transformers reads it from generation_config.json alone": frozenset(
        {"assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
         "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
         "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
         "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length",
         "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups",
         "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
         "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p",
         "typical_p"}
    ),
}  # fmt: skip
_HARMLESS = frozenset().union(*HARMLESS.values())
# Fields that may be null in every family: none ends a sequence, and what stands in the rope settings goes first.
_NULLABLE = frozenset({"eos_token_id", "partial_rotary_factor", "rope_theta"})
# Read in families with a sliding window.
WINDOW = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})


def completed(config: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """The config with the family's names and defaults; raises UserError for a value that longhelix does not run."""
    given = dict(config)
    for alias, name in fields.aliases.items():
        if alias in given:
            given[name] = given.pop(alias)
    read = fields.defaults.keys() | fields.ignored
    unread = {name: neutral for name, neutral in NEUTRAL.items() if name not in read}
    for name, neutral in {**unread, **fields.neutral}.items():
        if name in given:
            _check_neutral(name, given[name], neutral)
    _check_window(given, fields)
    if given.get("rope_parameters") is None:
        given.pop("rope_parameters", None)
    nullable = fields.nullable | _NULLABLE
    for name, default in fields.defaults.items():
        if given.get(name, default) is None and default is not None and name not in nullable:
            allowed = f"a value, or leave it out to get {default}"
            raise refused(f"{name} in the model's settings", None, allowed, "invalid_model")
    return {**fields.defaults, **given}


def unread_fields(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in the config of a model that runs which longhelix does not know, sorted."""
    family = FAMILIES[config["model_type"]]
    config, fields = family.decoder(config), family.fields
    read = REQUIRED | OPTIONAL | _HARMLESS | WINDOW | NEUTRAL.keys() | fields.defaults.keys()
    known = read | fields.aliases.keys() | fields.neutral.keys() | fields.ignored
    return tuple(sorted({*config.keys() - known, *rope_mapping(config).keys() & UNREAD_ROPE_KEYS}))


def _check_neutral(name: str, value: Any, neutral: Neutral) -> None:
    if not any(type(value) is type(known) and value == known for known in neutral.values):
        raise UserError(
            f"config.json has {name} = {shown(value)}: longhelix supports only {shown(neutral.values[0])} "
            f"({neutral.meaning})",
            "invalid_model",
        )


def _check_window(given: Mapping[str, Any], fields: ConfigFields) -> None:
    """Refuse a window in the config of a family whose attention has none."""
    kinds, full = given.get("layer_types"), ("full_attention", "attention")
    reads = "layer_types" in fields.defaults or "layer_types" in fields.ignored
    if (
        not reads
        and kinds is not None
        and not (isinstance(kinds, (list, tuple)) and all(kind in full for kind in kinds))
    ):
        allowed = "full_attention for every layer, or leave it out"
        raise refused("layer_types in the model's settings", kinds, allowed, "invalid_model")
    window = given.get("sliding_window")
    if "sliding_window" not in fields.defaults and window is not None and given.get("use_sliding_window") is not False:
        raise UserError(
            f"config.json has sliding_window = {shown(window)}, but models of this family attend to all earlier "
            "tokens: set it to null if the model was not trained with a window",
            "invalid_model",
        )
