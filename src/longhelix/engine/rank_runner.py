"""The runner of an engine's loop: sends steps to the ranks, and collects their results."""

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.guides import Guides
from longhelix.engine.shown_images import ShownImages
from longhelix.engine.workers.pool import WorkerPool
from longhelix.engine.workers.transport import TakeTokens
from longhelix.scheduler.step import Step, StepResult


class RankRunner:
    """The loop's runner. Just before each step, it sends the image rows and the token table that the step needs.

    If this data makes a rank fail, the rank fails during the step. The failure is then attributed to a running request.
    """

    def __init__(self, pool: WorkerPool, config: EngineConfig, images: ShownImages, guides: Guides | None) -> None:
        self._pool, self._config, self._images, self._guides = pool, config, images, guides
        self._sent_token_table = False  # ranks need the token table for guides

    def submit(self, step: Step) -> None:
        if not self._sent_token_table and any(new.sampling.guide is not None for new in step.changes.new):
            assert self._guides is not None, "the request was rejected otherwise"
            layout = self._config.layout
            ranks = [rank for rank in range(layout.world_size) if layout.has_head(rank)]
            self._pool.show(ranks, TakeTokens(self._guides.table))
            self._sent_token_table = True
        for rows in self._images.rows(step):
            self._pool.show(self._image_ranks(step), rows)
        self._pool.submit(step)

    def collect(self, timeout_s: float) -> StepResult | None:
        return self._pool.collect(timeout_s)

    def _image_ranks(self, step: Step) -> list[int]:
        """Return the ranks that take part in the step and need images."""
        layout = self._config.layout
        taken = step.turn.instances or range(layout.kvp)
        return [rank for rank in self._config.image_ranks if layout.kvp_rank(rank) in taken]
