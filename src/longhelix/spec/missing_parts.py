"""Parts of models that longhelix can plan for, but that the engine does not compute yet."""

from collections.abc import Iterator

from longhelix.spec.attention import GroupedQueryAttention, MultiHeadLatentAttention
from longhelix.spec.layer import FFN, Mixer
from longhelix.spec.linear import LinearAttention
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE


def missing_parts(spec: ModelSpec) -> list[str]:
    """Return the names of these parts, each once. Empty if the engine runs the model."""
    layers = dict.fromkeys(spec.layers)
    parts = [part for layer in layers for mixer in layer.mixers for part in _of_mixer(mixer)]
    parts += [part for layer in layers for ffn in layer.ffns for part in _of_ffn(ffn)]
    return list(dict.fromkeys(parts))


def _of_mixer(mixer: Mixer) -> Iterator[str]:
    if isinstance(mixer, LinearAttention):
        yield "linear attention (Gated DeltaNet)"
        return
    if mixer.visibility.indexer is not None:
        yield "an indexer (DeepSeek sparse attention)"
    if isinstance(mixer, MultiHeadLatentAttention) and mixer.visibility.limit_tokens is not None:
        yield "windows of latent attention"
    if isinstance(mixer, GroupedQueryAttention):
        if mixer.projections.output_gate:
            yield "a gate of attention outputs"
        if mixer.scores.sinks:
            yield "attention sinks"
        if mixer.norms.l2:
            yield "L2 norms of queries and keys"
        if mixer.scores.temperature_tuning:
            yield "a temperature that depends on positions"


def _of_ffn(ffn: FFN) -> Iterator[str]:
    if ffn.activation.function == "xielu":
        yield "the activation xIELU"
    if isinstance(ffn, MoE):
        if ffn.biases:
            yield "experts with biases"
        if ffn.routing.weighted_inputs:
            yield "experts with weighted inputs"
