"""Turns prompts with images into token ids. Each image token is repeated once for every token of its image."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.vision_language_checkpoint import VisionLanguageCheckpoint
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.prompt import ImagePrompt, ReadPrompt, token_ids
from longhelix.engine.shown_images import ShownImage
from longhelix.engine.vision.patches import Patcher, Patches
from longhelix.engine.vision.tower import Tower
from longhelix.errors import UserError
from longhelix.scheduler.request import ImageSpan
from longhelix.spec import VisionSpec
from longhelix.values import refused

_MOST_IMAGES = 1024  # per prompt; limited because all images are opened before the vision tower runs


class Images:
    """Reads the images of prompts for one engine."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint = config, checkpoint
        self._patcher: Patcher | None = None  # loaded with the first image
        self._tower: Tower | None = None

    def read(self, prompt: ImagePrompt, encode: Callable[[str], Sequence[int]]) -> ReadPrompt:
        """Open a prompt's images. The vision tower runs on the images later.

        Args:
            prompt: the prompt.
            encode: returns the token ids of text.

        Raises:
            UserError: the model does not take images, or a prompt or an image is invalid or too long.
        """
        vision, checkpoint = self._config.spec.vision, self._checkpoint
        if vision is None or not isinstance(checkpoint, VisionLanguageCheckpoint):
            raise UserError(
                f"{self._config.spec.architecture} models do not take images: leave the images out, or choose a "
                "vision-language model",
                "unsupported_model",
            )
        if self._patcher is None or self._tower is None:
            self._patcher = Patcher(checkpoint.path)
            self._tower = Tower(checkpoint, self._config.spec, self._config.formats.dtype, self._config.image_bytes)
        given = prompt.prompt
        ids = encode(given) if isinstance(given, str) else given
        ids = token_ids(ids, self._config.spec.vocabulary.size, self._config.scheduler.max_model_len).tolist()
        given_images = _items(prompt.images)
        placed = _with_places(ids, len(given_images), vision)
        self._check_length(len(placed) - len(given_images), given_images, self._patcher)
        images = [self._patcher.patches(image) for image in given_images]
        expanded, spans = _expanded(placed, images, vision)
        states = self._tower.states
        shown = [ShownImage(span, partial(states, one)) for span, one in zip(spans, images, strict=True)]
        return ReadPrompt(expanded, shown)

    def _check_length(self, num_tokens: int, images: Sequence[Any], patcher: Patcher) -> None:
        """Raise UserError if `num_tokens` and the images' tokens together exceed the limit. Reads no pixels."""
        most = self._config.scheduler.max_model_len
        for number, image in enumerate(images, 1):
            num_tokens += patcher.num_tokens(image)
            if num_tokens > most:
                raise UserError(
                    f"the prompt has {num_tokens} tokens with the first {number} of its {len(images)} images, but "
                    f"--max-model-len is {most}: give fewer or smaller images, or increase --max-model-len",
                    "context_length_exceeded",
                )


def _items(images: object) -> Sequence[Any]:
    if not isinstance(images, (list, tuple)) or not 0 < len(images) <= _MOST_IMAGES:
        raise refused("images", images, f"a list of 1 to {_MOST_IMAGES} paths, bytes of files or Pillow images")
    return images


def _with_places(ids: list[int], num_images: int, vision: VisionSpec) -> list[int]:
    """Return a prompt's ids with one image token per image. In a prompt without image tokens, images come first."""
    places = ids.count(vision.image_token_id)
    if places == num_images:
        return ids
    if places:
        raise UserError(
            f"the prompt has {places} image placeholders, but {num_images} images: give one image for each "
            "placeholder, or leave out all placeholders to put the images first"
        )
    return [vision.start_token_id, vision.image_token_id, vision.end_token_id] * num_images + ids


def _expanded(ids: list[int], images: Sequence[Patches], vision: VisionSpec) -> tuple["array[int]", list[ImageSpan]]:
    """Repeat each image token once for every token of its image. Returns the ids as int32 and the images' spans."""
    expanded = array("i")
    spans: list[ImageSpan] = []
    left = iter(images)
    for token_id in ids:
        if token_id == vision.image_token_id:
            image = next(left)
            spans.append(ImageSpan(len(expanded), image.rows, image.columns, image.digest))
            expanded.extend(array("i", [token_id]) * image.num_tokens)
        else:
            expanded.append(token_id)
    return expanded, spans
