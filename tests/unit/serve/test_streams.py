"""Streams of events: comments while nothing is sent, the error that ends one, refusals in clients' words."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from longhelix import SamplingParams, UserError
from longhelix.engine.result import Delta
from longhelix.errors import PassingError, RequestError
from longhelix.scheduler.request import ServiceLevel
from longhelix.serve import driver, streams
from longhelix.serve.answer_format import AnswerFormat
from longhelix.serve.engine_request import EngineRequest, IdleNotice, PendingRequest, PrefillProgress
from longhelix.serve.errors import ClientError, response_for
from longhelix.serve.work_queue import WorkQueue


class Words(AnswerFormat):
    """Events of texts; a delta without text is none."""

    def __init__(self):
        self.requests = [SimpleNamespace(num_tokens=9)]

    def first(self):
        yield {"first": True}

    def events(self, place, delta):
        if delta.text:
            yield {"text": delta.text}

    def last(self):
        yield {"last": True}


class Answers:
    """Gives what it was given: deltas after some seconds each, or an error."""

    def __init__(self, *given):
        self._given = given
        self._got = asyncio.Queue()
        self._feeding = asyncio.create_task(self._feed())

    async def _feed(self):
        for wait_s, got in self._given:
            await asyncio.sleep(wait_s)
            self._got.put_nowait(got)
        self._got.put_nowait(None)

    is_open = True

    def notify_idle(self):
        self._got.put_nowait(IdleNotice())

    def __aiter__(self):
        return self

    async def __anext__(self):
        got = await self._got.get()
        if got is None:
            raise StopAsyncIteration
        if isinstance(got, Exception):
            raise got
        return 0, got


def lines_of(*given):
    async def read():
        return [line async for line in streams.stream(Answers(*given), Words()).body_iterator]

    return asyncio.run(read())


class Echoes(Words):
    """Begins with long events. made: threads that have made one."""

    is_long = True

    def __init__(self):
        super().__init__()
        self.long_answers = WorkQueue("long answers", 1)
        self.made = []

    def first(self):
        for number in range(3):
            self.made.append(threading.current_thread())
            yield {"first": number}


def test_long_events_are_made_one_by_one_and_off_the_event_loop():
    async def read(form):
        lines, made = [], []
        async for line in streams.stream(Answers(), form).body_iterator:
            lines.append(line)
            made.append(len(form.made))
        return lines, made

    form = Echoes()
    lines, made = asyncio.run(read(form))
    assert lines[:3] == [f'data: {{"first":{number}}}\n\n' for number in range(3)]
    assert made[:3] == [1, 2, 3], "none is made before the one before it is sent"
    assert threading.current_thread() not in form.made


def text(words=""):
    return Delta(1, words, None)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(streams, "KEEP_ALIVE_S", 0.2)


def test_events_come_as_they_are_and_end():
    assert lines_of((0, text("a")), (0, text()), (0, PrefillProgress(7)), (0, text("b"))) == [
        'data: {"first":true}\n\n',
        'data: {"text":"a"}\n\n',
        'event: progress\ndata: {"index":0,"prefilled_tokens":7,"prompt_tokens":9}\n\n',
        'data: {"text":"b"}\n\n',
        'data: {"last":true}\n\n',
        "data: [DONE]\n\n",
    ]


@pytest.mark.usefixtures("soon")
def test_a_comment_counts_from_the_last_line_and_not_from_the_last_token():
    """Tokens whose text is yet to come keep no connection alive."""
    found = lines_of((0, text("a")), *[(0.05, text())] * 12, (0, text("b")))
    comments = [line for line in found if line.startswith(":")]
    assert comments
    assert [line for line in found if not line.startswith(":")][2] == 'data: {"text":"b"}\n\n'


@pytest.mark.usefixtures("soon")
def test_waiting_has_comments_too():
    assert any(line.startswith(":") for line in lines_of((0.7, text("a"))))


@pytest.mark.usefixtures("soon")
def test_comments_go_on_while_nothing_comes_and_end_with_the_stream():
    async def read():
        answers, told = Answers((0.9, text("a"))), []
        tell, answers.notify_idle = answers.notify_idle, lambda: (told.append(1), tell())
        found = [line async for line in streams.stream(answers, Words()).body_iterator]
        before = len(told)
        await asyncio.sleep(3 * streams.KEEP_ALIVE_S)
        return found, before, len(told)

    found, before, after = asyncio.run(read())
    assert 3 <= len([line for line in found if line.startswith(":")]) == before == after <= 4


class Taking:
    """A driver that takes what is asked, and never gives anything."""

    def check_room(self, lengths): ...

    def abort(self, answer): ...

    def add(self, request, on_update):
        pending = PendingRequest(request, on_update)
        pending.accepted.set_result(None)
        return pending


async def taken():
    """The answers to one request, which get nothing."""
    answers = driver.RequestGroup(Taking())
    await answers.submit([EngineRequest((1,), 1, SamplingParams(), ServiceLevel(), 0.0)])
    return answers


@pytest.mark.usefixtures("soon")
def test_tokens_without_text_keep_no_comment_away():
    """Not even those that lie there when it is due."""

    async def read():
        answers = await taken()
        tell = answers.notify_idle
        answers.notify_idle = lambda: (answers._on_update(0, text()), tell())
        lines = streams.stream(answers, Words()).body_iterator
        await anext(lines)
        began_s = asyncio.get_running_loop().time()
        comment = await asyncio.wait_for(anext(lines), 5 * streams.KEEP_ALIVE_S)
        took_s = asyncio.get_running_loop().time() - began_s
        answers.end()
        return comment, took_s

    comment, took_s = asyncio.run(read())
    assert comment.startswith(":")
    assert took_s < 1.5 * streams.KEEP_ALIVE_S


@pytest.mark.usefixtures("soon")
def test_a_stream_that_is_left_where_it_was_has_no_timer():
    async def leave():
        answers = await taken()
        lines = streams.stream(answers, Words()).body_iterator
        await anext(lines)
        await anext(lines)
        answers.end()
        told = []
        answers.notify_idle = lambda: told.append(1)
        await asyncio.sleep(3 * streams.KEEP_ALIVE_S)
        return told, lines

    told, _ = asyncio.run(leave())
    assert told == []


@pytest.mark.usefixtures("soon")
def test_what_nobody_reads_is_one_comment_however_long():
    async def read():
        answers = await taken()
        lines = streams.stream(answers, Words()).body_iterator
        found = [await anext(lines), await anext(lines)]
        await asyncio.sleep(5.5 * streams.KEEP_ALIVE_S)
        found.append(await asyncio.wait_for(anext(lines), 0.05))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(lines), streams.KEEP_ALIVE_S / 2)
        answers.end()
        return found

    assert [line[0] for line in asyncio.run(read())] == ["d", ":", ":"]


def test_what_comes_in_time_has_none():
    assert not any(line.startswith(":") for line in lines_of((0.3, text("a")), (0.3, text("b"))))


def test_nothing_in_an_event_ends_its_line():
    """As clients have it that split text by all that ends lines, such as Python's `splitlines`."""
    ends = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    _, told, failed, _ = lines_of((0, text(ends)), (0, UserError(f"no{ends}")))
    for line in (told, failed):
        assert len(line.splitlines()) == 2
        assert line.endswith("\n\n")
    assert json.loads(told[6:])["text"] == ends
    assert json.loads(failed[6:])["error"]["message"] == f"no{ends}"


