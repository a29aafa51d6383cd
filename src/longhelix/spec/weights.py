"""The table of a model's weights: the name, rows and columns of each weight, and the ranks that share it.

This table has three readers: `models.parameters` (a rank's tensors), `perf.weights` (amounts on the fullest
rank), and below `num_parameters` and `num_active_parameters`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod

from longhelix.spec.attention import GroupedQueryAttention, MultiHeadLatentAttention
from longhelix.spec.families import FAMILIES
from longhelix.spec.ffn import MLP, Activation
from longhelix.spec.layer import FFN, LayerSpec, Mixer
from longhelix.spec.layout import HeadShape
from longhelix.spec.linear import LinearAttention
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE
from longhelix.spec.norms import Norms
from longhelix.spec.quantised_modules import Storage
from longhelix.spec.sparse import Indexer


class Split(Enum):
    """Which ranks of a stage share the items of a dim. `Layout` divides the items."""

    WHOLE = auto()  # every rank has all
    QUERY_HEADS = auto()  # over TPA
    KV_HEADS = auto()  # over TPA
    OUTPUT_HEADS = auto()  # query heads, over the ranks that sum the output projection
    LINEAR_HEADS = auto()  # of linear attention: over those ranks as well
    FFN_COLUMNS = auto()  # over all ranks of an FFN
    SHARED_COLUMNS = auto()  # of shared experts: over all ranks of an FFN
    EXPERT_COLUMNS = auto()  # over TPF
    EXPERTS = auto()  # over EP
    VOCABULARY = auto()  # over all ranks of an FFN


class WeightDtype(Enum):
    """The dtype in which the engine keeps a weight."""

    ACTIVATION = auto()  # that of activations
    PRODUCT = auto()  # that of weights, which may be narrower: those of large products
    FLOAT32 = auto()


@dataclass(frozen=True)
class Dim:
    """A dimension of a weight. It consists of items, and ranks share the items without splitting any.

    Attributes:
        split: Which ranks share them.
        count: How many items there are.
        unit: Numbers of an item.
        heads: For splits by heads of attention, all heads of the layer.
    """

    split: Split
    count: int
    unit: int = 1
    heads: HeadShape | None = None

    @property
    def size(self) -> int:
        return self.count * self.unit

    @property
    def all_heads(self) -> HeadShape:
        """`heads`, for splits by heads of attention."""
        assert self.heads is not None
        return self.heads


_ONCE = Dim(Split.WHOLE, 1)


@dataclass(frozen=True)
class WeightSpec:
    """A matrix of `rows` and `columns`, or a vector without columns.

    Attributes:
        name: Its name in the model. Weights of the same name are stacked by rows in the order of the table.
        tensor: Its name in checkpoints. If each of `experts` has its own weight, both names have "{}" for its number.
        rows: Its first dim.
        columns: Its second dim. None for vectors.
        experts: Experts that have their own weight.
        exact: It is loaded in the checkpoint's dtype.
        stored: The dtype in which the engine keeps it.
        plus_one: The checkpoint has the weight minus one. The sum is exact in float32.
    """

    name: str
    tensor: str
    rows: Dim
    columns: Dim | None = None
    experts: Dim = _ONCE
    exact: bool = False
    stored: WeightDtype = WeightDtype.ACTIVATION
    plus_one: bool = False

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims of the tensor."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    @property
    def all_dims(self) -> tuple[Dim, Dim, Dim | None]:
        """Its experts, rows and columns."""
        return self.experts, self.rows, self.columns

    @property
    def is_expert(self) -> bool:
        """Whether each expert has its own."""
        return self.experts.split is Split.EXPERTS

    @property
    def in_experts(self) -> bool:
        """Whether it belongs to routed or shared experts."""
        return self.is_expert or self.name.startswith("shared.")

    @property
    def num_elements(self) -> int:
        """Numbers of the weight, or of one expert's weight."""
        return prod(dim.size for dim in self.dims)


_EMBEDDING = "model.embed_tokens"


