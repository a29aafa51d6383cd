"""Who may read the file of a cluster's secret."""

import os
from types import SimpleNamespace

import pytest

from longhelix.engine.hosts.secret import read_secret
from longhelix.errors import UserError

pytestmark = pytest.mark.unit


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    return file


def test_a_file_that_all_users_can_read_is_refused(file):
    file.chmod(0o644)
    with pytest.raises(UserError) as refusal:
        read_secret(file)
    assert str(refusal.value) == (
        f"all users of this host can read the cluster secret file {file}: run chmod 600 {file}"
    )


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_owner_and_group_may_read_it(file, mode):
    file.chmod(mode)
    assert read_secret(file) == "0123456789abcdef"


def test_secrets_of_containers_may_have_any_mode(file, monkeypatch):
    """Kubernetes mounts a Secret read-only, with mode 644 by default."""
    file.chmod(0o644)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID))
    assert read_secret(file) == "0123456789abcdef"
