"""What users give as a prompt, as token ids."""

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
    """A prompt that shows images, for vision-language models.

    prompt: text or token ids. The model's image token, such as <|image_pad|>, has each image's place in it; where a
    prompt has none of them, all images come first. images: paths of files, their bytes, or Pillow images, in their
    order.
    """

    prompt: str | Sequence[int]
    images: Sequence[Any]


@dataclass(frozen=True)
class ReadPrompt:
    """An `ImagePrompt` whose images the vision tower has seen: `LLM.read` makes it. token_ids: with that of an image as
    often as it has tokens."""

    token_ids: Sequence[int]
    images: Sequence[ShownImage]


Prompt = str | Sequence[int] | ImagePrompt | ReadPrompt


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Raises UserError for anything else."""
    if (
        isinstance(prompts, str | ImagePrompt | ReadPrompt)
        or _is_array(prompts)
        or (_is_sequence(prompts) and _holds_ids(prompts))
    ):
        return [prompts]
    if not _is_sequence(prompts):
        raise UserError(f"the prompts are {shown(prompts)}: give text, token ids, or a list of those")
    return list(prompts)


def token_ids(prompt: Sequence[int], vocab_size: int, most: int) -> "array[int]":
    """The ids of a prompt that is given as token ids: whole numbers of any kind, checked against the vocabulary. Those
    of an array are looked at all at once, and others one by one, which takes many times as long.

    Raises UserError; if there are more than `most` ids, before any is looked at.
    """
    if not (_is_sequence(prompt) or _is_array(prompt)):
        raise UserError(f"a prompt is {shown(prompt)}: give text, or a list of token ids")
    count = _length(prompt)
    if count > most:
        raise UserError(
            f"the prompt has {count} tokens, but --max-model-len is {most}: shorten the prompt, or set --max-model-len "
            f"to more than {count}",
            "context_length_exceeded",
        )
    ids = _array(prompt) if _is_array(prompt) or isinstance(prompt, array) else _numbers(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UserError(f"a prompt is {shown(prompt)}: its token ids must be whole numbers, one after the other")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        raise UserError(f"prompt token {wrong[0]} is outside the model's vocabulary of {vocab_size}")
    return array("i", ids.astype(np.int32, copy=False).tobytes())


def _is_sequence(value: object) -> bool:
    return isinstance(value, (list, tuple, range, array))


def _is_array(value: object) -> bool:
    """Whether this is a numpy array or converts to one, as torch tensors do."""
    return hasattr(value, "__array__") and hasattr(value, "__len__") and getattr(value, "ndim", 0) > 0


def _holds_ids(values: Sequence[object]) -> bool:
    return _length(values) > 0 and isinstance(values[0], (int, np.integer))


def _length(values: Sequence[object]) -> int:
    try:
        return len(values)
    except Exception as error:  # of a range that no memory holds, and of whatever users make
        raise UserError(f"a prompt is {shown(values)}: that is too long, or has no length") from error


def _array(values: object) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception as error:  # of a tensor that numpy cannot take: bfloat16, or not in this memory
        raise UserError(f"a prompt is {shown(values)}: its token ids must be whole numbers in host memory") from error


def _numbers(values: Sequence[object]) -> np.ndarray:
    """Python's and numpy's whole numbers as an array. True and 2.0 are refused."""
    wrong = next((kind for kind in set(map(type, values)) if not _is_whole(kind)), None)
    if wrong is not None:
        first = next(value for value in values if type(value) is wrong)
        raise UserError(f"a prompt token is {shown(first)}: token ids are whole numbers")
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except OverflowError as error:
        beyond = next(value for value in values if not -(2**63) <= value < 2**63)
        raise UserError(f"prompt token {shown(beyond)} is outside of every vocabulary") from error


def _is_whole(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, bool)
