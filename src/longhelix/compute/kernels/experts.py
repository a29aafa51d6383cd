"""Ops of an FFN with experts: routing of rows to experts, and the outputs of experts.

CPUs run native kernels over weights in panels, GPUs run grouped products over weights in rows, and other devices the
reference. Shared experts count as one more expert with the number `num_experts`, which every row takes last. So routed
and shared experts are one op and one sum.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from longhelix.compute.kernels import native, reference
from longhelix.compute.kernels.library import (
    activation_arguments,
    activation_of,
    dense,
    is_compiling,
    library,
    triton_kernels,
)
from longhelix.compute.kernels.operands import check_operands, check_taken
from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.compute.kernels.weight import PACKED, PANELS, PLAIN, Weight, WeightArrangement
from longhelix.spec import Activation, MoE, Routing

SWIGLU = Activation()


def route(logits_TX: Tensor, bias_E: Tensor | None, moe: MoE) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row. Of equal scores, the expert or group with the lower number wins.

    Args:
        logits_TX: Logits of the experts, then of the shared gate, if there is one. float32.
        bias_E: Added to scores when experts are chosen, but not to weights. float32.

    Returns:
        weights_TY (float32) and experts_TY (int64), best first. Y is the number of experts per token. If there are
        shared experts, one more comes last, weighted by 1 or by the sigmoid of its gate.

    Softmax routing as in Mixtral (arXiv 2401.04088) and DeepSeek-V2 (arXiv 2405.04434, group-limited); sigmoid routing
    with a bias that only chooses as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    if _is_native(logits_TX) and not is_compiling():
        return _route_native(logits_TX, bias_E, moe)
    return torch.ops.longhelix.route(logits_TX, bias_E, *_routing(moe))


library.define(
    "route(Tensor logits_TX, Tensor? bias_E, int num_experts, int experts_per_token, bool shared, bool shared_gate, "
    "bool sigmoid, bool normalised, int num_groups, int groups_per_token, float scale) -> (Tensor, Tensor)"
)


def _routing(moe: MoE) -> tuple[int, int, bool, bool, bool, bool, int, int, float]:
    sizes, routing = (moe.num_experts, moe.experts_per_token, moe.shared_size > 0), moe.routing
    groups = routing.num_groups, routing.groups_per_token
    return *sizes, routing.shared_gate, routing.sigmoid, routing.normalised, *groups, routing.scale


def _route(logits_TX, bias_E, num_experts, per_token, shared, shared_gate, sigmoid, normalised, groups, taken, scale):
    moe = MoE(
        num_experts,
        per_token,
        expert_size=0,
        shared_size=int(shared),
        routing=Routing(
            shared_gate=shared_gate,
            sigmoid=sigmoid,
            normalised=normalised,
            num_groups=groups,
            groups_per_token=taken,
            scale=scale,
        ),
    )
    return (_route_native if _is_native(logits_TX) else reference.route)(logits_TX, bias_E, moe)


def _is_native(logits_TX: Tensor) -> bool:
    return native.module is not None and logits_TX.device.type == "cpu"


def _route_native(logits_TX, bias_E, moe):
    logits_TX, bias_E = logits_TX.contiguous(), None if bias_E is None else bias_E.contiguous()
    rows, columns = len(logits_TX), moe.experts_per_token + (moe.shared_size > 0)
    weights_TY = logits_TX.new_empty(rows, columns)
    experts_TY = logits_TX.new_empty(rows, columns, dtype=torch.int64)
    native.module.route(
        logits_TX.data_ptr(),
        rows,
        0 if bias_E is None else bias_E.data_ptr(),
        moe.num_experts,
        moe.experts_per_token,
        moe.routing.num_groups,
        moe.routing.groups_per_token,
        moe.routing.sigmoid,
        moe.routing.normalised,
        moe.routing.scale,
        moe.shared_size > 0,
        moe.routing.shared_gate,
        weights_TY.data_ptr(),
        experts_TY.data_ptr(),
    )
    return weights_TY, experts_TY


@torch.library.register_fake("longhelix::route", lib=library)
def _(logits_TX, bias_E, num_experts, per_token, shared, *_):
    shape = logits_TX.shape[0], per_token + shared
    return logits_TX.new_empty(shape), logits_TX.new_empty(shape, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Experts:
    """The weights of this rank's experts, all in one arrangement.

    A rank may have no columns of an expert. It counts the expert's rows nevertheless.

    Attributes:
        ids: Numbers of the experts.
        rows_e: Number of rows that each expert has had. int64, on the device of the weights.
        addresses: Lets ops in graphs find the weights without a list of tensors. On GPUs the result of `addresses`, for
            panels the key in `_NUMBERED`. Empty: ops take lists.
    """

    ids: tuple[int, ...]
    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    rows_e: Tensor
    addresses: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls,
        ids: tuple[int, ...],
        gate_up: tuple[Weight, ...],
        down: tuple[Weight, ...],
        num_experts: int,
        device: torch.device,
    ) -> "Experts":
        """Make experts on `device`. num_experts: number of experts on all ranks."""
        rows_e = torch.zeros(len(ids), dtype=torch.int64, device=device)
        if rows_e.is_cuda:
            return cls(ids, gate_up, down, rows_e, addresses=addresses(ids, gate_up, down, num_experts))
        experts = cls(ids, gate_up, down, rows_e)
        if experts.arrangement is PANELS:
            number = next(_NUMBERS)
            experts = _NUMBERED[number] = replace(experts, addresses=(torch.tensor([number]),))
        return experts

    @property
    def arrangement(self) -> WeightArrangement:
        """The arrangement of all weights. Ranks without experts use native kernels, if there are any."""
        panels = all(weight.arrangement is PANELS for weight in (*self.gate_up, *self.down))
        if panels and native.module is not None:
            return PANELS
        return self.down[0].arrangement if self.down else PLAIN

    @property
    def lead(self) -> int:
        """`Weight.lead` of all down-projections with columns."""
        leads = [weight.lead for weight in self.down if weight.depth]
        return leads[0] if leads else 0

    @property
    def hidden(self) -> int | None:
        """Number of inputs and outputs of each expert. None: there are no experts."""
        return self.down[0].outputs if self.down else None

    @property
    def weight_dtype(self) -> str | None:
        """Number format of all weights. None: there are no experts."""
        return self.down[0].dtype if self.down else None

    @property
    def rounds_inputs(self) -> bool:
        """`Weight.rounds_inputs` of all weights."""
        return bool(self.down) and self.down[0].rounds_inputs

    @cached_property
    def handle(self):
        """The weights in the form that native kernels take."""
        gate_up, down = ([weight.handle for weight in weights] for weights in (self.gate_up, self.down))
        return native.module.ExpertSet(self.ids, gate_up, down)


_NUMBERED: WeakValueDictionary[int, Experts] = WeakValueDictionary()  # experts whose weights are panels
_NUMBERS = itertools.count()


def addresses(
    ids: Sequence[int], gate_up: Sequence[Weight], down: Sequence[Weight], num_experts: int
) -> tuple[Tensor, Tensor]:
    """Return the addresses of weights for kernels of GPUs. The weights must not move.

    Returns:
        index_E: Index of each of `num_experts` among this rank's e experts. -1: on another rank. int32.
        weights_e3: Address of gate and up (2 f, H) or of up (f, H), address of down (H, f), and the number of columns
            f. int64.
    """
    index = [-1] * num_experts
    for place, number in enumerate(ids):
        index[number] = place
    weights = [(a.values.data_ptr(), b.values.data_ptr(), b.depth) for a, b in zip(gate_up, down, strict=True)]
    assert all(address % 16 == 0 for *both, _ in weights for address in both)
    device = down[0].values.device if down else None
    return (
        torch.tensor(index, dtype=torch.int32, device=device),
        torch.tensor(weights, dtype=torch.int64, device=device).view(-1, 3),
    )


def run_experts(
    x_TH: Tensor,
    experts: Experts,
    weights_TY: Tensor,
    experts_TY: Tensor,
    *,
    activation: Activation = SWIGLU,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scales_TX: Tensor | None = None,
) -> Tensor:
    """Return residual + the weighted sum of the outputs of each row's experts on this rank.

    The output of an expert is down(function(gate(x)) * up(x)) (arXiv 2002.05202), or down(function(up(x))) if the
    activation is not gated. The sum is float32, and rounded once.
    Adds the number of rows of each expert to `experts.rows_e`.

    Args:
        weights_TY: As `route` returns them.
        experts_TY: As `route` returns them. Numbers above those of all experts stand for no expert.
        activation: What experts do between their products.
        norm: Weight of an RMSNorm of x before the experts, as in `linear`.
        residual: Any dtype.
        dtype: Dtype of the result. None: that of x.
        scales_TX: As in `linear`.

    Raises:
        ValueError: An operand has the wrong shape or dtype.
    """
    dtype = dtype or x_TH.dtype
    options = norm, norm_eps, residual, dtype, scales_TX, experts.rows_e
    numbered = len(experts.addresses) == 1  # panels, without a look at the weights of each expert
    if not is_compiling() and (numbered or experts.arrangement is PANELS) and _is_native(x_TH):
        return _run_panels(x_TH, experts, weights_TY, experts_TY, activation, *options)
    # Pass addresses if there are any, because the dispatcher needs longer for hundreds of tensors than kernels run.
    listed = len(experts.addresses) == 0
    gate_up = [weight.values for weight in experts.gate_up] if listed else []
    down = [weight.values for weight in experts.down] if listed else []
    return torch.ops.longhelix.run_experts(
        x_TH,
        gate_up,
        down,
        list(experts.addresses),
        weights_TY,
        experts_TY,
        *activation_arguments(activation),
        *options,
        [] if numbered else experts.ids,
        [] if numbered else [weight.depth for weight in experts.down],
        experts.lead,
        experts.hidden,
        experts.weight_dtype,
        PANELS.name if numbered else experts.arrangement.name,
        experts.rounds_inputs,
    )


library.define(
    "run_experts(Tensor x_TH, Tensor[] gate_up, Tensor[] down, Tensor[] addresses, Tensor weights_TY, "
    "Tensor experts_TY, str function, bool gated, Tensor? norm, float norm_eps, Tensor? residual, ScalarType dtype, "
    "Tensor? scales_TX, Tensor(a!) rows_e, int[] ids, int[] columns, int lead, int? hidden, str? weight_dtype, "
    "str arrangement, bool rounds_inputs) -> Tensor"
)


def _run_experts(
    x_TH,
    gate_up,
    down,
    addresses,
    weights_TY,
    experts_TY,
    function,
    gated,
    norm,
    norm_eps,
    residual,
    dtype,
    scales_TX,
    rows_e,
    ids,
    columns,
    lead,
    hidden,
    weight_dtype,
    arrangement,
    rounds_inputs,
):
    activation = activation_of(function, gated)
    options = activation, norm, norm_eps, residual, dtype, scales_TX, rows_e
    if len(addresses) == 1:
        return _run_panels(x_TH, _NUMBERED[int(addresses[0])], weights_TY, experts_TY, *options)
    if not addresses and arrangement == PANELS.name and _is_native(x_TH):
        gate_ups = (
            Weight(
                w,
                weight_dtype,
                outputs=activation.projections * f,
                depth=hidden,
                arrangement=PANELS,
                rounds_inputs=rounds_inputs,
            )
            for w, f in zip(gate_up, columns, strict=True)
        )
        downs = (
            Weight(
                w,
                weight_dtype,
                outputs=hidden,
                depth=f,
                arrangement=PANELS,
                lead=lead,
                rounds_inputs=rounds_inputs,
            )
            for w, f in zip(down, columns, strict=True)
        )
        experts = Experts(tuple(ids), tuple(gate_ups), tuple(downs), rows_e)
        return _run_panels(x_TH, experts, weights_TY, experts_TY, *options)
    if scales_TX is not None or dtype != x_TH.dtype:
        raise ValueError("int8 rows with scales and results of another dtype need native kernels: leave them out")
    check_operands(x_TH, weight_dtype, hidden, hidden, norm, residual, dtype, scales_TX)
    check_taken(weights_TY, experts_TY, x_TH.shape[0])
    residual = None if residual is None else residual.to(dtype)
    if addresses:
        routing = weights_TY, experts_TY, rows_e
        packed = (weight_dtype, lead, rounds_inputs) if arrangement == PACKED.name else ()
        options = activation, norm, norm_eps, residual, *packed
        return triton_kernels().run_experts(x_TH, *addresses, columns, *routing, *options)
    if arrangement == PACKED.name:
        gate_up = [
            PackedRows(w, weight_dtype, activation.projections * f, hidden)
            for w, f in zip(gate_up, columns, strict=True)
        ]
        down = [
            PackedRows(w, weight_dtype, hidden, f, lead=lead if f else 0) for w, f in zip(down, columns, strict=True)
        ]
    normed_TH = x_TH if norm is None else reference.rms_norm(x_TH, norm, norm_eps)
    routing = weights_TY, experts_TY, rows_e, ids
    out_TH = reference.run_experts(normed_TH, gate_up, down, *routing, activation, rounds_inputs)
    return out_TH if residual is None else residual + out_TH


def _run_panels(x_TH, experts, weights_TY, experts_TY, activation, norm, norm_eps, residual, dtype, scales_TX, rows_e):
    hidden = experts.hidden
    check_operands(x_TH, experts.weight_dtype, hidden, hidden, norm, residual, dtype, scales_TX)
    check_taken(weights_TY, experts_TY, x_TH.shape[0])
    if residual is not None and residual.dtype != dtype:
        residual = residual.to(dtype)
    if norm is not None and norm.dtype != x_TH.dtype:
        x_TH, norm = reference.rms_norm(x_TH, norm, norm_eps), None
    x_TH, weights_TY, experts_TY = (operand.contiguous() for operand in (x_TH, weights_TY, experts_TY))
    norm, residual, scales_TX = dense(norm), dense(residual), dense(scales_TX)
    out_TH = x_TH.new_empty(x_TH.shape, dtype=dtype)
    native.module.experts(
        x_TH.data_ptr(),
        native.module.Number.int8 if scales_TX is not None else native.NUMBER_BY_DTYPE[x_TH.dtype],
        0 if scales_TX is None else scales_TX.data_ptr(),
        *x_TH.shape,
        0 if norm is None else norm.data_ptr(),
        norm_eps,
        experts.handle,
        weights_TY.data_ptr(),
        experts_TY.data_ptr(),
        experts_TY.shape[1],
        *native.activation(activation),
        0 if residual is None else residual.data_ptr(),
        out_TH.data_ptr(),
        native.NUMBER_BY_DTYPE[dtype],
        rows_e.data_ptr(),
    )
    return out_TH


@torch.library.register_fake("longhelix::run_experts", lib=library)
def _(x_TH, gate_up, down, addresses, weights_TY, experts_TY, function, gated, norm, norm_eps, residual, dtype, *_):
    return x_TH.new_empty(x_TH.shape, dtype=dtype)


library.impl("route", _route, "CompositeExplicitAutograd")
library.impl("run_experts", _run_experts, "CompositeExplicitAutograd")
