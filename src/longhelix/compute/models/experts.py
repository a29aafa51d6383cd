"""The FFN with experts at TPF x EP."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longhelix.compute.kernels import Experts, Weight, linear, make_weight, quantise_rows, rms_norm, route, run_experts
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.projection import Residual
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spec import FORMATS, ModelSpec
from longhelix.spec.weights import expert_formats


class ExpertFFN(nn.Module):
    """An FFN with experts. EP splits the experts, TPF the columns of each, and all ranks split shared experts.

    Every rank has all rows and routes them in the same way, so no row travels. A rank computes the outputs of its
    experts for the rows that take them, and one all-reduce adds up everything (Helix, arXiv 2507.07120, section 2.2;
    the paper's all-reduce inside an expert group and its sum over groups are one sum here).
    """

    def __init__(self, spec: ModelSpec, index: int, mesh: Mesh, weights: Weights) -> None:
        super().__init__()
        moe, prefix = spec.layers[index].moe, f"layers.{index}."
        assert moe is not None
        self.moe = moe
        self.mesh = mesh
        self.eps = spec.rms_norm_eps
        self.norm = weights.find(prefix + "ffn_norm")
        norm_after = weights.find(prefix + "ffn_norm_after")
        self.residual = Residual(norm_after, self.eps, spec.layers[index].residual_scale)
        # Decided for all ranks, because it decides what they gather.
        formats = expert_formats(spec, index, weights.weight_dtype)
        self.rounds_inputs = all(FORMATS[format].arithmetic.rounds_inputs for format in formats)
        router_XH = weights.take(prefix + "router")
        if moe.routing.shared_gate:
            router_XH = torch.cat((router_XH, weights.take(prefix + "shared_gate")))
        # In float32, because small differences of scores decide which experts are chosen.
        self.router = make_weight(router_XH.float(), "float32")
        bias_E = weights.find(prefix + "routing_bias")
        self.bias_E = None if bias_E is None else bias_E.float()
        local_experts = mesh.layout.experts(moe.num_experts, mesh.rank)
        self.num_local_experts = len(local_experts)
        stems = {expert: f"{prefix}experts.{expert}." for expert in local_experts}
        if moe.shared_size:
            stems[moe.num_experts] = prefix + "shared."
        num_experts = moe.num_experts + (moe.shared_size > 0)
        self.experts = tuple(
            _make_experts(weights, same, num_experts, router_XH.device, moe.activation.projections)
            for same in _by_format(weights, stems)
        )

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.router, *(weight for each in self.experts for weight in (*each.gate_up, *each.down))

    @property
    def rows_per_expert(self) -> Tensor:
        """Number of rows that each of this rank's routed experts has had, (e). int64."""
        return self.experts[0].rows_e[: self.num_local_experts]

    def forward(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """Return hidden_TH with the FFN's output added. Padding rows take no expert."""
        x_TH, logits_TX, options = self._rows_and_logits(hidden_TH, batch)
        weights_TY, experts_TY = route(logits_TX, self.bias_E, self.moe)
        if batch.padding_T is not None:
            experts_TY = experts_TY.masked_fill(batch.padding_T.unsqueeze(1), self.moe.num_experts + 1)
        run = partial(self._run, x_TH, weights_TY, experts_TY, options)
        group, sharding = self.mesh.ffn, batch.sharding
        if group.size == 1:
            return run(hidden_TH) if self.residual.is_plain else self.residual.add(hidden_TH, run(None))
        part_TH = run(None)
        if sharding.pass_shards is not None:
            part_TH = sharding.pass_shards.all_rows(sharding.pass_shards.summed_rows(part_TH))
        elif sharding.token_shards is not None:
            part_TH = sharding.token_shards.summed_rows(part_TH)
        elif self.residual.is_plain:
            return group.all_reduce_add(part_TH, hidden_TH)
        else:
            part_TH = group.all_reduce(part_TH)
        return self.residual.add(hidden_TH, part_TH)

    def _run(
        self,
        x_TH: Tensor,
        weights_TY: Tensor,
        experts_TY: Tensor,
        options: Mapping[str, Any],
        residual_TH: Tensor | None,
    ) -> Tensor:
        """Return the residual, if there is one, plus the weighted outputs of this rank's experts."""
        options = {"activation": self.moe.activation, **options}
        for experts in self.experts:
            residual_TH = run_experts(x_TH, experts, weights_TY, experts_TY, **options, residual=residual_TH)
        assert residual_TH is not None
        return residual_TH

    def _rows_and_logits(self, hidden_TH: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return all rows, the router's logits of each, and remaining arguments of `run_experts`, such as the norm.

        With token shards, each rank norms and routes its own rows, and gathers both. If experts round their inputs,
        rows are gathered as int8 and scales.
        """
        norm = {} if self.norm is None else {"norm": self.norm, "norm_eps": self.eps}
        shards = batch.sharding.token_shards or batch.sharding.pass_shards
        if shards is None:
            return hidden_TH, linear(hidden_TH, self.router, **norm, dtype=torch.float32), norm
        if batch.sharding.pass_shards is None:
            x_LH = hidden_TH
        else:
            normed_TH = rms_norm(hidden_TH, self.norm, self.eps) if norm else hidden_TH
            x_LH, norm = shards.local_rows(normed_TH), {}
        logits_TX = shards.all_rows(linear(x_LH, self.router, **norm, dtype=torch.float32))
        if self.rounds_inputs:
            q_LH, scales_LX = quantise_rows(x_LH, **norm)
            options = {"scales_TX": shards.all_rows(scales_LX), "dtype": hidden_TH.dtype}
            return shards.all_rows(q_LH), logits_TX, options
        return shards.all_rows(rms_norm(x_LH, self.norm, self.eps) if norm else x_LH), logits_TX, {}


def _by_format(weights: Weights, stems: Mapping[int, str]) -> list[dict[int, str]]:
    """Group experts whose weights have the same number format and are cut at the same place of scale blocks.

    There is at least one group. Routed experts come first.
    """
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for number, stem in stems.items():
        key = weights.format(stem + "down"), weights.lead(stem + "down")
        groups.setdefault(key, {})[number] = stem
    return list(groups.values()) or [{}]


def _make_experts(
    weights: Weights, stems: Mapping[int, str], num_experts: int, device: torch.device, projections: int
) -> Experts:
    """Make experts from the weights whose names begin with `stems`, by number.

    Args:
        num_experts: Number of experts of all ranks.
        projections: Number of an expert's products before its activation.
    """
    # If one weight cannot be in panels, none is.
    arrangement = weights.arrangement([stem + name for stem in stems.values() for name in ("gate_up", "down")])
    gate_up, down = [], []
    for stem in stems.values():
        gate_up.append(weights.product(stem + "gate_up", projections, arrangement))
        down.append(weights.product(stem + "down", 1, arrangement))
    return Experts.of(tuple(stems), tuple(gate_up), tuple(down), num_experts, device)
