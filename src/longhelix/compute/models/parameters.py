"""All parameters of a rank, read off the table of weights: checkpoint names, global shapes, and the rank's slices.

The loader reads by this table, and a checkpoint is checked against it before any rank starts. No torch.
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
    """The parameters of `rank`, in the order in which they are loaded.

    If embeddings are tied, a last stage that has no embedding loads it as its "head".
    """
    return tuple(_parameters(spec, layout, rank))


def stored_bytes(spec: ModelSpec, layout: Layout, rank: int, dtype: str, weight_dtype: str) -> dict[str, int]:
    """The bytes that each parameter of `rank` takes once it is laid out, by its name, without what fills up panels.

    Tied embeddings are the "head", with "embedding" beside it where the head's format cannot give its rows back.
    """
    bytes_of = {
        WeightDtype.ACTIVATION: number_format(dtype).weight_bytes,
        WeightDtype.PRODUCT: number_format(weight_dtype).weight_bytes,
        WeightDtype.FLOAT32: number_format("float32").weight_bytes,
    }
    parameters = declare(spec, layout, rank)
    found = {parameter.name: int(parameter.num_elements * bytes_of[parameter.stored]) for parameter in parameters}
    if spec.tied_embeddings and layout.has_embedding(rank) and layout.has_head(rank):
        elements = next(parameter.num_elements for parameter in parameters if parameter.name == "embedding")
        found["head"] = int(elements * bytes_of[WeightDtype.PRODUCT])
        if not number_format(weight_dtype).weight_scales.bits:
            del found["embedding"]
    return found


def _parameters(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Parameter]:
    def held(dim: Dim) -> range:
        return _items(dim, layout, rank)

    if layout.has_embedding(rank):
        yield from _stacked([embedding(spec)], held)
    for layer in layout.layers(spec.num_layers, rank):
        weights = layer_weights(spec, spec.layers[layer])
        yield from _stacked(weights, held, f"layers.{layer}.", f"model.layers.{layer}.")
    if layout.has_head(rank):
        yield from _stacked([last_norm(spec)], held)
        if not (spec.tied_embeddings and layout.has_embedding(rank)):
            yield from _stacked([head(spec)], held)


def _stacked(
    weights: Iterable[WeightSpec], held: Callable[[Dim], range], to: str = "", at: str = ""
) -> Iterator[Parameter]:
    """The parameters made of `weights`: one for each name, and for each expert that this rank has. They are named
    `to`... in the model, and `at`... in the checkpoint."""
    for experts, of_experts in groupby(weights, lambda weight: weight.experts):
        templates = [_template(list(same), held, to, at) for _, same in groupby(of_experts, lambda weight: weight.name)]
        for expert in held(experts):
            yield from (_of_expert(template, expert) for template in templates)


def _template(same: Sequence[WeightSpec], held: Callable[[Dim], range], to: str, at: str) -> Parameter:
    """The parameter of weights with one name, which has "{}" for the number of an expert."""
    sources = tuple(_source(weight, held, at) for weight in same)
    return Parameter(to + same[0].name, sources, same[0].exact, same[0].stored)


def _source(weight: WeightSpec, held: Callable[[Dim], range], at: str) -> Source:
    pieces = ((held(dim), dim.unit) for dim in weight.dims)
    slices = tuple(range(items.start * unit, items.stop * unit) for items, unit in pieces)
    return Source(at + weight.tensor, tuple(dim.size for dim in weight.dims), slices, weight.rows.unit)


def _of_expert(template: Parameter, expert: int) -> Parameter:
    sources = tuple(replace(source, name=source.name.format(expert)) for source in template.sources)
    return replace(template, name=template.name.format(expert), sources=sources)


def _items(dim: Dim, layout: Layout, rank: int) -> range:
    """The items of a dim that `rank` has."""
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
    """Check a checkpoint's tensors (name -> shape, dtype) against the table. Raises UserError at the first misfit.

    `quantised`: whether dtypes other than the floats can be read. GGUF files are dequantised, safetensors are not.
    """
    declared = set()
    # One by one: a config may call for more layers or experts than memory has room for, which no checkpoint has.
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
    wanted = [name for name in unused if not _changes_nothing(name) and _layer_of(name) not in predicting]
    if wanted:
        raise UserError(
            f"the checkpoint has tensors that a {spec.architecture} model does not use ({len(wanted)}, such as "
            f"{shown(wanted[0])}): the config and the weights do not belong together",
            "invalid_checkpoint",
        )
    if unused:
        warnings.warn(
            f"{len(unused)} tensors of the checkpoint, such as {shown(unused[0])}, are not read, because no "
            "computation uses them",
            stacklevel=4,
        )


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    """Whether this is a copy of the embedding, which is read instead."""
    return spec.tied_embeddings and name == "lm_head.weight"


def _predicting_layers(tensors: Iterable[str], num_layers: int) -> set[int]:
    """The layers of multi-token prediction, which DeepSeek and GLM store after the last layer: those that project an
    embedding and a hidden state together. The model's answers are the same without them."""
    layers = {_layer_of(name) for name in tensors if name.endswith(".eh_proj.weight")}
    return {layer for layer in layers if layer is not None and layer >= num_layers}


def _layer_of(name: str) -> int | None:
    """The layer that a tensor is in. None: it is in none."""
    found = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
    return None if found is None else int(found[1])


def _changes_nothing(name: str) -> bool:
    """Whether the model's answers are the same without this tensor.

    That holds for tensors derived from the config, for extra heads, for multi-token prediction with names of its own,
    and for the vision tower of a model whose config is a text model's.
    """
    return _UNREAD.fullmatch(name) is not None
