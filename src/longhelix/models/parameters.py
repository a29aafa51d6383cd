"""Every parameter of the model, declared once: its checkpoint names, global shapes and this rank's slices.

The loader reads by this table, and a checkpoint is checked against it before any rank starts. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longhelix.errors import UserError
from longhelix.layout import HeadShape, Layout
from longhelix.spec import DTYPES, ModelSpec


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor of `shape`, of which a rank keeps `slices` (one range per dim)."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A local tensor under the model's own name: its sources, one after the other along dim 0."""

    name: str
    sources: tuple[Source, ...]

    @property
    def num_elements(self) -> int:
        total = 0
        for source in self.sources:
            size = 1
            for length in source.local_shape:
                size *= length
            total += size
        return total


def declare(spec: ModelSpec, layout: Layout, rank: int) -> tuple[Parameter, ...]:
    """The parameters of `rank`, in the order in which they are loaded."""
    vocabulary, hidden = layout.vocabulary(spec.vocab_size, rank), range(spec.hidden_size)
    parameters = [_matrix("embedding", "model.embed_tokens.weight", spec.vocab_size, vocabulary, hidden)]
    for layer in range(spec.num_layers):
        parameters += _layer(spec, layout, rank, f"layers.{layer}.", f"model.layers.{layer}.")
    parameters.append(_vector("norm", "model.norm.weight", spec.hidden_size))
    if not spec.tied_embeddings:
        parameters.append(_matrix("head", "lm_head.weight", spec.vocab_size, vocabulary, hidden))
    return tuple(parameters)


def _layer(spec: ModelSpec, layout: Layout, rank: int, to: str, at: str) -> Iterator[Parameter]:
    heads = HeadShape(spec.num_query_heads, spec.num_kv_heads)
    size, hidden, columns = spec.head_size, range(spec.hidden_size), layout.ffn_columns(spec.ffn_size, rank)
    kv_rows = (spec.num_kv_heads * size, _rows(layout.kv_heads(heads, rank), size))
    query_rows = (spec.num_query_heads * size, _rows(layout.query_heads(heads, rank), size))
    merged_rows = _rows(layout.merged_query_heads(heads, rank), size)
    projections = (("q_proj", *query_rows), ("k_proj", *kv_rows), ("v_proj", *kv_rows))

    yield _vector(to + "attention_norm", at + "input_layernorm.weight", spec.hidden_size)
    yield _stacked(
        to + "qkv", [(at + f"self_attn.{name}.weight", total, rows) for name, total, rows in projections], hidden
    )
    if spec.qkv_bias:
        yield _stacked(
            to + "qkv_bias", [(at + f"self_attn.{name}.bias", total, rows) for name, total, rows in projections]
        )
    if spec.qk_norm:
        yield _vector(to + "q_norm", at + "self_attn.q_norm.weight", size)
        yield _vector(to + "k_norm", at + "self_attn.k_norm.weight", size)
    output = Source(at + "self_attn.o_proj.weight", (spec.hidden_size, query_rows[0]), (hidden, merged_rows))
    yield Parameter(to + "output", (output,))
    if spec.attention_output_bias:
        yield _vector(to + "output_bias", at + "self_attn.o_proj.bias", spec.hidden_size)
    yield _vector(to + "ffn_norm", at + "post_attention_layernorm.weight", spec.hidden_size)
    gate_up = [(at + f"mlp.{name}.weight", spec.ffn_size, columns) for name in ("gate_proj", "up_proj")]
    yield _stacked(to + "gate_up", gate_up, hidden)
    down = Source(at + "mlp.down_proj.weight", (spec.hidden_size, spec.ffn_size), (hidden, columns))
    yield Parameter(to + "down", (down,))
    if spec.ffn_bias:
        biases = [(at + f"mlp.{name}.bias", spec.ffn_size, columns) for name in ("gate_proj", "up_proj")]
        yield _stacked(to + "gate_up_bias", biases)
        yield _vector(to + "down_bias", at + "mlp.down_proj.bias", spec.hidden_size)


def _rows(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)


def _vector(name: str, source: str, length: int) -> Parameter:
    return Parameter(name, (Source(source, (length,), (range(length),)),))


def _matrix(name: str, source: str, num_rows: int, rows: range, columns: range) -> Parameter:
    return Parameter(name, (Source(source, (num_rows, len(columns)), (rows, columns)),))


def _stacked(name: str, parts: list[tuple[str, int, range]], columns: range | None = None) -> Parameter:
    """Sources stacked by rows: matrices with `columns`, or vectors without."""
    if columns is None:
        return Parameter(name, tuple(Source(source, (total,), (rows,)) for source, total, rows in parts))
    return Parameter(
        name, tuple(Source(source, (total, len(columns)), (rows, columns)) for source, total, rows in parts)
    )


def check(spec: ModelSpec, tensors: Mapping[str, tuple[tuple[int, ...], str]], quantised: bool) -> None:
    """Hold a checkpoint's tensors (name -> shape, dtype) against the table; raises UserError at the first misfit.

    `quantised`: whether dtypes other than the floats are read (GGUF dequantises, safetensors do not).
    """
    declared = {source.name: source for parameter in declare(spec, Layout(), 0) for source in parameter.sources}
    for name, source in declared.items():
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
    """Tensors that some exporters write although the model derives or shares them."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")
