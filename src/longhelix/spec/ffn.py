"""A dense FFN, and what an FFN does between its products."""

from typing import Literal

import msgspec

Function = Literal["silu", "gelu", "gelu_tanh", "relu_squared", "xielu", "clamped_swiglu"]


class Activation(msgspec.Struct, frozen=True):
    """What an FFN does between its products.

    The functions are SiLU, GELU, GELU with a tanh in place of its error function, the square of ReLU, xIELU with
    learned parameters (arXiv 2411.13010), and the SwiGLU of gpt-oss. The latter limits the gate and the up-projection
    to 7, and adds one to the up-projection.

    Attributes:
        function: Function of the gate, or of the up-projection if there is no gate.
        gated: The function of a gate weighs the up-projection (arXiv 2002.05202).
    """

    function: Function = "silu"
    gated: bool = True

    @property
    def projections(self) -> int:
        """Number of products before the function: gate and up, or only up."""
        return 1 + self.gated


class MLP(msgspec.Struct, frozen=True, tag=True):
    """A dense FFN.

    Attributes:
        num_columns: Width of its up-projection.
        bias: Its products have biases.
        activation: What it does between its products.
    """

    num_columns: int
    bias: bool = False
    activation: Activation = Activation()
