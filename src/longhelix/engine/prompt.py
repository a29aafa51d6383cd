"""The types of prompts that users can give, and their conversion to checked token ids."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longhelix.engine.shown_images import ShownImage
from longhelix.errors import UserError
from longhelix.values import shown


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images, for vision-language models.

    The model's image token, such as <|image_pad|>, marks the position of each image in the prompt. If the prompt has no
    image token, all images come first.
    """

    prompt: str | Sequence[int]  # text or token ids
    images: Sequence[Any]  # file paths, contents of files as bytes, or Pillow images, in the order of their tokens


@dataclass(frozen=True)
class ReadPrompt:
    """An `ImagePrompt` after the vision tower has run on its images. `LLM.read` returns it."""

    token_ids: Sequence[int]  # each image token is repeated once for every token of its image
    images: Sequence[ShownImage]  # the prompt's images, in the order of their positions


Prompt = str | Sequence[int] | ImagePrompt | ReadPrompt


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Raises UserError for anything else."""
    if (
        isinstance(prompts, str | ImagePrompt | ReadPrompt)
        or _is_array(prompts)
        or (_is_sequence(prompts) and _holds_ids(prompts))
    ):
        return [prompts]
    if not _is_sequence(prompts):
        raise UserError(f"prompts is {shown(prompts)}: give text, token ids, or a list of them")
    return list(prompts)


def token_ids(prompt: Sequence[int], vocab_size: int, most: int) -> "array[int]":
    """Check the token ids of a prompt against the vocabulary and return them as int32.

    An array is checked in one operation. In other sequences, each id is checked separately, which takes much longer.

    Args:
        prompt: integers of any integer type.
        vocab_size: ids must be smaller than this.
        most: the largest number of ids. A longer prompt is rejected before its ids are read.

    Raises:
        UserError: the prompt is too long, or it contains values that are not ids of the vocabulary.
    """
    if not (_is_sequence(prompt) or _is_array(prompt)):
        raise UserError(f"a prompt is {shown(prompt)}: give text, or a list of token ids")
    count = _length(prompt)
    if count > most:
        raise UserError(
            f"the prompt has {count} tokens, but --max-model-len is {most}: shorten the prompt, or set --max-model-len "
            f"above {count}",
            "context_length_exceeded",
        )
    ids = _array(prompt) if _is_array(prompt) or isinstance(prompt, array) else _numbers(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"a prompt is {shown(prompt)}: give its token ids as a one-dimensional list of integers")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise UserError(
            f"prompt token {wrong[0]} is outside the model's vocabulary of {vocab_size}: use ids from 0 to "
            f"{vocab_size - 1}"
        )
    return array("i", ids.astype(np.int32, copy=False).tobytes())


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple, range, array))


def _is_array(value: object) -> bool:
    """Return whether the value is a numpy array or can be converted to an array, like a torch tensor."""
    return hasattr(value, "__array__") and hasattr(value, "__len__") and getattr(value, "ndim", 0) > 0


def _holds_ids(values: Sequence[object]) -> bool:
    return _length(values) > 0 and isinstance(values[0], (int, np.integer))


def _length(values: Sequence[object]) -> int:
    try:
        return len(values)
    except Exception as error:  # a huge range or a user's own class may raise any exception
        raise UserError(f"a prompt is {shown(values)}: its length cannot be read; give a shorter list") from error


def _array(values: object) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception as error:  # numpy cannot convert tensors in bfloat16 or on a GPU
        raise UserError(f"a prompt is {shown(values)}: give its token ids as integers in host memory") from error


def _numbers(values: Sequence[object]) -> np.ndarray:
    """Return Python or numpy integers as an int64 array. Other values, such as True and 2.0, are rejected."""
    wrong = next((kind for kind in set(map(type, values)) if not _is_whole(kind)), None)
    if wrong is not None:
        first = next(value for value in values if type(value) is wrong)
        raise UserError(f"a prompt token is {shown(first)}: give token ids as integers")
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except OverflowError as error:
        beyond = next(value for value in values if not -(2**63) <= value < 2**63)
        raise UserError(
            f"prompt token {shown(beyond)} is larger than any vocabulary: use ids of the model's vocabulary"
        ) from error


def _is_whole(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, bool)
