"""Sequence parallelism over links between network namespaces, with a tiny model: what travels, how long, and that
nothing is left."""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from world import run_ranks

from longhelix.cli.main import main
from longhelix.compute.kernels import native
from longhelix.errors import EngineError
from longhelix.measure import link
from longhelix.measure.calibrate import measurements
from longhelix.measure.calibrate.measurements import CalibrationScope
from longhelix.measure.sequence_parallelism import SequenceParallelismJob, pairs
from longhelix.measure.world import World
from longhelix.spec.layout import Layout

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.module is None, reason="this measures the native kernels, which are not built here"),
]
LACKING = link.missing()
needs_links = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
HOST = os.readlink("/proc/self/ns/net")
SIZES = ("--prompts", "90", "600", "--chunk-tokens", "512", "--sp-min-token-num", "100", "--threads", "1")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a model of six small layers."""
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=192, intermediate_size=96, vocab_size=500, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=8192,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def nothing_is_left(monkeypatch, tmp_path):
    """Afterwards no descendant of this process is in another network; no files of ranks are left, and no devices."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    devices = set(psutil.net_if_stats())
    yield
    deadline_s = time.monotonic() + 60
    while (apart(os.getpid()) or list(tmp_path.glob("longhelix-*"))) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    assert not apart(os.getpid())
    assert not list(tmp_path.glob("longhelix-*"))
    assert set(psutil.net_if_stats()) == devices


