"""The FFN with experts at TPF x EP."""

import torch
from torch import Tensor, nn

from longhelix.kernels import Weight, linear, make_weight, rms_norm
from longhelix.models.routing import route
from longhelix.parallel.mesh import Mesh
from longhelix.spec import ModelSpec


class ExpertFFN(nn.Module):
    """Experts over EP, the columns of each over TPF, shared experts over all ranks; one all-reduce adds up everything.

    Every rank has all rows and routes all of them, the same way, so no row travels: a rank computes its experts' part
    of the rows that take them (Helix, arXiv 2507.07120, section 2.2; its all-reduce inside an expert group and the sum
    over groups are one sum here). `rows_per_expert_e` counts the rows that each of its experts has had.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: dict[str, Tensor], prefix: str, weight_dtype: str) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe = spec.moe
        self.mesh = mesh
        self.eps = spec.rms_norm_eps
        self.held = mesh.layout.experts(spec.moe.num_experts, mesh.rank)
        self.norm = weights.pop(prefix + "ffn_norm")
        self.router_EH = weights.pop(prefix + "router").float()
        bias_E = weights.pop(prefix + "routing_bias", None)
        self.bias_E = None if bias_E is None else bias_E.float()
        self.gate_up = [make_weight(weights.pop(f"{prefix}experts.{e}.gate_up"), weight_dtype, 2) for e in self.held]
        self.down = [make_weight(weights.pop(f"{prefix}experts.{e}.down"), weight_dtype) for e in self.held]
        self.shared = None
        if spec.moe.shared_size:
            gate_up = make_weight(weights.pop(prefix + "shared.gate_up"), weight_dtype, halves=2)
            self.shared = gate_up, make_weight(weights.pop(prefix + "shared.down"), weight_dtype)
        self.shared_gate_1H = weights.pop(prefix + "shared_gate", None)
        self.rows_per_expert_e = torch.zeros(len(self.held), dtype=torch.int64)

    @property
    def products(self) -> tuple[Weight, ...]:
        return *self.gate_up, *self.down, *(self.shared or ())

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """hidden_TH with the FFN's output added."""
        normed_TH = rms_norm(hidden_TH, self.norm, self.eps)
        weights_TY, experts_TY = route(nn.functional.linear(normed_TH.float(), self.router_EH), self.bias_E, self.moe)
        out_TH = self._routed(normed_TH, weights_TY, experts_TY)
        if self.shared is not None:
            out_TH = out_TH + self._shared(normed_TH)
        return self.mesh.ffn.all_reduce_add(out_TH, hidden_TH)

    def _routed(self, normed_TH: Tensor, weights_TY: Tensor, experts_TY: Tensor) -> Tensor:
        """This rank's experts on the rows that take them, sorted by expert: one product of all rows for each."""
        out_TH = torch.zeros_like(normed_TH)
        order = experts_TY.flatten().argsort(stable=True)
        per_expert_E = torch.bincount(experts_TY.flatten(), minlength=self.moe.num_experts)
        counts_e = per_expert_E[self.held.start : self.held.stop]
        self.rows_per_expert_e += counts_e.cpu()
        first = int(per_expert_E[: self.held.start].sum())
        for index, pairs in enumerate(order[first : first + int(counts_e.sum())].split(counts_e.tolist())):
            if not len(pairs):
                continue
            rows = pairs // experts_TY.shape[1]
            inner = linear(normed_TH[rows], self.gate_up[index], swiglu=True)
            weights_T1 = weights_TY.flatten()[pairs].unsqueeze(1)
            out_TH.index_add_(0, rows, (linear(inner, self.down[index]) * weights_T1).to(out_TH.dtype))
        return out_TH

    def _shared(self, normed_TH: Tensor) -> Tensor:
        gate_up, down = self.shared
        out_TH = linear(linear(normed_TH, gate_up, swiglu=True), down)
        if self.shared_gate_1H is None:
            return out_TH
        return out_TH * nn.functional.linear(normed_TH, self.shared_gate_1H).sigmoid()
