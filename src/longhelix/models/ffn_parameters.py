"""The parameters of one layer's FFN. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from longhelix.layout import Layout
from longhelix.models.parameter import Parameter, matrix, sliced, stacked, vector
from longhelix.spec import ModelSpec, MoE


@dataclass(frozen=True)
class _Names:
    """What checkpoints of an architecture call the parts of an FFN with experts."""

    ffn: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


_NAMES = {"mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"), "qwen2_moe": _Names(shared="shared_expert")}


def ffn_parameters(spec: ModelSpec, layout: Layout, rank: int, layer: int, to: str, at: str) -> Iterator[Parameter]:
    """Under the model's names `to`..., from the checkpoint's `at`..., norm included."""
    yield vector(to + "ffn_norm", at + "post_attention_layernorm.weight", spec.hidden_size)
    if spec.moe is not None and spec.has_experts(layer):
        yield from _experts(spec, spec.moe, layout, rank, to, at)
        return
    columns = layout.ffn_columns(spec.ffn_size, rank)
    yield from _ffn(spec, _Names(), spec.ffn_size, columns, to, at + "mlp.")
    if spec.ffn_bias:
        biases = [(at + f"mlp.{name}.bias", spec.ffn_size, columns) for name in ("gate_proj", "up_proj")]
        yield stacked(to + "gate_up_bias", biases)
        yield vector(to + "down_bias", at + "mlp.down_proj.bias", spec.hidden_size)


def _experts(spec: ModelSpec, moe: MoE, layout: Layout, rank: int, to: str, at: str) -> Iterator[Parameter]:
    names, hidden = _NAMES.get(spec.architecture, _Names()), range(spec.hidden_size)
    at += names.ffn + "."
    yield matrix(to + "router", at + "gate.weight", moe.num_experts, range(moe.num_experts), hidden)
    if moe.routing_bias:
        yield vector(to + "routing_bias", at + "gate.e_score_correction_bias", moe.num_experts, exact=True)
    columns = layout.expert_columns(moe.expert_size, rank)
    for expert in layout.experts(moe.num_experts, rank):
        yield from _ffn(spec, names, moe.expert_size, columns, f"{to}experts.{expert}.", f"{at}experts.{expert}.")
    if moe.shared_size:
        shared = layout.ffn_columns(moe.shared_size, rank)
        yield from _ffn(spec, _Names(), moe.shared_size, shared, to + "shared.", f"{at}{names.shared}.")
    if moe.shared_gate:
        yield matrix(to + "shared_gate", at + "shared_expert_gate.weight", 1, range(1), hidden)


def _ffn(spec: ModelSpec, names: _Names, size: int, columns: range, to: str, at: str) -> Iterator[Parameter]:
    gate_up = [(at + f"{name}.weight", size, columns) for name in (names.gate, names.up)]
    yield stacked(to + "gate_up", gate_up, range(spec.hidden_size))
    yield sliced(to + "down", at + f"{names.down}.weight", spec.hidden_size, size, columns)
