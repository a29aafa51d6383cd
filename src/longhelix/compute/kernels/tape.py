"""Tapes: the native calls of one step, recorded once and run again without Python between them.

In a step, Python between kernels takes longer than many kernels, and a CPU has no queue that hides it. A tape is to
native calls what a CUDA graph is to launches: it keeps their arguments, including addresses.
"""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longhelix.compute.kernels import native

# Operators that compute nothing: memory for a kernel that is on the tape, or another view of it.
_EMPTY = {"empty", "new_empty", "empty_like"}
_VIEWS = {"detach", "view", "flatten", "unflatten", "slice", "select", "unsqueeze", "squeeze"}


class Tape:
    """Records native calls inside of `with tape:`. `run` repeats them on the same memory.

    Recording changes nothing of what runs, so ranks that wait for each other meanwhile may record or not. What a tape
    cannot hold makes it incomplete, and then it cannot run.
    """

    def __init__(self) -> None:
        self._calls = native.module.Tape()
        self._watch = _Watch()

    def __enter__(self) -> None:
        self._watch.__enter__()
        native.module.record(self._calls)  # last: what is entered in vain is never left

    def __exit__(self, *error: object) -> None:
        native.module.record(None)
        self._watch.__exit__(*error)

    @property
    def complete(self) -> bool:
        """Whether only native calls ran, so that `run` has the same effect."""
        return self._watch.complete

    def run(self) -> None:
        """Run the recorded calls in order. Raises their errors."""
        assert self.complete, "a tape lacks what ran outside of native calls"
        self._calls.run()


class _Watch(TorchDispatchMode):
    """Keeps every created tensor alive, and detects operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = True
        self._results: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a tape is recorded, and what would keep the compiler away imports it: 1.3 s.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in _EMPTY or (name in _VIEWS and _shares_memory(result, args[0])):
            self._results.append(result)
        else:
            self.complete = False
        return result


def _shares_memory(view: Tensor, base: Tensor) -> bool:
    """Return whether the result is a view. Some view operators copy if strides do not allow a view."""
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
