"""All parameters of a rank, from the table of weights: checkpoint names, global shapes, and the rank's slices.

The loader reads by this table. The engine checks a checkpoint against it before any rank starts. No torch.
"""

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import msgspec

from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.parameter import Parameter, Source
from longhelix.compute.models.schemes import SCHEMES, with_stored_scales
from longhelix.errors import UserError
from longhelix.spec import DTYPES, ModelSpec, number_format
from longhelix.spec.layout import Layout
from longhelix.spec.quantisation import Quantisation, Storage
from longhelix.spec.weights import (
    Dim,
    Split,
    WeightDtype,
    WeightSpec,
    embedding,
    head,
    last_norm,
    layer_weights,
    packed_storage,
    shares_embedding,
)
from longhelix.values import shown

_UNREAD = re.compile(
    r"(?:.*\.)?rotary_emb\.(?:inv_freq|cos_cached|sin_cached)"
    r"|(?:pretrained_model\.)?(?:v_head|value_head|score|classifier|reward_head)\..*"
    r"|(?:model\.)?(?:mtp|mtp_layers|visual|vision_tower|vision_model|multi_modal_projector)\..*"
    r"|(?:.*\.)?self_attn\.(?:\w+\.)?(?:[qkv]|kv|prob_output|output)_(?:scale|zero_point)",
    re.DOTALL,
)
_EXPERTS = re.compile(r"(layers\.[0-9]+\.(?:experts|shared))\..*")


def declare(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Parameter, ...]:
    """Return the parameters of `rank`, in loading order.

    If embeddings are tied, a rank with the embedding has no "head" of its own, unless the checkpoint packs it.
    """
    return tuple(_parameters(spec, layout, rank))


def stored_bytes(spec: ModelSpec, layout: Layout, rank: int, dtype: str, weight_dtype: str) -> dict[str, int]:
    """Return the bytes of each arranged parameter of `rank` by name, without the padding of panels.

    Tied embeddings are the "head". There is also an "embedding" if rows of the head's format cannot be read exactly.
    """
    parameters = declare(spec, layout, rank)
    sizes = {parameter.name: parameter.stored_bytes(dtype, weight_dtype) for parameter in parameters}
    if layout.has_embedding(rank) and layout.has_head(rank) and "head" not in sizes:
        embedded = next(parameter for parameter in parameters if parameter.name == "embedding")
        sizes["head"] = replace(embedded, stored=WeightDtype.PRODUCT).stored_bytes(dtype, weight_dtype)
        if not number_format(embedded.format(weight_dtype)).weight_scales.bits:
            del sizes["embedding"]
    return sizes


def mixed_weight(spec: ModelSpec) -> Parameter | None:
    """Return a weight that becomes numbers although the checkpoint packs it, or wider numbers than it has.

    It stores the weight's tensors in different formats, or orders the inputs of experts.
    """
    for parameter in _parameters(spec, Layout(), 0, _different_layers(spec)):
        storages = {source.storage for source in parameter.sources}
        if parameter.stored is not WeightDtype.PRODUCT or storages == {None}:
            continue
        kept = packed_storage(storages, parameter.in_experts)
        if kept is None or (kept.is_number and kept.repacked is not None):
            return parameter
    return None


def slow_weight(spec: ModelSpec, layout: Layout, weight_dtype: str) -> tuple[int, Parameter] | None:
    """Return a rank, and a packed weight whose inputs there do not fit the native CPU kernels. None: all weights fit.

    weight_dtype: number format of the weights of products that the checkpoint does not pack.
    """
    layers = _different_layers(spec)
    for rank in range(layout.world_size):
        for parameter in _parameters(spec, layout, rank, layers):
            share = parameter.share(weight_dtype)
            if share is not None and not share.fits_panels and parameter.local_shape[0]:
                return rank, parameter
    return None


def _different_layers(spec: ModelSpec) -> Collection[int]:
    """Return one layer of each kind, and of each set of formats that the checkpoint has."""
    quantisation = spec.checkpoint.quantisation
    kinds: dict[object, int] = {}
    for index, layer in enumerate(spec.layers):
        storages = None
        if quantisation is not None:
            names = (weight.tensor.format(0).removesuffix(".weight") for weight in layer_weights(spec, layer))
            storages = tuple(quantisation.storage_of(f"model.layers.{index}.{name}") for name in names)
        kinds.setdefault((layer, storages), index)
    return kinds.values()


