"""Build TensorRT-LLM commands.

TensorRT-LLM calls KVP "Helix". Its generation servers decode with Helix, and its context servers prefill.
"""

from collections.abc import Iterator

from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import COUNT, SWITCH, TEXT, Option, Options, PeerCommand, Setting
from longhelix.plan.peer_limits import (
    GPUS_OF_A_SERVER,
    activation_dtype,
    draft_notes,
    mixed_formats,
    overlap_notes,
    position_notes,
    replicates_ffn,
    uneven_experts,
    uneven_ffn,
    uneven_heads,
    weight_notes,
)
from longhelix.spec import ModelSpec

NAME = "TensorRT-LLM"
CONFIG_FILE = "trtllm.yaml"
_PARALLEL = "docs/source/features/parallel-strategy.md at 65b31db1b401"
_HELIX = "docs/source/features/helix.md at 04c8822cc42f"
_HELIX_GROUPS = "pull request 10477"
_HELIX_MODELS = "tensorrt_llm/_torch/models/modeling_qwen3.py at 5dedf53b14d9, pull request 11570"
_SERVE = "tensorrt_llm/commands/serve.py at 00209af149e7"
_ARGUMENTS = "tensorrt_llm/llmapi/llm_args.py at 000439672005"
_DISAGGREGATED = "docs/source/features/disagg-serving.md at 0434b982fa38"
_QUANTISATION = "docs/source/features/quantization.md at 09d4c79ba941"
_MAPPING = "tensorrt_llm/mapping.py at b35ac1b64368"
_MODELS = "docs/source/models/supported-models.md at 00b6d5a25c30"
_ENVIRONMENT = "tensorrt_llm/_torch/pyexecutor/model_engine.py at 1a0dc5f70054"

OPTIONS = Options(
    (
        Option("--config", TEXT, _PARALLEL),
        Option("tensor_parallel_size", COUNT, _PARALLEL),
        Option("pipeline_parallel_size", COUNT, _SERVE),
        Option("context_parallel_size", COUNT, _HELIX),
        Option("cp_config.cp_type", ("HELIX",), _HELIX),
        Option("cp_config.tokens_per_block", COUNT, _HELIX),
        Option("moe_tensor_parallel_size", COUNT, _PARALLEL),
        Option("moe_expert_parallel_size", COUNT, _PARALLEL),
        Option("enable_attention_dp", SWITCH, _PARALLEL),
        Option("dtype", ("auto", "float16", "bfloat16", "float32"), _ARGUMENTS),
        Option("max_seq_len", COUNT, _SERVE),
        Option("max_batch_size", COUNT, _SERVE),
        Option("max_num_tokens", COUNT, _SERVE),
        Option("enable_chunked_prefill", SWITCH, _SERVE),
        Option("kv_cache_config.dtype", ("auto", "float16", "bfloat16", "float32", "fp8", "nvfp4"), _ARGUMENTS),
        Option("kv_cache_config.tokens_per_block", COUNT, _HELIX),
        Option("kv_cache_config.enable_block_reuse", SWITCH, _ARGUMENTS),
        Option("cache_transceiver_config.backend", ("DEFAULT", "UCX", "NIXL", "MPI"), _DISAGGREGATED),
        Option("TLLM_ALLOW_LONG_MAX_MODEL_LEN", ("1",), _ENVIRONMENT),
    )
)

_KV_WORDS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
_FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "deepseek_v3", "kimi_k2",
    "deepseek_v32", "exaone4", "gemma3", "gemma3_text", "glm4_moe", "gpt_oss", "llama4", "qwen3_next",
)  # fmt: skip
_AUTO_DEPLOY = ("deepseek_v2", "granite")  # listed for its AutoDeploy backend alone
_HELIX_FAMILIES = ("deepseek_v3", "kimi_k2", "qwen3")
_BLOCK_TOKENS = 32


