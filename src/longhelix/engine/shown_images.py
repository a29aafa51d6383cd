"""The images of unfinished requests, and the image rows that each step needs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from longhelix.engine.workers.transport import TakeImageRows
from longhelix.scheduler.request import ImageSpan
from longhelix.scheduler.step import Step


@dataclass(frozen=True)
class ShownImage:
    """An image in a prompt."""

    span: ImageSpan  # position of the image in the prompt
    # Runs the vision tower, which is slow. Returns states in the form of `compute.models.batch.ImageRows`.
    make: Callable[[], bytes]
    states: bytes | None = None  # the result of `make`, if it has been called

    def seen(self) -> "ShownImage":
        """Return the image with its states."""
        return self if self.states is not None else replace(self, states=self.make())

    def unseen(self) -> "ShownImage":
        """Return the image without its states, which use memory."""
        return replace(self, states=None)


class ShownImages:
    """Keeps the images of unfinished requests and cuts out the rows that each step needs.

    Ranks keep an image's rows for one step only, so waiting requests use no memory on the ranks. This process keeps the
    states of an image until its last row has been sent for a step. If the states of all images exceed `most_bytes`, the
    remaining states are computed when a step needs them. After a request starts again, the states of its images are
    also computed when a step needs them.
    """

    def __init__(self, layers: int, most_bytes: int) -> None:
        """Args:
        layers: number of states for each token of an image.
        most_bytes: largest number of bytes of states to keep.
        """
        self._layers, self._most_bytes = layers, most_bytes
        self._of_request: dict[int, list[ShownImage]] = {}
        self._awaited: dict[int, set[int]] = {}  # by request: indices of the images with rows that were not sent yet
        self._lengths: dict[int, int] = {}  # by running request: tokens that were part of a step so far
        self._states: dict[bytes, bytes] = {}  # by digest
        self._wanted = Counter[bytes]()  # by digest: number of prompt positions that still need the image
        self.num_bytes = 0  # size of the states that are kept; any thread may read it

    def add(self, request_id: int, images: Sequence[ShownImage]) -> None:
        """Add the images of a waiting request. If computing their states raises an error, no image is kept."""
        self._of_request[request_id] = [image.unseen() for image in images]
        self._awaited[request_id] = set()
        try:
            for number, image in enumerate(images):
                self._await(request_id, number, image)
        except BaseException:
            self.forget(request_id)
            raise

    def forget(self, request_id: int) -> None:
        """Drop the images of a request that has ended. Does nothing if it has none."""
        self._lengths.pop(request_id, None)
        for number in list(self._awaited.get(request_id, ())):
            self._release(request_id, number)
        self._awaited.pop(request_id, None)
        self._of_request.pop(request_id, None)

    def rows(self, step: Step) -> Iterator[TakeImageRows]:
        """Yield the image rows in the chunks of the next step."""
        for new in step.changes.new:
            if new.id in self._of_request:
                self._lengths[new.id] = new.kv.cached_tokens
        for chunk in step.chunks:
            images = self._of_request.get(chunk.id)
            if images is None:
                continue
            start = self._lengths[chunk.id]
            stop = self._lengths[chunk.id] = start + chunk.num_tokens
            for number, image in enumerate(images):
                own = range(max(image.span.start, start), min(image.span.stop, stop))
                if own:
                    yield TakeImageRows(chunk.id, own.start, self._cut(image, own))
                if image.span.stop <= stop:
                    self._release(chunk.id, number)

    def _await(self, request_id: int, number: int, image: ShownImage) -> None:
        digest = image.span.digest
        if digest not in self._states and (image.states is not None or self.num_bytes < self._most_bytes):
            states = image.seen().states
            assert states is not None
            if self.num_bytes + len(states) <= self._most_bytes:
                self._states[digest] = states
                self.num_bytes += len(states)
        self._wanted[digest] += 1
        self._awaited[request_id].add(number)

    def _release(self, request_id: int, number: int) -> None:
        """Record that no further step needs this image for this request."""
        if number not in self._awaited[request_id]:
            return
        self._awaited[request_id].remove(number)
        digest = self._of_request[request_id][number].span.digest
        self._wanted[digest] -= 1
        if not self._wanted[digest]:
            del self._wanted[digest]
            self.num_bytes -= len(self._states.pop(digest, b""))

    def _cut(self, image: ShownImage, places: range) -> bytes:
        """Return the states of some of the image's tokens. `places`: positions of these tokens in the prompt."""
        states = self._states.get(image.span.digest)
        states = image.make() if states is None else states
        row_bytes = len(states) // (self._layers * image.span.num_tokens)
        first, stop = places.start - image.span.start, places.stop - image.span.start
        layers = (layer * image.span.num_tokens for layer in range(self._layers))
        return b"".join(states[(layer + first) * row_bytes : (layer + stop) * row_bytes] for layer in layers)
