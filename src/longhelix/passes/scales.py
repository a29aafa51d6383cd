"""Quantise gathered values. A calibration run can determine static scales, which become constants of the graphs."""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from longhelix.passes.plan import ShardingPlan

LARGEST = {"int8": 127.0, "fp8": 448.0}  # largest number of each narrow type


@dataclass(frozen=True)
class SentFormat:
    """How to send the values that a plan quantises. Sequences have one item per value, in the order of the graph."""

    name: str  # narrow type: "int8" or "fp8"
    scales: Sequence[float] | None = None  # static scales; None: each token has its own scale
    noted: Sequence[str] | None = None  # places at which a calibration records the largest numbers

    @property
    def how(self) -> str:
        """Suffix of pattern names, such as "StaticINT8"."""
        return ("Dynamic" if self.scales is None else "Static") + self.name.upper()


_library = torch.library.Library("longhelix_passes", "FRAGMENT")
# In a captured CUDA graph, this op would record only the first input.
_library.define("observed(Tensor highest_LX, str place) -> Tensor", tags=torch.Tag.cudagraph_unsafe)


class Calibration:
    """Determines static scales by recording the largest gathered numbers while a module runs on typical inputs:

        calibration = Calibration()
        recording = SequenceParallel(group, quantize="int8", scales=calibration)  # compile with this pass, then run
        sp = SequenceParallel(group, quantize="int8", scales=calibration.scales("int8", group))

    Use a separate calibration for each module. A scale belongs to a place in the module's graph, for any number of
    tokens. If two modules have the same ops on token shards, they would use the same scales.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._highest: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        _calibrations[self.number] = self

    def note(self, place: str, highest: Tensor) -> None:
        """Record the largest number at a place in one run. This method is thread-safe."""
        with self._lock:
            self._highest[place] = torch.maximum(self._highest.get(place, highest), highest)

    def scales(self, quantize: str, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return static scales by place.

        Each scale maps the largest number recorded on any rank to the largest number of the narrow type.

        All ranks of the group must call this method, after they have run the same graphs.

        Raises:
            ValueError: Nothing was recorded, the ranks ran different graphs, or recorded numbers are not finite. All
                ranks then raise this error.
        """
        check_quantize(quantize)
        self._check_same_places(group)
        highest = torch.stack([self._highest[place] for place in sorted(self._highest)])
        # A maximum over the ranks may drop a NaN, but keeps an infinity.
        highest = highest.where(highest.isfinite(), torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        if not highest.isfinite().all():
            raise ValueError("the calibration recorded numbers that are not finite: run it on other inputs")
        found = (highest.clamp_min(1e-12) / LARGEST[quantize]).tolist()
        return {key_of(quantize, place): scale for place, scale in zip(sorted(self._highest), found, strict=True)}

    def _check_same_places(self, group: dist.ProcessGroup | None) -> None:
        """Raise ValueError on all ranks unless all ranks recorded the same places, and at least one place."""
        digest = hashlib.sha256("\n".join(sorted(self._highest)).encode()).digest()
        own = int.from_bytes(digest[:7], "big")
        seen = torch.tensor([own, -own, int(not self._highest)])
        dist.all_reduce(seen, dist.ReduceOp.MAX, group)
        most, least, empty = seen[0], -seen[1], seen[2]
        if empty:
            raise ValueError(
                "the calibration recorded nothing on at least one rank: compile a module with its pass and run it on "
                "at least min_tokens tokens. The pass's explain() says why no value was gathered quantised"
            )
        if most != least:
            raise ValueError(
                "the calibration recorded different graphs on different ranks: run the same graphs on all ranks"
            )


_numbers = count()
_calibrations: WeakValueDictionary[int, Calibration] = WeakValueDictionary()


def check_quantize(quantize: object) -> None:
    """Raise ValueError unless `quantize` names a narrow type."""
    if not isinstance(quantize, str) or quantize not in LARGEST:
        raise ValueError(f"quantize {quantize!r} is not known: use one of {', '.join(LARGEST)}")


def key_of(quantize: str, place: str) -> str:
    """Return the key of a static scale, which is valid for one narrow type only."""
    return f"{quantize}/{place}"


def places(graph: Graph, plan: ShardingPlan, lines: Sequence[str]) -> list[str]:
    """Return the place of each value that the plan quantises, in the order of the graph.

    Args:
        lines: The graph's nodes on token shards, from `agreement.shard_lines`.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    quantised = [node for node in graph.nodes if node in plan.gathered and node in plan.quantised]
    return [f"{digest}/{index}" for index in range(len(quantised))]


def _observed(highest_LX: Tensor, place: str) -> Tensor:
    number, _, of_graph = place.partition("/")
    calibration = _calibrations.get(int(number))
    if calibration is not None:
        calibration.note(of_graph, highest_LX.amax())
    return highest_LX.clone()


_library.impl("observed", _observed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "longhelix_passes::observed", lambda highest_LX, place: torch.empty_like(highest_LX), lib=_library
)

OBSERVED = torch.ops.longhelix_passes.observed.default
