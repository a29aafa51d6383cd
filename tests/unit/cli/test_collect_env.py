"""What `longhelix collect-env` says, and what it does not."""

import json

import pytest

from longhelix.cli import collect_env as module
from longhelix.cli.main import main
from longhelix.compute.machine import devices, host

pytestmark = pytest.mark.unit


def collected(capsys):
    assert main(["collect-env", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_is_here(capsys):
    found = collected(capsys)
    assert found["versions"]["torch"]
    assert found["versions"]["longhelix"]
    assert found["processor"]["cores"] == host.cores()
    assert found["processor"]["native kernels"] == devices.native_instruction_set()
    assert found["memory"]["bytes"] >= found["memory"]["available bytes"] > 0
    assert found["gpus"]["names"] == devices.gpu_names()
    assert " of " in found["limits"]["open files"]


def test_keys_are_never_shown_and_others_are(capsys, monkeypatch):
    for name, value in {
        "LONGHELIX_API_KEY": "hush",
        "NCCL_AUTH_TOKEN": "hush",
        "AWS_SECRET": "hush",
        "OMP_NUM_THREADS": "3",
        "NCCL_DEBUG": "INFO\nversions: 1",
        "LONGHELIX_OTLP_ENDPOINT": "https://me:hush@h@host:4318/v1/traces",
        "TORCH_PROXY": "http://hush@host, http://other",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["collect-env"]) == 0
    said = capsys.readouterr().out
    assert "hush" not in said
    assert "AWS_SECRET" not in said
    lines = said.splitlines()
    assert "  LONGHELIX_API_KEY: (set, not shown)" in lines
    assert "  OMP_NUM_THREADS: 3" in lines
    assert "  LONGHELIX_OTLP_ENDPOINT: https://(not shown)@host:4318/v1/traces" in lines
    assert "  TORCH_PROXY: http://(not shown)@host, http://other" in lines
    assert "  NCCL_DEBUG: INFO\\nversions: 1" in lines
    assert collected(capsys)["environment"]["OMP_NUM_THREADS"] == "3"


def test_nothing_that_is_missing_is_an_error(capsys, monkeypatch, tmp_path):
    def broken(*arguments):
        raise OSError

    for room, name in ((devices, "gpu_names"), (devices, "native_instruction_set"), (host, "memory_bytes")):
        monkeypatch.setattr(room, name, broken)
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(module, "_PACKAGES", ("no-such-package",))
    found = collected(capsys)
    assert found["versions"]["no-such-package"] is None
    assert found["gpus"]["names"] is found["memory"]["bytes"] is found["limits"]["shared memory bytes"] is None
    assert main(["collect-env"]) == 0
    assert "  names: none found" in capsys.readouterr().out


def test_the_processor_is_read_from_what_the_kernel_says(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some: CPU\nflags\t\t: fpu avx2\n\nmodel name\t: Other\nflags\t\t: fpu\n"
    )
    assert host.processor(tmp_path) == "Some: CPU"
    assert host.instruction_sets(tmp_path) == ["fpu", "avx2"]
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: asimd sve\n")
    assert host.instruction_sets(tmp_path) == ["asimd", "sve"]
