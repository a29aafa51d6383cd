"""Commands that measure over several hosts, which are network namespaces."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
from networks import Network

from longhelix.cli.bench import meet_hosts
from longhelix.cli.options import HostFlags
from longhelix.compute.kernels import native
from longhelix.measure.hosts import MeasuringHosts

pytestmark = [
    pytest.mark.dist,
    pytest.mark.usefixtures("all_cores"),
    pytest.mark.skipif(native.module is None, reason="this measures the native kernels, which are not built here"),
]
SECRET = {"LONGHELIX_CLUSTER_SECRET": "a secret for tests, and only for them"}
DECODE = ("bench", "decode", "--no-peers", "--contexts", "200", "300")
TWO_RANKS = ("--kvp", "2", "--repeats", "2")


def start(network, node, words, nnodes=2, directory=None, **variables):
    place = ["--nnodes", str(nnodes), "--node-rank", str(node), "--master-addr", network.address(0)]
    return network.start(
        node,
        ["-m", "longhelix", *words, *place],
        env=os.environ | SECRET | variables,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(network, nnodes, words):
    """Run a command on all hosts. Returns what each has printed to standard output and standard error."""
    started = [start(network, node, words, nnodes) for node in range(nnodes)]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * nnodes, outputs
    return outputs


def test_a_layout_over_two_hosts_is_measured_and_host_0_has_the_results():
    with Network(2) as network:
        (out, _), (others, err) = run(network, 2, (*DECODE, *TWO_RANKS, "--json"))
    rows = json.loads(out)["decode"]["rows"]
    assert [(row["context"], row["layout"], row["ranks"]) for row in rows] == [(200, "2 x 1", 2), (300, "2 x 1", 2)]
    assert all(row["step_s"] > 0 and row["read_bytes"] > 0 for row in rows)
    assert (others, err.splitlines()[-1]) == ("", "host 0 has the results")


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("--kvp", "2", "--repeats", "3"), {}, "host 1 has another command (bench decode"),
        (
            TWO_RANKS,
            {"LONGHELIX_CLUSTER_SECRET": "another secret of a careless user"},
            "host 1 has another cluster secret",
        ),
    ],
    ids=["command", "secret"],
)
def test_hosts_that_do_not_fit_get_one_sentence(words, variables, said):
    with Network(2) as network:
        first = start(network, 0, (*DECODE, *TWO_RANKS))
        second = start(network, 1, (*DECODE, *words), **variables)
        lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in (first, second)]
        assert [first.returncode, second.returncode] == [2, 2]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"error: {said}")


def test_fewer_ranks_than_hosts_are_refused():
    with Network(2) as network:
        started = [start(network, node, DECODE) for node in range(2)]
        lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in started]
        assert [process.returncode for process in started] == [2, 2]
    assert lines[0] == lines[1]
    assert "1 ranks, but there are 2 hosts" in lines[0]


@pytest.mark.parametrize("form", [["--node-rank", "1"], ["--node-rank=1"]], ids=["two words", "one word"])
def test_what_a_host_has_of_its_own_is_no_part_of_the_common_command(monkeypatch, form):
    told = []
    monkeypatch.setattr(MeasuringHosts, "of", lambda settings, command, tell: told.append(command))
    monkeypatch.setattr(sys, "argv", ["longhelix", "bench", "decode", "--nnodes", "2", *form, "--kvp", "2"])
    meet_hosts(HostFlags())
    assert told == [["bench", "decode", "--kvp", "2"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_calibration_measures_the_link_between_hosts(tmp_path):
    for node in range(2):
        (tmp_path / str(node)).mkdir()
    with Network(2) as network:
        words = ("calibrate", "--short", "--json", "--out")
        started = [start(network, node, (*words, "system.toml"), directory=tmp_path / str(node)) for node in range(2)]
        outputs = [process.communicate(timeout=500) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    for node, (out, _) in enumerate(outputs):
        system = tomllib.loads((tmp_path / str(node) / "system.toml").read_text())
        assert system["scale_out"]["latency_s"]["source"] == "fitted: 20 collectives between hosts"
        (link,) = json.loads(out)["links"]["rows"]
        assert system["scale_out"]["bytes_per_s"]["value"] == pytest.approx(link["fitted_bytes_per_s"], rel=1e-3)
        assert link["link"] == "network"
