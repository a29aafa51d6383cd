"""Commands that measure over several hosts, which are network namespaces."""

import json
import os
import socket
import subprocess
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
import torch
from networks import Network, ranks
from transformers import AutoModelForCausalLM, LlamaConfig

from longhelix import UserError
from longhelix.cli.main import main
from longhelix.cli.measuring_hosts import common_words
from longhelix.compute.kernels import native
from longhelix.engine.hosts.membership import Membership
from longhelix.errors import EngineError
from longhelix.measure.hosts import MeasuringHosts
from longhelix.spec.hosts import Hosts
from tiers import few

pytestmark = [
    pytest.mark.dist,
    pytest.mark.usefixtures("all_cores"),
    pytest.mark.skipif(native.module is None, reason="this measures the native kernels, which are not built here"),
]
SECRET = {"LONGHELIX_CLUSTER_SECRET": "a secret for tests, and only for them"}
DECODE = ("bench", "decode", "--no-peers", "--contexts", "200", "300")
TWO_RANKS = ("--kvp", "2", "--repeats", "2")


def start(network, node, words, nnodes=2, directory=None, **variables):
    place = ["--node-rank", str(node), "--master-addr", network.address(0)]
    if "--nnodes" not in words:
        place += ["--nnodes", str(nnodes)]
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


def test_a_layout_over_two_hosts_is_measured_and_host_0_has_the_results(capfd):
    with Network(2) as network:
        (out, _), (others, err) = run(network, 2, (*DECODE, *TWO_RANKS, "--json"))
    rows = json.loads(out)["decode"]["rows"]
    assert [(row["context"], row["layout"], row["ranks"]) for row in rows] == [(200, "2 x 1", 2), (300, "2 x 1", 2)]
    assert main([*DECODE, *TWO_RANKS, "--json"]) == 0
    on_one_host = json.loads(capfd.readouterr().out)["decode"]["rows"]
    # The sums over both ranks.
    assert [row["read_bytes"] for row in rows] == [row["read_bytes"] for row in on_one_host]
    assert all(row["step_s"] > 0 for row in rows)
    assert (others, err.splitlines()[-1]) == ("", "host 0 has the results")


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    few(
        [
            (("--kvp", "2", "--repeats", "3"), {}, "host 1 has another command (bench decode"),
            ((*TWO_RANKS, "--nnodes", "3"), {}, "host 1 has another --nnodes (3) than host 0 (2)"),
            (
                TWO_RANKS,
                {"LONGHELIX_CLUSTER_SECRET": "another secret of a careless user"},
                "host 1 has another cluster secret",
            ),
        ]
    ),
    ids=["command", "number of hosts", "secret"],
)
def test_hosts_that_do_not_fit_get_one_sentence(words, variables, said):
    with Network(2) as network:
        first = start(network, 0, (*DECODE, *TWO_RANKS))
        second = start(network, 1, (*DECODE, *words), **variables)
        lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in (first, second)]
        assert [first.returncode, second.returncode] == [2, 2]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"error: {said}")


@pytest.mark.slow
def test_fewer_ranks_than_hosts_are_refused():
    with Network(2) as network:
        started = [start(network, node, DECODE) for node in range(2)]
        lines = [process.communicate(timeout=60)[1].splitlines()[-1] for process in started]
        assert [process.returncode for process in started] == [2, 2]
    assert all("a layout has 1 rank, but there are 2 hosts" in line for line in lines)


def test_what_a_host_has_of_its_own_is_no_part_of_the_common_command():
    own = ["--node-rank", "1", "--master-addr=a", "--allow-without-secret"]
    assert common_words(["bench", *own[:2], "--kvp", "2", *own[2:], "--threads", "1"]) == [
        "bench", "--kvp", "2", "--threads", "1",
    ]  # fmt: skip


