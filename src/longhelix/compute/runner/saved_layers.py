"""Which layers each file of a saved context has."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.compute.runner.config import EngineConfig
from longhelix.spec.layout import HeadShape


@dataclass(frozen=True)
class SavedLayers:
    """Layers whose KV a rank saves to one file: those of a KV group that keep KV of equal sizes.

    Attributes:
        group: Their KV group.
        heads: Their heads.
        layers: Their indices in the model.
        are_all: They are all layers of the KV group.
    """

    group: int
    heads: HeadShape
    layers: tuple[int, ...]
    are_all: bool


def saved_groups(config: EngineConfig) -> Sequence[int]:
    """Return the KV group of each layer in the cache of an engine. Without windows, it is 0."""
    return config.spec.groups if config.scheduler.cache.windows else (0,) * config.spec.num_layers


def saved_layers(config: EngineConfig) -> tuple[SavedLayers, ...]:
    """Return the layers of each file, of all pipeline stages. A rank saves those of its own stage."""
    groups, layers = saved_groups(config), config.spec.layers
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, (group, layer) in enumerate(zip(groups, layers, strict=True)):
        if layer.attention is not None:
            kind = group, layer.attention.heads.num_kv_heads, layer.attention.cache_entry
            kinds.setdefault(kind, []).append(index)
    files = []
    for indices in kinds.values():
        attention, group = layers[indices[0]].attention, groups[indices[0]]
        assert attention is not None
        files.append(SavedLayers(group, attention.heads, tuple(indices), len(indices) == groups.count(group)))
    return tuple(files)
