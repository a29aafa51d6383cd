"""Triton's interpreter, made to run whatever was imported before it, and to round as the device does.

Triton decides whether to interpret when a function is decorated; here its functions and ours are exchanged afterwards,
so that no environment variable reaches other tests. The interpreter of Triton 3.6 truncates float32 to bfloat16, loses
the carry of a rounding to 8 bits, takes bfloat16 for an integer in products and in casts from integers, multiplies with
whatever order of sums numpy has, and leaves triton.language changed where one function has called another: what follows
mends these.
"""

import numpy as np
import pytest
import torch
import triton.experimental.gluon  # noqa: F401  The interpreter imports it late, when it no longer imports.
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from longhelix.compute.kernels.triton import (
    attention,
    expert_rows,
    experts,
    merge,
    nvfp4,
    packed_products,
    rows,
    weight_tiles,
    write,
)

_TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


def _convert_float(values: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"int{source.primitive_bitwidth}"))
    converted = bits.view(_TORCH[source.name]).to(_TORCH[target.name])
    return converted.view(_BITS[converted.element_size()]).numpy()


_cast = InterpreterBuilder.cast_impl
_create_dot = InterpreterBuilder.create_dot
_patch_lang_tensor = interpreter._patch_lang_tensor


def _cast_through_float32(self: InterpreterBuilder, value: TensorHandle, target: tl.dtype) -> TensorHandle:
    if target.scalar == tl.bfloat16 and value.dtype.scalar.is_int():
        value = _cast(self, value, tl.float32)
    return _cast(self, value, target)


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
    if a.dtype == tl.bfloat16:
        a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
    if a.dtype == tl.float32:
        # Some processors' products of float32 sum a row in an order that depends on its place in the tile.
        total, *_ = rest
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(total.data.dtype)
        return TensorHandle(product + total.data, total.dtype.scalar)
    return _create_dot(self, a, b, *rest)


def _with_index(tensor: type, scope: object) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _call(self: InterpretedFunction, *values: object, **named: object) -> object:
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*values, **named)
    finally:
        scope.restore()


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, our kernels run in the interpreter."""
    patch.setattr(interpreter, "_convert_float", _convert_float)
    patch.setattr(interpreter, "_patch_lang_tensor", _with_index)
    patch.setattr(InterpreterBuilder, "cast_impl", _cast_through_float32)
    patch.setattr(InterpreterBuilder, "create_dot", _dot)
    patch.setattr(InterpretedFunction, "__call__", _call)
    # Arguments live on the CPU already: nothing to copy back, and pools may be larger than memory.
    patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
    ours = attention, expert_rows, experts, merge, nvfp4, packed_products, rows, weight_tiles, write
    for module in (tl, tl.standard, *ours):
        for name, member in list(vars(module).items()):
            if isinstance(member, JITFunction):
                patch.setattr(module, name, InterpretedFunction(member.fn))
