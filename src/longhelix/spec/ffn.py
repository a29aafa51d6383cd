"""A dense FFN."""

from typing import Literal

import msgspec

# What gated FFNs do with their gate: SiLU (SwiGLU), or gpt-oss' SwiGLU, which limits its inputs and adds one.
Activation = Literal["silu", "clamped_swiglu"]


class GatedFFN(msgspec.Struct, frozen=True, tag=True):
    """A gated FFN.

    Attributes:
        num_columns: Width of its gate and of its up-projection.
        bias: Its products have biases.
        activation: What it does with its gate.
    """

    num_columns: int
    bias: bool = False
    activation: Activation = "silu"
