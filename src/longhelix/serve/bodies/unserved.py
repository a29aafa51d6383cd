"""Request fields of other servers that are not supported but would change an answer, with advice on alternatives.

OpenAI, vLLM, SGLang, llama.cpp, TGI, Ollama and transformers each define their own fields. The server ignores fields
that cannot change an answer. tests/unit/serve/test_fields_of_others.py lists the ignored fields with the reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unserved:
    """Field that is not supported."""

    neutral: tuple[Any, ...] = ()  # accepted values, which have no effect; null is always accepted
    advice: str = "leave it out"  # advice for the client on what to send instead

    def asks_for_nothing(self, value: object) -> bool:
        return value is None or value in self.neutral


def check_unserved(given: Mapping[str, object] | None, unserved: Mapping[str, Unserved]) -> None:
    """Refuse unsupported fields.

    Args:
        given: the unknown fields of a body.
        unserved: unsupported fields by name.

    Raises:
        ValueError: an unsupported field has a value that would change the answer.
    """
    for name, value in (given or {}).items():
        if name in unserved and not unserved[name].asks_for_nothing(value):
            raise ValueError(f"{name} is not served here: {unserved[name].advice}")


def _ours(name: str, *neutral: Any) -> Unserved:
    """Return the entry of a field that this server supports only under a different name."""
    return Unserved(neutral, f"use {name}")


_ENABLE_THINKING = _ours('chat_template_kwargs, such as {"enable_thinking": false}')
_TOP_LEVEL = Unserved(({},), "give its fields at the top level of the body")
_KEY_OF_CACHE = _ours("cache_salt", "")
_TEMPLATE_VARIABLE = Unserved(([],), "put it into chat_template_kwargs, if the model's template reads it")
_ALL_PENALTIES_COUNT = "leave it out: penalties here count all tokens"
_IMAGE_SIZES = Unserved((), "leave it out: the model's own settings determine how images are scaled")

UNSERVED: dict[str, Unserved] = {
    # Sampling parameters that have another name here, or only one supported value.
    "repeat_penalty": _ours("repetition_penalty", 1),
    "repeat_last_n": Unserved((-1,), _ALL_PENALTIES_COUNT),
    "penalty_last_n": Unserved((-1,), _ALL_PENALTIES_COUNT),
    "repetition_penalty_range": Unserved((0, -1), _ALL_PENALTIES_COUNT),
    "rep_pen": _ours("repetition_penalty", 1),
    "temp": _ours("temperature"),
    "n_predict": _ours("max_tokens"),
    "num_predict": _ours("max_tokens"),
    "max_new_tokens": _ours("max_tokens"),
    "max_length": _ours("max_tokens"),
    "max_gen_len": _ours("max_tokens"),
    "max_tokens_to_sample": _ours("max_tokens"),
    "min_new_tokens": _ours("min_tokens", 0),
    "min_length": _ours("min_tokens", 0),
    "n_cmpl": _ours("n", 1),
    "num_return_sequences": _ours("n", 1),
    "random_seed": _ours("seed"),
    "sampling_seed": _ours("seed"),
    "stop_sequences": _ours("stop", []),
    "stop_words": _ours("stop", []),
    "stop_strings": _ours("stop", []),
    "stop_regex": Unserved(("", []), "use stop, which takes plain strings"),
    "n_probs": _ours("logprobs", 0),
    "top_n_tokens": _ours("logprobs", 0),
    "no_stop_trim": _ours("include_stop_str_in_output", False),
    "do_sample": Unserved((True,), "set temperature to 0 to choose the most likely tokens"),
    "return_full_text": _ours("echo in /v1/completions", False),
    "return_tokens": _ours("return_token_ids", False),
    "details": Unserved((False,), "use logprobs and return_token_ids"),
    "decoder_input_details": _ours("prompt_logprobs", False),
    "truncate": Unserved((), "shorten the prompt"),
    "truncate_prompt_tokens": Unserved((), "shorten the prompt"),
    "inputs": _ours("prompt or messages"),
    "prompt": _ours("messages or input"),
    "messages": _ours("prompt"),
    "max_tokens": _ours("max_output_tokens"),
    "max_completion_tokens": _ours("max_tokens"),
    "max_output_tokens": _ours("max_tokens"),
    "parameters": _TOP_LEVEL,
    "options": _TOP_LEVEL,
    "extra_body": _TOP_LEVEL,
    "sampling_params": _TOP_LEVEL,
    "nvext": _TOP_LEVEL,
    # Sampling methods that are not implemented.
    "typical_p": Unserved((1,)),
    "typical": Unserved((1,)),
    "top_a": Unserved((0,)),
    "top_h": Unserved(),
    "tfs": Unserved((1,)),
    "tfs_z": Unserved((1,)),
    "top_n_sigma": Unserved((-1, 0)),
    "nsigma": Unserved((-1, 0)),
    "min_keep": Unserved((0, 1)),
    "min_tokens_to_keep": Unserved((0, 1)),
    "xtc_probability": Unserved((0,)),
    "dynatemp_range": Unserved((0,)),
    "dynamic_temperature": Unserved((False,)),
    "smoothing_factor": Unserved((0,)),
    "mirostat": Unserved((0,)),
    "mirostat_mode": Unserved((0,)),
    "dry_multiplier": Unserved((0,)),
    "adaptive_target": Unserved((-1,)),
    "epsilon_cutoff": Unserved((0,)),
    "eta_cutoff": Unserved((0,)),
    "penalty_alpha": Unserved((0,)),
    "no_repeat_ngram_size": Unserved((0,)),
    "encoder_no_repeat_ngram_size": Unserved((0,)),
    "encoder_repetition_penalty": Unserved((1,)),
    "temperature_last": Unserved((False,)),
    "samplers": Unserved(([], "")),
    "sampler_seq": Unserved(([], "")),
    "sampler_priority": Unserved(([],)),
    "guidance_scale": Unserved((1,)),
    "cfg_scale": Unserved((1,)),
    "negative_prompt": Unserved(("",)),
    "watermark": Unserved((False,)),
    "watermarking": Unserved((False,)),
    "best_of": Unserved((1,), "use n, and choose among the choices"),
    "use_beam_search": Unserved((False,)),
    "num_beams": Unserved((1,)),
    "num_beam_groups": Unserved((1,)),
    "beam_width": Unserved((1,)),
    "length_penalty": Unserved((1,)),
    "diversity_penalty": Unserved((0,)),
    "early_stopping": Unserved((False,)),
    "bad_words": Unserved(([],), "use logit_bias with -100 for their tokens"),
    "bad_words_ids": Unserved(([],), "use logit_bias with -100 for these tokens"),
    "suppress_tokens": Unserved(([],), "use logit_bias with -100 for these tokens"),
    "banned_tokens": Unserved(([], ""), "use logit_bias with -100 for these tokens"),
    "allowed_token_ids": Unserved(([],), "use guided_choice or guided_regex"),
    "logprob_token_ids": Unserved(([],), "use logprobs"),
    "logit_processors": Unserved(([],)),
    "logits_processors": Unserved(([],)),
    "custom_logit_processor": Unserved(("", [])),
    "custom_params": Unserved(({},)),
    "vllm_xargs": Unserved(({},)),
    "repetition_detection": Unserved((), "use stop or max_tokens"),
    "post_sampling_probs": Unserved((False,), "use logprobs, which describe the model's own distribution"),
    "t_max_predict_ms": Unserved((0, -1), "use max_tokens"),
    "n_indent": Unserved((0,)),
    "t_max_prompt_ms": Unserved((0, -1)),
    # Guided decoding.
    "grammar": _ours("guided_grammar", ""),
    "ebnf": _ours("guided_grammar", ""),
    "regex": _ours("guided_regex", ""),
    "json_schema": _ours("response_format with the type json_schema"),
    "json_mode": _ours("response_format with the type json_object", False),
    "format": _ours("response_format", ""),
    "structural_tag": _ours("response_format or structured_outputs"),
    "guided_whitespace_pattern": Unserved(),
    "grammar_lazy": Unserved((False,)),
    "grammar_triggers": Unserved(([],)),
    # Rendering of messages into a prompt.
    "add_special_tokens": Unserved(
        (False,), "use /v1/completions; the chat template already adds special tokens to messages"
    ),
    "chat_template": Unserved(
        (), "put its variables into chat_template_kwargs; the server uses the model's own template"
    ),
    "documents": _TEMPLATE_VARIABLE,
    "template": Unserved(("",), "use /v1/completions with the whole prompt"),
    "system": Unserved(("",), "give a message with the role system"),
    "system_prompt": Unserved(("",), "give a message with the role system"),
    "raw": Unserved((False,), "use /v1/completions"),
    "safe_prompt": Unserved((False,), "give a message with the role system"),
    "prompt_mode": Unserved(),
    "tool_prompt": Unserved(("",)),
    "guideline": Unserved(("",), "give a message with the role system"),
    "task": Unserved(),
    "enable_thinking": _ENABLE_THINKING,
    "thinking": _ENABLE_THINKING,
    "think": _ENABLE_THINKING,
    "reasoning": _ours("reasoning_effort or chat_template_kwargs", {}),
    "reasoning_effort": Unserved((), "use chat_template_kwargs in /v1/chat/completions"),
    "chat_template_kwargs": Unserved(({},), "use /v1/chat/completions"),
    "add_generation_prompt": Unserved((True,), "use /v1/chat/completions"),
    "continue_final_message": Unserved((False,), "use /v1/chat/completions"),
    "thinking_budget": Unserved((-1,), "use max_tokens"),
    "thinking_token_budget": Unserved((-1,), "use max_tokens"),
    "thinking_budget_tokens": Unserved((-1,), "use max_tokens"),
    "reasoning_budget": Unserved((-1,), "use max_tokens"),
    "reasoning_budget_tokens": Unserved((-1,), "use max_tokens"),
    "reasoning_format": Unserved(("auto",)),
    "include_reasoning": Unserved((True,)),
    "separate_reasoning": Unserved((True,)),
    "stream_reasoning": Unserved((True,)),
    "chat_format": Unserved(),
    "chat_parser": Unserved(("",)),
    "thinking_forced_open": Unserved((False,)),
    "parse_tool_calls": Unserved((True,)),
    "functions": _ours("tools", []),
    "function_call": _ours("tool_choice", "none", "auto"),
    "tools": Unserved(([],), "use /v1/chat/completions"),
    "tool_choice": Unserved(("none", "auto"), "use /v1/chat/completions"),
    "web_search_options": Unserved(),
    "plugins": Unserved(([],)),
    "transforms": Unserved(([],)),
    "models": Unserved(([],), "use model"),
    "moderation": Unserved(),
    "verbosity": Unserved(("medium",)),
    "input_ids": Unserved((), "use /v1/completions, whose prompt may be token ids"),
    "prompt_embeds": Unserved(([], "")),
    "input_embeds": Unserved(),
    "inputs_embeds": Unserved(),
    "suffix": Unserved(("",), "put it into the prompt, as the model's files say"),
    "input_prefix": Unserved(("",), "put it into the prompt, as the model's files say"),
    "input_suffix": Unserved(("",), "put it into the prompt, as the model's files say"),
    "input_extra": Unserved(([],), "put it into the prompt, as the model's files say"),
    # Images, audio and video.
    "modalities": Unserved((["text"],)),
    "audio": Unserved(),
    "image_data": Unserved(([],), "use /v1/chat/completions with parts of the type image_url"),
    "images": Unserved(([],), "use parts of the type image_url"),
    "media_io_kwargs": Unserved(({},)),
    "mm_processor_kwargs": Unserved(({},), _IMAGE_SIZES.advice),
    "images_config": Unserved(({},), _IMAGE_SIZES.advice),
    "max_dynamic_patch": _IMAGE_SIZES,
    "min_dynamic_patch": _IMAGE_SIZES,
    "use_audio_in_video": Unserved((False,)),
    # Adapters and KV cache.
    "lora": Unserved(([],)),
    "lora_path": Unserved(([], "")),
    "lora_request": Unserved(),
    "adapter_id": Unserved(("",)),
    "extra_key": _KEY_OF_CACHE,
    "session_params": Unserved(({},), "send the whole conversation, or use context"),
    "kv_transfer_params": Unserved(({},)),
    "ec_transfer_params": Unserved(({},)),
    # Additional content of the answer.
    "echo": Unserved((False,), "use /v1/completions"),
    "logprobs": Unserved((False, 0), "use /v1/chat/completions"),
    "top_logprobs": Unserved((0,), "use logprobs, which is a number here"),
    "prompt_logprobs": Unserved((), "use /v1/completions or /v1/chat/completions"),
    "return_token_ids": Unserved((False,), "use /v1/completions or /v1/chat/completions"),
    "return_tokens_as_token_ids": _ours("return_token_ids", False),
    "return_token_strs": _ours("/detokenize", False),
    "return_prompt_token_ids": _ours("/tokenize", False),
    "return_prompt_text": Unserved((False,), "use /tokenize and /detokenize"),
    "return_hidden_states": Unserved((False,)),
    "return_routed_experts": Unserved((False,)),
    "return_meta_info": Unserved((False,)),
    "response_fields": Unserved(([],)),
    "enable_response_messages": Unserved((False,)),
}