def _parameters(spec: ModelSpec, layout: Layout, rank: int, only: Collection[int] | None = None) -> Iterator[Parameter]:
    """Yield the parameters of a rank. only: the layers that count. None: all."""

    def local_items(dim: Dim) -> range:
        return _items(dim, layout, rank)

    stacked = partial(_stacked, local_items, spec.checkpoint.quantisation)
    if layout.has_embedding(rank):
        yield from stacked([embedding(spec)])
    for layer in layout.layers(spec.num_layers, rank):
        if only is not None and layer not in only:
            continue
        weights = layer_weights(spec, spec.layers[layer])
        yield from stacked(weights, f"layers.{layer}.", f"model.layers.{layer}.")
    if layout.has_head(rank):
        yield from stacked([last_norm(spec)])
        if not (shares_embedding(spec) and layout.has_embedding(rank)):
            yield from stacked([head(spec)])


def _stacked(
    local_items: Callable[[Dim], range],
    quantisation: Quantisation | None,
    weights: Iterable[WeightSpec],
    to: str = "",
    at: str = "",
) -> Iterator[Parameter]:
    """Yield the parameters made of `weights`: one for each name and each of this rank's experts.

    Args:
        local_items: Returns the items of a dim that this rank has.
        quantisation: Which modules the checkpoint packs. None: it packs none.
        to: Prefix of names in the model.
        at: Prefix of names in the checkpoint.
    """
    for experts, of_experts in groupby(weights, lambda weight: weight.experts):
        templates = [
            _template(list(same), local_items, to, at) for _, same in groupby(of_experts, lambda weight: weight.name)
        ]
        for expert in local_items(experts):
            yield from (_packed(_of_expert(template, expert), quantisation) for template in templates)


def _packed(parameter: Parameter, quantisation: Quantisation | None) -> Parameter:
    """Return the parameter with how the checkpoint packs its sources."""
    if quantisation is None or parameter.stored is WeightDtype.FLOAT32:
        return parameter
    sources = (
        replace(source, storage=quantisation.storage_of(source.module))
        if source.name.endswith(".weight") and len(source.shape) == 2
        else source
        for source in parameter.sources
    )
    return replace(parameter, sources=tuple(sources))


def _template(same: Sequence[WeightSpec], local_items: Callable[[Dim], range], to: str, at: str) -> Parameter:
    """Return the parameter of weights with one name, in which "{}" stands for the number of an expert."""
    sources = tuple(_source(weight, local_items, at) for weight in same)
    first = same[0]
    return Parameter(
        to + first.name,
        sources,
        exact=first.exact,
        stored=first.stored,
        plus_one=first.plus_one,
        in_experts=first.in_experts,
    )


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


def check(spec: ModelSpec, tensors: Mapping[str, tuple[tuple[int, ...], str]], *, gguf: bool) -> None:
    """Check a checkpoint's tensors (name -> shape, dtype) against the table. Raises UserError at the first error.

    gguf: Whether the tensors are those of a GGUF file, which can have dtypes other than floats. The file's metadata say
        what config.json says for safetensors.
    """
    declared = set()
    config, apart = (
        ("the file's metadata", "convert the model again")
        if gguf
        else ("the model's config", "the config and the weights do not belong together")
    )
    for source in _sources(spec):
        if source.storage is not None:
            declared.update(_check_packed(source, source.storage, tensors, config, apart))
            continue
        declared.add(source.name)
        shape, dtype = _found(source.name, tensors, config)
        if shape != source.shape:
            raise UserError(
                f"tensor {source.name!r} has shape {list(shape)}, but {config} requires {list(source.shape)}: {apart}",
                "invalid_checkpoint",
            )
        if dtype not in DTYPES and not gguf:
            raise UserError(
                f"tensor {source.name!r} has dtype {dtype}: longhelix reads {', '.join(DTYPES)}", "invalid_checkpoint"
            )
    unused = sorted(name for name in tensors if name not in declared and not _is_tied_head(name, spec))
    predicting = _predicting_layers(tensors, spec.num_layers)
    needed = [name for name in unused if not _changes_nothing(name) and _layer_of(name) not in predicting]
    if needed:
        raise UserError(
            f"the checkpoint has tensors that a {spec.architecture} model does not use ({len(needed)}, such as "
            f"{shown(needed[0])}): {apart}",
            "invalid_checkpoint",
        )
    if unused:
        warnings.warn(
            f"{len(unused)} tensors of the checkpoint, such as {shown(unused[0])}, are not read, because no "
            "computation uses them",
            stacklevel=4,
        )


