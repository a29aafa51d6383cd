"""The environment variables of ranks."""

from pathlib import Path

from longhelix.engine.workers.environment import rank_environment


def test_what_is_set_stays_and_the_rest_has_defaults(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    found = rank_environment()
    assert (found["GOMP_SPINCOUNT"], found["THP_MEM_ALLOC_ENABLE"]) == ("7", "1")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == "/caches/longhelix/compiled"


def test_users_without_a_home_are_served(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "TORCHINDUCTOR_CACHE_DIR" not in rank_environment()
