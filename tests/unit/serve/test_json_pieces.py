"""JSON of long answers."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.serve.json_pieces import json_pieces

pytestmark = pytest.mark.unit

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def whole(value):
    return json.loads(b"".join(json_pieces(value)))


@given(VALUES, st.lists(VALUES))
def test_pieces_are_the_value(value, items):
    assert whole(value) == value
    assert whole({"items": iter(items), "value": value}) == {"items": items, "value": value}


@pytest.mark.parametrize("text", ["a" * 300_000, 'é"\n' * 100_000, "😀" * 100_000])
def test_no_piece_is_long(text):
    ids = list(range(100_000))
    value = {"text": text, "ids": array("i", ids), "more": [ids]}
    pieces = list(json_pieces({"text": text, "ids": array("i", ids)}))
    assert max(map(len, pieces)) < 1 << 19
    assert len(pieces) > 100
    assert whole(value) == {"text": text, "ids": ids, "more": [ids]}


def test_an_item_is_made_once_the_one_before_it_is_written():
    made = []

    def items():
        for number in range(3):
            made.append(number)
            yield {"number": number}

    pieces = json_pieces({"items": items()})
    written = b""
    while b"0" not in written:
        written += next(pieces)
    assert made == [0]
    assert json.loads(written + b"".join(pieces)) == {"items": [{"number": 0}, {"number": 1}, {"number": 2}]}
