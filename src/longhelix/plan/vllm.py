"""Build vLLM commands.

In vLLM, decode context parallel (KVP) ranks belong to a tensor parallel group. The group shards one FFN over all its
ranks.
"""

from collections.abc import Iterator

from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import COUNT, INDEX, SWITCH, TEXT, Option, Options, PeerCommand, Setting
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
from longhelix.spec import LinearAttention

NAME = "vLLM"
_PARALLEL = "vllm/config/parallel.py at 00193b82b0e2"
_MODEL = "vllm/config/model.py at 0052a5b81898"
_CACHE = "vllm/config/cache.py at 002f10e0cfa1"
_SCHEDULER = "vllm/config/scheduler.py at 01230b40128e"
_DATA_PARALLEL = "docs/serving/data_parallel_deployment.md at 01e4fce07423"
_CONTEXT_PARALLEL = "docs/serving/context_parallel_deployment.md at 020505c2af90"
_FP8 = "docs/features/quantization/fp8.md at 024460769793"
_ENVIRONMENT = "vllm/envs.py at f218f9c24d22"

# Option names are the field names of vLLM's configs, with dashes (docs/configuration/engine_args.md at 124053c51d33).
OPTIONS = Options(
    (
        Option("--tensor-parallel-size", COUNT, _PARALLEL),
        Option("--pipeline-parallel-size", COUNT, _PARALLEL),
        Option("--data-parallel-size", COUNT, _PARALLEL),
        Option("--enable-expert-parallel", SWITCH, _PARALLEL),
        Option("--decode-context-parallel-size", COUNT, _PARALLEL),
        Option("--dcp-comm-backend", ("ag_rs", "a2a"), _PARALLEL),
        Option("--nnodes", COUNT, _PARALLEL),
        Option("--node-rank", INDEX, _PARALLEL),
        Option("--master-addr", TEXT, _PARALLEL),
        Option("--data-parallel-size-local", COUNT, _DATA_PARALLEL),
        Option("--data-parallel-start-rank", INDEX, _DATA_PARALLEL),
        Option("--data-parallel-address", TEXT, _DATA_PARALLEL),
        Option("--headless", SWITCH, _DATA_PARALLEL),
        Option("--dtype", ("auto", "half", "float16", "bfloat16", "float", "float32"), _MODEL),
        Option("--quantization", ("fp8",), _FP8),
        Option(
            "--kv-cache-dtype",
            ("auto", "float16", "bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4"),
            _CACHE,
        ),
        Option("--max-model-len", COUNT, _MODEL),
        Option("--max-num-batched-tokens", COUNT, _SCHEDULER),
        Option("--max-num-seqs", COUNT, _SCHEDULER),
        Option("--enable-chunked-prefill", SWITCH, _SCHEDULER),
        Option("VLLM_ALLOW_LONG_MAX_MODEL_LEN", ("1",), _ENVIRONMENT),
    )
)

