"""Runners that compute nothing: steps take the time that they are said to, and a clock moves by that."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import NamedTuple

from longhelix.request import Cost, SampledToken, Step, StepResult


class RanStep(NamedTuple):
    """A step, and from when to when it ran, in seconds of the runner's clock."""

    step: Step
    result: StepResult
    begin_s: float
    end_s: float


class SimulatedRunner(ABC):
    """A `Runner` with a clock of its own, which is moved by results and by `wait_until`.

    A step passes through `stages` pipeline stages and takes an even share of its seconds in each. It enters the first
    when its predecessor has left that; with decodes when its predecessor has ended, which sampled their last tokens.
    """

    def __init__(self, stages: int = 1) -> None:
        self.now_s = 0.0
        self.stages = stages
        self._left_s = [0.0] * stages  # when the last step left each stage
        self._in_flight: deque[RanStep] = deque()
        self.last: RanStep | None = None

    @abstractmethod
    def _result(self, step: Step) -> StepResult:
        """What a step gives, and how long it takes."""

    def submit(self, step: Step) -> None:
        result = self._result(step)
        begin_s = max(self.now_s, self._left_s[-1] if step.work.decode_rows else self._left_s[0])
        end_s, stage_s = begin_s, result.taken_s / self.stages
        for stage, left_s in enumerate(self._left_s):
            end_s = self._left_s[stage] = max(end_s, left_s) + stage_s
        self._in_flight.append(RanStep(step, result, begin_s, end_s))

    def collect(self, timeout_s: float) -> StepResult | None:
        """The oldest step's result, at the time of its end; the clock does not know a timeout."""
        self.last = self._in_flight.popleft()
        self.now_s = max(self.now_s, self.last.end_s)
        return self.last.result

    def wait_until(self, time_s: float) -> None:
        """Let time pass with nothing to run."""
        assert not self._in_flight
        self.now_s = max(self.now_s, time_s)


class PredictedRunner(SimulatedRunner):
    """Steps take the time that a cost gives, after what they swap: `swap_s` for the way of one KV block out of its pool
    and back, to and from all KVP ranks at once. A step without rows takes none. Every token of a sequence has the same
    id."""

    def __init__(self, cost: Cost, stages: int = 1, swap_s: float = 0.0) -> None:
        super().__init__(stages)
        self._cost = cost
        self._swap_s = swap_s
        self._tokens: dict[int, SampledToken] = {}
        self._decoding: dict[int, SampledToken] = {}
        self._decoded: tuple[SampledToken, ...] | None = ()

    def _result(self, step: Step) -> StepResult:
        sampled, work = self._sampled(step), step.work
        seconds = self._cost.seconds(work) if work.rows else 0.0
        if step.swapped_out or step.swapped_in:
            seconds += self._swap_s / 2 * _most_swapped(step)
        return StepResult(step.id, sampled, work.rows, 0, work.parts, taken_s=seconds)

    def _sampled(self, step: Step) -> tuple[SampledToken, ...]:
        """A token of every sequence that decodes, then of those whose prompts end; and follow what the step changes."""
        if step.ended or step.leaving or step.joining:
            self._decoded = None
            for id in step.ended:
                self._tokens.pop(id, None)
                self._decoding.pop(id, None)
            for id in step.leaving:
                self._decoding.pop(id, None)
        for new in step.new:
            self._tokens[new.id] = SampledToken(new.id, 0)
        for id in step.joining:
            self._decoding[id] = self._tokens[id]
        if self._decoded is None:
            self._decoded = tuple(self._decoding.values())
        ending = tuple(self._tokens[chunk.id] for chunk in step.chunks if chunk.sample)
        return self._decoded + ending if ending else self._decoded


def _most_swapped(step: Step) -> int:
    """The most blocks that go either way on one KVP rank."""
    blocks = [block for block, _ in step.swapped_out] + [block for _, block in step.swapped_in]
    return max(Counter(block.owner for block in blocks).values())
