"""The process of a rank, as it sees itself."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from longhelix.engine.workers import started_rank
from longhelix.engine.workers.started_rank import StartedRank


@pytest.mark.parametrize("error", [None, PermissionError, OSError(30, "Read-only file system")])
def test_a_rank_reads_its_place_and_takes_a_name_where_it_may(monkeypatch, error):
    ended, written = Mock(), Mock(side_effect=error)
    monkeypatch.setattr(started_rank, "end_with_parent", ended)
    monkeypatch.setattr(Path, "write_text", written)
    monkeypatch.setattr(sys, "argv", ["rank", "--rank", "3", "--directory", "/meet", "--parent", "17", "a", "b"])
    assert StartedRank.from_command_line() == StartedRank(3, Path("/meet"), ("a", "b"))
    ended.assert_called_once_with(17, Path("/meet"))
    written.assert_called_once_with("longhelix 3")