def test_an_error_is_the_last_event():
    *_, failed, done = lines_of((0, text("a")), (0, UserError("no", "some_code")))
    assert json.loads(failed[6:])["error"]["code"] == "some_code"
    assert done == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (ClientError("the prompt is wrong", "prompt"), 400, "prompt"),
        (UserError("min_p is 3: set it to a number"), 400, "min_p"),
        (UserError("n is 3: set it to a number"), 400, "n"),
        (UserError("nothing fits here"), 400, None),
        (UserError("stop token id 7 is outside"), 400, "stop_token_ids"),
        (UserError("max_new_tokens is 0: set it to more"), 400, "max_tokens"),
        (UserError("there is no context 'a' in /srv/contexts: known are b", "unknown_context"), 404, "context"),
        (UserError("there is a context 'a' in /srv/contexts already", "context_exists"), 409, "id"),
        (UserError("set --kv-cache-tokens to more", "kv_cache_exceeded"), 400, None),
        (UserError("make room, or choose another --contexts-dir than /srv", "disk_full"), 507, None),
        (UserError("the folder /srv cannot be read", "disk_error"), 500, None),
        (UserError("use generate without --chat", "no_chat_template"), 400, "messages"),
    ],
)
def test_refusals_are_in_clients_words(error, status, param):
    answer = response_for(error)
    found = json.loads(answer.body)["error"]
    assert (answer.status_code, found["param"], found["code"]) == (status, param, error.code)
    assert "--" not in found["message"]
    assert "/srv" not in found["message"]
    assert "max_new_tokens" not in found["message"]


def test_what_would_fail_again_has_no_status_that_clients_send_again():
    answer = response_for(RequestError("the request failed: its logits are no numbers"))
    found = json.loads(answer.body)["error"]
    assert (answer.status_code, found["type"], found["code"]) == (422, "server_error", RequestError("").code)
    assert answer.status_code not in (408, 409, 429)


def test_what_may_go_well_later_has_one_that_they_do():
    answer = response_for(PassingError("guides cannot be checked: nothing was found within 60 s"))
    found = json.loads(answer.body)["error"]
    assert (answer.status_code, found["type"], found["code"]) == (503, "server_error", PassingError("").code)
    assert answer.headers["retry-after"]
    assert found["message"].endswith("try again later")
