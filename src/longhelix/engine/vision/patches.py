"""Scales images and cuts them into patches for the model's vision tower."""

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

# The number of pixels is checked before the image is scaled down, because a small file may contain a huge image.
_MOST_PIXELS = 2**27


# Files that contain the settings for scaling images. A model folder has one of these files.
_FILES = ("preprocessor_config.json", "processor_config.json")
SETTINGS = " or ".join(_FILES)


# An image as users give it: the path of a file, the bytes of a file, or a Pillow image.
Source: TypeAlias = "str | os.PathLike[str] | bytes | PIL.Image.Image"


@dataclass(frozen=True, eq=False)
class Patches:
    """An image whose patches are not cut yet."""

    rows: int  # number of rows of tokens
    columns: int  # number of columns of tokens
    digest: bytes  # SHA-256 of the image's size and pixels
    # Reads the image again and returns patches_PX, float32. The patches of a token are adjacent.
    cut: Callable[[], NDArray[np.float32]]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Patcher:
    """Cuts images into patches with the settings in a model folder's preprocessor_config.json or processor_config.json.

    Raises:
        UserError: the folder has neither file, or the packages of the extra `vl` are not installed.
    """

    def __init__(self, folder: Path) -> None:
        if not any((folder / name).is_file() for name in _FILES):
            raise UserError(
                f"{folder} has no {SETTINGS}, but images need its settings: give a complete model folder",
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
        except Exception as error:  # transformers may raise any exception
            raise UserError(
                f"the settings for scaling images cannot be read from {SETTINGS} in {folder} ({error}): download it "
                "again",
                "invalid_checkpoint",
            ) from error

    def num_tokens(self, image: Source) -> int:
        """Return the number of an image's tokens. Reads only the image's size. Raises UserError like `patches`."""
        with self._opened(image) as (name, opened):
            rows, columns = self._grid(name, *opened.size)
        return rows * columns

    def patches(self, image: Source) -> Patches:
        """Return an image's patches. Raises UserError if it is no image, or is too large or too narrow."""
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
        """Return the rows and columns of tokens of an image with this size in pixels."""
        processor = self._processor
        unit, size = processor.patch_size * processor.merge_size, processor.size
        try:
            scaled = self._scaled(
                height, width, factor=unit, min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"]
            )
        except Exception as error:  # raised for shapes that the model's rules reject
            raise _unreadable(name, error) from error
        return scaled[0] // unit, scaled[1] // unit

    def _upright(self, image: Any) -> tuple[str, PIL.Image.Image]:
        """Return an image's name for messages and its pixels.

        The pixels are 8-bit RGB. The image is rotated as its EXIF data says, and its transparent parts become white.
        """
        with self._opened(image) as (name, opened):
            if opened.mode in ("I", "F"):
                raise UserError(
                    f"{name} has 32 bits per pixel, so its value for white is unknown: give it with 8 or 16 bits",
                    "invalid_image",
                )
            try:
                return name, self._on_white(self._ops.exif_transpose(opened))
            except Exception as error:  # raised for truncated files
                raise _unreadable(name, error) from error

    def _on_white(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """Return an image without transparency, converted in the same way as by transformers' processors."""
        transparent = image.info.get("transparency")
        if image.mode.startswith("I;16"):  # Pillow would clip these values at 255
            values = np.asarray(image)
            gray = (values >> 8).astype(np.uint8)
            if isinstance(transparent, int):
                gray[values == transparent] = 255
            return self._pillow.fromarray(gray).convert("RGB")
        if image.mode in ("La", "RGBa"):  # the colours are premultiplied by alpha
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        if "A" not in image.getbands() and transparent is None:
            return image.convert("RGB")
        image = image.convert("RGBA")
        white = self._pillow.new("RGBA", image.size, (255, 255, 255, 255))
        return self._pillow.alpha_composite(white, image).convert("RGB")

    @contextmanager
    def _opened(self, image: Any) -> Iterator[tuple[str, PIL.Image.Image]]:
        """Open an image like `_open`, and check its size. If this method opened the image, it also closes the image."""
        name, opened = self._open(image)
        with nullcontext() if opened is image else opened:
            if opened.width * opened.height > _MOST_PIXELS:
                raise _too_large(name)
            yield name, opened

    def _open(self, image: Any) -> tuple[str, PIL.Image.Image]:
        """Return an image's name for messages, and the image. Its pixels are not read yet."""
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
        except self._pillow.DecompressionBombError as error:  # more pixels than Pillow accepts
            raise _too_large(name) from error
        except Exception as error:  # Pillow's readers may raise any exception
            raise UserError(
                f"{name} cannot be read as an image ({error}): give a file that Pillow reads, such as PNG or JPEG",
                "invalid_image",
            ) from error


def _digest(upright: PIL.Image.Image) -> bytes:
    return hashlib.sha256(f"{upright.width} {upright.height} ".encode() + upright.tobytes()).digest()


def _unreadable(name: str, error: Exception) -> UserError:
    return UserError(f"{name} cannot be read as an image ({error}): give another image", "invalid_image")


def _too_large(name: str) -> UserError:
    return UserError(f"{name} has more than {_MOST_PIXELS} pixels: give a smaller image", "invalid_image")


def missing_extra() -> UserError:
    return UserError(
        "images need Pillow and transformers, which are not installed: run `pip install 'longhelix[vl]'`",
        "missing_extra",
    )
