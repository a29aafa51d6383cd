"""The verb that measures this machine: what it writes from given measurements, what it refuses, and the real thing."""

import json

import pytest

from longhelix.cli.main import main
from longhelix.compute.kernels import native
from longhelix.measure.bench import predictions
from longhelix.measure.calibrate.machine import MachineJob
from longhelix.measure.calibrate.measurements import SHORT, Measurements
from longhelix.measure.calibrate.system import local_system
from longhelix.measure.configuration import configure
from longhelix.measure.world import collect
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="calibrate measures the native kernels, which are not built here"),
]

MACHINE = {"kernel_s": 1e-6, "flops_per_s.float32": 2e11}
RATES = {"float32": 1e11, "bfloat16": 4e11, "int8": 3e11, "int4": 2e11, "w8a8": 6e11}
PRODUCTS = [
    {"weight_dtype": dtype, "rows": rows, "flops_per_s": rate * min(1, rows / 128)}
    for rows in (1, 16, 128, 512)
    for dtype, rate in RATES.items()
]
CALLS = [
    {"collective": name, "ranks": ranks, "bytes": size_bytes, "shm_s": 7e-6 * (ranks - 1) + size_bytes / 4e9}
    for name in ("all-reduce", "all-to-all", "all-gather", "reduce-scatter")
    for ranks in (2, 4)
    for size_bytes in (2048, 524288)
]


def request(work, tokens, seconds, ranks=1, dtype="bfloat16"):
    layout = {"layout": f"{ranks} x 1", "ranks": ranks, "weight_dtype": dtype, "kv_dtype": dtype}
    chunk = 512 if work == "prefill" else None
    peaks = {"memory_bytes_per_s": 35e9, "outside_s": 1e-3} if chunk is None else {"matmul_flops_per_s": 4e11}
    return (
        layout
        | peaks
        | {
            "work": work,
            "tokens": tokens,
            "chunk": chunk,
            "seconds": seconds,
            "spread": 0.0,
        }
    )


FITTED = [
    request("decode", 2048, 0.012),
    request("decode", 16384, 0.024),
    request("prefill", 512, 0.35),
    request("prefill", 2048, 1.7),
]
OTHERS = [
    request("decode", 2048, 0.013, ranks=2),
    request("decode", 4096, 0.014),
    request("decode", 2048, 0.008, dtype="int8"),
]


@pytest.fixture
def measured(monkeypatch):
    """Times of a real machine, in place of measuring this one."""
    found = Measurements(MACHINE, PRODUCTS, CALLS, FITTED)
    monkeypatch.setattr(Measurements, "take", lambda scope, configs, on_point, hosts: found)
    return found


def test_what_is_measured_is_written_and_read_as_the_system_local(measured, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert main(["calibrate", "--short", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    local = load_system("local")
    assert told["path"] == str(tmp_path / "longhelix" / "local.toml")
    rows = told["constants"]["rows"]
    assert {row["constant"]: row["value"] for row in rows} == local.constants
    assert {row["constant"]: row["source"] for row in rows} == local.sources
    assert all(abs(row["error"]) < 0.1 for row in told["predictions"]["rows"])
    assert all(source.startswith(("measured: ", "fitted: ", "assumed: ")) for source in local.sources.values())
    assert (local.memory.bytes_per_s, local.shared) == (35e9, True)
    assert (local.fixed.kernel_s, local.fixed.step_s) == (1e-6, 1e-3)
    assert [local.rate(dtype) for dtype in ("int8", "int4", "w8a8")] == pytest.approx([3e11, 2e11, 6e11])
    assert [row["flops_per_s"] for row in told["products"]["rows"]] == [row["flops_per_s"] for row in PRODUCTS]
    assert 0.7 < local.memory.efficiency < 0.95
    assert local.network.scale_up.latency_s + local.fixed.collective_s == pytest.approx(7e-6, rel=0.3)


def test_tables_show_the_constants_and_how_well_they_fit(measured, tmp_path, capsys):
    path = tmp_path / "new" / "mine.toml"
    assert main(["calibrate", "--short", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "attention_efficiency" in out
    assert "for `fit` points" in " ".join(out.split())
    assert f"Wrote {path}." in out
    assert load_system(str(path)).name == "mine"


def test_points_are_told_by_what_they_are_used_for(measured):
    everything = Measurements(MACHINE, PRODUCTS, CALLS, FITTED + OTHERS)
    configs = [
        configure("builtin", Layout(), [64], weight_dtype=dtype, kv_dtype=dtype) for dtype in ("bfloat16", "int8")
    ]
    system = local_system(everything, configs[0], SHORT)
    assert system == local_system(measured, configs[0], SHORT)  # the others have no part in it
    rows = [row for config in configs for row in predictions.predicted(system, config, everything.requests, SHORT)]
    assert [row["use"] for row in rows] == ["fit"] * 4 + ["test"] * 2 + ["extra"]
    assert all(row["error"] == pytest.approx(row["predicted_s"] / row["seconds"] - 1) for row in rows)
    means = predictions.mean_errors(rows)
    assert means["test"] == pytest.approx((abs(rows[4]["error"]) + abs(rows[5]["error"])) / 2)
    assert max(means.values()) < 0.2


@pytest.mark.parametrize(
    ("out", "sentence"),
    [("local.json", "is not the name of a TOML file"), ("/proc/nowhere/x.toml", "cannot be created")],
)
def test_a_file_that_cannot_be_written_is_refused_before_all_work(out, sentence, monkeypatch, capsys):
    monkeypatch.setattr(Measurements, "take", None)
    assert main(["calibrate", "--out", out, "--json"]) == 2
    assert sentence in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.dist
def test_the_machine_is_measured():
    ((machine,),) = collect(MachineJob(repeats=2), 1, lambda row: None)
    assert set(machine) == set(MACHINE)
    assert 0 < machine["kernel_s"] < 1e-2
    assert machine["flops_per_s.float32"] > 1e9


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_short_calibration_of_this_machine(tmp_path, capfd):
    path = tmp_path / "machine.toml"
    assert main(["calibrate", "--short", "--out", str(path)]) == 0
    capfd.readouterr()
    system = load_system(str(path))
    assert system.shared
    assert 0 < system.memory.efficiency <= 1
    assert system.fixed.collective_s + system.network.scale_up.latency_s < 1e-2