def embedding(spec: ModelSpec) -> WeightSpec:
    """Return the embedding. It stays as a checkpoint packs it, like weights of products."""
    stored = WeightDtype.ACTIVATION if _embedding_storage(spec) is None else WeightDtype.PRODUCT
    rows = Dim(Split.VOCABULARY, spec.vocabulary.size)
    return WeightSpec("embedding", f"{_EMBEDDING}.weight", rows, _hidden(spec), stored=stored)


def shares_embedding(spec: ModelSpec) -> bool:
    """Return whether the head is the embedding. A tied head of a packed embedding is a weight of its own."""
    storage = _embedding_storage(spec)
    return spec.vocabulary.tied_embeddings and (storage is None or storage.is_number)


def _embedding_storage(spec: ModelSpec) -> Storage | None:
    quantisation = spec.checkpoint.quantisation
    return None if quantisation is None else quantisation.storage_of(_EMBEDDING)


def last_norm(spec: ModelSpec) -> WeightSpec:
    return _norm(spec.layers[-1].norms, "norm", "model.norm.weight", _hidden(spec))


def head(spec: ModelSpec) -> WeightSpec:
    """Return the LM head. With tied embeddings, its tensor is the embedding."""
    tensor = embedding(spec).tensor if spec.vocabulary.tied_embeddings else "lm_head.weight"
    return _product("head", tensor, Dim(Split.VOCABULARY, spec.vocabulary.size), _hidden(spec))


def packed_storage(storages: Iterable[Storage | None], in_experts: bool) -> Storage | None:
    """Return how a product's weight is kept, from how a checkpoint stores its tensors.

    None: it becomes numbers of the model's dtype, because the checkpoint has numbers, or its tensors differ, or it is
    an expert's and its inputs are ordered: the rows of all experts lie in one order.
    """
    first, *others = storages
    if first is None or (first.ordered and in_experts):
        return None
    form = first.kept, first.ordered
    return first if all(each is not None and (each.kept, each.ordered) == form for each in others) else None


def expert_formats(spec: ModelSpec, layer: int, weight_dtype: str) -> set[str]:
    """Return the number formats in which the weights of a layer's experts are kept, on all ranks.

    weight_dtype: that of weights of products which the checkpoint does not pack.
    """
    quantisation = spec.checkpoint.quantisation
    if quantisation is None:
        return {weight_dtype}
    weights = (weight for weight in layer_weights(spec, spec.layers[layer]) if weight.in_experts)
    # The checkpoint has one format for all routed experts of a layer.
    modules = {
        f"model.layers.{layer}.{weight.tensor.format(0)}".removesuffix(".weight")
        for weight in weights
        if weight.stored is WeightDtype.PRODUCT
    }
    packed = (packed_storage([quantisation.storage_of(module)], in_experts=True) for module in modules)
    return {weight_dtype if storage is None else storage.kept for storage in packed}


def layer_weights(spec: ModelSpec, layer: LayerSpec) -> tuple[WeightSpec, ...]:
    """Return the weights of a layer. Names and tensors do not have the layer's prefix."""
    parts = (*layer.mixers, *layer.ffns)
    return tuple(weight for part in parts for weight in part_weights(spec, part, layer.norms))


def part_weights(spec: ModelSpec, part: Mixer | FFN, norms: Norms) -> tuple[WeightSpec, ...]:
    """Return the weights of a mixer or FFN and of its norms. Names do not have the layer's prefix."""
    weights = _ffn(spec, part, norms) if isinstance(part, MLP | MoE) else _mixer(spec, part, norms)
    renamed = FAMILIES[spec.architecture].tensors
    return tuple(
        replace(weight, tensor=renamed[weight.tensor]) if weight.tensor in renamed else weight for weight in weights
    )


