"""A fingerprint of a model: its configuration, and samples of the files that hold its weights."""

import hashlib
from typing import Any

import msgspec

from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.parameters import declare
from longhelix.errors import UserError
from longhelix.spec import MLP, LayerSpec, LinearAttention, ModelSpec, MoE, RopeSpec
from longhelix.spec.attention import MultiHeadLatentAttention
from longhelix.spec.layer import Mixer
from longhelix.spec.layout import Layout

# Of each file, evenly spread: whoever trains a model on changes nearly all of its numbers.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint(spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """The same for copies of a model wherever they lie, another one for another model: SHA-256 over its configuration
    and, of each file of weights, its size and some thousands of bytes. Rope settings do not count, because an option
    replaces them. Raises UserError if a file cannot be read."""
    sha = hashlib.sha256(msgspec.json.encode(_configuration(spec)))
    for path in checkpoint.files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                sha.update(size.to_bytes(8, "little"))
                for sample in range(_SAMPLES):
                    file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                    sha.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", "invalid_checkpoint") from error
    return sha.hexdigest()


def rope_fingerprint(spec: ModelSpec) -> str:
    """Return SHA-256 over the rope settings of the model's rotations."""
    settings = b"".join(msgspec.json.encode(_rope_settings(rotation.rope)) for rotation in spec.rotations)
    return hashlib.sha256(settings).hexdigest()


# Saved contexts have these fingerprints. So the names and their order stay when records of the spec change, and what
# came later is left out where it changes nothing.


def _configuration(spec: ModelSpec) -> dict[str, Any]:
    """Return the configuration without rope settings."""
    vocabulary, checkpoint = spec.vocabulary, spec.checkpoint
    rules = () if checkpoint.quantisation is None else checkpoint.quantisation.rules
    layers = {layer: _layer(layer) for layer in dict.fromkeys(spec.layers)}
    multipliers = vocabulary.multipliers
    written = {
        "architecture": spec.architecture,
        "hidden_size": spec.hidden_size,
        "vocab_size": vocabulary.size,
        "max_positions": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "dtype": checkpoint.dtype,
        "layers": [layers[layer] for layer in spec.layers],
        "stored_dtype": "+".join(dict.fromkeys(rule.storage.format for rule in rules)),
        "stored_experts_alone": bool(rules and spec.moes) and not _packs_attention(spec),
        "tied_embeddings": vocabulary.tied_embeddings,
        "eos_token_ids": vocabulary.eos_token_ids,
        "vision": spec.vision,
        "multipliers": {"embedding": multipliers.embedding, "logits": multipliers.logits}
        | _later(rounded=multipliers.rounded, logit_cap=multipliers.logit_cap),
    }
    if checkpoint.quantisation is not None:
        written["packed"] = _packed(spec)
    return written


def _packed(spec: ModelSpec) -> dict[str, tuple[str, str]]:
    """Return the scheme of each quantised weight, and the format of its numbers, by its name in the checkpoint."""
    sources = (source for parameter in declare(spec, Layout(), 0) for source in parameter.sources)
    storages = {source.name: source.storage for source in sources if source.storage is not None}
    return {
        name: (storage.scheme, storage.kept if storage.is_number else storage.format)
        for name, storage in storages.items()
    }


def _packs_attention(spec: ModelSpec) -> bool:
    """Return whether the checkpoint packs the last layer's attention."""
    quantisation, last = spec.checkpoint.quantisation, spec.num_layers - 1
    return quantisation is not None and quantisation.storage_of(f"model.layers.{last}.self_attn.o_proj") is not None


def _layer(layer: LayerSpec) -> dict[str, Any]:
    """Return a layer's configuration. Its norms follow from the architecture."""
    return {
        "mixers": [_mixer(mixer) for mixer in layer.mixers],
        "ffns": [_mlp(ffn) if isinstance(ffn, MLP) else _mixture(ffn) for ffn in layer.ffns],
        "residual_scale": layer.residual_scale,
    }


def _mixer(mixer: Mixer) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.to_builtins(mixer)
    if isinstance(mixer, LinearAttention):
        return written
    written["rope"] = _rope_settings(RopeSpec(sections=mixer.rope.sections))
    if isinstance(mixer, MultiHeadLatentAttention):
        return written
    projections, norms, scores = mixer.projections, mixer.norms, mixer.scores
    kept = {name: value for name, value in written.items() if name not in ("projections", "norms", "scores")}
    return kept | {
        "qkv_bias": projections.qkv_bias,
        "output_bias": projections.output_bias,
        "qk_norm": norms.qk,
        "output_gate": projections.output_gate,
        "sinks": scores.sinks,
        "l2_norm": norms.l2,
        "temperature_tuning": scores.temperature_tuning,
        "score_scale": scores.scale,
        **_later(value_norm=norms.value, score_cap=scores.cap),
    }


def _mlp(mlp: MLP) -> dict[str, Any]:
    return {
        "type": "GatedFFN",
        "num_columns": mlp.num_columns,
        "bias": mlp.bias,
        "activation": mlp.activation.function,
        **_later(without_gate=not mlp.activation.gated),
    }


def _mixture(moe: MoE) -> dict[str, Any]:
    routing = moe.routing
    return {
        "type": "MoE",
        "num_experts": moe.num_experts,
        "experts_per_token": moe.experts_per_token,
        "expert_size": moe.expert_size,
        "shared_size": moe.shared_size,
        "routing_bias": routing.bias,
        "shared_gate": routing.shared_gate,
        "sigmoid": routing.sigmoid,
        "normalised": routing.normalised,
        "num_groups": routing.num_groups,
        "groups_per_token": routing.groups_per_token,
        "scale": routing.scale,
        "biases": moe.biases,
        "shared_bias": moe.shared_bias,
        "activation": moe.activation.function,
        "weighted_inputs": routing.weighted_inputs,
        **_later(without_gate=not moe.activation.gated),
    }


def _later(**settings: float | None) -> dict[str, float]:
    """Return the settings that change something."""
    return {name: value for name, value in settings.items() if value}


def _rope_settings(rope: RopeSpec) -> dict[str, Any]:
    scaling = rope.scaling
    return {
        "kind": scaling.kind,
        "theta": rope.theta,
        "factor": scaling.factor,
        "original_max_positions": scaling.original_max_positions,
        "attention_factor": scaling.attention_factor,
        "latent_factor": scaling.latent_factor,
        "low_freq_factor": scaling.llama3.low_freq_factor,
        "high_freq_factor": scaling.llama3.high_freq_factor,
        "beta_fast": scaling.yarn.beta_fast,
        "beta_slow": scaling.yarn.beta_slow,
        "truncate": scaling.yarn.truncate,
        "short_factor": scaling.longrope.short_factor,
        "long_factor": scaling.longrope.long_factor,
        "divisors": rope.divisors,
        "sections": rope.sections,
    }
