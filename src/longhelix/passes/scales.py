"""How what is gathered is quantised. Static scales are found by a calibration run, and then are constants of graphs."""

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

LARGEST = {"int8": 127.0, "fp8": 448.0}  # numbers of the narrow types


@dataclass(frozen=True)
class Quantisation:
    """How what a plan quantises travels, in the order of the graph. name: of the narrow type. scales: static; None:
    each token has its own. noted: the places under which their largest numbers are noted."""

    name: str
    scales: Sequence[float] | None = None
    noted: Sequence[str] | None = None

    @property
    def how(self) -> str:
        """As names of patterns end."""
        return ("Dynamic" if self.scales is None else "Static") + self.name.upper()


_library = torch.library.Library("longhelix_passes", "FRAGMENT")
# Captured in a CUDA graph, it would note the first input alone.
_library.define("observed(Tensor highest_LX, str place) -> Tensor", tags=torch.Tag.cudagraph_unsafe)


class Calibration:
    """Takes notes of what is gathered quantised, with a scale for each token, while a module runs on typical inputs:

        calibration = Calibration()
        noting = SequenceParallel(group, quantize="int8", scales=calibration)  # compile with it, and run
        sp = SequenceParallel(group, quantize="int8", scales=calibration.scales("int8", group))

    One is for one module: scales are found again by the place in its graph, whatever the number of tokens, and a graph
    that does the same on token shards, be it another module's, takes them for its own.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._highest: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        _calibrations[self.number] = self

    def note(self, place: str, highest: Tensor) -> None:
        """The largest number there in one run. Any thread may call it."""
        with self._lock:
            self._highest[place] = torch.maximum(self._highest.get(place, highest), highest)

    def scales(self, quantize: str, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """By place, such that the largest number seen on any rank of the group becomes the largest of the narrow type.
        All ranks call this, once they have run the same graphs. Raises ValueError, on all of them, where nothing was
        seen, or not the same graphs, or numbers that are not finite."""
        check_quantize(quantize)
        self._check_alike(group)
        highest = torch.stack([self._highest[place] for place in sorted(self._highest)])
        # A maximum over ranks may lose a NaN, but not an infinity.
        highest = highest.where(highest.isfinite(), torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        if not highest.isfinite().all():
            raise ValueError("a calibration has seen numbers that are not finite: run it on other inputs")
        found = (highest.clamp_min(1e-12) / LARGEST[quantize]).tolist()
        return {key_of(quantize, place): scale for place, scale in zip(sorted(self._highest), found, strict=True)}

    def _check_alike(self, group: dist.ProcessGroup | None) -> None:
        """Raise ValueError, on all ranks, unless all have seen the same places, at least one."""
        digest = hashlib.sha256("\n".join(sorted(self._highest)).encode()).digest()
        own = int.from_bytes(digest[:7], "big")
        seen = torch.tensor([own, -own, int(not self._highest)])
        dist.all_reduce(seen, dist.ReduceOp.MAX, group)
        most, least, empty = seen[0], -seen[1], seen[2]
        if empty:
            raise ValueError(
                "a calibration has seen nothing, on this rank or another: compile a module with it and run that on at "
                "least min_tokens tokens; explain() of its pass says why nothing was gathered quantised"
            )
        if most != least:
            raise ValueError("a calibration has seen other graphs on other ranks: run the same ones on all of them")


_numbers = count()
_calibrations: WeakValueDictionary[int, Calibration] = WeakValueDictionary()


def check_quantize(quantize: object) -> None:
    """Raise ValueError unless it is a narrow type."""
    if not isinstance(quantize, str) or quantize not in LARGEST:
        raise ValueError(f"quantize {quantize!r} is not known: use one of {', '.join(LARGEST)}")


def key_of(quantize: str, place: str) -> str:
    """Under which a static scale is found: those of one narrow type are of no use to another."""
    return f"{quantize}/{place}"


def places(graph: Graph, plan: ShardingPlan, lines: Sequence[str]) -> list[str]:
    """Of what the plan quantises, in the order of the graph. lines: what the graph does on token shards."""
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