def with_stored_formats(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> ModelSpec:
    """Return the spec with the formats that a checkpoint's tensors have, where its config does not say them.

    See `schemes.with_stored_scales`. Weights that the same rule packs have the same format.
    """
    quantisation = spec.checkpoint.quantisation
    if quantisation is None:
        return spec
    num_storages = len({rule.storage for rule in quantisation.rules})
    stored: dict[Storage, Storage] = {}
    for source in _sources(spec):
        if source.storage is not None and source.storage not in stored:
            rows, columns = source.shape
            stored[source.storage] = with_stored_scales(source.storage, tensors, source.module, (rows, columns))
        if len(stored) == num_storages or not _is_stored(source, tensors):
            break  # `check` refuses a checkpoint without a tensor
    rules = (
        msgspec.structs.replace(rule, storage=stored.get(rule.storage, rule.storage)) for rule in quantisation.rules
    )
    found = msgspec.structs.replace(quantisation, rules=tuple(rules))
    return replace(spec, checkpoint=replace(spec.checkpoint, quantisation=found))


def _is_stored(source: Source, tensors: Iterable[str]) -> bool:
    """Return whether a checkpoint has the tensors of a weight."""
    if source.storage is None:
        return source.name in tensors
    rows, columns = source.shape
    forms = SCHEMES[source.storage.scheme].tensors(source.module, (rows, columns), source.storage)
    return all(name in tensors for name, form in forms.items() if form.required)


def _sources(spec: ModelSpec) -> Iterator[Source]:
    """Yield the tensors of the model, but check that the experts of a layer have one format.

    One by one, because a config may ask for more layers or experts than fit into memory. No checkpoint has them.
    """
    first: dict[str, Parameter] = {}
    for parameter in _parameters(spec, Layout(), 0):
        experts = _EXPERTS.fullmatch(parameter.name)
        if experts is not None and parameter.stored is WeightDtype.PRODUCT:
            _check_alike(first.setdefault(experts[1], parameter), parameter, spec.checkpoint.dtype)
        yield from parameter.sources


def _check_alike(first: Parameter, other: Parameter, dtype: str) -> None:
    """Check that two weights of a layer's experts have one format. dtype: that of weights that are not packed."""
    first_format, other_format = first.format(dtype), other.format(dtype)
    if first_format != other_format:
        raise UserError(
            f"the checkpoint stores {other.sources[0].name!r} as {other_format}, but "
            f"{first.sources[0].name!r} as {first_format}: use a checkpoint whose experts of a layer have one "
            "format",
            "unsupported_model",
        )


def _check_packed(
    source: Source, storage: Storage, tensors: Mapping[str, tuple[tuple[int, ...], str]], config: str, apart: str
) -> Iterable[str]:
    """Check the tensors of a packed weight, and return their names.

    config, apart: What requires the tensors, and what to do if it requires others, in words.
    """
    rows, columns = source.shape
    forms = SCHEMES[storage.scheme].tensors(source.module, (rows, columns), storage)
    for name, form in forms.items():
        if name not in tensors and not form.required:
            continue
        shape, dtype = _found(name, tensors, config)
        if not form.allows(shape, dtype):
            raise UserError(
                f"tensor {name!r} has dtype {dtype} and shape {list(shape)}, but a weight of {rows} rows and "
                f"{columns} columns in {storage.format} needs {form}: {apart}",
                "invalid_checkpoint",
            )
    return forms


def _found(name: str, tensors: Mapping[str, tuple[tuple[int, ...], str]], config: str) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype of a tensor that the model needs. config: What requires it, in words."""
    if name not in tensors:
        raise UserError(
            f"the checkpoint has no tensor {name!r}, which {config} requires: check that all files of the model are "
            "present and belong together",
            "invalid_checkpoint",
        )
    return tensors[name]


def _is_tied_head(name: str, spec: ModelSpec) -> bool:
    """Return whether this is a copy of the embedding, which is read instead."""
    return spec.vocabulary.tied_embeddings and name == "lm_head.weight"


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

    That holds for tensors derived from the config, extra heads, multi-token prediction with its own names, the vision
    tower of a model with the config of a text model, and scales of queries, keys and values: longhelix scales each
    vector of its KV cache by itself.
    """
    return _UNREAD.fullmatch(name) is not None
