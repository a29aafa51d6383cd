"""Stop strings that a text includes: it ends behind the first one to complete, however the text was split."""

import pytest

from longhelix.engine.text.stop_strings import StopStrings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "wanted"), [(["b"], "ab"), (["cd", "bcde"], "abcd"), (["def", "bcdef"], "abcdef"), (["x"], "abcdef")]
)
def test_a_text_ends_behind_its_stop_string(stops, wanted, size):
    text, given, found, stopped = "abcdef", 0, "", False
    strings = StopStrings(stops, includes=True)
    while given < len(text) and not stopped:
        more, stopped = strings.push(text[given : given + size])
        found, given = found + more, given + size
    assert found + ("" if stopped else strings.flush()) == wanted
