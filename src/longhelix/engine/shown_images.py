"""The images that the ranks have, because requests show them."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from longhelix.request import ImageSpan
from longhelix.workers.pool import WorkerPool
from longhelix.workers.transport import DropImage, TakeImage


@dataclass(frozen=True)
class ShownImage:
    """An image in a prompt. states: makes what `TakeImage` has of it, which takes long."""

    span: ImageSpan
    states: Callable[[], bytes]

    def seen(self) -> Self:
        """The same, with what takes long done."""
        states = self.states()
        return replace(self, states=lambda: states)


class ShownImages:
    """Gives the ranks that need it each image once, however many requests show it, before any step does, and has them
    drop it when the last of these has ended."""

    def __init__(self, pool: WorkerPool, ranks: Collection[int]) -> None:
        self._pool, self._ranks = pool, ranks
        self._of_request: dict[int, list[bytes]] = {}
        self._requests = Counter[bytes]()  # by image

    def show(self, request_id: int, images: Sequence[ShownImage]) -> None:
        """A request shows these images, and its first step is yet to come."""
        shown = self._of_request[request_id] = []
        for image in images:
            digest = image.span.digest
            if not self._requests[digest]:
                self._pool.show(self._ranks, TakeImage(digest, image.span.num_tokens, image.states()))
            self._requests[digest] += 1
            shown.append(digest)

    def forget(self, request_id: int) -> None:
        """A request has ended, if it showed any. Steps that have rows of it are under way, and no more of them come."""
        for digest in self._of_request.pop(request_id, ()):
            self._requests[digest] -= 1
            if not self._requests[digest]:
                del self._requests[digest]
                self._pool.show(self._ranks, DropImage(digest))
