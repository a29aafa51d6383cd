"""Images in data URLs: nothing is fetched, and what they could cost is bounded before their pixels are read."""

import base64
import struct
import zlib
from io import BytesIO

import numpy as np
import PIL.Image
import pytest

from longhelix.serve import images
from longhelix.serve.errors import ClientError
from longhelix.serve.images import MOST_BYTES, MOST_IMAGES, MOST_PIXELS, MOST_SCANS, read_images

IMAGE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 5, 3), dtype=np.uint8))


def file_of(image, form):
    written = BytesIO()
    image.save(written, form)
    return written.getvalue()


def url_of(file, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def refused(url):
    urls = url if isinstance(url, list) else [url]
    with pytest.raises(ClientError) as refusal:
        read_images(urls, "messages")
    assert (refusal.value.param, refusal.value.code) == ("messages", "invalid_image")
    assert len(str(refusal.value)) < 400
    return str(refusal.value)


@pytest.mark.parametrize("form", ["png", "jpeg", "webp"])
def test_files_are_what_was_sent(form):
    file = file_of(IMAGE, form)
    assert read_images([url_of(file, f"image/{form}"), url_of(file, "IMAGE/PNG")], "messages") == [file] * 2


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/cat.png",
        "https://example.com/cat.png",
        "ftp://example.com/cat.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "cat.png",
        "",
        "data",
        "//example.com/cat.png",
        "HTTP://example.com/" + "x" * 10_000,
    ],
)
def test_nothing_is_fetched(url, monkeypatch):
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("socket.socket", None)
    assert "does not fetch images" in refused(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/svg+xml;base64,AAAA", "send the image itself"),
        ("data:image/gif;base64,R0lGODlhAQABAAAAACw=", "send the image itself"),
        ("data:text/html;base64,AAAA", "send the image itself"),
        ("data:;base64,AAAA", "send the image itself"),
        ("data:image/png,AAAA", "send the image itself"),
        ("data:image/png;base64", "send the image itself"),
        ("data:image/png;base64;charset=utf-8,AAAA", "send the image itself"),
        ("data:image/png;base64,AAA", "is not valid base64"),
        ("data:image/png;base64,AA A", "is not valid base64"),
        ("data:image/png;base64,ÄÄÄÄ", "is not valid base64"),
        ("data:image/png;base64,", "cannot be read as PNG, JPEG or WebP"),
        ("data:image/png;base64,AAAA", "cannot be read as PNG, JPEG or WebP"),
        (url_of(file_of(IMAGE, "gif")), "cannot be read as PNG, JPEG or WebP"),
        (url_of(file_of(IMAGE, "bmp")), "cannot be read as PNG, JPEG or WebP"),
        (url_of(file_of(IMAGE, "png")[:20]), "cannot be read as PNG, JPEG or WebP"),
    ],
)
def test_what_is_no_image_of_these_kinds_is_refused(url, words):
    assert words in refused(url)


def bomb(width, height):
    """A PNG's beginning, which says how large the image is."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + (
        struct.pack(">I", 8) + b"IDAT" + b"\x00" * 12
    )  # fmt: skip


@pytest.mark.parametrize("size", [(MOST_PIXELS + 1, 1), (10_000, 10_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_images_that_are_larger_than_their_files_are_refused_by_their_headers(size, monkeypatch):
    monkeypatch.setattr(PIL.Image.Image, "load", None)
    assert f"more than {MOST_PIXELS} pixels" in refused(url_of(bomb(*size)))


def test_a_jpeg_of_very_many_scans_is_refused():
    """Each would be decoded over all pixels. In other files those bytes mean nothing."""
    begin, mark, scan = file_of(IMAGE, "jpeg").partition(b"\xff\xda")

    def url(count):
        return url_of(begin + (mark + scan[:-2]) * count + scan[-2:], "image/jpeg")

    assert len(read_images([url(MOST_SCANS)], "messages")) == 1
    assert f"more than {MOST_SCANS} scans" in refused(url(MOST_SCANS + 1))
    assert read_images([url_of(file_of(IMAGE, "png") + mark * 1000)], "messages")


def test_all_images_of_a_request_are_bounded_together(monkeypatch):
    most = url_of(bomb(MOST_PIXELS // 2**10, 2**10))
    assert len(read_images([most] * 4, "messages")) == 4
    assert "pixels in total" in refused([most] * 5)
    assert f"at most {MOST_IMAGES}" in refused([url_of(file_of(IMAGE, "png"))] * (MOST_IMAGES + 1))
    monkeypatch.setattr(images, "MOST_BYTES", 100)
    monkeypatch.setattr(base64, "b64decode", None)
    assert "more than 100 bytes" in refused("data:image/png;base64," + "A" * 140)


def test_the_bound_on_bytes_is_that_of_the_file():
    url = "data:image/png;base64," + "A" * (4 * ((MOST_BYTES + 2) // 3) + 8)
    assert f"more than {MOST_BYTES} bytes" in refused(url)
