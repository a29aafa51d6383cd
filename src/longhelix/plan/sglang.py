"""Build SGLang commands.

SGLang's decode context parallelism stripes MLA latents over the ranks of a tensor parallel group. The group shards one
FFN over all its ranks.
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
    uneven_experts,
    uneven_ffn,
    uneven_heads,
    weight_notes,
)

NAME = "SGLang"
_PARALLEL = "python/sglang/srt/arg_groups/fields/parallel.py at 00ac7105db02"
_SCHEDULE = "python/sglang/srt/arg_groups/fields/schedule.py at 001b88623b1d"
_MODEL = "python/sglang/srt/arg_groups/fields/model.py at 0116c6066d6e"
_CHOICES = "python/sglang/srt/arg_groups/choices.py at 0099dee6aa65"
_ARGUMENTS = "docs_new/docs/advanced_features/server_arguments.mdx at 0278d9cb760a"
_DCP = "docs.sglang.io/docs/advanced_features/dcp.md"
_ENVIRONMENT = "python/sglang/srt/environ.py at 21ff4b08a196"

OPTIONS = Options(
    (
        Option("--model-path", TEXT, _MODEL),
        Option("--tp-size", COUNT, _PARALLEL),
        Option("--pp-size", COUNT, _PARALLEL),
        Option("--dp-size", COUNT, _PARALLEL),
        Option("--enable-dp-attention", SWITCH, _PARALLEL),
        Option("--ep-size", COUNT, _PARALLEL),
        Option("--dcp-size", COUNT, _PARALLEL),
        Option("--dcp-comm-backend", ("ag_rs", "a2a", "fi_a2a"), _PARALLEL),
        Option("--nnodes", COUNT, _PARALLEL),
        Option("--node-rank", INDEX, _PARALLEL),
        Option("--dist-init-addr", TEXT, _PARALLEL),
        Option("--attention-backend", ("flashinfer",), _ARGUMENTS),
        Option("--dtype", ("auto", "half", "float16", "bfloat16", "float", "float32"), _MODEL),
        Option("--quantization", ("fp8",), _CHOICES),
        Option(
            "--kv-cache-dtype",
            ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16"),
            _MODEL,
        ),
        Option("--context-length", COUNT, _MODEL),
        Option("--chunked-prefill-size", COUNT, _SCHEDULE),
        Option("--max-running-requests", COUNT, _SCHEDULE),
        Option("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", ("1",), _ENVIRONMENT),
    )
)

# Values of --kv-cache-dtype. SGLang has no names for float16 and float32. "auto" selects the activation format.
_KV_WORDS = {
    "float32": "auto",
    "float16": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp4": "nvfp4",
    "nvfp4": "nvfp4",
}
# The help of --enable-dp-attention lists these model families: DeepSeek-V2 and its successors, and Qwen 2 and 3 MoE.
_DATA_PARALLEL_ATTENTION = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "qwen2_moe", "qwen3_moe")


def command(deployment: Deployment, model_name: str) -> PeerCommand:
    """Return the `python3 -m sglang.launch_server` command, or the reasons why SGLang cannot run the deployment."""
    cannot = tuple(_cannot(deployment))
    if cannot:
        return PeerCommand(NAME, cannot=cannot)
    settings = _settings(deployment, model_name)
    long = deployment.context > deployment.model.max_positions
    environment: dict[str, Setting] = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1" if long else None}
    return PeerCommand(
        NAME,
        ("python3", "-m", "sglang.launch_server", *OPTIONS.arguments(settings)),
        OPTIONS.assignments(environment),
        notes=tuple(_notes(deployment)),
        sources=OPTIONS.sources(settings, environment),
    )


def _settings(deployment: Deployment, model_name: str) -> dict[str, Setting]:
    degrees, sharded = deployment.degrees, deployment.sharded
    groups = deployment.groups
    chunk_tokens = deployment.chunk_tokens
    return {
        "--model-path": model_name,
        "--tp-size": degrees.num_ranks,
        "--pp-size": degrees.pp if degrees.pp > 1 else None,
        "--dp-size": groups if groups > 1 else None,
        "--enable-dp-attention": groups > 1,
        "--ep-size": degrees.ep if degrees.ep > 1 else None,
        "--dcp-size": deployment.kvp if sharded else None,
        "--dcp-comm-backend": "a2a" if sharded else None,
        "--dtype": activation_dtype(deployment),
        "--quantization": "fp8" if deployment.weight_dtype == "fp8" and deployment.expert_dtype is None else None,
        "--kv-cache-dtype": _KV_WORDS[deployment.kv_dtype],
        "--context-length": deployment.context,
        # SGLang divides the values of this option and of --max-running-requests evenly among all groups
        # (python/sglang/srt/arg_groups/hooks/parallel_hook.py at 008b79d2358b, and the scheduler's
        # max_running_requests // dp_size).
        "--chunked-prefill-size": None if chunk_tokens is None else chunk_tokens * groups,
        "--max-running-requests": deployment.users_of_a_group * groups,
    }


def _cannot(deployment: Deployment) -> Iterator[str]:
    model, degrees = deployment.model, deployment.degrees
    if deployment.tied:
        yield (
            "a copy of the FFN on every KVP rank is not supported: decode context parallel ranks belong to the tensor "
            f"parallel group, and this group shards one FFN over all its ranks ({_DCP})"
        )
    if deployment.grouped and model.architecture not in _DATA_PARALLEL_ATTENTION:
        yield (
            f"data parallel attention is not supported for {model.architecture}: --enable-dp-attention works only "
            f"with DeepSeek-V2 and its successors, and with Qwen 2 and 3 MoE ({_PARALLEL})"
        )
    name = "tp-size / dp-size" if deployment.grouped else "tp-size"
    yield from uneven_heads(deployment, deployment.group_ranks, name)
    yield from uneven_ffn(deployment, degrees.num_ranks, "tp-size")
    yield from uneven_experts(deployment, "tp-size / ep-size", "ep-size")
    if deployment.sharded:
        yield from _cannot_share_kv(deployment)
    yield from mixed_formats(deployment)
    if deployment.kv_dtype not in _KV_WORDS:
        yield f"a KV cache in {deployment.kv_dtype} is not supported: --kv-cache-dtype has no such value ({_MODEL})"


def _cannot_share_kv(deployment: Deployment) -> Iterator[str]:
    """Yield the limits of decode context parallelism."""
    model, degrees = deployment.model, deployment.degrees
    if not model.has_latents:
        yield (
            f"decode context parallelism is not supported for {model.architecture}: SGLang shards only MLA latents, "
            f"and the KV heads of Qwen3.5 models ({_DCP}, pull request 25090)"
        )
    if any(attention.visibility.indexer is not None for attention in model.attentions):
        yield (
            f"decode context parallelism is not supported for the indexer of {model.architecture}: pull request 39330, "
            "which would add support, is still open"
        )
    if degrees.pp > 1:
        yield (
            f"decode context parallel size {deployment.kvp} with {degrees.pp} pipeline stages: no document or test of "
            f"SGLang combines decode context parallelism with pipeline stages ({_DCP})"
        )
    if deployment.kv_dtype in ("fp4", "nvfp4"):
        yield (
            "a KV cache in nvfp4 with decode context parallelism: no SGLang document mentions this combination, and "
            "pull request 32795 would reject it"
        )


def _notes(deployment: Deployment) -> Iterator[str]:
    yield from weight_notes(deployment, ("fp8",))
    yield from position_notes(deployment)
    yield from overlap_notes(deployment)
    yield from draft_notes(deployment)
    if deployment.sharded:
        yield (
            "on GPUs older than Blackwell, use --attention-backend flashinfer, with which SGLang tested decode context "
            f"parallelism ({_DCP})"
        )
    if deployment.sharded and deployment.grouped:
        yield (
            "decode context parallelism with data parallel attention: SGLang's documentation says that the two "
            f"complement each other ({_DCP}), but it names no test of this combination"
        )
    if deployment.degrees.world_size > GPUS_OF_A_SERVER:
        yield (
            f"{deployment.degrees.world_size} GPUs on several servers: run the command on every server, with --nnodes, "
            f"--node-rank and --dist-init-addr ({_PARALLEL})"
        )
