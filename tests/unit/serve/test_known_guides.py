"""Guides of requests: what is known is answered at once, and all else is found off the event loop."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.serve.errors import ClientError
from longhelix.serve.serving import Serving
from longhelix.serve.work_queue import WorkQueue

pytestmark = pytest.mark.unit

GUIDE = Guide("regex", "a+")


def found(knows):
    """What a request with GUIDE gets, and the names of the threads that looked at it."""
    looked = []
    llm = SimpleNamespace(
        knows_guide=knows, check_guide=lambda guide: looked.append((guide, threading.current_thread()))
    )
    serving = SimpleNamespace(llm=llm, _guide_queue=WorkQueue("guides", 4))
    return asyncio.run(Serving.guide(serving, lambda: GUIDE, "guided_regex")), looked


def test_what_is_known_is_not_looked_at_again():
    """It may be forgotten meanwhile, and would then be compiled on the event loop."""
    assert found(lambda guide: True) == (GUIDE, [])


def test_what_is_not_known_is_looked_at_on_another_thread():
    guide, [(looked_at, thread)] = found(lambda guide: False)
    assert guide == looked_at == GUIDE
    assert thread is not threading.main_thread()


def test_what_was_refused_is_refused_again():
    def refuse(guide):
        raise UserError("unclosed group", "invalid_guide")

    with pytest.raises(ClientError, match="unclosed group") as refused:
        found(refuse)
    assert (refused.value.param, refused.value.code) == ("guided_regex", "invalid_guide")
