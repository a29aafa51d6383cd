"""What a GPU would be asked to do: launches of kernels, and what makes the host wait for it.

Counted below the caller, as torch dispatches operators and as Triton's interpreter launches kernels.
"""

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# Operators whose results, or the sizes of these, the host must have before it goes on.
_WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique2",
    "unique_dim", "unique_consecutive", "repeat_interleave", "argwhere",
}  # fmt: skip
# Operators that launch nothing: memory, and other views of it.
_NOTHING = {
    "empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "view", "_unsafe_view", "reshape",
    "flatten", "unflatten", "slice", "select", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "split",
    "split_with_sizes", "chunk", "unbind", "narrow", "as_strided", "lift_fresh", "promote_types",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts, by name: `kernels` in Triton, `operators` of torch that launch some, `waits` of the host."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._inside = False
        launch = GridExecutor.__call__

        def counted(executor: GridExecutor, *values: object, **named: object) -> None:
            self.kernels[executor.fn.__name__] += 1
            self._inside = True  # what the interpreter computes with torch
            try:
                launch(executor, *values, **named)
            finally:
                self._inside = False

        patch.setattr(GridExecutor, "__call__", counted)
        for name in ("tolist", "numpy", "cpu"):  # on the CPU no operator sees them
            patch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name: str, method: Callable) -> Callable:
        def call(*values: object, **named: object) -> object:
            if not self._inside:
                self.waits[name] += 1
            return method(*values, **named)

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "longhelix":
            # An op of ours is counted by what runs inside of it.
            with self:
                return _implementation(name)(*args, **(kwargs or {}))
        if func.namespace == "aten" and not self._inside:
            if name in _WAITS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1])):
                self.waits[name] += 1
            elif name not in _NOTHING:
                self.operators[name] += 1
        return func(*args, **(kwargs or {}))


def _implementation(name: str) -> Callable:
    modules = (module for path, module in sys.modules.items() if path.startswith("longhelix.compute.kernels."))
    return next(getattr(module, f"_{name}") for module in modules if hasattr(module, f"_{name}"))


def _by_mask(indices: list[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
