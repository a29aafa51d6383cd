"""All parameters of a rank, from the table of weights: checkpoint names, global shapes, and the rank's slices.

The loader reads by this table. The engine checks a checkpoint against it before any rank starts. No torch.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from longhelix.compute.models.parameter import Parameter, Source
from longhelix.errors import UserError
from longhelix.spec import DTYPES, ModelSpec, number_format
from longhelix.spec.layout import Layout
from longhelix.spec.weights import Dim, Split, WeightDtype, WeightSpec, embedding, head, last_norm, layer_weights
from longhelix.values import shown

_UNREAD = re.compile(
    r"(?:.*\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"
    r"|(?:pretrained_model\.)?(?:v_head|value_head|score|classifier|reward_head)\..*"
    r"|(?:model\.)?(?:mtp|mtp_layers|visual|vision_tower|vision_model|multi_modal_projector)\..*",
    re.DOTALL,
)


def declare(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Parameter, ...]:
    """Return the parameters of `rank`, in loading order.

    If embeddings are tied, a last stage without embedding loads it as its "head".
    """
    return tuple(_parameters(spec, layout, rank))


def stored_bytes(spec: ModelSpec, layout: Layout, rank: int, dtype: str, weight_dtype: str) -> dict[str, int]:
    """Return the bytes of each arranged parameter of `rank` by name, without the padding of panels.

    Tied embeddings are the "head". There is also an "embedding" if rows of the head's format cannot be read exactly.
    """
    bytes_of = {
        WeightDtype.ACTIVATION: number_format(dtype).weight_bytes,
        WeightDtype.PRODUCT: number_format(weight_dtype).weight_bytes,
        WeightDtype.FLOAT32: number_format("float32").weight_bytes,
    }
    parameters = declare(spec, layout, rank)
    sizes = {parameter.name: int(parameter.num_elements * bytes_of[parameter.stored]) for parameter in parameters}
    if spec.tied_embeddings and layout.has_embedding(rank) and layout.has_head(rank):
        elements = next(parameter.num_elements for parameter in parameters if parameter.name == "embedding")
        sizes["head"] = int(elements * bytes_of[WeightDtype.PRODUCT])
        if not number_format(weight_dtype).weight_scales.bits:
            del sizes["embedding"]
    return sizes


def _parameters(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Parameter]:
    def local_items(dim: Dim) -> range:
        return _items(dim, layout, rank)

    if layout.has_embedding(rank):
        yield from _stacked([embedding(spec)], local_items)
    for layer in layout.layers(spec.num_layers, rank):
        weights = layer_weights(spec, spec.layers[layer])
        yield from _stacked(weights, local_items, f"layers.{layer}.", f"model.layers.{layer}.")
    if layout.has_head(rank):
        yield from _stacked([last_norm(spec)], local_items)
        if not (spec.tied_embeddings and layout.has_embedding(rank)):
            yield from _stacked([head(spec)], local_items)


def _stacked(
    weights: Iterable[WeightSpec], local_items: Callable[[Dim], range], to: str = "", at: str = ""
) -> Iterator[Parameter]:
    """Yield the parameters made of `weights`: one for each name and each of this rank's experts.

    Args:
        local_items: Returns the items of a dim that this rank has.
        to: Prefix of names in the model.
        at: Prefix of names in the checkpoint.
    """
    for experts, of_experts in groupby(weights, lambda weight: weight.experts):
        templates = [
            _template(list(same), local_items, to, at) for _, same in groupby(of_experts, lambda weight: weight.name)
        ]
        for expert in local_items(experts):
            yield from (_of_expert(template, expert) for template in templates)


def _template(same: Sequence[WeightSpec], local_items: Callable[[Dim], range], to: str, at: str) -> Parameter:
    """Return the parameter of weights with one name, in which "{}" stands for the number of an expert."""
    sources = tuple(_source(weight, local_items, at) for weight in same)
    first = same[0]
    return Parameter(to + first.name, sources, first.exact, first.stored, first.plus_one)


def _source(weight: WeightSpec, local_items: Callable[[Dim], range], at: str) -> Source:
    pieces = ((local_items(dim), dim.unit) for dim in weight.dims)
    slices = tuple(range(items.start * unit, items.stop * unit) for items, unit in pieces)
    return Source(at + weight.tensor, tuple(dim.size for dim in weight.dims), slices, weight.rows.unit)


def _of_expert(template: Parameter, expert: int) -> Parameter:
    sources = tuple(replace(source, name=source.name.format(expert)) for source in template.sources)
    return replace(template, name=template.name.format(expert), sources=sources)


def _items(dim: Dim, layout: Layout, rank: int) -> range:
    """Return the items of a dim that `rank` has."""
    match dim.split:
        case Split.WHOLE:
            return range(dim.count)
        case Split.QUERY_HEADS:
            return layout.query_heads(dim.all_heads, rank)
        case Split.KV_HEADS:
            return layout.kv_heads(dim.all_heads, rank)
        case Split.OUTPUT_HEADS:
            return layout.output_heads(dim.all_heads, rank)
        case Split.FFN_COLUMNS | Split.SHARED_COLUMNS:
            return layout.ffn_columns(dim.count, rank)
        case Split.EXPERT_COLUMNS:
            return layout.expert_columns(dim.count, rank)
        case Split.EXPERTS:
            return layout.experts(dim.count, rank)
        case Split.VOCABULARY:
            return layout.vocabulary(dim.count, rank)


def check(spec: ModelSpec, tensors: Mapping[str, tuple[tuple[int, ...], str]], quantised: bool) -> None:
    """Check a checkpoint's tensors (name -> shape, dtype) against the table. Raises UserError at the first error.

    quantised: Whether dtypes other than floats can be read. GGUF files are dequantised, safetensors are not.
    """
    declared = set()
    # One by one, because a config may ask for more layers or experts than fit into memory. No checkpoint has them.
    for source in (source for parameter in _parameters(spec, Layout(), 0) for source in parameter.sources):
        declared.add(name := source.name)
        if name not in tensors:
            raise UserError(
                f"the checkpoint has no tensor {name!r}, which the model's config requires: check that all files of "
                "the model are present and belong together",
                "invalid_checkpoint",
            )
        shape, dtype = tensors[name]
        if shape != source.shape:
            raise UserError(
                f"tensor {name!r} has shape {list(shape)}, but the model's config requires {list(source.shape)}: the "
                "config and the weights do not belong together",
                "invalid_checkpoint",
            )
        if dtype not in DTYPES and not quantised:
            raise UserError(
                f"tensor {name!r} has dtype {dtype}: longhelix reads {', '.join(DTYPES)}", "invalid_checkpoint"
            )
    unused = sorted(name for name in tensors if name not in declared and not _is_tied_head(name, spec))
    predicting = _predicting_layers(tensors, spec.num_layers)
    needed = [name for name in unused if not _changes_nothing(name) and _layer_of(name) not in predicting]
    if needed:
        raise UserError(
            f"the checkpoint has tensors that a {spec.architecture} model does not use ({len(needed)}, such as "
            f"{shown(needed[0])}): the config and the weights do not belong together",
            "invalid_checkpoint",
        )
    if unused:
        warnings.warn(
            f"{len(unused)} tensors of the checkpoint, such as {shown(unused[0])}, are not read, because no "
            "computation uses them",
            stacklevel=4,
        )


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    """Return whether this is a copy of the embedding, which is read instead."""
    return spec.tied_embeddings and name == "lm_head.weight"


def _predicting_layers(tensors: Iterable[str], num_layers: int) -> set[int]:
    """Return the layers of multi-token prediction, which DeepSeek and GLM store after the last layer.

    They project an embedding and a hidden state together. The model's answers do not depend on them.
    """
    layers = {_layer_of(name) for name in tensors if name.endswith(".eh_proj.weight")}
    return {layer for layer in layers if layer is not None and layer >= num_layers}


def _layer_of(name: str) -> int | None:
    """Return the layer of a tensor, or None if it belongs to no layer."""
    match = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    return None if match is None else int(match[1])


def _changes_nothing(name: str) -> bool:
    """Return whether the model's answers do not depend on this tensor.

    That holds for tensors derived from the config, extra heads, multi-token prediction with its own names, and the
    vision tower of a model with the config of a text model.
    """
    return _UNREAD.fullmatch(name) is not None
