"""Simulated runners, which do not run a model. Each step advances a clock by a predicted or recorded time."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import SampledToken, Step, StepMeasurements, StepResult
from longhelix.scheduler.work import Cost


class SimulatedStep(NamedTuple):
    """A step with its start and end time, in seconds on the runner's clock."""

    step: Step
    result: StepResult
    begin_s: float
    end_s: float


class SimulatedRunner(ABC):
    """A `Runner` with its own clock. `collect` and `wait_until` advance the clock.

    A step passes through `stages` pipeline stages and spends an equal part of its time in each stage. It enters the
    first stage when both of these conditions are met:

    - The previous step has left the first stage. If KVP instances have their own clocks, this applies to the previous
      step of each instance that takes part in the step.
    - The last token of every decoding sequence is known. For this, the previous step of the microbatch must have
      ended, and so must the last chunk of each prompt that now starts to decode.
    """

    def __init__(self, stages: int = 1, clocks: int = 1) -> None:
        self.now_s = 0.0
        self.stages = stages
        self._left_s = [[0.0] * stages for _ in range(clocks)]  # when the last step on each clock left each stage
        self._decoded_s: dict[int, float] = {}  # end time of the last step of each microbatch
        self._prompt_s: dict[int, float] = {}  # end time of each prompt's last chunk, until the prompt decodes
        self._in_flight: list[SimulatedStep] = []
        self.last: SimulatedStep | None = None

    @abstractmethod
    def _result(self, step: Step) -> StepResult:
        """Return the result of a step, including the time that the step takes."""

    def submit(self, step: Step) -> None:
        result = self._result(step)
        clocks = [self._left_s[at] for at in step.turn.instances or (0,)]
        begin_s = max(self.now_s, *(left_s[0] for left_s in clocks))
        if self.stages > 1 and step.work.decode_rows:
            begin_s = max(begin_s, self._tokens_s(step))
        end_s, stage_s = begin_s, result.measured.taken_s / self.stages
        for stage in range(self.stages):
            end_s = max(end_s, *(left_s[stage] for left_s in clocks)) + stage_s
            for left_s in clocks:
                left_s[stage] = end_s
        if self.stages > 1:
            self._note_tokens(step, end_s)
        self._in_flight.append(SimulatedStep(step, result, begin_s, end_s))

    def _tokens_s(self, step: Step) -> float:
        """Return the time at which a step's input tokens are known for all of its decoding sequences."""
        joining_s = (self._prompt_s.pop(id, 0.0) for id in step.changes.joining)
        return max([self._decoded_s.get(step.turn.microbatch, 0.0), *joining_s])

    def _note_tokens(self, step: Step, end_s: float) -> None:
        """Record that the tokens that a step samples are known at `end_s`."""
        if step.work.decode_rows:
            self._decoded_s[step.turn.microbatch] = end_s
        for chunk in step.chunks:
            if chunk.sample:
                self._prompt_s[chunk.id] = end_s
        for id in step.changes.ended:
            self._prompt_s.pop(id, None)

    def collect(self, timeout_s: float) -> StepResult | None:
        """Advance the clock to the end of the step that ends first, and return the result of this step.

        If the step ends later than `timeout_s` from now, return None and leave the clock unchanged.
        """
        next_one = self._next()
        if self._in_flight[next_one].end_s > self.now_s + timeout_s:
            return None
        self.last = self._in_flight.pop(next_one)
        self.now_s = max(self.now_s, self.last.end_s)
        return self.last.result

    def _next(self) -> int:
        """Return the index of the step in flight that ends first. On a tie, return the step submitted first."""
        return min(range(len(self._in_flight)), key=lambda at: self._in_flight[at].end_s)

    @property
    def runs(self) -> bool:
        """True if a step is in flight."""
        return bool(self._in_flight)

    def wait_until(self, time_s: float) -> None:
        """Advance the clock to `time_s`. No step in flight may end before this time."""
        self.now_s = max(self.now_s, time_s)


class PredictedRunner(SimulatedRunner):
    """Runner that predicts the time of each step.

    The time of a step is the time of its work, plus the time that each stage takes to swap and move blocks. A step
    without rows has no work. All sampled tokens have the same id.

    Args of the constructor:
        cost: predicts the time of a step's work.
        swap_s: seconds to swap one KV block out and in again. All KVP ranks swap at the same time.
        move_s: returns the seconds to move KV blocks between KVP ranks. Its arguments are the maximum number of blocks
            that one rank sends and the maximum number that one rank receives.
    """

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
        self._leads: dict[int, int] = {}  # instance that samples the tokens of each sequence
        self._decoding: dict[int, dict[int, SampledToken]] = {}  # decoding sequences, by microbatch or by instance
        self._decoded: dict[int, tuple[SampledToken, ...]] = {}  # cache of the values of `_decoding`, as tuples

    def _result(self, step: Step) -> StepResult:
        sampled, work = self._sampled(step), step.work
        seconds, moved_s = self._cost.seconds(work) if work.rows else 0.0, 0.0
        if step.transfers.swapped_out or step.transfers.swapped_in:
            # The time to swap a block counts all layers, and so only blocks of the first group count.
            swapped = [swap.block for swap in step.transfers.swapped_out + step.transfers.swapped_in if not swap.group]
            seconds += self.stages * self._swap_s / 2 * (_most(swapped) if swapped else 0)
        if step.changes.rebalances and (moved := step.moved):
            moved_s = self._move_s(_most(source for source, _ in moved), _most(target for _, target in moved))
            seconds += self.stages * moved_s
        return StepResult(
            step_id=step.id,
            sampled=sampled,
            num_tokens=work.rows,
            measured=StepMeasurements(taken_s=seconds, moved_s=moved_s, parts=work.parts),
        )

    def _sampled(self, step: Step) -> tuple[SampledToken, ...]:
        """Update the sequences for a step, and return the tokens that the step samples.

        The tokens of decoding sequences come first, followed by those of drafts, none of which is accepted, and by the
        first tokens of finished prompts.
        """
        for id in step.changes.ended:
            self._tokens.pop(id, None)
            self._leads.pop(id, None)
        for id in (*step.changes.ended, *step.changes.leaving):
            for at, decoding in self._decoding.items():
                if decoding.pop(id, None) is not None:
                    self._decoded.pop(at, None)
        for new in step.changes.new:
            self._tokens[new.id] = SampledToken(new.id, 0)
            if new.instances:
                self._leads[new.id] = new.instances[0]
        for id in step.changes.joining:
            at = self._leads.get(id, step.turn.microbatch)
            self._decoding.setdefault(at, {})[id] = self._tokens[id]
            self._decoded.pop(at, None)
        decoded = tuple(chain.from_iterable(map(self._decoded_at, step.turn.instances or (step.turn.microbatch,))))
        ending = tuple(self._tokens[draft.id] for draft in step.drafts)
        ending += tuple(self._tokens[chunk.id] for chunk in step.chunks if chunk.sample)
        return decoded + ending if ending else decoded

    def _decoded_at(self, at: int) -> tuple[SampledToken, ...]:
        """Return the tokens of the sequences of one microbatch, or of the sequences that one instance leads."""
        decoded = self._decoded.get(at)
        if decoded is None:
            decoded = self._decoded[at] = tuple(self._decoding.get(at, {}).values())
        return decoded


def _most(blocks: Iterable[Block]) -> int:
    """Return the maximum number of these blocks on one KVP rank."""
    return max(Counter(block.owner for block in blocks).values())
