"""A process, as the one that asked for it sees it."""

import socket
import subprocess
from unittest.mock import Mock

import pytest

from longhelix.engine.workers import process
from longhelix.engine.workers.process import Process

pytestmark = pytest.mark.unit


def test_a_status_is_not_lost_by_an_interrupt_while_it_is_read(monkeypatch):
    report, reports = socket.socketpair()
    with report, reports, subprocess.Popen(["true"]) as ended:
        ended.wait()
        found = Process(ended.pid, report, {}, Mock())
        reports.send(b"-11")
        monkeypatch.setattr(process, "int", Mock(side_effect=KeyboardInterrupt), raising=False)
        with pytest.raises(KeyboardInterrupt):
            found.poll()
        monkeypatch.undo()
        assert (found.poll(), found.untold) == (-11, "")
