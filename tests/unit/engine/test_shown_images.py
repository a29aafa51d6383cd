"""The rows of images that steps get, and what is kept of images until then."""

import pytest

from longhelix.engine.shown_images import ShownImage, ShownImages
from longhelix.scheduler.request import ImageSpan, SamplingParams
from longhelix.scheduler.step import Chunk, InitialKV, NewSequence, SequenceChanges, Step

LAYERS, ROW_BYTES = 2, 3


def states_of(tokens, mark=b"x"):
    """[layers, tokens, 3 bytes]: the layer, the token, the mark."""
    return b"".join(bytes((layer, token)) + mark for layer in range(LAYERS) for token in range(tokens))


def image(start, tokens, mark=b"x", made=None):
    def make():
        if made is not None:
            made.append(mark)
        return states_of(tokens, mark)

    return ShownImage(ImageSpan(start, 1, tokens, mark * 32), make)


def step(*chunks, new=()):
    begun = tuple(NewSequence(id, SamplingParams(), 0, 100, InitialKV((9,), True, cached)) for id, cached in new)
    return Step(
        1,
        changes=SequenceChanges(new=begun),
        chunks=tuple(Chunk(id, bytes(4 * count), (), False) for id, count in chunks),
    )


def given(images, one):
    return [(rows.id, rows.start, rows.states) for rows in images.rows(one)]


def part(first, stop, mark=b"x"):
    return b"".join(bytes((layer, token)) + mark for layer in range(LAYERS) for token in range(first, stop))


def test_a_step_gets_the_rows_of_its_chunks():
    images = ShownImages(LAYERS, 1000)
    images.add(7, [image(2, 4), image(6, 3, b"y")])
    assert given(images, step((7, 2), (8, 5), new=[(7, 0), (8, 0)])) == []
    assert given(images, step((7, 3))) == [(7, 2, part(0, 3))]
    assert given(images, step((7, 3))) == [(7, 5, part(3, 4)), (7, 6, part(0, 2, b"y"))]
    assert given(images, step((8, 3))) == []
    assert given(images, step((7, 3))) == [(7, 8, part(2, 3, b"y"))]


def test_nothing_is_given_of_what_is_cached():
    images = ShownImages(LAYERS, 1000)
    images.add(7, [image(2, 4), image(6, 3, b"y")])
    assert given(images, step((7, 3), new=[(7, 7)])) == [(7, 7, part(1, 3, b"y"))]
    assert images.num_bytes == 0


def test_a_request_that_is_computed_again_gets_them_again():
    images, made = ShownImages(LAYERS, 1000), []
    images.add(7, [image(0, 4, made=made)])
    assert given(images, step((7, 9), new=[(7, 0)])) == [(7, 0, part(0, 4))]
    assert images.num_bytes == 0
    assert given(images, step((7, 2), new=[(7, 0)])) == [(7, 0, part(0, 2))]
    assert given(images, step((7, 2))) == [(7, 2, part(2, 4))]
    assert made == [b"x"] * 3


def test_states_are_kept_once_and_until_nobody_awaits_them():
    images, made = ShownImages(LAYERS, 1000), []
    for request in (1, 2, 3):
        images.add(request, [image(0, 4, made=made), image(4, 4, made=made)])
    assert images.num_bytes == 4 * LAYERS * ROW_BYTES
    assert made == [b"x"]
    list(images.rows(step((1, 8), (2, 5), new=[(1, 0), (2, 0)])))
    images.forget(3)
    assert images.num_bytes > 0
    images.forget(2)
    assert images.num_bytes == 0
    images.forget(1)
    images.forget(1)
    assert made == [b"x"]


def test_states_beyond_the_limit_are_made_when_a_step_needs_them():
    most = 5 * LAYERS * ROW_BYTES
    images, made = ShownImages(LAYERS, most), []
    for request in range(20):
        images.add(request, [image(1, 4, bytes([request]), made)])
        assert images.num_bytes <= most
    for request in range(20):
        assert given(images, step((request, 9), new=[(request, 0)])) == [(request, 1, part(0, 4, bytes([request])))]
    assert images.num_bytes == 0


def test_what_was_made_before_is_not_made_again():
    made = []
    seen = image(0, 4, made=made).seen()
    images = ShownImages(LAYERS, 1000)
    images.add(1, [seen])
    assert given(images, step((1, 4), new=[(1, 0)])) == [(1, 0, part(0, 4))]
    assert made == [b"x"]
    assert (seen.seen().states, seen.unseen().states) == (states_of(4), None)


def test_nothing_is_kept_of_a_request_whose_images_cannot_be():
    def fail():
        raise MemoryError("too much")

    images = ShownImages(LAYERS, 1000)
    with pytest.raises(MemoryError):
        images.add(1, [image(0, 4), ShownImage(ImageSpan(4, 1, 2, b"z" * 32), fail)])
    assert images.num_bytes == 0
    assert given(images, step((1, 9), new=[(1, 0)])) == []
