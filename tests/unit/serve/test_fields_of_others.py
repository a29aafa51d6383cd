"""Every request field of other servers is served, refused in words, or known not to change an answer."""

import itertools

import pytest
from pydantic import ValidationError

from longhelix.serve.bodies import ChatBody, CompletionBody, Message, ResponseBody
from longhelix.serve.bodies.unserved import UNSERVED

pytestmark = pytest.mark.unit

# The request fields of each server, read in November 2026 from openai 3.57's types, the protocol files of vLLM and
# SGLang, llama.cpp's server-task.cpp, and the documentation of TGI and Ollama.
OPENAI_CHAT = """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop
store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"""
OPENAI_COMPLETIONS = """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt
seed stop stream stream_options suffix temperature top_p user"""
OPENAI_RESPONSES = """access_programs background background_options context_management conversation image include
input instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier
service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user"""
VLLM = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo
add_special_tokens response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval best_of guided_json
guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag
early_stopping logits_processors detokenize"""
VLLM_CHAT = (
    VLLM
    + """ messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text"""
)
VLLM_COMPLETIONS = VLLM + " prompt suffix prompt_embeds"
VLLM_RESPONSES = """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice tools
top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key request_id
mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages previous_response
structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs"""
SGLANG = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params response_format
custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority custom_labels
max_new_tokens min_new_tokens sampling_seed structural_tag stream_interval"""
SGLANG_CHAT = (
    SGLANG
    + """ messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls
return_prompt_token_ids return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning
stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids"""
)
SGLANG_COMPLETIONS = SGLANG + " prompt best_of echo suffix json_schema"
LLAMA_CPP = """timings_per_token stream stream_options cache_prompt return_tokens return_progress max_tokens n_predict
max_completion_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_predict_ms t_max_prompt_ms
response_fields top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p temperature dynatemp_range
dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base
dry_allowed_length dry_penalty_last_n mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs
min_keep backend_sampling post_sampling_probs speculative.n_min speculative.n_max speculative.p_min speculative.type
speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits logprobs lora dry_sequence_breakers
json_schema grammar grammar_lazy grammar_triggers preserved_tokens chat_format reasoning_format thinking_forced_open
parse_tool_calls chat_parser reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag
reasoning_budget_message reasoning_budget_arm_immediately thinking_budget_tokens logit_bias ignore_eos stop samplers
id_slot image_data system_prompt"""
LLAMA_CPP_CHAT = (
    LLAMA_CPP
    + """ messages tools tool_choice parallel_tool_calls add_generation_prompt response_format
chat_template_kwargs top_logprobs continue_final_message enable_thinking reasoning_effort"""
)
LLAMA_CPP_COMPLETIONS = LLAMA_CPP + " prompt input_prefix input_suffix input_extra"
TGI = """inputs parameters best_of decoder_input_details details do_sample frequency_penalty grammar max_new_tokens
repetition_penalty return_full_text seed stop temperature top_k top_n_tokens top_p truncate typical_p watermark
adapter_id tool_prompt guideline stop_sequences"""
OLLAMA = """format options keep_alive think raw template system suffix images num_predict num_ctx num_keep num_batch
num_gpu num_thread repeat_last_n repeat_penalty tfs_z typical_p mirostat mirostat_tau mirostat_eta penalize_newline"""
TRANSFORMERS = """max_length max_new_tokens min_length min_new_tokens early_stopping do_sample num_beams use_cache
temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
length_penalty no_repeat_ngram_size bad_words_ids suppress_tokens guidance_scale num_return_sequences penalty_alpha
stop_strings"""

SENT = {
    ChatBody: [OPENAI_CHAT, VLLM_CHAT, SGLANG_CHAT, LLAMA_CPP_CHAT, TGI, OLLAMA, TRANSFORMERS],
    CompletionBody: [OPENAI_COMPLETIONS, VLLM_COMPLETIONS, SGLANG_COMPLETIONS, LLAMA_CPP_COMPLETIONS, TGI, OLLAMA,
                     TRANSFORMERS],
    ResponseBody: [OPENAI_RESPONSES, VLLM_RESPONSES],
}  # fmt: skip

_BOOKKEEPING = "a name or label for whoever asks, in logs and bills"
_SPEED = "says how an answer is computed or how fast, and not what it is"
_PLACE = "says which process or machine computes the answer"
_WITH_ANOTHER = "is read only with another field, which is refused"
_MEASUREMENTS = "adds measurements beside the answer"
HARMLESS = {
    **dict.fromkeys(("metadata", "safety_identifier", "request_id", "session_id", "rid", "custom_labels", "user"),
        _BOOKKEEPING),
    **dict.fromkeys(("service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "prediction",
        "cache_prompt", "n_cache_reuse", "use_cache", "keep_alive", "backend_sampling", "ngram_corpus_id",
        "speculative.n_min", "speculative.n_max", "speculative.p_min", "speculative.type", "speculative.ngram_size_n",
        "speculative.ngram_size_m", "speculative.ngram_m_hits", "num_batch", "num_gpu", "num_thread",
        "guided_decoding_backend", "stream_interval"), _SPEED),
    **dict.fromkeys(("id_slot", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank",
        "disagg_prefill_dp_rank", "data_parallel_rank", "access_programs", "background_options"), _PLACE),
    **dict.fromkeys(("xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "mirostat_tau", "mirostat_eta", "adaptive_decay", "truncation_side",
        "preserved_tokens", "reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_message",
        "reasoning_budget_arm_immediately", "routed_experts_start_len", "routed_experts_prompt_start",
        "max_tool_calls", "penalize_newline"), _WITH_ANOTHER),
    **dict.fromkeys(("timings_per_token", "return_progress", "return_cached_tokens_details"), _MEASUREMENTS),
    **dict.fromkeys(("n_keep", "n_discard", "num_keep", "num_ctx"), "says what to drop from a full context: none is"),
    **dict.fromkeys(("return_token_offsets", "return_mm_kwargs"), "is of vLLM's routes that render a prompt alone"),
    "store": "keeps a copy elsewhere; /v1/responses refuses it",
    "spaces_between_special_tokens": "fast tokenizers, the only ones here, never add such blanks",
    "detokenize": "answers over HTTP always have their text",
    "parallel_tool_calls": "is of tools, which are refused where this is not served",
}  # fmt: skip


