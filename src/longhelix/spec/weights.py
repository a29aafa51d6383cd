"""The weights of a model, each declared once: what it is called, its rows and columns, and who shares them.

Three read this table: `models.parameters` (what one rank loads, and from where), `perf.weights` (numbers on the fullest
rank), and below `num_parameters` and `num_active_parameters`: how many there are, and how many of them a token meets.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import prod

from longhelix.spec.linear import LinearAttention
from longhelix.spec.mla import MLA
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE
from longhelix.spec.sparse import Indexer


class Split(Enum):
    """Which ranks of a stage share the items of a dim; `Layout` says who has which."""

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
    """`count` items of `unit` numbers each, of which ranks have some, whole."""

    split: Split
    count: int
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit


_ONCE = Dim(Split.WHOLE, 1)


@dataclass(frozen=True)
class WeightSpec:
    """A matrix of `rows` and `columns`, or a vector without columns.

    name: what the model calls it; what has one name is stacked by rows in the order of the table. tensor: what it is in
    checkpoints. Where every one of `experts` has its own, "{}" in both stands for the expert's number. exact: it
    is loaded in the checkpoint's dtype.
    """

    name: str
    tensor: str
    rows: Dim
    columns: Dim | None = None
    experts: Dim = _ONCE
    exact: bool = False
    stored: WeightDtype = WeightDtype.ACTIVATION

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Those of the tensor."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    @property
    def num_elements(self) -> int:
        """Numbers in it, or in that of one expert."""
        return prod(dim.size for dim in self.dims)


def embedding(spec: ModelSpec) -> WeightSpec:
    return WeightSpec("embedding", "model.embed_tokens.weight", Dim(Split.VOCABULARY, spec.vocab_size), _hidden(spec))


def last_norm(spec: ModelSpec) -> WeightSpec:
    return WeightSpec("norm", "model.norm.weight", _hidden(spec))


def head(spec: ModelSpec) -> WeightSpec:
    """Where embeddings are tied, the embedding's tensor."""
    tensor = embedding(spec).tensor if spec.tied_embeddings else "lm_head.weight"
    return _product("head", tensor, Dim(Split.VOCABULARY, spec.vocab_size), _hidden(spec))


def layer_weights(spec: ModelSpec, with_experts: bool, is_linear: bool = False) -> tuple[WeightSpec, ...]:
    """Those of one layer, whose FFN has experts or is dense, and whose attention may be linear; names and tensors
    without the layer's own prefix."""
    linear = spec.linear if is_linear else None
    attention = _attention(spec) if linear is None else _linear_attention(spec, linear)
    weights, renamed = (*attention, *_ffn(spec, spec.moe if with_experts else None)), spec.family.tensors
    return tuple(replace(each, tensor=renamed[each.tensor]) if each.tensor in renamed else each for each in weights)


def num_parameters(spec: ModelSpec) -> int:
    """All numbers of a model: matrices, norms and biases; a head that is the embedding counts once, further heads (MTP)
    not."""
    own_head = 0 if spec.tied_embeddings else head(spec).num_elements
    num_experts = 0 if spec.moe is None else spec.moe.num_experts
    ends = embedding(spec).num_elements + last_norm(spec).num_elements + own_head
    return ends + _in_layers(spec, num_experts)


def num_active_parameters(spec: ModelSpec) -> int:
    """Those that one token meets: all but an embedding that is not the head, and of the experts those it takes."""
    taken = 0 if spec.moe is None else spec.moe.experts_per_token
    return last_norm(spec).num_elements + head(spec).num_elements + _in_layers(spec, taken)


def _in_layers(spec: ModelSpec, num_experts: int) -> int:
    """With so many experts in each layer that has any."""
    layers = Counter((spec.has_experts(layer), spec.is_linear(layer)) for layer in range(spec.num_layers))
    return sum(
        count * weight.num_elements * (num_experts if weight.experts.split is Split.EXPERTS else 1)
        for kind, count in layers.items()
        for weight in layer_weights(spec, *kind)
    )


def _attention(spec: ModelSpec) -> Iterator[WeightSpec]:
    hidden = _hidden(spec)
    yield WeightSpec("attention_norm", "input_layernorm.weight", hidden)
    yield from _grouped_query(spec) if spec.mla is None else _latent(spec, spec.mla)
    if spec.attention_output_bias:
        yield WeightSpec("output_bias", "self_attn.o_proj.bias", hidden)


def _grouped_query(spec: ModelSpec) -> Iterator[WeightSpec]:
    hidden, size = _hidden(spec), spec.head_size
    queries, keys = (
        Dim(Split.QUERY_HEADS, spec.num_query_heads, 2 * size if spec.family.gated else size),
        Dim(Split.KV_HEADS, spec.num_kv_heads, size),
    )
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, rows in projections.items():
        yield _product("qkv", f"self_attn.{name}.weight", rows, hidden)
    for name, rows in projections.items() if spec.qkv_bias else ():
        yield WeightSpec("qkv_bias", f"self_attn.{name}.bias", rows)
    if spec.qk_norm:
        yield WeightSpec("q_norm", "self_attn.q_norm.weight", _whole(size))
        yield WeightSpec("k_norm", "self_attn.k_norm.weight", _whole(size))
    if spec.family.sinks:
        yield WeightSpec("sinks", "self_attn.sinks", Dim(Split.QUERY_HEADS, spec.num_query_heads))
    yield _product("output", "self_attn.o_proj.weight", hidden, Dim(Split.OUTPUT_HEADS, spec.num_query_heads, size))


