"""The watchdog on starts and steps. It finds ranks that stand still while their processes live, such as ranks that wait
for each other forever."""

from collections.abc import Collection

from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.progress import Progress
from longhelix.errors import EngineError
from longhelix.scheduler.work import Cost, Work

FACTOR, GRACE_S = 10.0, 5.0
DISK_S = 120.0  # what an answer may take that waits for a slow disk
# What may pass between two signs that a start gets on: a slow disk, a compiler at work on all layers.
START_S = 600.0
# What steps may take beside their prediction: the compiler at work for a shape that is new to it; reference kernels.
_COMPILER_S = 600.0
_REFERENCE_FACTOR = 100.0


class Watchdog:
    """Follows the steps in flight and the progress that ranks report.

    A step stands still when none of its ranks that have yet to do it has made progress (a collective, a layer, a step
    of a guide, or the end of a step) for FACTOR times the seconds that the cost model predicts for the whole step, plus
    GRACE_S. The prediction is made only when it is needed, which is hardly ever. A start stands still after START_S,
    and an answer that no step delays after GRACE_S. Time counts only while the engine listens.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._cost: Cost | None = None
        self._in_flight: dict[int, Work] = {}
        self._layout = config.layout
        self._progress = dict.fromkeys(range(config.layout.world_size), Progress())
        self._still_s = dict.fromkeys(self._progress, 0.0)
        self._packed = True
        self._compiles = False

    def ready(self, cost: Cost, packed: bool, compiles: bool) -> None:
        """All ranks take steps, whose seconds `cost` predicts. `packed`: no rank runs reference kernels. `compiles`: a
        rank may call a compiler for a step of a new shape."""
        self._cost = cost
        self._packed = packed
        self._compiles = compiles

    def submitted(self, step_id: int, work: Work) -> None:
        self._in_flight[step_id] = work

    def finished(self, step_id: int) -> None:
        del self._in_flight[step_id]

    def given(self, ranks: Collection[int]) -> None:
        """Ranks are given something to do, which some of them have waited for."""
        for rank in ranks:
            self._still_s[rank] = 0.0

    def got_on(self, rank: int) -> None:
        """A rank has made progress."""
        self._still_s[rank] = 0.0

    def heard(self, rank: int, progress: Progress) -> None:
        """A rank has given a sign of life."""
        if progress != self._progress[rank]:
            self._progress[rank] = progress
            self._still_s[rank] = 0.0

    @property
    def still_s(self) -> float:
        """For how long no rank has got on."""
        return self._still_s_of(self._still_s)

    def waited(self, seconds: float) -> None:
        for rank in self._still_s:
            self._still_s[rank] += seconds

    def check_start(self, ready: set[int]) -> None:
        """Raise EngineError, which names ranks, if the start stands still. `ready`: the ranks that have started."""
        if self._still_s_of(self._progress.keys() - ready) > START_S:
            fault, feat = "stands still while it starts", "takes steps"
            raise EngineError(self._words(fault, feat, self._progress, ready, START_S))

    def check(self, step_id: int, ranks: Collection[int], done: set[int]) -> None:
        """Raise EngineError, which names step and ranks, if step `step_id` of `ranks` stands still. `done`: those that
        have done it."""
        still_s = self._still_s_of(set(ranks) - done)
        if still_s > GRACE_S and still_s > (limit_s := self._limit_s(step_id)):
            raise EngineError(self._words(f"stands still in step {step_id}", "has done the step", ranks, done, limit_s))

    def _still_s_of(self, ranks: Collection[int]) -> float:
        """For how many seconds none of these ranks has got on."""
        return min((self._still_s[rank] for rank in ranks), default=0.0)

    def check_answer(self, missing: set[int], patience_s: float = GRACE_S) -> None:
        """Raise EngineError if the `missing` ranks, which were asked something, do not answer within `patience_s` once
        their steps are done."""
        still_s = self._still_s_of(missing)
        if still_s <= patience_s:
            return
        limit_s = max([patience_s, *map(self._limit_s, self._in_flight)])
        if still_s > limit_s:
            places = (f"rank {rank} is {_where(progress)}" for rank, progress in self._progress.items())
            fault = f"ranks {sorted(missing)} do not answer: {_for_s(still_s, limit_s)}"
            raise EngineError("; ".join([fault, *places]))

    def _limit_s(self, step_id: int) -> float:
        assert self._cost is not None
        predicted_s = self._cost.seconds(self._in_flight[step_id])
        if not self._packed:
            predicted_s *= _REFERENCE_FACTOR
        return FACTOR * predicted_s + GRACE_S + (_COMPILER_S if self._compiles else 0.0)

    def _words(self, fault: str, feat: str, ranks: Collection[int], done: set[int], limit_s: float) -> str:
        """What is wrong with the first of `ranks` that is not `done`, and where the others are. `feat`: what the `done`
        ranks have done."""
        left = {rank: self._progress[rank] for rank in ranks if rank not in done}
        first = min(left, key=self._order)
        others = [f"rank {rank} {feat}" for rank in sorted(done)]
        others += [f"rank {rank} is {_where(progress)}" for rank, progress in left.items() if rank != first]
        for_s = _for_s(self._still_s_of(left), limit_s)
        return "; ".join([f"rank {first} {fault}, {_where(left[first])}: {for_s}", *others])

    def _order(self, rank: int) -> tuple[bool, bool, int, int]:
        """Of a rank that may hold the others up: one that waits for another stage is held up by that, and one that
        waits in a collective by one of its stage that does not come there."""
        progress = self._progress[rank]
        return progress.awaited != "", progress.collective != "", self._layout.stage(rank), progress.collectives


def _for_s(still_s: float, limit_s: float) -> str:
    return f"nothing has got on for {still_s:.1f} s, and {limit_s:.1f} s are the limit"


def _where(progress: Progress) -> str:
    if progress.awaited:
        return f"in {progress.awaited}"
    begun = f"after {progress.collectives} collectives" if progress.collectives else "before any collective"
    return f"in {progress.collective}" if progress.collective else f"outside of collectives, {begun}"
