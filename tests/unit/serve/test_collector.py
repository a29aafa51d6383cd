"""Python's garbage collector stops the event loop while it walks, so it walks what requests have made and no more."""

import gc

import pytest

from longhelix.serve import server
from longhelix.serve.gate import AccessControl

pytestmark = pytest.mark.unit


def is_walked(thing):
    return any(each is thing for each in gc.get_objects())


def test_it_does_not_walk_what_was_there_before_the_server(monkeypatch):
    before, found = [{}], []
    monkeypatch.setattr(server, "build", lambda serving, admission: None)
    monkeypatch.setattr(server._Server, "run", lambda self, sockets: found.append(is_walked(before)))
    server.run(None, AccessControl((), 1), server.Address(port=0), print)
    assert found == [False]
    assert is_walked(before)