def _latent(spec: ModelSpec, mla: MLA) -> Iterator[WeightSpec]:
    """MLA: down-projections whole on every rank, up-projections and the output by query heads."""
    hidden, latent = _hidden(spec), _whole(mla.kv_lora_rank)
    queries = Dim(Split.QUERY_HEADS, spec.num_query_heads, spec.head_size)
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
    for name, rows in down.items() if spec.qkv_bias else ():
        yield WeightSpec("latent_down_bias", f"self_attn.{name}.bias", rows)
    yield WeightSpec("latent_norm", "self_attn.kv_a_layernorm.weight", latent)
    made = Dim(Split.QUERY_HEADS, spec.num_query_heads, mla.nope_size + mla.value_size)
    yield WeightSpec("latent_up", "self_attn.kv_b_proj.weight", made, latent)
    values = Dim(Split.OUTPUT_HEADS, spec.num_query_heads, mla.value_size)
    yield _product("output", "self_attn.o_proj.weight", hidden, values)
    if spec.indexer is not None and mla.q_lora_rank is not None:
        yield from _indexer(spec, spec.indexer, _whole(mla.q_lora_rank))


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
    yield WeightSpec("attention_norm", "input_layernorm.weight", hidden)
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


def _ffn(spec: ModelSpec, moe: MoE | None) -> Iterator[WeightSpec]:
    hidden = _hidden(spec)
    yield WeightSpec("ffn_norm", "post_attention_layernorm.weight", hidden)
    if moe is not None:
        yield from _mixture(spec, moe)
        return
    yield from _biased_swiglu(spec, "", "mlp.", Dim(Split.FFN_COLUMNS, spec.ffn_size))


def _mixture(spec: ModelSpec, moe: MoE) -> Iterator[WeightSpec]:
    experts = _whole(moe.num_experts)
    yield WeightSpec("router", "mlp.gate.weight", experts, _hidden(spec), stored=WeightDtype.FLOAT32)
    if moe.biases:
        yield WeightSpec("router_bias", "mlp.gate.bias", experts)
    if moe.routing_bias:
        tensor = "mlp.gate.e_score_correction_bias"
        yield WeightSpec("routing_bias", tensor, experts, exact=True, stored=WeightDtype.FLOAT32)
    columns, each = Dim(Split.EXPERT_COLUMNS, moe.expert_size), Dim(Split.EXPERTS, moe.num_experts)
    yield from _swiglu(spec, "experts.{}.", "mlp.experts.{}.", columns, each)
    if moe.biases:
        yield from _swiglu_biases(spec, "experts.{}.", "mlp.experts.{}.", columns, each)
    if moe.shared_size:
        shared = Dim(Split.SHARED_COLUMNS, moe.shared_size)
        yield from _biased_swiglu(spec, "shared.", "mlp.shared_experts.", shared)
    if moe.shared_gate:
        tensor = "mlp.shared_expert_gate.weight"
        yield WeightSpec("shared_gate", tensor, _whole(1), _hidden(spec), stored=WeightDtype.FLOAT32)


def _biased_swiglu(spec: ModelSpec, name: str, tensor: str, columns: Dim) -> Iterator[WeightSpec]:
    yield from _swiglu(spec, name, tensor, columns)
    if spec.ffn_bias:
        yield from _swiglu_biases(spec, name, tensor, columns)


def _swiglu_biases(spec: ModelSpec, name: str, tensor: str, columns: Dim, experts: Dim = _ONCE) -> Iterator[WeightSpec]:
    yield WeightSpec(name + "gate_up_bias", tensor + "gate_proj.bias", columns, experts=experts)
    yield WeightSpec(name + "gate_up_bias", tensor + "up_proj.bias", columns, experts=experts)
    yield WeightSpec(name + "down_bias", tensor + "down_proj.bias", _hidden(spec), experts=experts)


def _swiglu(spec: ModelSpec, name: str, tensor: str, columns: Dim, experts: Dim = _ONCE) -> Iterator[WeightSpec]:
    hidden = _hidden(spec)
    yield _product(name + "gate_up", tensor + "gate_proj.weight", columns, hidden, experts)
    yield _product(name + "gate_up", tensor + "up_proj.weight", columns, hidden, experts)
    yield _product(name + "down", tensor + "down_proj.weight", hidden, columns, experts)


def _product(name: str, tensor: str, rows: Dim, columns: Dim, experts: Dim = _ONCE) -> WeightSpec:
    return WeightSpec(name, tensor, rows, columns, experts, stored=WeightDtype.PRODUCT)


def _hidden(spec: ModelSpec) -> Dim:
    return _whole(spec.hidden_size)


def _whole(size: int) -> Dim:
    return Dim(Split.WHOLE, size)
