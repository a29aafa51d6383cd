"""What an FFN does between its products, `reference.activate`, on blocks in float32."""

import triton
import triton.language as tl


@triton.jit
def activated(x, FUNCTION: tl.constexpr):
    """The function of the gate, or of the only product if there is no gate."""
    if FUNCTION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu":
        result = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z.
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif FUNCTION == "relu_squared":
        positive = tl.where(x < 0.0, 0.0, x)
        result = positive * positive
    else:
        tl.static_assert(FUNCTION == "clamped_swiglu")
        limited = tl.where(x > 7.0, 7.0, x)
        result = limited / (1.0 + tl.exp(-1.702 * limited))
    return result


@triton.jit
def gated_input(up, FUNCTION: tl.constexpr):
    """What the gate weighs."""
    if FUNCTION == "clamped_swiglu":
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return up
