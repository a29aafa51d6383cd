"""The layers of a model with the number format of each of their weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Generic, TypeVar

from longhelix.spec import FORMATS, ModelSpec
from longhelix.spec.layer import FFN, Mixer
from longhelix.spec.norms import Norms
from longhelix.spec.quantisation import Quantisation, Storage
from longhelix.spec.weights import WeightDtype, WeightSpec, embedding, head, last_norm, packed_storage, part_weights

Part = TypeVar("Part", bound=Mixer | FFN)


@dataclass(frozen=True)
class StoredWeight:
    """A weight and its number format.

    Attributes:
        spec: The weight.
        dtype: Its number format.
        packed: The checkpoint packs it: each output has its own scale blocks, which ranks repeat where they split one.
        ordered: The inputs of a scale block do not lie side by side, so ranks keep them in an order.
        has_order: It counts the bytes of the order. Weights that are joined in one product share an order, which the
            first of them counts.
    """

    spec: WeightSpec
    dtype: str
    packed: bool = False
    ordered: bool = False
    has_order: bool = False


StoredWeights = tuple[StoredWeight, ...]
Formats = Callable[[Sequence[WeightSpec], str], StoredWeights]  # of weights, and the prefix of their tensors


@dataclass(frozen=True, eq=False)
class LayerPart(Generic[Part]):
    """A mixer or an FFN of some layers, with its weights. Layers in which both are equal have the same object."""

    spec: Part
    weights: StoredWeights


@dataclass(frozen=True)
class StoredLayer:
    """The parts of a layer."""

    mixers: tuple[LayerPart[Mixer], ...]
    ffns: tuple[LayerPart[FFN], ...]

    @property
    def weights(self) -> StoredWeights:
        parts: tuple[LayerPart[Mixer] | LayerPart[FFN], ...] = (*self.mixers, *self.ffns)
        return tuple(weight for part in parts for weight in part.weights)


@dataclass(frozen=True)
class StoredModel:
    """The layers of a model in order, and the weights of its ends."""

    layers: tuple[StoredLayer, ...]
    embedding: StoredWeights
    head: StoredWeights
    last_norm: StoredWeights


def stored_model(model: ModelSpec, formats: Formats) -> StoredModel:
    """Return the model with the formats of its weights."""
    tables: dict[tuple[Mixer | FFN, Norms], tuple[WeightSpec, ...]] = {}
    mixers: dict[tuple[Mixer, StoredWeights], LayerPart[Mixer]] = {}
    ffns: dict[tuple[FFN, StoredWeights], LayerPart[FFN]] = {}

    def weights(part: Mixer | FFN, norms: Norms, layer: int) -> StoredWeights:
        if (part, norms) not in tables:
            tables[part, norms] = part_weights(model, part, norms)
        return formats(tables[part, norms], f"model.layers.{layer}.")

    layers = (
        StoredLayer(
            tuple(_shared(mixers, mixer, weights(mixer, layer.norms, index)) for mixer in layer.mixers),
            tuple(_shared(ffns, ffn, weights(ffn, layer.norms, index)) for ffn in layer.ffns),
        )
        for index, layer in enumerate(model.layers)
    )
    ends = (formats([end(model)], "") for end in (embedding, head, last_norm))
    return StoredModel(tuple(layers), *ends)


def _shared(
    known: dict[tuple[Part, StoredWeights], LayerPart[Part]], spec: Part, own: StoredWeights
) -> LayerPart[Part]:
    """Return the known part with these weights, or a new one."""
    return known.setdefault((spec, own), LayerPart(spec, own))


def in_dtypes(dtype: str, expert_dtype: str) -> Formats:
    """Return the formats of matrices in one dtype, and experts in another. Norms and biases are ignored."""

    def formats(weights: Sequence[WeightSpec], prefix: str) -> StoredWeights:
        matrices = (weight for weight in weights if weight.columns is not None)
        return tuple(StoredWeight(weight, expert_dtype if weight.is_expert else dtype) for weight in matrices)

    return formats


def as_packed(quantisation: Quantisation, dtypes: dict[WeightDtype, str], expert_dtype: str | None) -> Formats:
    """Return the formats in which the engine keeps the weights of a quantised checkpoint, with norms and biases.

    Args:
        quantisation: Which modules are packed. The engine needs one format for all experts of a layer.
        dtypes: The dtypes of weights that are not packed.
        expert_dtype: The dtype of experts. None: as the checkpoint has them.
    """

    def stored(weight: WeightSpec, packed: Storage | None, is_first: bool) -> StoredWeight:
        own = expert_dtype if weight.is_expert and weight.stored is WeightDtype.PRODUCT else None
        ordered = packed is not None and packed.ordered
        dtype = own or (dtypes[weight.stored] if packed is None else packed.kept)
        keeps_scales = FORMATS[dtype].codes is not None or (own is None and packed is not None)
        return StoredWeight(weight, dtype, packed=keeps_scales, ordered=ordered, has_order=ordered and is_first)

    def formats(weights: Sequence[WeightSpec], prefix: str) -> StoredWeights:
        found = list[StoredWeight]()
        for _, group in groupby(weights, attrgetter("name")):
            same = list(group)
            modules = ((prefix + weight.tensor).format(0).removesuffix(".weight") for weight in same)
            packed = None
            if same[0].stored is WeightDtype.PRODUCT:
                packed = packed_storage(map(quantisation.storage_of, modules), same[0].in_experts)
            found += (stored(weight, packed, weight is same[0]) for weight in same)
        return tuple(found)

    return formats
