"""The watchdog for starts and steps. It finds ranks that are stuck although their processes are alive.

For example, ranks may wait for each other forever.
"""

from collections.abc import Collection

from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.progress import Progress
from longhelix.errors import EngineError
from longhelix.scheduler.work import Cost, Work

FACTOR, GRACE_S = 10.0, 5.0
DISK_S = 120.0  # longest time to wait for an answer that may need a slow disk
START_S = 600.0  # longest time without progress during a start, for a slow disk or for compiling all layers
_COMPILER_S = 600.0  # added to the time limit of a step if a new shape may have to be compiled
_REFERENCE_FACTOR = 100.0  # factor by which reference kernels may be slower than predicted


class Watchdog:
    """Follows the steps in flight and the progress that ranks report.

    A step is stuck when none of its unfinished ranks has made progress for a certain time. This limit is GRACE_S plus
    FACTOR times the predicted duration of the step. Progress is a collective, a layer, a step of a guide, or the end of
    a step. The duration is predicted only when it is needed, which is rare.

    A start is stuck after START_S without progress. An answer is overdue after GRACE_S if no step delays it. The
    watchdog counts only the time in which the engine listens.
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
        """Record that all ranks have started.

        Args:
            cost: predicts the seconds of a step.
            packed: False if any rank runs reference kernels.
            compiles: whether a rank may call a compiler for a step with a new shape.
        """
        self._cost = cost
        self._packed = packed
        self._compiles = compiles

    def submitted(self, step_id: int, work: Work) -> None:
        """Record that a step was sent."""
        self._in_flight[step_id] = work

    def finished(self, step_id: int) -> None:
        """Record that all ranks have finished a step."""
        del self._in_flight[step_id]

    def given(self, ranks: Collection[int]) -> None:
        """Record that ranks received work. The watchdog ignores the time that the ranks were idle before this."""
        for rank in ranks:
            self._still_s[rank] = 0.0

    def made_progress(self, rank: int) -> None:
        """Record that a rank has made progress."""
        self._still_s[rank] = 0.0

    def on_heartbeat(self, rank: int, progress: Progress) -> None:
        """Record the progress that a rank's heartbeat reports."""
        if progress != self._progress[rank]:
            self._progress[rank] = progress
            self._still_s[rank] = 0.0

    @property
    def still_s(self) -> float:
        """Seconds since any rank last made progress."""
        return self._still_s_of(self._still_s)

    def waited(self, seconds: float) -> None:
        """Add time in which the engine listened for messages."""
        for rank in self._still_s:
            self._still_s[rank] += seconds

    def check_start(self, ready: set[int]) -> None:
        """Raise EngineError if the start is stuck. `ready`: the ranks that have started."""
        if self._still_s_of(self._progress.keys() - ready) > START_S:
            fault, feat = "is stuck in its start", "has started"
            raise EngineError(self._describe(fault, feat, ranks=self._progress, done=ready, limit_s=START_S))

    def check(self, step_id: int, ranks: Collection[int], done: set[int]) -> None:
        """Raise EngineError if step `step_id` of `ranks` is stuck. `done`: the ranks that have finished the step."""
        still_s = self._still_s_of(set(ranks) - done)
        if still_s > GRACE_S and still_s > (limit_s := self._limit_s(step_id)):
            fault, feat = f"is stuck in step {step_id}", "has finished the step"
            raise EngineError(self._describe(fault, feat, ranks=ranks, done=done, limit_s=limit_s))

    def _still_s_of(self, ranks: Collection[int]) -> float:
        """Return the seconds since any of these ranks last made progress."""
        return min((self._still_s[rank] for rank in ranks), default=0.0)

    def check_answer(self, missing: set[int], patience_s: float = GRACE_S) -> None:
        """Raise EngineError if the `missing` ranks have not answered a message within `patience_s` seconds.

        If steps are in flight, the limit is at least the limit of each of these steps.
        """
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

    def _describe(self, fault: str, feat: str, *, ranks: Collection[int], done: set[int], limit_s: float) -> str:
        """Return a message that names the rank that is most likely stuck, and says what the other ranks are doing.

        Args:
            fault: what is wrong with the stuck rank.
            feat: what the ranks in `done` have achieved.
            ranks: all ranks of the step or of the start.
            done: the ranks that are not stuck.
            limit_s: the time limit that was exceeded.
        """
        left = {rank: self._progress[rank] for rank in ranks if rank not in done}
        first = min(left, key=self._sort_key)
        others = [f"rank {rank} {feat}" for rank in sorted(done)]
        others += [f"rank {rank} is {_where(progress)}" for rank, progress in left.items() if rank != first]
        for_s = _for_s(self._still_s_of(left), limit_s)
        return "; ".join([f"rank {first} {fault}, {_where(left[first])}: {for_s}", *others])

    def _sort_key(self, rank: int) -> tuple[bool, bool, int, int]:
        """Return a sort key. The rank that most likely blocks the other ranks comes first.

        A rank that waits for another stage is blocked by that stage. A rank that waits in a collective is blocked by a
        rank of its stage that has not reached it.
        """
        progress = self._progress[rank]
        return progress.awaited != "", progress.collective != "", self._layout.stage(rank), progress.collectives


def _for_s(still_s: float, limit_s: float) -> str:
    return f"no progress for {still_s:.1f} s, and the limit is {limit_s:.1f} s"


def _where(progress: Progress) -> str:
    if progress.awaited:
        return f"in {progress.awaited}"
    begun = f"after {progress.collectives} collectives" if progress.collectives else "before any collective"
    return f"in {progress.collective}" if progress.collective else f"outside collectives, {begun}"