def test_what_has_no_effect_is_refused_nowhere():
    assert HARMLESS.keys().isdisjoint(UNSERVED)


def known(body):
    return {field.alias or name for name, field in body.model_fields.items()}


def cases():
    for body, servers in SENT.items():
        for name in sorted(set(" ".join(servers).split())):
            yield pytest.param(body, name, id=f"{body.__name__}-{name}")


@pytest.mark.parametrize(("body", "name"), list(cases()))
def test_each_field_is_served_refused_or_without_effect(body, name):
    if name in known(body):
        return
    assert name in body.unserved or name in HARMLESS


def smallest(body):
    return {"messages": [{"role": "user", "content": "x"}]} if body is ChatBody else {body.prompt_field: "x"}


@pytest.mark.parametrize("body", SENT)
def test_what_is_not_served_is_refused_unless_it_asks_for_nothing(body):
    for name, field in body.unserved.items():
        if name in known(body):
            continue
        for value in (None, *field.neutral):
            assert body(**smallest(body), **{name: value}).model_extra == {name: value}
        wanted = next(value for value in (0.75, True, "some", ["some"]) if value not in field.neutral)
        with pytest.raises(ValidationError, match=f"{name} is not served here: {field.advice.split()[0]}"):
            body(**smallest(body), **{name: wanted})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("repeat_penalty", 1.1, "use repetition_penalty"),
        ("n_predict", 64, "use max_tokens"),
        ("typical_p", 0.9, "leave it out"),
        ("mirostat", 2, "leave it out"),
        ("length_penalty", 2.0, "leave it out"),
        ("regex", "a+", "use guided_regex"),
        ("ebnf", 'root ::= "a"', "use guided_grammar"),
        ("top_logprobs", 3, "use logprobs"),
        ("continue_final_message", True, "use /v1/chat/completions"),
        ("max_completion_tokens", 3, "use max_tokens"),
    ],
)
def test_whoever_is_refused_is_told_what_there_is(name, value, words):
    with pytest.raises(ValidationError, match=f"{name} is not served here: {words}"):
        CompletionBody(prompt="x", **{name: value})


def test_advice_names_fields_that_are_served():
    """Each word of an advice that looks like a field of a body is one."""
    served = set().union(*map(known, SENT)) | {"enable_thinking", "json_schema", "json_object", "image_url"}
    for name, field in UNSERVED.items():
        named = {word.strip(',:;"{}') for word in field.advice.split() if "_" in word}
        assert named <= served, name


def test_fields_without_effect_are_passed_over():
    for body, (name, value) in itertools.product(SENT, {"request_id": "a", "cache_prompt": True, "id_slot": 3}.items()):
        assert body(**smallest(body), **{name: value})


@pytest.mark.parametrize("fields", [{"prefix": True}, {"partial": True}, {"audio": {"id": "a"}}, {"function_call": {}}])
def test_fields_of_messages_that_are_not_served_are_refused(fields):
    (name,) = fields
    assert Message(role="assistant", content="x", **{name: None}).for_template("messages[0]")["content"] == "x"
    with pytest.raises(ValidationError, match=f"{name} is not served here"):
        Message(role="assistant", content="x", **fields)


def test_neutral_fields_of_structured_outputs_are_accepted():
    neutral = {
        "structural_tag": None,
        "disable_any_whitespace": False,
        "backend": "guidance",
        "whitespace_pattern": None,
    }
    body = CompletionBody(prompt="x", structured_outputs={"regex": "a", **neutral})
    assert body.guide().text == "a"
    for wrong in ({"structural_tag": "x"}, {"disable_any_whitespace": True}, {"strange": None}):
        with pytest.raises(ValidationError):
            CompletionBody(prompt="x", structured_outputs={"regex": "a", **wrong})


@pytest.mark.parametrize("logprobs", [None, False])
def test_alternatives_without_log_probabilities_are_refused(logprobs):
    assert ChatBody(**smallest(ChatBody), logprobs=logprobs, top_logprobs=0).num_logprobs is None
    with pytest.raises(ValidationError, match="top_logprobs is 3 without logprobs: set logprobs to true"):
        ChatBody(**smallest(ChatBody), logprobs=logprobs, top_logprobs=3)
