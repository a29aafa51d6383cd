"""The torch library of our ops, and what their forms share.

An op has a signature with shapes (letters in docs/internals/shapes.md), a reference, fast forms, and a fake, so that
graphs keep it whole. Registered as torch.ops.longhelix.*. Packed operands run the native CPU kernels, CUDA tensors the
Triton kernels, everything else the reference. Outside of a graph a native kernel is called directly: the dispatcher
costs more than a small kernel does.
"""

import torch
from torch import Tensor

from longhelix.compute.kernels.layer import ARRANGEMENTS, KVFormat, KVLayer
from longhelix.spec import Activation

library = torch.library.Library("longhelix", "DEF")
is_compiling = torch.compiler.is_compiling


def dense_rows(rows: Tensor) -> Tensor:
    """Return the tensor with contiguous rows, at any distance from each other."""
    if rows.stride(-1) == 1 and (rows.dim() == 2 or rows.stride(1) == rows.shape[2]):
        return rows
    return rows.contiguous()


def dense(values: Tensor | None) -> Tensor | None:
    return values if values is None or values.is_contiguous() else values.contiguous()


def triton_kernels():
    """Return the module of GPU kernels. Imports Triton only on the first call."""
    from longhelix.compute.kernels import triton

    return triton


def activation_arguments(activation: Activation | None) -> tuple[str, bool]:
    """Return the function's name and whether it is gated. The name is empty if there is no activation."""
    return ("", False) if activation is None else (activation.function, activation.gated)


def activation_of(function: str, gated: bool) -> Activation | None:
    """Rebuild the activation that was passed to an op by `activation_arguments`."""
    return Activation(function, gated) if function else None


def format_arguments(layer: KVLayer) -> tuple[str, str, int, bool, bool]:
    format = layer.format
    return format.arrangement.name, format.dtype, format.value_size, format.shared_values, format.rounded


def layer_of(values, scales, key_size, arrangement, dtype, value_size, shared_values, rounded) -> KVLayer:
    """Rebuild the layer that was passed to an op as tensors."""
    chosen = ARRANGEMENTS[arrangement]
    block_tokens, num_kv_heads = chosen.sizes(values)
    format = KVFormat(
        dtype=dtype,
        block_tokens=block_tokens,
        num_kv_heads=num_kv_heads,
        key_size=key_size,
        value_size=value_size,
        arrangement=chosen,
        shared_values=shared_values,
        rounded=rounded,
    )
    return KVLayer(format, values, scales)
