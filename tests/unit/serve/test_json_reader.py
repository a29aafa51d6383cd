"""JSON of clients, beside the standard library's own parser."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.serve import json_reader
from longhelix.serve.json_reader import DEEPEST, LONG_TEXT, MOST_VALUES, JsonBoundsError, read_json

pytestmark = pytest.mark.unit

LONG = " " * (LONG_TEXT + 1)  # which makes a text a long one
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 99) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(st.integers(0, 10**6), min_size=3),
)


def read(parse, text):
    """What a text is, or what is wrong with it, and where."""
    try:
        return repr(parse(text))
    except json.JSONDecodeError as error:
        return error.msg, error.pos


@given(VALUES, st.sampled_from([None, 1]), st.data())
def test_it_reads_what_the_standard_library_reads_and_refuses_the_rest_with_the_same_words(value, indent, data):
    text = json.dumps(value, indent=indent)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(text)))
        text = (
            text[:place] + data.draw(st.sampled_from(',[]{}":01-. x\n')) + text[place + data.draw(st.integers(0, 1)) :]
        )
    text = LONG + text
    assert read(read_json, text) == read(json.loads, text)


@pytest.mark.parametrize(
    "text", ["[1,2,]", "[1,,2]", "[01,2]", "[1 2,3]", "[,1]", "[1,2", "[1,2,", "[1,2]]", "[1,2.5,3]"]
)
def test_lists_of_numbers_are_no_exception(text):
    assert read(read_json, LONG + text) == read(json.loads, LONG + text)


@pytest.mark.parametrize("value", ["[]", "{}", "null", '""', "1.5", "-1"])
def test_many_small_values_are_refused(value):
    def some(count):
        return '{"a": [' + ",".join([value] * count) + "]}"

    assert len(read_json(some(MOST_VALUES - 2))["a"]) == MOST_VALUES - 2
    with pytest.raises(JsonBoundsError, match=f"has more than {MOST_VALUES} values"):
        read_json(some(MOST_VALUES - 1))


def test_a_prompt_may_have_more_token_ids_and_nothing_else():
    ids = list(range(MOST_VALUES + 9))
    assert read_json(json.dumps({"prompt": ids}))["prompt"] == ids
    assert read_json(json.dumps({"prompt": [ids, ids]}))["prompt"] == [ids, ids]
    with pytest.raises(JsonBoundsError, match="values"):
        read_json(json.dumps({"prompt": {"inside": ids}}))


@pytest.mark.parametrize("before", ["", LONG])
def test_depth_is_bounded(before):
    for opening, closing in ("[]", ('{"a":', "}")):
        assert read_json(before + opening * DEEPEST + "1" + closing * DEEPEST)
        for levels in (DEEPEST + 1, 5000, 100_000):
            with pytest.raises(JsonBoundsError, match="nested deeper than"):
                read_json(before + opening * levels + "1" + closing * levels)


def test_other_threads_run_while_numbers_are_read(monkeypatch):
    """They wait for a part at a time: none has more than 65,536 characters."""
    read_at_once = []
    loads = json.loads
    monkeypatch.setattr(json_reader.json, "loads", lambda text: read_at_once.append(len(text)) or loads(text))
    text = json.dumps({"prompt": list(range(10**5, 2 * 10**5))})
    assert read_json(text) == loads(text)
    assert len(read_at_once) > 10
    assert max(read_at_once) < 70_000


def test_threads_read_at_the_same_time():
    found = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: read_json(LONG + f'{{"a": [{at}, {{"b": {at}}}]}}')}))
        for at in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {at: {"a": [at, {"b": at}]} for at in range(8)}