def num_parameters(spec: ModelSpec) -> int:
    """Count all numbers of a model: matrices, norms and biases. Tied embeddings count once, MTP heads do not count."""
    own_head = 0 if spec.vocabulary.tied_embeddings else head(spec).num_elements
    ends = embedding(spec).num_elements + last_norm(spec).num_elements + own_head
    return ends + _in_layers(spec, taken_only=False)


def num_active_parameters(spec: ModelSpec) -> int:
    """Count the numbers that one token uses: its experts, and everything else except for an untied embedding."""
    return last_norm(spec).num_elements + head(spec).num_elements + _in_layers(spec, taken_only=True)


def _in_layers(spec: ModelSpec, taken_only: bool) -> int:
    """Count the numbers in layers, with all experts, or only with those that a token takes."""

    def times(layer: LayerSpec, weight: WeightSpec) -> int:
        if not weight.is_expert:
            return 1
        assert layer.moe is not None
        return layer.moe.experts_per_token if taken_only else layer.moe.num_experts

    return sum(
        count * weight.num_elements * times(layer, weight)
        for layer, count in Counter(spec.layers).items()
        for weight in layer_weights(spec, layer)
    )


def _mixer(spec: ModelSpec, mixer: Mixer, norms: Norms) -> Iterator[WeightSpec]:
    hidden = _hidden(spec)
    if norms.before:
        yield _norm(norms, "attention_norm", "input_layernorm.weight", hidden)
    match mixer:
        case GroupedQueryAttention():
            yield from _grouped_query(spec, mixer, norms)
        case MultiHeadLatentAttention():
            yield from _latent(spec, mixer)
        case LinearAttention():
            yield from _linear_attention(spec, mixer)
    if norms.after:
        yield _norm(norms, "attention_norm_after", "post_attention_layernorm.weight", hidden)


def _norm(norms: Norms, name: str, tensor: str, rows: Dim) -> WeightSpec:
    """Return the weight of a norm. A sum with one keeps all its digits: the engine does not round it to fewer bits."""
    stored = WeightDtype.FLOAT32 if norms.plus_one else WeightDtype.ACTIVATION
    return WeightSpec(name, tensor, rows, stored=stored, plus_one=norms.plus_one)


def _grouped_query(spec: ModelSpec, attention: GroupedQueryAttention, norms: Norms) -> Iterator[WeightSpec]:
    hidden, size, heads, has = _hidden(spec), attention.head_size, attention.heads, attention.projections
    queries, keys = (
        _heads(Split.QUERY_HEADS, heads, 2 * size if has.output_gate else size),
        _heads(Split.KV_HEADS, heads, size),
    )
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, rows in projections.items():
        yield _product("qkv", f"self_attn.{name}.weight", rows, hidden)
    for name, rows in projections.items() if has.qkv_bias else ():
        yield WeightSpec("qkv_bias", f"self_attn.{name}.bias", rows)
    for name in ("q_norm", "k_norm") if attention.norms.qk else ():
        yield _norm(norms, name, f"self_attn.{name}.weight", _whole(size))
    if attention.scores.sinks:
        yield WeightSpec("sinks", "self_attn.sinks", _heads(Split.QUERY_HEADS, heads, 1))
    yield _product("output", "self_attn.o_proj.weight", hidden, _heads(Split.OUTPUT_HEADS, heads, size))
    if has.output_bias:
        yield WeightSpec("output_bias", "self_attn.o_proj.bias", hidden)


