"""Runners that compute nothing: steps take the time that they are said to, and a clock moves by that."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import SampledToken, Step, StepResult
from longhelix.scheduler.work import Cost


class SimulatedStep(NamedTuple):
    """A step, and from when to when it ran, in seconds of the runner's clock."""

    step: Step
    result: StepResult
    begin_s: float
    end_s: float


class SimulatedRunner(ABC):
    """A `Runner` with a clock of its own, which is moved by results and by `wait_until`.

    A step passes through `stages` pipeline stages and takes an even share of its seconds in each. It enters the first
    when its predecessor has left that, of KVP instances with clocks of their own the last one of any of its own, and
    the steps that sampled the last tokens of its decodes have ended: the last one of their microbatch, and those with
    the last chunks of the prompts of decodes that join it.
    """

    def __init__(self, stages: int = 1, clocks: int = 1) -> None:
        self.now_s = 0.0
        self.stages = stages
        self._left_s = [[0.0] * stages for _ in range(clocks)]  # when the last step of each clock left each stage
        self._decoded_s: dict[int, float] = {}  # when the last step of each microbatch ended
        self._prompt_s: dict[int, float] = {}  # and that of each prompt's last chunk, until it decodes
        self._in_flight: list[SimulatedStep] = []
        self.last: SimulatedStep | None = None

    @abstractmethod
    def _result(self, step: Step) -> StepResult:
        """What a step gives, and how long it takes."""

    def submit(self, step: Step) -> None:
        result = self._result(step)
        clocks = [self._left_s[at] for at in step.instances or (0,)]
        begin_s = max(self.now_s, *(left_s[0] for left_s in clocks))
        if self.stages > 1 and step.work.decode_rows:
            begin_s = max(begin_s, self._tokens_s(step))
        end_s, stage_s = begin_s, result.taken_s / self.stages
        for stage in range(self.stages):
            end_s = max(end_s, *(left_s[stage] for left_s in clocks)) + stage_s
            for left_s in clocks:
                left_s[stage] = end_s
        if self.stages > 1:
            self._note_tokens(step, end_s)
        self._in_flight.append(SimulatedStep(step, result, begin_s, end_s))

    def _tokens_s(self, step: Step) -> float:
        """When the last tokens of a step's decodes are known."""
        joining_s = (self._prompt_s.pop(id, 0.0) for id in step.joining)
        return max([self._decoded_s.get(step.microbatch, 0.0), *joining_s])

    def _note_tokens(self, step: Step, end_s: float) -> None:
        """A step's tokens are known at `end_s`."""
        if step.work.decode_rows:
            self._decoded_s[step.microbatch] = end_s
        for chunk in step.chunks:
            if chunk.sample:
                self._prompt_s[chunk.id] = end_s
        for id in step.ended:
            self._prompt_s.pop(id, None)

    def collect(self, timeout_s: float) -> StepResult | None:
        """The result of the step that ends first, at the time of its end. None: it takes longer than `timeout_s`, which
        passes only in `wait_until`."""
        next_one = self._next()
        if self._in_flight[next_one].end_s > self.now_s + timeout_s:
            return None
        self.last = self._in_flight.pop(next_one)
        self.now_s = max(self.now_s, self.last.end_s)
        return self.last.result

    def _next(self) -> int:
        """Which of the steps in flight ends next; of several at once that which was submitted first."""
        return min(range(len(self._in_flight)), key=lambda at: self._in_flight[at].end_s)

    @property
    def runs(self) -> bool:
        """Whether there is a step in flight."""
        return bool(self._in_flight)

    def wait_until(self, time_s: float) -> None:
        """Let time pass in which no step ends."""
        self.now_s = max(self.now_s, time_s)


class PredictedRunner(SimulatedRunner):
    """Steps take the time that a cost gives, after what they swap and move, in each stage: `swap_s` for the way of one
    KV block out of its pool and back, to and from all KVP ranks at once; `move_s` for blocks that go to other KVP
    ranks, by the most that one sends and that one receives. A step without rows takes none. Every token of a sequence
    has the same id."""

    def __init__(
        self,
        cost: Cost,
        stages: int = 1,
        swap_s: float = 0.0,
        move_s: Callable[[int, int], float] = lambda sent, received: 0.0,
        clocks: int = 1,
    ) -> None:
        super().__init__(stages, clocks)
        self._cost = cost
        self._swap_s = swap_s
        self._move_s = move_s
        self._tokens: dict[int, SampledToken] = {}
        self._leads: dict[int, int] = {}  # the instance that samples a sequence's tokens
        self._decoding: dict[int, dict[int, SampledToken]] = {}  # by microbatch, or by instance
        self._decoded: dict[int, tuple[SampledToken, ...]] = {}  # those that have not changed

    def _result(self, step: Step) -> StepResult:
        sampled, work = self._sampled(step), step.work
        seconds, moved_s = self._cost.seconds(work) if work.rows else 0.0, 0.0
        if step.swapped_out or step.swapped_in:
            swapped = _most([block for block, _ in step.swapped_out] + [block for _, block in step.swapped_in])
            seconds += self.stages * self._swap_s / 2 * swapped
        if step.widened and (moved := step.moved):
            moved_s = self._move_s(_most(source for source, _ in moved), _most(target for _, target in moved))
            seconds += self.stages * moved_s
        return StepResult(step.id, sampled, work.rows, 0, work.parts, taken_s=seconds, moved_s=moved_s)

    def _sampled(self, step: Step) -> tuple[SampledToken, ...]:
        """A token of every sequence that decodes, then of those whose prompts end; and follow what the step changes."""
        for id in step.ended:
            self._tokens.pop(id, None)
            self._leads.pop(id, None)
        for id in (*step.ended, *step.leaving):
            for at, decoding in self._decoding.items():
                if decoding.pop(id, None) is not None:
                    self._decoded.pop(at, None)
        for new in step.new:
            self._tokens[new.id] = SampledToken(new.id, 0)
            if new.instances:
                self._leads[new.id] = new.instances[0]
        for id in step.joining:
            at = self._leads.get(id, step.microbatch)
            self._decoding.setdefault(at, {})[id] = self._tokens[id]
            self._decoded.pop(at, None)
        decoded = tuple(chain.from_iterable(map(self._decoded_at, step.instances or (step.microbatch,))))
        ending = tuple(self._tokens[chunk.id] for chunk in step.chunks if chunk.sample)
        return decoded + ending if ending else decoded

    def _decoded_at(self, at: int) -> tuple[SampledToken, ...]:
        """Of the sequences of one microbatch, or that one instance leads."""
        decoded = self._decoded.get(at)
        if decoded is None:
            decoded = self._decoded[at] = tuple(self._decoding.get(at, {}).values())
        return decoded


def _most(blocks: Iterable[Block]) -> int:
    """How many of the blocks one KVP rank has at most."""
    return max(Counter(block.owner for block in blocks).values())
