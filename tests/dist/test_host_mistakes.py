"""Mistakes that the options of two hosts do not show: each host says the same sentence, within 30 s."""

import shutil

import pytest
from networks import Network
from safetensors.torch import load_file, save_file
from test_hosts import command, ended, say

from oracle import NATIVE_SIZES, make_oracle, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

LONGEST_S = 30


def assert_all_say(hosts, words):
    found = {ended(host, LONGEST_S) for host in hosts}
    assert len(found) == 1
    ((code, line),) = found
    assert code == 2
    assert line.startswith("error: ")
    assert words in line


def test_another_model_on_one_host(tmp_path):
    """Of the same config, with one other weight."""
    oracle = make_oracle(NATIVE_SIZES, tmp_path / "first", prompt_lengths=(1,), new_tokens=1)
    save_tokenizer_files(oracle.path)
    other = shutil.copytree(oracle.path, tmp_path / "second")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with Network(2) as network:
        hosts = []
        for node, path in enumerate((oracle.path, other)):
            arguments = command(network, node)
            arguments[arguments.index("builtin")] = str(path)
            hosts.append(say(network, node, arguments))
        assert_all_say(hosts, "host 1 (10.77.0.2) has other model files")


def test_two_followers_that_cannot_reach_each_other():
    with Network(3) as network:
        network.hide(1, 2)
        hosts = [say(network, node, command(network, node, "--kvp", "3", nnodes=3)) for node in range(3)]
        assert_all_say(
            hosts, "host 1 (10.77.0.2) cannot connect to host 2 (10.77.0.3) (timed out): allow all TCP ports"
        )


def test_hosts_without_a_number():
    with Network(2) as network:
        arguments = command(network, 0)
        place = arguments.index("--node-rank")
        del arguments[place : place + 2]
        hosts = [say(network, node, arguments) for node in range(2)]
        assert_all_say(hosts, "nnodes is 2, but node_rank is not set: set node_rank to the number of this host, from 0")


def test_a_secret_that_all_users_can_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o644)
    with Network(2) as network:
        hosts = [say(network, node, command(network, node, "--cluster-secret-file", str(secret))) for node in range(2)]
        assert_all_say(
            hosts, f"all users of this host can read the cluster secret file {secret}: run chmod 600 {secret}"
        )
