"""The parameters of one layer's attention. No torch."""

from collections.abc import Iterator

from longhelix.layout import HeadShape, Layout
from longhelix.models.parameter import Parameter, matrix, sliced, stacked, vector
from longhelix.spec import MLA, ModelSpec


def attention_parameters(spec: ModelSpec, layout: Layout, rank: int, to: str, at: str) -> Iterator[Parameter]:
    """Under the model's names `to`..., from the checkpoint's `at`..., norm included."""
    yield vector(to + "attention_norm", at + "input_layernorm.weight", spec.hidden_size)
    parts = _heads(spec, layout, rank, to, at) if spec.mla is None else _latent(spec, spec.mla, layout, rank, to, at)
    yield from parts
    if spec.attention_output_bias:
        yield vector(to + "output_bias", at + "self_attn.o_proj.bias", spec.hidden_size)


def _heads(spec: ModelSpec, layout: Layout, rank: int, to: str, at: str) -> Iterator[Parameter]:
    heads = HeadShape(spec.num_query_heads, spec.num_kv_heads)
    size, hidden = spec.head_size, range(spec.hidden_size)
    kv_rows = (spec.num_kv_heads * size, _rows(layout.kv_heads(heads, rank), size))
    query_rows = (spec.num_query_heads * size, _rows(layout.query_heads(heads, rank), size))
    projections = (("q_proj", *query_rows), ("k_proj", *kv_rows), ("v_proj", *kv_rows))
    yield stacked(
        to + "qkv", [(at + f"self_attn.{name}.weight", total, rows) for name, total, rows in projections], hidden
    )
    if spec.qkv_bias:
        yield stacked(
            to + "qkv_bias", [(at + f"self_attn.{name}.bias", total, rows) for name, total, rows in projections]
        )
    if spec.qk_norm:
        yield vector(to + "q_norm", at + "self_attn.q_norm.weight", size)
        yield vector(to + "k_norm", at + "self_attn.k_norm.weight", size)
    output = _rows(layout.output_heads(heads, rank), size)
    yield sliced(to + "output", at + "self_attn.o_proj.weight", spec.hidden_size, query_rows[0], output)


def _latent(spec: ModelSpec, mla: MLA, layout: Layout, rank: int, to: str, at: str) -> Iterator[Parameter]:
    """MLA: down-projections whole on every rank, up-projections and the output by query heads."""
    heads, at = HeadShape(spec.num_query_heads, spec.num_kv_heads), at + "self_attn."
    hidden, held = range(spec.hidden_size), layout.query_heads(heads, rank)
    queries = spec.num_query_heads * spec.head_size, _rows(held, spec.head_size)
    down = [("kv_a_proj_with_mqa", mla.cached_size)]
    if mla.q_lora_rank is None:
        yield matrix(to + "query_up", at + "q_proj.weight", *queries, hidden)
    else:
        down.insert(0, ("q_a_proj", mla.q_lora_rank))
        yield vector(to + "query_norm", at + "q_a_layernorm.weight", mla.q_lora_rank)
        yield matrix(to + "query_up", at + "q_b_proj.weight", *queries, range(mla.q_lora_rank))
    yield stacked(to + "latent_down", [(at + f"{name}.weight", size, range(size)) for name, size in down], hidden)
    if spec.qkv_bias:
        yield stacked(to + "latent_down_bias", [(at + f"{name}.bias", size, range(size)) for name, size in down])
    yield vector(to + "latent_norm", at + "kv_a_layernorm.weight", mla.kv_lora_rank)
    size = mla.nope_size + mla.value_size
    total = spec.num_query_heads * size
    yield matrix(to + "latent_up", at + "kv_b_proj.weight", total, _rows(held, size), range(mla.kv_lora_rank))
    output = _rows(layout.output_heads(heads, rank), mla.value_size)
    yield sliced(to + "output", at + "o_proj.weight", spec.hidden_size, spec.num_query_heads * mla.value_size, output)


def _rows(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
