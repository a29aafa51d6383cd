"""Measures a step while a rank runs it."""

import time

from longhelix.compute.parallel.mesh import Mesh
from longhelix.scheduler.step import PromptLogprobs, SampledToken, Step, StepMeasurements, StepResult


class Meter:
    """Measures one step, from its construction to `result`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._begun_s, self._stages_s = time.perf_counter(), self._waited_for_stages_s
        self._traffic, self._network_bytes = mesh.traffic, mesh.network_bytes
        self.begin_layers()

    def begin_layers(self) -> None:
        """Start to count exchanges. Copies of KV blocks before the layers do not count."""
        self._exchanged_bytes, self._waited_s = self._mesh.exchanged_bytes, self._mesh.waited_s

    @property
    def _waited_for_stages_s(self) -> float:
        return 0.0 if self._mesh.pipeline is None else self._mesh.pipeline.waited_s

    def result(
        self,
        step: Step,
        sampled: tuple[SampledToken, ...],
        prompt_logprobs: tuple[PromptLogprobs, ...],
        *,
        num_rows: int,
        moved_s: float,
        sees_waits: bool,
    ) -> StepResult:
        """Return the result of the step, which ends here.

        Args:
            num_rows: the rows that no other instance counts.
            moved_s: seconds in which blocks moved between ranks.
            sees_waits: whether waits of exchanges are measured.
        """
        mesh = self._mesh
        return StepResult(
            step_id=step.id,
            sampled=sampled,
            num_tokens=num_rows,
            prompt_logprobs=prompt_logprobs,
            measured=StepMeasurements(
                taken_s=time.perf_counter() - self._begun_s - (self._waited_for_stages_s - self._stages_s),
                moved_s=moved_s,
                exposed_s=mesh.waited_s - self._waited_s if sees_waits else None,
                exchanged_bytes=mesh.exchanged_bytes - self._exchanged_bytes,
                network_bytes=mesh.network_bytes - self._network_bytes,
                fingerprint=mesh.fingerprint(since=self._traffic),
                parts=step.work.parts,
            ),
        )
