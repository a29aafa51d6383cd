"""Every parameter of the model, declared once: its checkpoint names, global shapes and this rank's slices.

The loader reads by this table, and a checkpoint is checked against it before any rank starts. No torch.
"""

import re
from collections.abc import Iterator, Mapping

from longhelix.errors import UserError
from longhelix.layout import Layout
from longhelix.models.attention_parameters import attention_parameters
from longhelix.models.ffn_parameters import ffn_parameters
from longhelix.models.parameter import Parameter, matrix, vector
from longhelix.spec import DTYPES, ModelSpec


def declare(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Parameter, ...]:
    """The parameters of `rank`, in the order in which they are loaded."""
    return tuple(_parameters(spec, layout, rank))


def _parameters(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Parameter]:
    vocabulary, hidden = layout.vocabulary(spec.vocab_size, rank), range(spec.hidden_size)
    yield matrix("embedding", "model.embed_tokens.weight", spec.vocab_size, vocabulary, hidden)
    for layer in range(spec.num_layers):
        yield from _layer(spec, layout, rank, layer)
    yield vector("norm", "model.norm.weight", spec.hidden_size)
    if not spec.tied_embeddings:
        yield matrix("head", "lm_head.weight", spec.vocab_size, vocabulary, hidden)


def _layer(spec: ModelSpec, layout: Layout, rank: int, layer: int) -> Iterator[Parameter]:
    to, at = f"layers.{layer}.", f"model.layers.{layer}."
    yield from attention_parameters(spec, layout, rank, to, at)
    yield from ffn_parameters(spec, layout, rank, layer, to, at)


def check(spec: ModelSpec, tensors: Mapping[str, tuple[tuple[int, ...], str]], quantised: bool) -> None:
    """Hold a checkpoint's tensors (name -> shape, dtype) against the table; raises UserError at the first misfit.

    `quantised`: whether dtypes other than the floats are read (GGUF dequantises, safetensors do not).
    """
    declared = set()
    # One by one: a config may call for more layers or experts than memory has room for, which no checkpoint has.
    for source in (source for parameter in _parameters(spec, Layout(), 0) for source in parameter.sources):
        declared.add(name := source.name)
        if name not in tensors:
            raise UserError(
                f"the checkpoint has no tensor {name!r}, which the model's config calls for: "
                "check that all files are there and that config.json belongs to them",
                "invalid_checkpoint",
            )
        shape, dtype = tensors[name]
        if shape != source.shape:
            raise UserError(
                f"tensor {name!r} has shape {list(shape)}, but the model's config makes it {list(source.shape)}: "
                "the config and the weights do not belong together",
                "invalid_checkpoint",
            )
        if dtype not in DTYPES and not quantised:
            raise UserError(
                f"tensor {name!r} has dtype {dtype}: longhelix reads {', '.join(DTYPES)}", "invalid_checkpoint"
            )
    unused = sorted(name for name in tensors if name not in declared and not _is_redundant(name, spec))
    if unused:
        raise UserError(
            f"the checkpoint has a tensor {unused[0]!r} ({len(unused)} such) that a {spec.architecture} model does not "
            "use: the config and the weights do not belong together",
            "invalid_checkpoint",
        )


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Tensors that some exporters write although the model derives or shares them, and heads that look further ahead
    (DeepSeek's MTP, as layers after the last)."""
    later = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    if spec.mla is not None and later and int(later[1]) >= spec.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")
