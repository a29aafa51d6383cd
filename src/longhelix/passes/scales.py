"""How what is gathered is quantised. Static scales are found by a calibration run, and then are constants of graphs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from longhelix.passes.plan import Plan

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


_numbers = count()
_highest: dict[str, Tensor] = {}  # by the number of a calibration and the place

_library = torch.library.Library("longhelix_passes", "FRAGMENT")
_library.define("observed(Tensor highest_LX, str place) -> Tensor")


class Calibration:
    """Takes notes of what is gathered quantised, with a scale for each token, while a module runs on typical inputs:

        calibration = Calibration()
        noting = SequenceParallel(quantize="int8", scales=calibration)  # compile with it, and run
        sp = SequenceParallel(quantize="int8", scales=calibration.scales("int8"))

    One is for one module: scales are found again by the place in its graph, whatever the number of tokens.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)

    def scales(self, quantize: str, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """By place, such that the largest number seen on any rank of the group becomes the largest of the narrow type.
        All ranks call this, once they have run the same graphs. Raises ValueError where nothing was seen, or numbers
        that are not finite."""
        if quantize not in LARGEST:
            raise ValueError(f"quantize {quantize!r} is not known: use one of {', '.join(LARGEST)}")
        own = {place.partition("/")[2]: seen for place, seen in _highest.items() if self._has(place)}
        if not own:
            raise ValueError("a calibration has seen nothing: run a module that was compiled with it first")
        highest = torch.stack([own[place] for place in sorted(own)])
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        if not highest.isfinite().all():
            raise ValueError("a calibration has seen numbers that are not finite: run it on other inputs")
        found = (highest.clamp_min(1e-12) / LARGEST[quantize]).tolist()
        return dict(zip(sorted(own), found, strict=True))

    def _has(self, place: str) -> bool:
        return place.startswith(f"{self.number}/")


def places(graph: Graph, plan: Plan, lines: Sequence[str]) -> list[str]:
    """Of what the plan quantises, in the order of the graph. lines: what the graph does on token shards."""
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    quantised = [node for node in graph.nodes if node in plan.gathered and node in plan.quantised]
    return [f"{digest}/{index}" for index in range(len(quantised))]


def _observed(highest_LX: Tensor, place: str) -> Tensor:
    highest = highest_LX.amax()
    _highest[place] = torch.maximum(_highest[place], highest) if place in _highest else highest
    return highest_LX.clone()


_library.impl("observed", _observed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "longhelix_passes::observed", lambda highest_LX, place: torch.empty_like(highest_LX), lib=_library
)

OBSERVED = torch.ops.longhelix_passes.observed.default
