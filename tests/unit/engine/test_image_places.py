"""The places of images in prompts."""

from array import array
from types import SimpleNamespace

import pytest

from longhelix.engine.images import _expanded
from longhelix.scheduler.request import ImageSpan

pytestmark = pytest.mark.unit


def test_an_image_stands_as_often_as_it_has_tokens():
    """In one array of int32, as the engine takes prompts: several requests may have it."""
    images = [SimpleNamespace(rows=1, columns=3, digest=b"a", num_tokens=3)]
    images.append(SimpleNamespace(rows=2, columns=1, digest=b"b", num_tokens=2))
    ids, spans = _expanded([1, 9, 2, 9], images, SimpleNamespace(image_token_id=9))
    assert ids == array("i", [1, 9, 9, 9, 2, 9, 9])
    assert spans == [ImageSpan(1, 1, 3, b"a"), ImageSpan(5, 2, 1, b"b")]