# Values of --kv-cache-dtype. vLLM has no name for float32. The value "auto" selects the activation format.
_KV_WORDS = {
    "float32": "auto",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
_FEWEST_BATCHED_TOKENS = 2048  # default of --max-num-batched-tokens, at least --max-num-seqs (vllm/config/scheduler.py)


def command(deployment: Deployment, model_name: str) -> PeerCommand:
    """Return the `vllm serve` command, or the reasons why vLLM cannot run the deployment."""
    cannot = tuple(_cannot(deployment))
    if cannot:
        return PeerCommand(NAME, cannot=cannot)
    settings = _settings(deployment)
    long = deployment.context > deployment.model.max_positions
    environment: dict[str, Setting] = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1" if long else None}
    return PeerCommand(
        NAME,
        ("vllm", "serve", model_name, *OPTIONS.arguments(settings)),
        OPTIONS.assignments(environment),
        notes=tuple(_notes(deployment)),
        sources=OPTIONS.sources(settings, environment),
    )


def _settings(deployment: Deployment) -> dict[str, Setting]:
    degrees, sharded = deployment.degrees, deployment.sharded
    users, chunk_tokens = deployment.users_of_a_group, deployment.chunk_tokens
    batched_tokens = users if users > _FEWEST_BATCHED_TOKENS else None
    if chunk_tokens is not None:
        batched_tokens = chunk_tokens + users  # one chunk, and one token for each decoding request
    return {
        # DCP ranks are part of the tensor parallel group. Each data parallel rank has its own tensor parallel group.
        "--tensor-parallel-size": deployment.group_ranks,
        "--pipeline-parallel-size": degrees.pp if degrees.pp > 1 else None,
        "--data-parallel-size": deployment.groups if deployment.grouped else None,
        "--enable-expert-parallel": degrees.ep > 1 or None,
        "--decode-context-parallel-size": deployment.kvp if sharded else None,
        "--dcp-comm-backend": "a2a" if sharded else None,
        "--dtype": activation_dtype(deployment),
        "--quantization": "fp8" if deployment.weight_dtype == "fp8" and deployment.expert_dtype is None else None,
        "--kv-cache-dtype": _KV_WORDS[deployment.kv_dtype],
        "--max-model-len": deployment.context,
        "--max-num-batched-tokens": batched_tokens,
        "--enable-chunked-prefill": chunk_tokens is not None or None,
        "--max-num-seqs": users,
    }


def _cannot(deployment: Deployment) -> Iterator[str]:
    degrees, tensor_parallel = deployment.degrees, deployment.group_ranks
    if deployment.tied:
        yield (
            "a copy of the FFN on every KVP rank is not supported: decode context parallel ranks belong to the tensor "
            f"parallel group, and this group shards one FFN over all its ranks ({_PARALLEL})"
        )
    if deployment.grouped and not deployment.model.moes:
        yield (
            "a dense FFN cannot be sharded over data parallel ranks: each data parallel rank has a copy of the FFN, "
            f"and only experts are sharded ({_DATA_PARALLEL})"
        )
    if degrees.ep not in (1, degrees.num_ranks):
        yield (
            f"TPF {degrees.tpf} x EP {degrees.ep}: vLLM either shards the columns of every expert over all tensor and "
            "data parallel ranks, or places whole experts on the ranks with --enable-expert-parallel "
            "(docs/serving/expert_parallel_deployment.md at 017025691b30)"
        )
    yield from uneven_heads(deployment, tensor_parallel, "tensor parallel size")
    yield from uneven_ffn(deployment, tensor_parallel, "tensor parallel size")
    # Ranks may have different numbers of experts (vllm/model_executor/layers/fused_moe/expert_map_manager.py at
    # 54f88b20607e).
    yield from uneven_experts(deployment, "tensor x data parallel size", None)
    if deployment.sharded:
        yield from _cannot_share_kv(deployment, tensor_parallel)
    yield from mixed_formats(deployment)
    yield from _cannot_keep(deployment)


def _cannot_share_kv(deployment: Deployment, tensor_parallel: int) -> Iterator[str]:
    """Yield the limits of decode context parallelism. The limits on heads do not apply to latent attention."""
    model, kvp = deployment.model, deployment.kvp
    if model.views:
        yield (
            "decode context parallelism is not supported for sliding windows: no document mentions it, and pull "
            "request 47181, which would have added support, was closed"
        )
    if any(isinstance(mixer, LinearAttention) for layer in model.layers for mixer in layer.mixers):
        yield (
            f"decode context parallelism is not supported for {model.architecture}: vLLM rejects it for caches that "
            "hold linear attention states (vLLM 0.20.2, according to pull request 299 of flagos-ai/vllm-plugin-FL)"
        )
    if model.has_latents:
        return
    for heads in dict.fromkeys(attention.heads for attention in model.attentions):
        most = tensor_parallel // heads.num_kv_heads
        if tensor_parallel <= heads.num_kv_heads or kvp > most:
            yield (
                f"decode context parallel size {kvp} with tensor parallel size {tensor_parallel}: at most {most} is "
                f"allowed (tensor parallel size / {heads.num_kv_heads} KV heads, rounded down), and the tensor "
                f"parallel size must exceed the number of KV heads ({_MODEL})"
            )
        elif heads.group_size % kvp:
            yield (
                f"decode context parallel size {kvp} must divide the {heads.group_size} query heads per KV head "
                f"({_MODEL})"
            )


def _cannot_keep(deployment: Deployment) -> Iterator[str]:
    """Yield the KV and activation formats that vLLM's kernels do not support.

    Some formats are unsupported only with latent attention or with KVP.
    """
    if deployment.kv_dtype not in _KV_WORDS:
        yield f"a KV cache in {deployment.kv_dtype} is not supported: --kv-cache-dtype has no such value ({_CACHE})"
    lacking = [
        *(["latent attention"] if deployment.model.has_latents else []),
        *(["decode context parallelism"] if deployment.sharded else []),
    ]
    if not lacking:
        return
    without = f"support {' or '.join(lacking)} (docs/design/attention_backends.md at 001394336840)"
    if activation_dtype(deployment) == "float32":
        yield f"attention in float32: only TRITON_ATTN and FLEX_ATTENTION compute in it, but these do not {without}"
    if deployment.kv_dtype in ("int8", "int4"):
        yield f"a KV cache in {_KV_WORDS[deployment.kv_dtype]}: only TRITON_ATTN reads it, but does not {without}"
    if deployment.kv_dtype in ("fp4", "nvfp4"):
        yield (
            f"a KV cache in nvfp4: only FlashInfer's TRTLLM kernels support it, and vLLM does not use them for "
            f"{' or '.join(lacking)} (vllm/config/vllm.py, pull request 40177)"
        )


def _notes(deployment: Deployment) -> Iterator[str]:
    degrees = deployment.degrees
    yield from weight_notes(deployment, ("fp8",))
    yield from position_notes(deployment)
    yield from overlap_notes(deployment)
    yield from draft_notes(deployment)
    if deployment.grouped and deployment.sharded:
        yield (
            "assumption: each data parallel rank has its own decode context parallel ranks, because they belong to its "
            f"tensor parallel group ({_CONTEXT_PARALLEL}). No vLLM document mentions this combination"
        )
    if deployment.grouped and deployment.model.moes and replicates_ffn(deployment.model):
        yield "dense FFNs and shared experts are replicated on every data parallel rank, not sharded across all ranks"
    if degrees.world_size > GPUS_OF_A_SERVER:
        yield _servers_note(deployment)


def _servers_note(deployment: Deployment) -> str:
    gpus = f"{deployment.degrees.world_size} GPUs on several servers: run the command on every server"
    if deployment.grouped:
        return (
            f"{gpus}, with --data-parallel-size-local and --data-parallel-address. On all servers except the first, "
            f"also set --data-parallel-start-rank and --headless ({_DATA_PARALLEL})"
        )
    return f"{gpus}, with --nnodes, --node-rank and --master-addr ({_PARALLEL})"
