"""The weights of a layer's parts on the fullest rank of each layout (`Setting.priced_amount`): numbers and bytes.

They come from the table of weights, and determine memory and the costs of products.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.row_bytes import order_bytes, row_bytes
from longhelix.perf.setting import Setting
from longhelix.perf.stored_layers import StoredWeight, StoredWeights
from longhelix.spec import number_format
from longhelix.spec.attention import MultiHeadLatentAttention
from longhelix.spec.moe import MoE
from longhelix.spec.weights import Dim, Split


@dataclass(frozen=True)
class Amount:
    """The numbers of weights in one number format.

    Attributes:
        dtype: The number format.
        numbers: How many numbers there are.
        packed_bytes: Bytes of weights that a checkpoint packs. None: each number takes its average share of scales.
    """

    dtype: str
    numbers: Array
    packed_bytes: Array | None = None

    @property
    def bytes(self) -> Array:
        if self.packed_bytes is None:
            return self.numbers * number_format(self.dtype).weight_bytes
        return self.packed_bytes

    def times(self, count: Array) -> "Amount":
        """Return the weights `count` times."""
        packed_bytes = None if self.packed_bytes is None else count * self.packed_bytes
        return Amount(self.dtype, count * self.numbers, packed_bytes)


def all_of(setting: Setting, layouts: Layouts, weights: Iterable[StoredWeight]) -> list[Amount]:
    """Return the amounts of some weights, one for each number format."""
    same: dict[tuple[str, bool], list[StoredWeight]] = {}
    for weight in weights:
        same.setdefault((weight.dtype, weight.packed), []).append(weight)
    return [_amount(setting, layouts, group) for group in same.values()]


def qkv(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """Wq, Wk, Wv over TPA, the same on every KVP rank. MLA: down-projections, whole, and the queries' up-projection."""
    return _named(setting, layouts, weights, "qkv", "latent_down", "query_up")


def key_absorption(
    setting: Setting, layouts: Layouts, attention: MultiHeadLatentAttention, weights: StoredWeights
) -> list[Amount]:
    """The half of the latents' up-projection that turns queries into latents, over TPA."""
    latents = attention.latents
    numbers = setting.query_heads(layouts, attention.heads) * (latents.nope_size * latents.kv_lora_rank)
    return [Amount(_latent_up_dtype(weights), numbers)]


def value_projection(attention: MultiHeadLatentAttention, weights: StoredWeights, num_heads: Array) -> list[Amount]:
    """The half that turns latent outputs of `num_heads` into values."""
    numbers = num_heads * (attention.latents.value_size * attention.latents.kv_lora_rank)
    return [Amount(_latent_up_dtype(weights), numbers)]


def _latent_up_dtype(weights: StoredWeights) -> str:
    """Return the dtype of the latents' up-projection, which never stays packed."""
    return next(weight.dtype for weight in weights if weight.spec.name == "latent_up")


def output_projection(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """Wo: rows over all ranks that share a request, or over TPA beside a copy of the FFN."""
    return _named(setting, layouts, weights, "output")


def dense_ffn(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """Gate, up and down, columns over all ranks of an FFN."""
    return _named(setting, layouts, weights, "gate_up", "down")


def all_experts(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """Gate, up and down of all routed experts that a rank holds of a layer."""
    return _named(setting, layouts, weights, "experts.{}.gate_up", "experts.{}.down")


def expert(setting: Setting, layouts: Layouts, moe: MoE, weights: StoredWeights) -> list[Amount]:
    """One expert's gate, up and down, columns over TPF."""
    share = num_experts(setting, layouts, moe)
    return [
        Amount(held.dtype, held.numbers / share, None if held.packed_bytes is None else held.packed_bytes / share)
        for held in all_experts(setting, layouts, weights)
    ]


def num_experts(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    """Experts of the fullest rank."""
    return _pieces(moe.num_experts, layouts.ep, setting, layouts)


def shared_experts(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """All shared experts: columns over all ranks of an FFN, or whole on each if groups have their own requests."""
    return _named(setting, layouts, weights, "shared.gate_up", "shared.down")


def router(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    return _named(setting, layouts, weights, "router")


def indexer(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """An indexer's queries, key and weights of its heads, whole on every rank."""
    return _named(setting, layouts, weights, "index_queries", "index_key", "index_heads")


def linear_inputs(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    """Linear attention's queries, keys, values, gates and rates."""
    return _named(setting, layouts, weights, "linear_in")


def linear_output(setting: Setting, layouts: Layouts, weights: StoredWeights) -> list[Amount]:
    return _named(setting, layouts, weights, "linear_out")


def _named(setting: Setting, layouts: Layouts, weights: StoredWeights, *names: str) -> list[Amount]:
    """Return the amounts of the weights with these names."""
    return all_of(setting, layouts, (weight for weight in weights if weight.spec.name in names))


def _amount(setting: Setting, layouts: Layouts, weights: Sequence[StoredWeight]) -> Amount:
    """Return the amount of weights of one format, all packed or none."""
    numbers, packed_bytes = layouts.zeros, layouts.zeros
    for weight in weights:
        experts, rows, columns = (_numbers(dim, setting, layouts) for dim in weight.spec.all_dims)
        numbers = numbers + experts * rows * columns
        if weight.packed:
            packed_bytes = packed_bytes + experts * rows * row_bytes(setting, layouts, weight)
            packed_bytes = packed_bytes + order_bytes(setting, layouts, weight)
    return Amount(weights[0].dtype, numbers, packed_bytes if weights[0].packed else None)


def _numbers(dim: Dim | None, setting: Setting, layouts: Layouts) -> float | Array:
    return 1.0 if dim is None else _owned_items(dim, setting, layouts) * dim.unit


def _owned_items(dim: Dim, setting: Setting, layouts: Layouts) -> float | Array:
    """Return how many items of a dim a rank has. The fullest rank's are integers, so sums of products are exact."""
    match dim.split:
        case Split.WHOLE:
            return float(dim.count)
        case Split.QUERY_HEADS:
            return setting.query_heads(layouts, dim.all_heads)
        case Split.KV_HEADS:
            return setting.kv_heads(layouts, dim.all_heads)
        case Split.OUTPUT_HEADS:
            return setting.merged_query_heads(layouts, dim.all_heads)
    return _pieces(dim.count, layouts.sharers(dim.split), setting, layouts)


def _pieces(count: int, ranks: Array, setting: Setting, layouts: Layouts) -> Array:
    return setting.priced_amount(layouts, np.ceil(count / ranks), count / ranks)