def apart(pid):
    """The descendants of a process that have left the host's network."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(OSError):  # it has ended since
            if os.readlink(f"/proc/{child.pid}/ns/net") != HOST:
                found.append(child.pid)
    return found


def run(capfd, *arguments):
    status = main(["bench", "sp", *arguments, "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    return json.loads(out)


@pytest.mark.slow
@needs_links
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        (("--kvp", "1", "--tpa", "2"), ("flash-comm-v1", "flash-comm-v1-int8", "enable-sp")),
        (("--kvp", "2", "--tpa", "1"), ("flash-comm-v1", "flash-comm-v1-int8")),
    ],
    ids=["tpa 2", "kvp 2"],
)
def test_what_travels_is_what_the_formula_says(capfd, toy, nothing_is_left, layout, variants):
    rates = ("--rates-mbit", "20", "1000")
    found = run(capfd, "--model", toy, *layout, *SIZES, *rates, "--repeats", "2", "--variants", *variants)
    rows = found["sp"]["rows"]
    assert not [remark for remark in found["remarks"] if "loopback" in remark]
    points = [(rate, prompt) for rate in (20, 1000) for prompt in (90, 600)]
    names = [name for variant in variants for name in ("off", variant)]
    assert [(row["rate_mbit"], row["prompt"], row["variant"]) for row in rows] == [
        (*point, name) for point in points for name in names
    ]
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        assert off["time_over_off"] == off["bytes_over_off"] == 1
        assert on["bytes_over_off"] == pytest.approx(on["formula_bytes"] / off["formula_bytes"], abs=0.02)
        assert off["sharded_tokens"] == 0
        assert on["sharded_tokens"] == (512 if on["prompt"] == 600 else 0)  # the last step has 88 rows
        assert (on["bytes_over_off"] < 0.9) == (on["prompt"] == 600 and on["activation_dtype"] == "int8")
    for row in rows:
        assert row["over_formula"] == pytest.approx(1.05, abs=0.05)
        # What each rank sends takes its time; after each pause the link lets pass a burst at once.
        assert row["burst_bytes"] == link.burst_bytes(row["rate_mbit"])
        least_s = 8 * (row["sent_bytes"] / 2 - row["burst_bytes"]) / (row["rate_mbit"] * 1e6)
        assert row["prefill_s"] > 0.9 * least_s
    assert "sends a burst of up to 0.2 ms at its rate" in found["sp"]["note"]


QUICK = CalibrationScope(
    contexts=(64, 128), decode_repeats=2, prompts=(64, 128), prefill_repeats=1, machine_repeats=2, collective_repeats=1
)


@pytest.mark.slow
@needs_links
@pytest.mark.timeout(500)
def test_layouts_over_a_link_are_measured_beside_predictions(capfd, toy, nothing_is_left, monkeypatch):
    monkeypatch.setattr(measurements, "FULL", QUICK)
    points = ("--requests", "1", "3", "--contexts", "64", "100")
    arguments = ("--model", toy, "--rates-mbit", "100", "1000", *points, "--repeats", "2", "--json")
    assert main(["bench", "layouts", *arguments]) == 0
    found = json.loads(capfd.readouterr().out)
    links, rows = found["links"]["rows"], found["layouts"]["rows"]
    assert [row["rate_mbit"] for row in links] == [100, 1000]
    for row in links:
        assert 0.3 < 8 * row["bytes_per_s"] / (1e6 * row["rate_mbit"]) < 1.05
        assert row["latency_s"] > 0
    names = ["Helix", "Helix, HOP-B", "local", "TP", "tied", "SPP"]
    assert [(row["requests"], row["rate_mbit"], row["strategy"]) for row in rows] == [
        (requests, rate, name) for requests in (1, 3) for rate in (100, 1000) for name in names
    ]
    assert all(row["step_s"] > 0 and row["predicted_s"] > 0 for row in rows)
    assert all(row["parts"] == 1 for row in rows if row["strategy"] != "Helix, HOP-B")
    sent = {(row["requests"], row["strategy"]): row["network_bytes"] for row in rows}
    # Hidden states of bfloat16 to the last stage, and token ids of eight bytes back.
    assert sent[1, "SPP"] == 192 * 2 + 8
    assert sent[3, "SPP"] == 3 * sent[1, "SPP"]
    assert sent[1, "SPP"] < sent[1, "tied"] < sent[1, "Helix"] == sent[1, "Helix, HOP-B"]


def test_ranks_that_two_hosts_cannot_share_evenly_are_refused(capfd):
    assert main(["bench", "layouts", "--ranks", "3", "--rates-mbit", "100"]) == 2
    assert "as many on each of 2 hosts: set it to 2" in capfd.readouterr().err


@needs_links
def test_what_is_sent_after_a_pause_takes_the_time_of_its_rate_and_goes_in_large_pieces():
    points = [(10_000, 4_000_000), (1000, 100_000), (50, 100_000), (1000, 262_144), (1000, 4_000_000)]
    first, _ = run_ranks("link_rank", [f"{rate}:{count}" for rate, count in points], 2, 60)
    for (rate_mbit, count), line in zip(points, first.splitlines(), strict=True):
        found = json.loads(line)
        assert min(found["took_s"]) > 8 * (count - link.burst_bytes(rate_mbit)) / (rate_mbit * 1e6)
        if rate_mbit == 1000:  # cut to packets, these were 1448 bytes
            assert statistics.median(found["pieces"]) < count / 8000 + 5


@pytest.mark.parametrize(("rate_mbit", "burst"), [(0.001, 4096), (50, 4096), (1000, 25_000), (10_000, 250_000)])
def test_a_burst_is_what_the_link_carries_in_a_fifth_of_a_millisecond(rate_mbit, burst):
    assert link.burst_bytes(rate_mbit) == burst


@needs_links
@pytest.mark.slow
def test_tc_takes_every_rate_that_is_not_refused():
    rates = (link.LEAST_MBIT, 12.345678, link.MOST_MBIT)
    first, _ = run_ranks("link_rank", [f"{rate}:1" for rate in rates], 2, 60)
    assert len(first.splitlines()) == len(rates)


@pytest.mark.slow
@needs_links
@pytest.mark.timeout(200)
def test_a_rank_that_is_killed_leaves_no_network(toy, nothing_is_left):
    found = pairs(toy, Layout(tpa=2), ["flash-comm-v1"], [64], chunk_tokens=64, threads=1)
    with World(SequenceParallelismJob(found, (64,), (100.0,), 10**7), 2) as ranks:
        killer = threading.Thread(target=kill_once_apart, args=(ranks.process_ids[1],))
        killer.start()
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            next(ranks.points())
        killer.join()


def kill_once_apart(pid):
    deadline_s = time.monotonic() + 60
    while pid not in apart(os.getpid()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@needs_links
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_end_of_the_command_leaves_nothing(toy, nothing_is_left, number):
    command = [sys.executable, "-m", "longhelix", "bench", "sp", "--model", toy, *SIZES, "--variants", "flash-comm-v1"]
    command += ["--repeats", "1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=interruptible
    ) as process:
        try:
            deadline_s = time.monotonic() + 100
            while len(ranks := apart(process.pid)) < 2:
                assert time.monotonic() < deadline_s
                assert process.poll() is None, process.stdout.read()
                time.sleep(0.2)
            time.sleep(1)
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=60)
    assert not alive


def interruptible():
    """In the new process: what runs in a shell's background is born without a Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_without_links_loopback_is_used_and_said(capfd, monkeypatch, toy):
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(link.shutil, "which", lambda program: f"/bin/{program}")
    arguments = ["--model", toy, *SIZES, "--repeats", "1", "--variants", "flash-comm-v1", "--json"]
    assert main(["bench", "sp", *arguments]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    told = [line for line in err.splitlines() if line.startswith("sp: ")]
    assert (
        told[0] == "sp: --rates-mbit is ignored and the ranks use plain loopback, because network "
        "namespaces need root: run this as root"
    )
    assert [(row["link"], row["prompt"]) for row in found["sp"]["rows"]] == [
        ("loopback", prompt) for prompt in (90, 90, 600, 600)
    ]
    said = "plain loopback without a rate limit, because network namespaces need root"
    assert any(said in remark for remark in found["remarks"])
    for row in found["sp"]["rows"]:
        assert row["over_formula"] > 0.99  # others use it, too
        assert row["spread"] is None  # of one time
        assert row["burst_bytes"] is None


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(link.shutil, "which", lambda program: None if program == "tc" else f"/bin/{program}")
    assert link.missing() == "the program tc is missing: install iproute2"