def _latent(spec: ModelSpec, attention: MultiHeadLatentAttention) -> Iterator[WeightSpec]:
    """MLA: down-projections whole on every rank, up-projections and the output by query heads."""
    mla, heads = attention.latents, attention.heads
    hidden, latent = _hidden(spec), _whole(mla.kv_lora_rank)
    queries = _heads(Split.QUERY_HEADS, heads, attention.head_size)
    down = {"kv_a_proj_with_mqa": _whole(mla.cached_size)}
    if mla.q_lora_rank is None:
        yield _product("query_up", "self_attn.q_proj.weight", queries, hidden)
    else:
        query_latent = _whole(mla.q_lora_rank)
        down = {"q_a_proj": query_latent} | down
        yield WeightSpec("query_norm", "self_attn.q_a_layernorm.weight", query_latent)
        yield _product("query_up", "self_attn.q_b_proj.weight", queries, query_latent)
    for name, rows in down.items():
        yield _product("latent_down", f"self_attn.{name}.weight", rows, hidden)
    for name, rows in down.items() if attention.qkv_bias else ():
        yield WeightSpec("latent_down_bias", f"self_attn.{name}.bias", rows)
    yield WeightSpec("latent_norm", "self_attn.kv_a_layernorm.weight", latent)
    made = _heads(Split.QUERY_HEADS, heads, mla.nope_size + mla.value_size)
    yield WeightSpec("latent_up", "self_attn.kv_b_proj.weight", made, latent)
    values = _heads(Split.OUTPUT_HEADS, heads, mla.value_size)
    yield _product("output", "self_attn.o_proj.weight", hidden, values)
    if attention.visibility.indexer is not None and mla.q_lora_rank is not None:
        yield from _indexer(spec, attention.visibility.indexer, _whole(mla.q_lora_rank))
    if attention.output_bias:
        yield WeightSpec("output_bias", "self_attn.o_proj.bias", hidden)


def _indexer(spec: ModelSpec, indexer: Indexer, query_latent: Dim) -> Iterator[WeightSpec]:
    """Whole on every rank, as its heads score together (TensorRT-LLM, tech blog 15: no TP of the indexer)."""
    hidden, key = _hidden(spec), _whole(indexer.head_size)
    queries = _whole(indexer.num_heads * indexer.head_size)
    yield _product("index_queries", "self_attn.indexer.wq_b.weight", queries, query_latent)
    yield _product("index_key", "self_attn.indexer.wk.weight", key, hidden)
    yield _product("index_heads", "self_attn.indexer.weights_proj.weight", _whole(indexer.num_heads), hidden)
    yield WeightSpec("index_norm", "self_attn.indexer.k_norm.weight", key)
    yield WeightSpec("index_norm_bias", "self_attn.indexer.k_norm.bias", key)


def _linear_attention(spec: ModelSpec, linear: LinearAttention) -> Iterator[WeightSpec]:
    """Gated DeltaNet by heads; a key head, with its queries, is where its value heads are."""
    hidden, values = _hidden(spec), Dim(Split.LINEAR_HEADS, linear.num_value_heads, linear.value_size)
    heads, keys = Dim(Split.LINEAR_HEADS, linear.num_value_heads), linear.key_size
    for part in ("q", "k"):
        rows = Dim(Split.LINEAR_HEADS, linear.num_key_heads, keys)
        yield _product("linear_in", f"linear_attn.in_proj_{part}.weight", rows, hidden)
        yield WeightSpec("convolution", f"linear_attn.conv1d_{part}.weight", rows, _whole(linear.kernel_size))
    for part in ("v", "z"):
        yield _product("linear_in", f"linear_attn.in_proj_{part}.weight", values, hidden)
    yield WeightSpec("convolution", "linear_attn.conv1d_v.weight", values, _whole(linear.kernel_size))
    for part in ("b", "a"):
        yield _product("linear_in", f"linear_attn.in_proj_{part}.weight", heads, hidden)
    yield WeightSpec("decay", "linear_attn.A_log", heads)
    yield WeightSpec("decay_bias", "linear_attn.dt_bias", heads)
    yield WeightSpec("linear_norm", "linear_attn.norm.weight", _whole(linear.value_size))
    yield _product("linear_out", "linear_attn.out_proj.weight", hidden, values)


def _ffn(spec: ModelSpec, ffn: FFN, norms: Norms) -> Iterator[WeightSpec]:
    hidden = _hidden(spec)
    if norms.before:
        # Where outputs of attention are normed as well, that norm has the usual name of this one.
        before = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        yield _norm(norms, "ffn_norm", f"{before}.weight", hidden)
    match ffn:
        case MLP():
            columns = Dim(Split.FFN_COLUMNS, ffn.num_columns)
            yield from _shared_mlp(spec, "", "mlp.", columns, ffn.activation, ffn.bias)
        case MoE():
            yield from _mixture(spec, ffn)
    if norms.after:
        yield _norm(norms, "ffn_norm_after", "post_feedforward_layernorm.weight", hidden)


