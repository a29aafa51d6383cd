"""Lines for operators: one call is one line, whatever is in it, and nobody waits for a reader."""

import io
import json
import logging
import sys
import threading
import warnings

import pytest

from longhelix.serve import server_log as module
from longhelix.serve.server_log import ServerLog

pytestmark = pytest.mark.unit

NASTY = "a\nb\r\x00\x1b[2J\x85\u2028\u202e\ud800 é\x7f"


def test_text_is_words_or_facts():
    log = ServerLog()
    lines = []
    log._put = lines.append
    log.write("ready", "serving it", url="u")
    log.write("request", id="ab", ttft_s=0.12345678, left_out=None, code="two words", count=3)
    assert lines == ["serving it", 'request id=ab ttft_s=0.123457 code="two words" count=3']


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_forges_a_line(as_json):
    log = ServerLog(as_json)
    lines = []
    log._put = lines.append
    log.write("failure", NASTY, reason=NASTY)
    log.write("request", route=NASTY)
    for line in lines:
        assert len(line.splitlines()) == 1
        assert not any(ord(each) < 32 for each in line)
        line.encode()
    if as_json:
        found = [json.loads(line) for line in lines]
        assert found[0]["message"] == found[0]["reason"] == found[1]["route"] == NASTY
        assert all(each["time"].endswith("+00:00") for each in found)


def test_lines_are_written_in_order_and_all_of_them_at_the_end(capsys):
    log = ServerLog()
    for index in range(100):
        log.write("request", id=index)
    log.close()
    assert capsys.readouterr().err.splitlines() == [f"request id={index}" for index in range(100)]


def test_a_reader_that_stands_still_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(module, "_MOST_WAITING", 8)
    reads, begun = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text):
            begun.set()
            reads.wait(60)
            return super().write(text)

    stuck = Stuck()
    monkeypatch.setattr(sys, "stderr", stuck)
    log = ServerLog()
    log.write("request", id=0)
    assert begun.wait(60)
    for index in range(1, 30):
        log.write("request", id=index)
    reads.set()
    while "lost" not in stuck.getvalue():
        pass
    log.close()
    lines = stuck.getvalue().splitlines()
    assert lines == [f"request id={index}" for index in range(9)] + ["lost lines=21"]


def test_what_libraries_log_and_warn_of_are_lines(capsys):
    log = ServerLog()
    lines = []
    log._put = lines.append
    with log.captures_logs(), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            raise ValueError("what\na client sent")
        except ValueError as error:
            logging.getLogger("some.library").error("it failed: %s", "a\nb", exc_info=error)
        warnings.warn("be\nware", stacklevel=1)
    logging.getLogger("some.library").handlers.clear()
    assert lines[0] == "error: it failed: a\\nb"
    assert all(line.startswith("    ") for line in lines[1:-1])
    assert "    ValueError: what" in lines
    assert lines[-1] == "warning: be\\nware"
    assert capsys.readouterr().err == ""
