"""An image as its model's vision tower takes it: scaled, cut into patches, and how they lie."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longhelix.errors import UserError
from longhelix.values import shown

if TYPE_CHECKING:
    import PIL.Image

# Before it is scaled down: a small file may hold a huge image.
_MOST_PIXELS = 2**27


# The files that say how images are scaled, of which a folder has either.
_FILES = ("preprocessor_config.json", "processor_config.json")
SETTINGS = " or ".join(_FILES)


# An image as users give it: the path of a file, its bytes, or a Pillow image.
Source: TypeAlias = "str | os.PathLike[str] | bytes | PIL.Image.Image"


@dataclass(frozen=True, eq=False)
class Patches:
    """What is known of an image before its patches are cut. rows, columns: of its tokens. digest: SHA-256 of its size
    and pixels. cut: reads the image again and makes its patches_PX, float32, those of a token side by side."""

    rows: int
    columns: int
    digest: bytes
    cut: Callable[[], NDArray[np.float32]]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Patcher:
    """Makes patches of images, as preprocessor_config.json or processor_config.json in a model's folder says. Raises
    UserError where that or the packages of the extra `vl` are missing."""

    def __init__(self, folder: Path) -> None:
        if not any((folder / name).is_file() for name in _FILES):
            raise UserError(
                f"{folder} has no {SETTINGS}, which says how images are scaled: give a complete model folder",
                "invalid_checkpoint",
            )
        try:
            import PIL.Image
            import PIL.ImageOps
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
                Qwen2VLImageProcessorPil,
                smart_resize,
            )
        except ImportError as error:
            raise missing_extra() from error
        self._pillow, self._ops, self._scaled = PIL.Image, PIL.ImageOps, smart_resize
        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises whatever it comes across
            raise UserError(
                f"how images are scaled cannot be read from {SETTINGS} in {folder} ({error}): download it again",
                "invalid_checkpoint",
            ) from error

    def num_tokens(self, image: Source) -> int:
        """Of an image, by its size alone. Raises UserError as `patches` does."""
        with self._opened(image) as (name, opened):
            rows, columns = self._grid(name, *opened.size)
        return rows * columns

    def patches(self, image: Source) -> Patches:
        """Those of an image. Raises UserError for what is none, or too large or too narrow."""
        name, upright = self._upright(image)
        digest = _digest(upright)
        return Patches(*self._grid(name, *upright.size), digest, partial(self._cut, image, digest))

    def _cut(self, image: Source, digest: bytes) -> NDArray[np.float32]:
        name, upright = self._upright(image)
        if _digest(upright) != digest:
            raise UserError(f"{name} changed while it was read: give it again", "invalid_image")
        try:
            return self._processor(images=[upright], return_tensors="np")["pixel_values"]
        except Exception as error:
            raise _unreadable(name, error) from error

    def _grid(self, name: str, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image of that size."""
        processor = self._processor
        unit, size = processor.patch_size * processor.merge_size, processor.size
        try:
            scaled = self._scaled(height, width, unit, size["shortest_edge"], size["longest_edge"])
        except Exception as error:  # of shapes that the model's rules refuse
            raise _unreadable(name, error) from error
        return scaled[0] // unit, scaled[1] // unit

    def _upright(self, image: Any) -> tuple[str, PIL.Image.Image]:
        """What to call an image, and its pixels: turned as its EXIF says, red, green and blue in 8 bits, on white where
        it is transparent."""
        with self._opened(image) as (name, opened):
            if opened.mode in ("I", "F"):
                raise UserError(
                    f"{name} has 32 bits for a pixel, which do not say what is white: give it with 8 or 16 bits",
                    "invalid_image",
                )
            try:
                return name, self._on_white(self._ops.exif_transpose(opened))
            except Exception as error:  # of files that end early
                raise _unreadable(name, error) from error

    def _on_white(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """An image without transparency, as transformers' processors make it of one."""
        transparent = image.info.get("transparency")
        if image.mode.startswith("I;16"):  # Pillow cuts these off at 255
            values = np.asarray(image)
            gray = (values >> 8).astype(np.uint8)
            if isinstance(transparent, int):
                gray[values == transparent] = 255
            return self._pillow.fromarray(gray).convert("RGB")
        if image.mode in ("La", "RGBa"):  # multiplied by alpha
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        if "A" not in image.getbands() and transparent is None:
            return image.convert("RGB")
        image = image.convert("RGBA")
        white = self._pillow.new("RGBA", image.size, (255, 255, 255, 255))
        return self._pillow.alpha_composite(white, image).convert("RGB")

    @contextmanager
    def _opened(self, image: Any) -> Iterator[tuple[str, PIL.Image.Image]]:
        """As `_open`, and what was opened here is closed at the end."""
        name, opened = self._open(image)
        with nullcontext() if opened is image else opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise _too_large(name)
            yield name, opened

    def _open(self, image: Any) -> tuple[str, PIL.Image.Image]:
        """An image, of which no pixel was read yet, and what to call it."""
        if isinstance(image, self._pillow.Image):
            return "the image", image
        if isinstance(image, bytes):
            name, file = "the image", BytesIO(image)
        elif isinstance(image, str | os.PathLike):
            name, file = os.fspath(image), image
        else:
            raise UserError(
                f"an image is {shown(image)}: give the path of a file, its bytes, or a Pillow image", "invalid_image"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self._pillow.DecompressionBombWarning)  # see _MOST_PIXELS
                return name, self._pillow.open(file)
        except FileNotFoundError:
            raise UserError(f"there is no image {name!r}: give the path of a file", "invalid_image") from None
        except self._pillow.DecompressionBombError as error:  # more than Pillow opens
            raise _too_large(name) from error
        except Exception as error:  # Pillow's readers raise whatever they come across
            raise UserError(
                f"{name} cannot be read as an image ({error}): give a file that Pillow reads, such as PNG or JPEG",
                "invalid_image",
            ) from error


def _digest(upright: PIL.Image.Image) -> bytes:
    return hashlib.sha256(f"{upright.width} {upright.height} ".encode() + upright.tobytes()).digest()


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name} cannot be read as an image ({error}): give another", "invalid_image")


def _too_large(name: str) -> UserError:
    return UserError(f"{name} has more than {_MOST_PIXELS} pixels: give it smaller", "invalid_image")


def missing_extra() -> UserError:
    return UserError(
        "images need Pillow and transformers, which are not installed: run `pip install 'longhelix[vl]'`",
        "missing_extra",
    )
