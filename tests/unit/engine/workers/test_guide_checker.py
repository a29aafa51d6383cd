"""The process that compiles guides: what takes too much of it ends it alone."""

import json
import os
import re
import resource
import signal
import subprocess
import threading
import time

import psutil
import pytest

from longhelix.engine.workers import guide_checker, guide_checking
from longhelix.engine.workers.guide_checker import GuideChecker
from longhelix.errors import EngineError, PassingError, UserError
from longhelix.scheduler.guide import Guide, TokenTable

pytestmark = pytest.mark.unit

TABLE = TokenTable((*(bytes([byte]) for byte in range(256)), b"<e>"), (256,), (256,))
RULES = 5_000
# Each of these takes more stack or time than there is: of one process, here the one that is there for it.
MONSTERS = {
    "rules": Guide("grammar", "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(RULES)) + f'\nr{RULES}: "a"'),
    "terminals": Guide(
        "grammar", "start: T0\n" + "\n".join(f'T{n}: "x" T{n + 1}' for n in range(RULES)) + f'\nT{RULES}: "a"'
    ),
    "optional": Guide("regex", "a?" * 20_000),
}  # fmt: skip


@pytest.fixture(scope="module")
def checker():
    found = GuideChecker(lambda: TABLE)
    yield found
    found.close()


def children():
    return {
        child for child in psutil.Process().children() if "longhelix.engine.workers.guide_checking" in child.cmdline()
    }


def stop(process):
    """Stop every thread of a process. The signal goes to one of them, and the others run until that one runs."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_guides_are_compiled_once(checker, monkeypatch):
    checker.check(Guide("json"))
    asked = []
    exchange = guide_checker._exchange

    def counted(process, message, timeout_s):
        asked.append(message)
        return exchange(process, message, timeout_s)

    monkeypatch.setattr(guide_checker, "_exchange", counted)
    for _ in range(3):
        checker.check(Guide("regex", "(once|only)"))
    assert len(asked) == 1
    for _ in range(3):
        with pytest.raises(UserError, match="unclosed group") as refused:
            checker.check(Guide("regex", "a(b"))
        assert refused.value.code == "invalid_guide"
    assert len(asked) == 2
    assert checker.knows(Guide("regex", "(once|only)"))
    assert 0 <= checker.check(Guide("regex", "(once|only)")) < guide_checking._CPU_S  # its clock may not have moved
    with pytest.raises(UserError, match="unclosed group"):
        checker.knows(Guide("regex", "a(b"))


def test_it_forgets_the_first_of_very_many(checker, monkeypatch):
    monkeypatch.setattr(guide_checker, "_KNOWN", len(checker._found) + 2)
    guides = [Guide("regex", f"forgotten {number}") for number in range(guide_checker._KNOWN)]
    for guide in guides:
        checker.check(guide)
    assert all(checker.knows(guide) for guide in guides)
    checker.check(Guide("regex", "one more"))
    assert [checker.knows(guide) for guide in guides[:2]] == [False, True]


def test_descriptors_may_be_large(checker):
    """As in a server with a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this process may not have as many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    own = GuideChecker(lambda: TABLE)
    try:
        own.check(Guide("json"))
        assert own._process.stdout.fileno() > 1024
    finally:
        own.close()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_says_nothing_refuses_no_guide(monkeypatch):
    checker = GuideChecker(lambda: TABLE)
    checker.check(Guide("json"))
    stop(checker._process)
    monkeypatch.setattr(guide_checker, "_ANSWER_S", 0.1)
    with pytest.raises(PassingError, match="no answer within"):
        checker.check(Guide("regex", "a"))
    monkeypatch.undo()
    checker.check(Guide("regex", "a"))
    checker.close()


def test_a_process_that_reads_nothing_keeps_nobody_waiting(monkeypatch):
    """A guide may be longer than a pipe has room for."""
    checker = GuideChecker(lambda: TABLE)
    checker.check(Guide("json"))
    stop(checker._process)
    monkeypatch.setattr(guide_checker, "_ANSWER_S", 0.1)
    refused = []

    def ask():
        try:
            checker.check(Guide("choice", json.dumps(["long", "x" * 100_000])))
        except PassingError as error:
            refused.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(30)
    stands_still = asking.is_alive()
    checker.close()
    asking.join()
    assert not stands_still
    assert re.search(r"no answer within 0.1 s; .* ran for \d+\.\d s .* waited \d+\.\d s", refused[0])


def test_whoever_ends_the_process_refuses_no_guide(checker, monkeypatch):
    """While it has nothing to do, and while it compiles."""
    checker.check(Guide("json"))
    checker._process.kill()
    checker.check(Guide("regex", "after an end"))
    exchange, left = guide_checker._exchange, [1]

    def ended(process, message, timeout_s):
        if timeout_s == guide_checker._ANSWER_S and left[0]:
            left[0] -= 1
            process.kill()
        return exchange(process, message, timeout_s)

    monkeypatch.setattr(guide_checker, "_exchange", ended)
    checker.check(Guide("regex", "beside an end"))
    left[0] = 2
    with pytest.raises(PassingError, match="SIGKILL ended the process"):
        checker.check(Guide("regex", "beside two ends"))
    assert not checker.knows(Guide("regex", "beside two ends"))
    checker.check(Guide("regex", "beside two ends"))


def test_an_end_beside_a_start_is_that_of_the_new_process(monkeypatch):
    """Which `close` cannot know yet."""
    checker = GuideChecker(lambda: TABLE)
    closing = threading.Thread(target=checker.close)
    start = subprocess.Popen

    def started(*given, **more):
        process = start(*given, **more)
        closing.start()
        while not checker._closed:
            time.sleep(0.001)
        return process

    monkeypatch.setattr(guide_checker.subprocess, "Popen", started)
    with pytest.raises(EngineError, match="the engine has ended"):
        checker.check(Guide("json"))
    closing.join(30)
    assert not closing.is_alive()
    assert not checker.knows(Guide("json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MONSTERS)
def test_a_guide_that_takes_too_much_is_refused_and_others_are_not(checker, name):
    with pytest.raises(UserError, match="takes too much time or memory to compile") as refused:
        checker.check(MONSTERS[name])
    assert refused.value.code == "guide_too_large"
    checker.check(Guide("regex", f"after {name}"))


def test_whoever_asks_for_a_known_one_waits_for_nobody(checker):
    checker.check(Guide("json"))
    with checker._lock:
        asking = threading.Thread(target=checker.check, args=(Guide("json"),))
        asking.start()
        asking.join(10)
        assert not asking.is_alive()


def test_its_end_is_that_of_its_process():
    before = children()
    checker = GuideChecker(lambda: TABLE)
    checker.check(Guide("json"))
    (own,) = children() - before
    checker.close()
    checker.close()
    assert not own.is_running()
    with pytest.raises(EngineError):
        checker.check(Guide("regex", "later"))
    checker.check(Guide("json"))  # which is known


def test_a_process_that_nobody_holds_any_more_ends():
    before = children()
    checker = GuideChecker(lambda: TABLE)
    checker.check(Guide("json"))
    (own,) = children() - before
    del checker
    deadline_s = time.monotonic() + 30
    while own.is_running() and own.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not own.is_running() or own.status() == psutil.STATUS_ZOMBIE


def test_a_vocabulary_that_cannot_be_made_is_said_each_time():
    def table():
        raise UserError("no vocabulary")

    checker = GuideChecker(table)
    for _ in range(2):
        with pytest.raises(UserError, match="no vocabulary"):
            checker.check(Guide("json"))
    checker.close()


def test_a_process_that_does_not_start_is_no_fault_of_the_guide(monkeypatch):
    monkeypatch.setattr(guide_checker.sys, "executable", "/bin/false")
    checker = GuideChecker(lambda: TABLE)
    with pytest.raises(PassingError, match="guides cannot be checked"):
        checker.check(Guide("json"))
    checker.close()


def test_where_it_would_be_is_no_clients_business(monkeypatch, tmp_path):
    monkeypatch.setattr(guide_checker.sys, "executable", str(tmp_path / "nothing"))
    checker = GuideChecker(lambda: TABLE)
    with pytest.raises(PassingError, match=r"guides cannot be checked now \(No such file or directory\)"):
        checker.check(Guide("json"))
    checker.close()
