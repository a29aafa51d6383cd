"""Images in messages, as data URLs.

The server never fetches a URL, because clients could use it to reach the server's network. It checks the size, pixels
and scans of an image before it decodes the pixels.
"""

import base64
import binascii
import warnings
from collections.abc import Sequence
from io import BytesIO

from longhelix.engine.vision.patches import missing_extra
from longhelix.serve.errors import ClientError
from longhelix.values import shown

MOST_IMAGES = 64  # per request
MOST_BYTES = 20 * 2**20  # per image file
MOST_PIXELS = 2**25  # per image; slightly more than a frame of 8K video has
MOST_PIXELS_TOGETHER = 2**27  # per request, over all images
MOST_SCANS = 256  # per JPEG. Encoders write about ten, and decoding each scan touches all pixels.
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"  # first bytes of a JPEG file and of a scan
_FORMATS = ("PNG", "JPEG", "WEBP")
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_WANTED = "send the image itself, as data:image/png;base64,... (or image/jpeg, image/webp)"


def read_images(urls: Sequence[str], field: str) -> list[bytes]:
    """Decode the data URLs into image files, and check the files against the limits without decoding their pixels.

    Args:
        urls: data URLs of one request.
        field: request field that contains the URLs, for error messages.

    Raises:
        ClientError: a URL is not a data URL of an image, or an image exceeds a limit.
    """
    if len(urls) > MOST_IMAGES:
        raise _refused(f"there are {len(urls)} images: give at most {MOST_IMAGES}", field)
    files, pixels = [], 0
    for number, url in enumerate(urls, 1):
        name = f"image {number}"
        file = _file(url, name, field)
        if file.startswith(_JPEG) and file.count(_SCAN) > MOST_SCANS:
            raise _refused(f"{name} has more than {MOST_SCANS} scans: save it with fewer scans", field)
        pixels += _num_pixels(file, name, field)
        if pixels > MOST_PIXELS_TOGETHER:
            raise _refused(
                f"the images have more than {MOST_PIXELS_TOGETHER} pixels in total: give fewer or smaller images", field
            )
        files.append(file)
    return files


def _file(url: str, name: str, field: str) -> bytes:
    scheme, colon, rest = url.partition(":")
    if scheme.lower() != "data" or not colon:
        raise _refused(f"{name} has the URL {shown(url[:100])}, but the server does not fetch images: {_WANTED}", field)
    kind, comma, data = rest.partition(",")
    media_type, *parameters = kind.split(";")
    if media_type.lower() not in _MEDIA_TYPES or not comma or parameters[-1:] != ["base64"]:
        raise _refused(f"{name} is {shown(kind[:100])}: {_WANTED}", field)
    if 3 * len(data) // 4 > MOST_BYTES + 2:
        raise _refused(f"{name} has more than {MOST_BYTES} bytes: give a smaller image", field)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"{name} is not valid base64 ({error}): {_WANTED}", field) from error


def _num_pixels(file: bytes, name: str, field: str) -> int:
    """Read the number of pixels from the file's header."""
    try:
        import PIL.Image
    except ImportError as error:
        raise missing_extra() from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # MOST_PIXELS is checked instead
            with PIL.Image.open(BytesIO(file), formats=_FORMATS) as image:
                pixels = image.width * image.height
    except PIL.Image.DecompressionBombError as error:  # Pillow has its own limit
        raise _too_many_pixels(name, field) from error
    except Exception as error:  # Pillow's readers raise errors of many types
        raise _refused(f"{name} cannot be read as PNG, JPEG or WebP: give another image", field) from error
    if pixels > MOST_PIXELS:
        raise _too_many_pixels(name, field)
    return pixels


def _too_many_pixels(name: str, field: str) -> ClientError:
    return _refused(f"{name} has more than {MOST_PIXELS} pixels: give a smaller image", field)


def _refused(message: str, field: str) -> ClientError:
    return ClientError(message, field, "invalid_image")