@pytest.mark.slow
def test_an_error_of_one_host_ends_all(tmp_path):
    """Host 1 lacks the model."""
    for node in range(2):
        (tmp_path / str(node)).mkdir()
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=500, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "0" / "model")
    words = (*DECODE, "--kvp", "2", "--model", "model")
    with Network(2) as network:
        started = [start(network, node, words, directory=tmp_path / str(node)) for node in range(2)]
        lines = [process.communicate(timeout=100)[1].splitlines()[-1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert lines[0].startswith("error: host 1 has ended: ")
    assert lines[0].removeprefix("error: host 1 has ended: ") == lines[1].removeprefix("error: ")


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


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def membership(node_rank, port, nnodes=2):
    address = "127.0.0.1"
    return Membership(
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=address,
        first_address=address,
        port=port,
        address=address,
        interface="lo",
        keys=None,
        hosts=Hosts.in_order([1] * nnodes),
        is_launched=False,
    )


def meet(*classes):
    """Have hosts meet, one of each class, in threads. Returns what becomes of each: the host, or its exception."""
    port = free_port()
    with ThreadPoolExecutor(len(classes)) as pool:
        started = [
            pool.submit(made, membership(node, port, len(classes)), [], lambda line: None)
            for node, made in enumerate(classes)
        ]
        return [future.exception(timeout=60) or future.result() for future in started]


class Interrupted(MeasuringHosts):
    def _gather(self, own, nonce):
        raise KeyboardInterrupt


class Late(MeasuringHosts):
    def _gather(self, own, nonce):
        time.sleep(2)
        return super()._gather(own, nonce)


def test_a_host_that_is_interrupted_while_another_is_late_ends_all():
    first, second, third = meet(MeasuringHosts, Interrupted, Late)
    assert isinstance(second, KeyboardInterrupt)
    for error in (first, third):
        assert isinstance(error, EngineError)
        assert str(error) == "host 1 has ended: it was interrupted"


class Silent(MeasuringHosts):
    def _give_signs(self):
        pass  # but for the first one


def test_a_host_that_gives_no_more_signs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("longhelix.measure.hosts._BEAT_S", 0.2)
    monkeypatch.setattr("longhelix.measure.hosts._SILENCE_S", 2.0)
    first, silent, third = meet(MeasuringHosts, Silent, MeasuringHosts)
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(host.begin_world, tmp_path, b"{}", True) for host in (first, third)]
        errors = [future.exception(timeout=60) for future in begun]
    assert [str(error) for error in errors] == [
        "host 1 is gone: it was stopped or killed, or its network was cut off"
    ] * 2
    assert silent.node_rank == 1


def test_a_host_that_has_done_its_part_is_not_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("longhelix.measure.hosts._BEAT_S", 0.2)
    monkeypatch.setattr("longhelix.measure.hosts._SILENCE_S", 1.0)
    first, second, third = meet(MeasuringHosts, MeasuringHosts, MeasuringHosts)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(first.end)  # waits for the others
        third.check_others()
        second.end()
        for _ in range(3):
            time.sleep(1.5)
            third.check_others()
        assert not ending.done()
        third.end()
        ending.result(60)


@pytest.mark.slow
def test_a_host_that_is_cut_off_while_its_ranks_measure_ends_the_command():
    with Network(2) as network:
        first, second = (start(network, node, [*DECODE, "--kvp", "2", "--repeats", "2000"]) for node in range(2))
        deadline_s = time.monotonic() + 120
        while not has_ranks(second):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        time.sleep(15)  # they measure
        network.cut(1)
        start_s = time.monotonic()
        _, said = first.communicate(timeout=120)
        assert first.returncode == 1
        assert "host 1 is gone" in said.splitlines()[-1]
        assert time.monotonic() - start_s < 60
        second.kill()


def has_ranks(started):
    with suppress(ValueError):  # it has not started yet
        return bool(ranks(started))


def test_hosts_run_the_job_of_host_0_with_their_own_path_of_the_model(tmp_path):
    hosts = meet(MeasuringHosts, MeasuringHosts)
    paths = ["/home/jürgen/model", '/b/"model"']
    for host, path in zip(hosts, paths, strict=True):
        host.use_model(path)
    jobs = [msgspec.json.encode({"model": path, "host": node}) for node, path in enumerate(paths)]
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(host.begin_world, tmp_path, job, True) for host, job in zip(hosts, jobs, strict=True)]
        found = [msgspec.json.decode(future.result(timeout=60)) for future in begun]
    assert found == [{"model": path, "host": 0} for path in paths]


def test_the_first_error_of_all_hosts_counts():
    first, second = meet(MeasuringHosts, MeasuringHosts)
    assert first.failure(0.0) is None
    second.leave(EngineError("rank 1 was ended by SIGKILL"))
    first.leave(UserError("rank 0 has lost its peer"))
    for host in (first, second):
        assert str(host.failure(0.0)) == "host 1 has ended: rank 1 was ended by SIGKILL"
    assert first.last_rows([1], 0, 0.0) == {}
