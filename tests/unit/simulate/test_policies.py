"""What benchmarks/policies.py says, at a smaller size."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit


@pytest.fixture
def policies(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("policies")


@pytest.mark.slow
def test_lars_serves_short_prompts_ten_times_sooner_than_fcfs_and_starves_nobody(policies):
    study = policies.Study(requests=150, seed=2)
    lars, fcfs = (study.run(policy, rate_rps=1.0) for policy in ("lars", "fcfs"))
    assert 10 * lars.short_p99_s < fcfs.short_p99_s
    assert lars.attainment >= 0.99 > fcfs.attainment
    assert lars.worst < 1.2  # times its SLO, of all requests
    all_at_once_rps = 400.0
    assert 4 * study.run("lars", all_at_once_rps).worst < study.run("fcfs", all_at_once_rps).worst
