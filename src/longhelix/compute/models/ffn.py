"""The dense FFN at TPF."""

from torch import Tensor, nn

from longhelix.compute.kernels import Weight
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.projection import Residual, add_projected, project_normed
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spec import ModelSpec


class DenseFFN(nn.Module):
    """A dense FFN: columns over TPF = N, one all-reduce."""

    def __init__(self, spec: ModelSpec, index: int, mesh: Mesh, weights: Weights) -> None:
        super().__init__()
        prefix = f"layers.{index}."
        self.mesh = mesh
        layer = spec.layers[index]
        assert layer.dense is not None
        self.activation = layer.dense.activation
        self.eps = spec.rms_norm_eps
        self.norm = weights.find(prefix + "ffn_norm")
        self.residual = Residual(weights.find(prefix + "ffn_norm_after"), self.eps, layer.residual_scale)
        self.gate_up = weights.product(prefix + "gate_up", halves=self.activation.projections)
        self.gate_up_bias = weights.find(prefix + "gate_up_bias")
        self.down = weights.product(prefix + "down")
        self.down_bias = weights.find(prefix + "down_bias")

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.gate_up, self.down

    def forward(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """Return hidden_TH with the FFN's output added. Padding rows are computed too."""
        options = {"bias": self.gate_up_bias, "activation": self.activation}
        inner_Tf = project_normed(hidden_TH, self.gate_up, self.norm, self.eps, batch, **options)
        return add_projected(hidden_TH, inner_Tf, self.down, self.down_bias, self.residual, self.mesh.ffn, batch)
