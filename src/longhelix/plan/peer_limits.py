"""Limits and notes that apply to several other engines. Each text uses the engine's option names."""

from collections.abc import Iterator

from longhelix.plan.deployment import Deployment
from longhelix.spec import FORMATS, ModelSpec
from longhelix.spec.ffn import MLP

GPUS_OF_A_SERVER = 8
_FP8_BLOCK = 128  # block size of FP8 scales in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) and Qwen3


def activation_dtype(deployment: Deployment) -> str | None:
    """Return the first format of the weights and the KV that activations can use.

    Returns None if activations can use neither format. The engine then uses the format of the checkpoint.
    """
    names = (deployment.weight_dtype, deployment.kv_dtype)
    return next((name for name in names if FORMATS[name].arithmetic.activation), None)


def mixed_formats(deployment: Deployment) -> Iterator[str]:
    weights, kv = FORMATS[deployment.weight_dtype], FORMATS[deployment.kv_dtype]
    if weights.arithmetic.activation and kv.arithmetic.activation and weights is not kv:
        yield (
            f"a KV cache in {kv.name} with activations in {weights.name}: no document of the engine says that its "
            f"attention supports this combination"
        )


def uneven_heads(deployment: Deployment, parts: int, name: str) -> Iterator[str]:
    """Yield a limit for each kind of heads that cannot be split evenly over `parts` ranks.

    Args:
        name: the engine's option for the number of ranks.
    """
    model = deployment.model
    for heads in dict.fromkeys(attention.heads for attention in model.attentions):
        query_heads, kv_heads = heads.num_query_heads, heads.num_kv_heads
        if query_heads % parts:
            yield f"{name} {parts} must divide the {query_heads} query heads"
        if not model.has_latents and kv_heads % parts and parts % kv_heads:
            yield f"{name} {parts} must divide the {kv_heads} KV heads, or be a multiple of this number"


def replicates_ffn(model: ModelSpec) -> bool:
    """Whether layers have FFNs that all tokens pass through: dense ones, or shared experts."""
    return any(isinstance(ffn, MLP) or ffn.shared_size for ffn in model.ffns)


def uneven_ffn(deployment: Deployment, parts: int, name: str) -> Iterator[str]:
    """Yield a limit if the columns of dense FFNs or shared experts cannot be split evenly over `parts` ranks."""
    model = deployment.model
    for columns in dict.fromkeys(ffn.num_columns for ffn in model.ffns if isinstance(ffn, MLP)):
        if columns % parts:
            yield f"{name} {parts} must divide the {columns} columns of the FFN"
    for columns in dict.fromkeys(moe.shared_size for moe in model.moes):
        if columns % parts:
            yield f"{name} {parts} must divide the {columns} columns of the shared experts"


def uneven_experts(deployment: Deployment, tensor: str, expert: str | None) -> Iterator[str]:
    """Yield a limit if TPF does not divide the columns of an expert, or EP does not divide the number of experts.

    Args:
        tensor: the engine's option for TPF.
        expert: the engine's option for EP; None if the ranks may have different numbers of experts.
    """
    degrees = deployment.degrees
    moes = deployment.model.moes
    for columns in dict.fromkeys(moe.expert_size for moe in moes):
        if columns % degrees.tpf:
            yield f"{tensor} {degrees.tpf} must divide the {columns} columns of an expert"
    for num_experts in dict.fromkeys(moe.num_experts for moe in moes):
        if expert is not None and num_experts % degrees.ep:
            yield f"{expert} {degrees.ep} must divide the {num_experts} experts"


def weight_notes(deployment: Deployment, makes: tuple[str, ...]) -> Iterator[str]:
    """Yield notes on the weight formats that the checkpoint must have.

    Args:
        makes: formats to which the engine can convert wider weights at startup.
    """
    weights = FORMATS[deployment.weight_dtype]
    if not weights.arithmetic.activation and weights.name not in makes:
        yield f"the checkpoint must already store its weights in {weights.name}: no option of the command converts them"
    if deployment.expert_dtype is not None:
        yield f"the checkpoint must already store only its experts in {deployment.expert_dtype}, not its other weights"
    for columns in dict.fromkeys(moe.expert_size // deployment.degrees.tpf for moe in deployment.model.moes):
        if (deployment.expert_dtype or weights.name) in ("fp8", "fp8-block") and columns % _FP8_BLOCK:
            yield (
                f"a checkpoint with one scale per {_FP8_BLOCK} columns of FP8 weights does not load: each rank has "
                f"{columns} columns of an expert, which is not a multiple of {_FP8_BLOCK}"
            )


def position_notes(deployment: Deployment) -> Iterator[str]:
    model = deployment.model
    if deployment.context > model.max_positions:
        yield (
            f"the plan has {deployment.context} tokens, but the model's config has {model.max_positions} positions: "
            f"the environment variable before the command allows more tokens, but the quality of answers to longer "
            f"contexts depends on the RoPE scaling"
        )


def draft_notes(deployment: Deployment) -> Iterator[str]:
    if deployment.accepted_tokens > 1:
        yield (
            f"the plan assumes {deployment.accepted_tokens:g} tokens per step: also set up speculative decoding, with "
            f"a draft model that reaches this mean"
        )


def overlap_notes(deployment: Deployment) -> Iterator[str]:
    if deployment.sharded and deployment.hop_b:
        yield (
            "the plan overlaps exchanges with attention (HOP-B): no document of this engine mentions HOP-B, so expect "
            "a higher TPOT than planned"
        )