def _mixture(spec: ModelSpec, moe: MoE) -> Iterator[WeightSpec]:
    experts = _whole(moe.num_experts)
    yield WeightSpec("router", "mlp.gate.weight", experts, _hidden(spec), stored=WeightDtype.FLOAT32)
    if moe.biases:
        yield WeightSpec("router_bias", "mlp.gate.bias", experts)
    if moe.routing.bias:
        tensor = "mlp.gate.e_score_correction_bias"
        yield WeightSpec("routing_bias", tensor, experts, exact=True, stored=WeightDtype.FLOAT32)
    columns, experts = Dim(Split.EXPERT_COLUMNS, moe.expert_size), Dim(Split.EXPERTS, moe.num_experts)
    yield from _mlp(spec, "experts.{}.", "mlp.experts.{}.", columns, moe.activation, experts)
    if moe.biases:
        yield from _mlp_biases(spec, "experts.{}.", "mlp.experts.{}.", columns, moe.activation, experts)
    if moe.shared_size:
        shared = Dim(Split.SHARED_COLUMNS, moe.shared_size)
        yield from _shared_mlp(spec, "shared.", "mlp.shared_experts.", shared, moe.activation, moe.shared_bias)
    if moe.routing.shared_gate:
        tensor = "mlp.shared_expert_gate.weight"
        yield WeightSpec("shared_gate", tensor, _whole(1), _hidden(spec), stored=WeightDtype.FLOAT32)


def _shared_mlp(
    spec: ModelSpec, name: str, tensor: str, columns: Dim, activation: Activation, has_bias: bool
) -> Iterator[WeightSpec]:
    """Of an FFN that all rows pass through."""
    yield from _mlp(spec, name, tensor, columns, activation)
    if has_bias:
        yield from _mlp_biases(spec, name, tensor, columns, activation)


def _mlp_biases(
    spec: ModelSpec, name: str, tensor: str, columns: Dim, activation: Activation, experts: Dim = _ONCE
) -> Iterator[WeightSpec]:
    for side in _sides(activation):
        yield WeightSpec(name + "gate_up_bias", f"{tensor}{side}_proj.bias", columns, experts=experts)
    yield WeightSpec(name + "down_bias", tensor + "down_proj.bias", _hidden(spec), experts=experts)


def _mlp(
    spec: ModelSpec, name: str, tensor: str, columns: Dim, activation: Activation, experts: Dim = _ONCE
) -> Iterator[WeightSpec]:
    """An FFN's weights. "gate_up" is only the up-projection if there is no gate."""
    hidden = _hidden(spec)
    for side in _sides(activation):
        yield _product(name + "gate_up", f"{tensor}{side}_proj.weight", columns, hidden, experts)
    yield _product(name + "down", tensor + "down_proj.weight", hidden, columns, experts)


def _sides(activation: Activation) -> tuple[str, ...]:
    return ("gate", "up") if activation.gated else ("up",)


def _product(name: str, tensor: str, rows: Dim, columns: Dim, experts: Dim = _ONCE) -> WeightSpec:
    return WeightSpec(name, tensor, rows, columns, experts=experts, stored=WeightDtype.PRODUCT)


def _hidden(spec: ModelSpec) -> Dim:
    return _whole(spec.hidden_size)


def _heads(split: Split, heads: HeadShape, unit: int) -> Dim:
    """KV heads or query heads, of `unit` numbers each."""
    return Dim(split, heads.num_kv_heads if split is Split.KV_HEADS else heads.num_query_heads, unit, heads)


def _whole(size: int) -> Dim:
    return Dim(Split.WHOLE, size)