def command(deployment: Deployment, model_name: str) -> PeerCommand:
    """Return the `trtllm-serve` command and its CONFIG_FILE, or the reasons why it cannot run the deployment."""
    cannot = tuple(_cannot(deployment))
    if cannot:
        return PeerCommand(NAME, cannot=cannot)
    arguments: dict[str, Setting] = {"--config": CONFIG_FILE}
    settings = _settings(deployment)
    long = deployment.context > deployment.model.max_positions
    environment: dict[str, Setting] = {"TLLM_ALLOW_LONG_MAX_MODEL_LEN": "1" if long else None}
    return PeerCommand(
        engine=NAME,
        argv=("trtllm-serve", model_name, *OPTIONS.arguments(arguments)),
        environment=OPTIONS.assignments(environment),
        config=OPTIONS.sections(settings),
        notes=tuple(_notes(deployment)),
        sources=OPTIONS.sources(arguments, settings, environment),
    )


def _settings(deployment: Deployment) -> dict[str, Setting]:
    degrees, sharded = deployment.degrees, deployment.sharded
    experts = bool(deployment.model.moes)
    # With Helix, only context servers prefill prompts in chunks. This command starts a generation server.
    chunk_tokens = None if sharded else deployment.chunk_tokens
    users = deployment.users_of_a_group
    return {
        # With enable_attention_dp, each tensor parallel rank is a group with its own requests.
        "tensor_parallel_size": degrees.num_ranks // deployment.kvp,
        "pipeline_parallel_size": degrees.pp if degrees.pp > 1 else None,
        "context_parallel_size": deployment.kvp if sharded else None,
        "cp_config.cp_type": "HELIX" if sharded else None,
        "cp_config.tokens_per_block": _BLOCK_TOKENS if sharded else None,
        "moe_tensor_parallel_size": degrees.tpf if experts else None,
        "moe_expert_parallel_size": degrees.ep if experts else None,
        "enable_attention_dp": True if deployment.grouped else None,
        "dtype": activation_dtype(deployment),
        "max_seq_len": deployment.context,
        "max_batch_size": users,
        "max_num_tokens": None if chunk_tokens is None else chunk_tokens + users,
        "enable_chunked_prefill": False if sharded else chunk_tokens is not None or None,
        "kv_cache_config.dtype": _KV_WORDS[deployment.kv_dtype],
        "kv_cache_config.tokens_per_block": _BLOCK_TOKENS if sharded else None,
        # Off, as in TensorRT-LLM's test of Helix (tests/integration/defs/accuracy/test_disaggregated_serving.py).
        "kv_cache_config.enable_block_reuse": False if sharded else None,
        "cache_transceiver_config.backend": "DEFAULT" if sharded else None,
    }


def _cannot(deployment: Deployment) -> Iterator[str]:
    model, degrees = deployment.model, deployment.degrees
    if model.architecture not in _FAMILIES:
        is_auto_deploy = model.architecture in _AUTO_DEPLOY
        reason = "only the AutoDeploy backend supports" if is_auto_deploy else "the PyTorch backend does not list"
        yield f"{model.architecture} is not supported: {reason} this model family ({_MODELS})"
    if deployment.tied:
        yield (
            "a copy of the FFN on every KVP rank is not supported: one FFN is sharded over all context parallel ranks "
            f"({_HELIX})"
        )
    if deployment.grouped:
        yield from _cannot_be_grouped(deployment)
    else:
        yield from uneven_heads(deployment, degrees.tpa, "tensor_parallel_size")
        for query_heads in _query_heads(model):
            if query_heads % degrees.num_ranks:
                yield (
                    f"tensor_parallel_size x context_parallel_size {degrees.num_ranks} must divide the "
                    f"{query_heads} query heads, which all these ranks exchange"
                )
        yield from uneven_ffn(deployment, degrees.num_ranks, "tensor_parallel_size x context_parallel_size")
    yield from uneven_experts(deployment, "moe_tensor_parallel_size", "moe_expert_parallel_size")
    if deployment.sharded and model.architecture not in _HELIX_FAMILIES:
        yield (
            f"Helix is not supported for {model.architecture}: it supports only DeepSeek-V3, Kimi-K2 and dense Qwen3 "
            f"({_HELIX}; {_HELIX_MODELS})"
        )
    yield from mixed_formats(deployment)
    yield from _cannot_keep(deployment)


