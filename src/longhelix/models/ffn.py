"""The dense FFN at TPF."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import linear, silu

from longhelix.parallel.mesh import Mesh
from longhelix.spec import ModelSpec


class DenseFFN(nn.Module):
    """SwiGLU (arXiv 2002.05202): columns over TPF = N, one all-reduce."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.mesh = mesh
        self.gate_up = nn.Buffer(weights["gate_up"])
        self.gate_up_bias = nn.Buffer(weights["gate_up_bias"]) if spec.ffn_bias else None
        self.down = nn.Buffer(weights["down"])
        self.down_bias = nn.Buffer(weights["down_bias"]) if spec.ffn_bias else None

    def forward(self, hidden_TH: Tensor) -> Tensor:
        gate_Tf, up_Tf = linear(hidden_TH, self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        hidden_TH = self.mesh.stage.all_reduce(linear(silu(gate_Tf) * up_Tf, self.down))
        return hidden_TH if self.down_bias is None else hidden_TH + self.down_bias
