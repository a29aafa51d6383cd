"""An image as its model's vision tower takes it: scaled, cut into patches, and how they lie."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longhelix.errors import UserError
from longhelix.values import shown

if TYPE_CHECKING:
    import PIL.Image

# Before it is scaled down: a small file may hold a huge image.
_MOST_PIXELS = 2**27


@dataclass(frozen=True, eq=False)
class Patches:
    """patches_PX: of the image, float32, those of a token side by side. rows, columns: of its tokens. digest: SHA-256
    of all of that."""

    patches_PX: NDArray[np.float32]
    rows: int
    columns: int
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Patcher:
    """Makes patches of images, as the preprocessor_config.json in a model's folder says. Raises UserError where that or
    the packages of the extra `vl` are missing."""

    def __init__(self, folder: Path) -> None:
        config = folder / "preprocessor_config.json"
        if not config.is_file():
            raise UserError(
                f"{config} is missing, which says how images are scaled: give a complete model folder",
                "invalid_checkpoint",
            )
        try:
            import PIL.Image
            import PIL.ImageOps
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        except ImportError as error:
            raise missing_extra() from error
        self._pillow, self._ops = PIL.Image, PIL.ImageOps
        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises whatever it comes across
            raise UserError(f"{config} cannot be read ({error}): download it again", "invalid_checkpoint") from error

    def patches(self, image: str | os.PathLike[str] | PIL.Image.Image) -> Patches:
        """Those of an image file or a Pillow image. Raises UserError for what is none, or too large or too narrow."""
        name, opened = self._open(image)
        if opened.width * opened.height > _MOST_PIXELS:
            raise _too_large(name)
        try:
            upright = self._ops.exif_transpose(opened).convert("RGB")
            found = self._processor(images=[upright], return_tensors="np")
        except Exception as error:  # of files that end early, and of shapes that the model's rules refuse
            raise UserError(f"{name} cannot be read as an image ({error}): give another", "invalid_image") from error
        (grid,) = found["image_grid_thw"].tolist()
        merge = self._processor.merge_size
        patches_PX, rows, columns = found["pixel_values"], grid[1] // merge, grid[2] // merge
        digest = hashlib.sha256(f"{rows} {columns} ".encode() + patches_PX.tobytes()).digest()
        return Patches(patches_PX, rows, columns, digest)

    def _open(self, image: Any) -> tuple[str, PIL.Image.Image]:
        """An image, of which no pixel was read yet, and what to call it."""
        if isinstance(image, self._pillow.Image):
            return "the image", image
        if not isinstance(image, str | os.PathLike):
            raise UserError(f"an image is {shown(image)}: give the path of a file, or a Pillow image", "invalid_image")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self._pillow.DecompressionBombWarning)  # see _MOST_PIXELS
                return os.fspath(image), self._pillow.open(image)
        except FileNotFoundError:
            name = os.fspath(image)
            raise UserError(f"there is no image {name!r}: give the path of a file", "invalid_image") from None
        except self._pillow.DecompressionBombError as error:  # more than Pillow opens
            raise _too_large(os.fspath(image)) from error
        except Exception as error:  # Pillow's readers raise whatever they come across
            raise UserError(
                f"{os.fspath(image)!r} cannot be read as an image ({error}): give a file that Pillow reads, such as "
                "PNG or JPEG",
                "invalid_image",
            ) from error


def _too_large(name: str) -> UserError:
    return UserError(f"{name} has more than {_MOST_PIXELS} pixels: give it smaller", "invalid_image")


def missing_extra() -> UserError:
    return UserError(
        "images need Pillow and transformers, which are not installed: run `pip install 'longhelix[vl]'`",
        "missing_extra",
    )