def _cannot_be_grouped(deployment: Deployment) -> Iterator[str]:
    """Yield the limits of data parallel attention.

    In TensorRT-LLM, each group consists of one tensor parallel rank and its context parallel ranks.
    """
    if deployment.degrees.tpa > 1:
        yield (
            f"data parallel attention in groups of {deployment.degrees.tpa} GPUs that split the heads is not "
            f"supported: enable_attention_dp makes each tensor parallel rank a separate group ({_MAPPING})"
        )
    for query_heads in _query_heads(deployment.model):
        if query_heads % deployment.kvp:
            yield (
                f"context_parallel_size {deployment.kvp} must divide the {query_heads} query heads, because the "
                "context parallel ranks exchange them"
            )
    if not deployment.model.moes:
        yield (
            "a dense FFN cannot be sharded over data parallel ranks: with enable_attention_dp, each rank has a "
            "full copy (tensorrt_llm/_torch/models/modeling_qwen3.py at 5dedf53b14d9)"
        )


def _query_heads(model: ModelSpec) -> dict[int, None]:
    """The different numbers of query heads of the layers."""
    return dict.fromkeys(attention.heads.num_query_heads for attention in model.attentions)


def _cannot_keep(deployment: Deployment) -> Iterator[str]:
    """Yield the number formats that TensorRT-LLM does not support."""
    latent = deployment.model.has_latents
    if deployment.weight_dtype in ("int8", "w8a8"):
        yield f"weights in {deployment.weight_dtype} are not supported: no weight format is INT8 ({_QUANTISATION})"
    if deployment.weight_dtype == "int4" and latent:
        yield f"int4 weights with latent attention: TensorRT-LLM lists no such model ({_QUANTISATION})"
    if deployment.kv_dtype not in _KV_WORDS:
        yield (
            f"a KV cache in {deployment.kv_dtype} is not supported: kv_cache_config.dtype has no such value "
            f"({_ARGUMENTS})"
        )
    if deployment.kv_dtype in ("fp4", "nvfp4") and latent:
        yield f"a KV cache in nvfp4 with latent attention: no document mentions this combination ({_QUANTISATION})"
    elif deployment.kv_dtype in ("fp4", "nvfp4") and deployment.sharded:
        yield f"a KV cache in nvfp4 with Helix: no document mentions this combination ({_HELIX})"


def _notes(deployment: Deployment) -> Iterator[str]:
    model, ranks = deployment.model, deployment.degrees.world_size
    yield from weight_notes(deployment, ())
    yield from position_notes(deployment)
    yield from overlap_notes(deployment)
    yield from draft_notes(deployment)
    if deployment.sharded:
        yield (
            "this command starts a generation server, which needs Blackwell GPUs. Also start a context server, which "
            f"prefills, and `trtllm-serve disaggregated` in front of both servers ({_HELIX}; {_DISAGGREGATED})"
        )
    if deployment.grouped and deployment.sharded:
        yield f"Helix with data parallel attention needs a TensorRT-LLM version that includes {_HELIX_GROUPS}"
    if deployment.grouped:
        yield "assumption: max_batch_size is the number of requests per data parallel rank"
        if replicates_ffn(model):
            yield "dense FFNs and shared experts are replicated on every GPU, not sharded across all ranks"
    if ranks > GPUS_OF_A_SERVER:
        yield (
            f"{ranks} GPUs on several servers: start the command as in TensorRT-LLM's example `Run trtllm-serve with "
            "pytorch backend on Slurm`"
        )
