"""vLLM commands. Decode context parallel (KVP) ranks belong to the tensor parallel group, which shares the FFN."""

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
    uneven_experts,
    uneven_ffn,
    uneven_heads,
    weight_notes,
)

NAME = "vLLM"
_PARALLEL = "vllm/config/parallel.py at 00193b82b0e2"
_MODEL = "vllm/config/model.py at 0052a5b81898"
_CACHE = "vllm/config/cache.py at 002f10e0cfa1"
_SCHEDULER = "vllm/config/scheduler.py at 01230b40128e"
_DATA_PARALLEL = "docs/serving/data_parallel_deployment.md at 01e4fce07423"
_CONTEXT_PARALLEL = "docs/serving/context_parallel_deployment.md at 020505c2af90"
_FP8 = "docs/features/quantization/fp8.md at 024460769793"
_ENVIRONMENT = "vllm/envs.py at f218f9c24d22"

# On the command line, the fields of vLLM's configs have dashes (docs/configuration/engine_args.md at 124053c51d33).
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

# vLLM has no name for float32. "auto" means the format of activations.
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
_FEWEST_BATCHED_TOKENS = 2048  # default; must be at least max-num-seqs (vllm/config/scheduler.py)


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
        batched_tokens = chunk_tokens + users  # a chunk, and one token of every other request
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
            "KVP ranks with a copy of the FFN each: decode context parallel ranks belong to the tensor parallel group, "
            f"and the whole group shares one FFN ({_PARALLEL})"
        )
    if deployment.grouped and deployment.model.moe is None:
        yield (
            "a dense FFN over data parallel ranks: each of them has its own FFN, and only experts are shared "
            f"({_DATA_PARALLEL})"
        )
    if degrees.ep not in (1, degrees.num_ranks):
        yield (
            f"TPF {degrees.tpf} x EP {degrees.ep}: experts are shared by columns over all tensor x data parallel ranks,"
            " or whole with --enable-expert-parallel (docs/serving/expert_parallel_deployment.md at 017025691b30)"
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
    """Yield the limits of decode context parallelism. Latent attention has no limit on heads."""
    model, kvp, heads = deployment.model, deployment.kvp, deployment.heads
    if model.sliding_window is not None:
        yield (
            "decode context parallelism of a model with a sliding window: no document mentions it, and pull request "
            "47181, which would add it, was closed"
        )
    if model.linear is not None:
        yield (
            f"decode context parallelism of {model.architecture}: vLLM refuses it for caches with states of linear "
            "attention (vLLM 0.20.2, according to pull request 299 of flagos-ai/vllm-plugin-FL)"
        )
    if model.mla is not None:
        return
    most = tensor_parallel // heads.num_kv_heads
    if tensor_parallel <= heads.num_kv_heads or kvp > most:
        yield (
            f"decode context parallel size {kvp} with tensor parallel size {tensor_parallel}: at most {most} is "
            f"allowed (tensor parallel size / {heads.num_kv_heads} KV heads, rounded down), and the tensor parallel "
            f"size must exceed the number of KV heads ({_MODEL})"
        )
    elif heads.group_size % kvp:
        yield (
            f"decode context parallel size {kvp} must divide the {heads.group_size} query heads per KV head ({_MODEL})"
        )


def _cannot_keep(deployment: Deployment) -> Iterator[str]:
    """Yield the KV and activation formats that the kernels do not support, some only with latent attention or KVP."""
    if deployment.kv_dtype not in _KV_WORDS:
        yield f"a KV cache in {deployment.kv_dtype}: --kv-cache-dtype does not offer it ({_CACHE})"
    lacking = [
        *(["latent attention"] if deployment.model.mla is not None else []),
        *(["decode context parallelism"] if deployment.sharded else []),
    ]
    if not lacking:
        return
    without = f"lacks {' and '.join(lacking)} (docs/design/attention_backends.md at 001394336840)"
    if activation_dtype(deployment) == "float32":
        yield f"attention in float32: only TRITON_ATTN and FLEX_ATTENTION support it, which {without}"
    if deployment.kv_dtype in ("int8", "int4"):
        yield f"a KV cache in {_KV_WORDS[deployment.kv_dtype]}: only TRITON_ATTN supports it, which {without}"
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
    moe = deployment.model.moe
    if deployment.grouped and deployment.sharded:
        yield (
            "assumed: each data parallel rank has its own decode context parallel ranks, because these belong to its "
            f"tensor parallel group ({_CONTEXT_PARALLEL}); no document of the engine mentions both together"
        )
    if deployment.grouped and moe is not None and (moe.shared_size or moe.num_dense_layers):
        yield "dense FFNs and shared experts are copied to each data parallel rank, not shared over all ranks"
    if degrees.world_size > GPUS_OF_A_SERVER:
        yield _servers_note(deployment)


def _servers_note(deployment: Deployment) -> str:
    gpus = f"{deployment.degrees.world_size} GPUs on several servers: run the command on each server"
    if deployment.grouped:
        return (
            f"{gpus} with --data-parallel-size-local and --data-parallel-address, and on all but the first server also "
            f"with --data-parallel-start-rank and --headless ({_DATA_PARALLEL})"
        )
    return f"{gpus} with --nnodes, --node-rank and --master-addr ({_PARALLEL})"
