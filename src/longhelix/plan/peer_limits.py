"""What no peer has, and what several ask of a layout: each limit in a sentence, with the engine's name for it."""

from collections.abc import Iterator

from longhelix.plan.deployment import Deployment
from longhelix.spec import FORMATS

GPUS_OF_A_SERVER = 8
_FP8_BLOCK = 128  # DeepSeek-V3's checkpoints, arXiv 2412.19437 section 3.3.2, and Qwen3's in FP8


def activation_dtype(deployment: Deployment) -> str | None:
    """In which format activations are to be: that of weights or KV that are as wide; None: the checkpoint's own."""
    names = (deployment.weight_dtype, deployment.kv_dtype)
    return next((name for name in names if FORMATS[name].activation), None)


def mixed_formats(deployment: Deployment) -> Iterator[str]:
    weights, kv = FORMATS[deployment.weight_dtype], FORMATS[deployment.kv_dtype]
    if weights.activation and kv.activation and weights is not kv:
        yield (
            f"a KV cache in {kv.name} beside activations in {weights.name}: no document of the engine says that its "
            f"attention takes both"
        )


def uneven_heads(deployment: Deployment, parts: int, name: str) -> Iterator[str]:
    """Where `parts` ranks, which the engine calls `name`, do not share the heads evenly."""
    query_heads, kv_heads = deployment.heads.num_query_heads, deployment.heads.num_kv_heads
    if query_heads % parts:
        yield f"{name} {parts} has to divide the {query_heads} query heads"
    if deployment.model.mla is None and kv_heads % parts and parts % kv_heads:
        yield f"{name} {parts} has to divide the {kv_heads} KV heads, or be a multiple of them"


def uneven_ffn(deployment: Deployment, parts: int, name: str) -> Iterator[str]:
    """Where `parts` ranks do not share the columns of dense FFNs evenly, nor those of shared experts."""
    model = deployment.model
    if model.num_dense_layers and model.ffn_size % parts:
        yield f"{name} {parts} has to divide the {model.ffn_size} columns of the FFN"
    if model.moe is not None and model.moe.shared_size % parts:
        yield f"{name} {parts} has to divide the {model.moe.shared_size} columns of the shared experts"


def uneven_experts(deployment: Deployment, tensor: str, expert: str | None) -> Iterator[str]:
    """Where TPF, `tensor` in the engine's words, does not share an expert's columns evenly, or EP the experts.

    expert: None for engines whose ranks may have different numbers of experts.
    """
    moe, degrees = deployment.model.moe, deployment.degrees
    if moe is None:
        return
    if moe.expert_size % degrees.tpf:
        yield f"{tensor} {degrees.tpf} has to divide the {moe.expert_size} columns of an expert"
    if expert is not None and moe.num_experts % degrees.ep:
        yield f"{expert} {degrees.ep} has to divide the {moe.num_experts} experts"


def weight_notes(deployment: Deployment, makes: tuple[str, ...]) -> Iterator[str]:
    """What a checkpoint has to be; `makes`: formats into which the command's own options turn a wider one."""
    weights = FORMATS[deployment.weight_dtype]
    if not weights.activation and weights.name not in makes:
        yield f"the checkpoint has to hold its weights in {weights.name} already: no option here turns them into it"
    if deployment.expert_dtype is not None:
        yield f"the checkpoint has to hold its experts in {deployment.expert_dtype} already, and its other weights not"
    moe = deployment.model.moe
    columns = None if moe is None else moe.expert_size // deployment.degrees.tpf
    if weights.name == "fp8" and columns is not None and columns % _FP8_BLOCK:
        yield (
            f"a checkpoint whose FP8 weights have a scale for each {_FP8_BLOCK} columns does not load: here are "
            f"{columns} columns of an expert on a rank"
        )


def position_notes(deployment: Deployment) -> Iterator[str]:
    model = deployment.model
    if deployment.context > model.max_positions:
        yield (
            f"the model's config has {model.max_positions} positions, and {deployment.context} tokens are asked for: "
            f"the variable before the command allows that, but its answers beyond are only as good as its RoPE scaling"
        )


def draft_notes(deployment: Deployment) -> Iterator[str]:
    if deployment.accepted_tokens > 1:
        yield (
            f"the plan counts on {deployment.accepted_tokens:g} tokens of every step: speculative decoding has to be "
            f"set up as well, with a draft model that gives as many"
        )


def overlap_notes(deployment: Deployment) -> Iterator[str]:
    if deployment.sharded and deployment.hop_b:
        yield (
            "the plan counts on exchanges of a batch's parts that are hidden behind attention (HOP-B): no document of "
            "this engine has that, so tokens take longer"
        )
