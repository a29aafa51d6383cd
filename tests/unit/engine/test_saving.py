"""A context that is saved: computed, written part by part, computed again where it was displaced, given up."""

from array import array

import pytest

from longhelix import UserError
from longhelix.engine.contexts import NewContext
from longhelix.engine.result import Delta
from longhelix.engine.saving import Computing, Saving
from longhelix.errors import EngineError, RequestError

TOKENS = array("i", range(40))


class Ended:
    """What is seen of a result."""

    def __init__(self, reason="length"):
        self.finish_reason, self.error = reason, "it was too much"


class Engine:
    """Computes in one go when it is told to, and writes in three parts what is not displaced. cleaned: what was given
    up."""

    def __init__(self, displaced=0, fails=None):
        self.displaced, self.fails = displaced, fails
        self.asked, self.aborted, self.parts, self.cleaned = [], [], 0, 0

    def add(self, deltas):
        self.asked.append(deltas)
        return len(self.asked)

    def compute(self, reason="length"):
        self.asked[-1].append(Delta(len(self.asked), "", Ended(reason)))

    def writing(self, new):
        if self.displaced:
            self.displaced -= 1
            return None
        try:
            for _ in range(3):
                if self.fails is not None:
                    raise self.fails
                self.parts += 1
                yield
        except BaseException:
            self.cleaned += 1
            raise
        return f"saved {new.name}"


def saving_of(engine):
    computing = Computing(engine.add, lambda request_id: 7 * request_id, engine.aborted.append)
    return Saving(engine, NewContext("document", TOKENS, "", False), computing)


def test_it_is_written_a_part_at_a_time_once_it_is_computed():
    engine = Engine()
    saving = saving_of(engine)
    assert not saving.advance()
    assert (saving.status, saving.prefilled_tokens, engine.parts) == ("computing", 7, 0)
    engine.compute()
    for parts in (1, 2, 3):
        assert saving.advance()
        assert (saving.status, saving.prefilled_tokens, engine.parts) == ("saving", 40, parts)
    assert saving.advance()
    assert (saving.status, saving.result()) == ("ready", "saved document")
    assert not saving.advance()
    assert (len(engine.asked), engine.aborted) == (1, [])


def test_what_is_displaced_is_computed_again_three_times_in_all():
    engine = Engine(displaced=2)
    saving = saving_of(engine)
    for attempts in (2, 3):
        engine.compute()
        assert saving.advance()
        assert (saving.status, saving.prefilled_tokens, len(engine.asked)) == ("computing", 0, attempts)
        assert not saving.advance()
    engine.compute()
    while not saving.has_ended:
        assert saving.advance()
    assert saving.result() == "saved document"

    engine = Engine(displaced=3)
    saving = saving_of(engine)
    while not saving.has_ended:
        engine.compute()
        saving.advance()
    assert len(engine.asked) == 3
    with pytest.raises(UserError, match="was computed 3 times") as refusal:
        saving.result()
    assert refusal.value.code == "kv_cache_exceeded"


def test_what_is_wrong_with_its_disk_is_its_own_and_an_engine_that_fails_is_not():
    full = UserError("the disk is full", "disk_full")
    engine = Engine(fails=full)
    saving = saving_of(engine)
    engine.compute()
    assert saving.advance()
    assert (saving.status, saving.error, engine.cleaned) == ("failed", full, 1)
    engine = Engine(fails=EngineError("rank 1 is gone"))
    saving = saving_of(engine)
    engine.compute()
    with pytest.raises(EngineError, match="rank 1"):
        saving.advance()
    saving.end(EngineError("rank 1 is gone"))
    assert saving.status == "failed"


def test_a_request_that_fails_fails_it():
    engine = Engine()
    saving = saving_of(engine)
    engine.compute("error")
    assert saving.advance()
    with pytest.raises(RequestError, match="it was too much"):
        saving.result()


@pytest.mark.parametrize("when", ["computing", "saving", "ready"])
def test_it_may_be_given_up_at_any_time(when):
    engine = Engine()
    saving = saving_of(engine)
    if when != "computing":
        engine.compute()
        saving.advance()
    while when == "ready" and not saving.has_ended:
        saving.advance()
    saving.end(UserError("it was deleted"))
    saving.end(UserError("again"))
    assert (saving.status, str(saving.error)) == (
        ("ready", "None") if when == "ready" else ("failed", "it was deleted")
    )
    assert engine.aborted == ([1] if when == "computing" else [])
    assert engine.cleaned == (when == "saving")
    assert not saving.advance()


def test_what_fails_each_time_that_it_is_written_ends():
    """And not what ran while others made the engine fail."""
    engine = Engine()
    saving = saving_of(engine)
    saving.begin_again(0)
    engine.compute()
    saving.advance()
    saving.begin_again(1)
    assert (saving.status, len(engine.asked), engine.cleaned) == ("computing", 2, 1)
    engine.compute()
    saving.advance()
    saving.begin_again(1)
    with pytest.raises(RequestError, match="failed 2 times while the context was written"):
        saving.result()
    assert (len(engine.asked), engine.cleaned) == (2, 2)
