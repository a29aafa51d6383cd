"""A host's place in a cluster: from options, from launchers, and what is wrong with it."""

import socket

import pytest

from longhelix.engine.hosts import network
from longhelix.engine.hosts.launcher import with_launcher
from longhelix.engine.hosts.membership import Membership, common_settings, model_fingerprint
from longhelix.engine.hosts.secret import keys_of, read_secret
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

TWO = {"nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1"}


def test_one_host_is_no_cluster():
    assert Membership.of(EngineOptions(), Layout(kvp=2)) is None


def test_ranks_are_spread_as_evenly_as_possible():
    found = Membership.of(EngineOptions(**TWO), Layout(kvp=3))
    assert found.hosts.ranks == ((0, 1), (2,))
    assert (found.address, found.first_address, found.keys) == ("127.0.0.1", "127.0.0.1", None)
    assert found.interface in dict(socket.if_nameindex()).values()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_rank": 1}, "node_rank is set, but nnodes is not"),
        ({"nnodes": 2, "master_addr": "127.0.0.1"}, "nnodes is 2, but node_rank is not set"),
        ({"nnodes": 2, "node_rank": 0}, "nnodes is 2, but master_addr is not set"),
        (TWO | {"node_rank": 2}, "node_rank is 2, but nnodes is 2: number the hosts from 0 to 1"),
        (TWO | {"nnodes": 5}, "the layout has 4 ranks, but nnodes is 5"),
        (TWO | {"rank_mapping": "0,1;2"}, "has 3 ranks on 2 hosts, but the layout has 4 ranks"),
        (TWO | {"rank_mapping": "0-3"}, "has 4 ranks on 1 hosts"),
        (TWO | {"interface": "eth77"}, "this host has no interface 'eth77': set --interface to one of "),
        (TWO | {"master_addr": "no.such.host.invalid"}, "the host 'no.such.host.invalid' has no IPv4 address"),
        (TWO | {"cluster_secret_file": "/no/such/file"}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        Membership.of(EngineOptions(**options), Layout(kvp=2, tpa=2))


def test_other_interfaces_than_loopback_need_a_secret(monkeypatch):
    monkeypatch.setattr(network, "interface_of", lambda address: "eth0")
    options = TWO | {"node_rank": 0, "master_addr": "10.1.2.3"}
    with pytest.raises(UserError, match="there is no secret that protects them: give the same --cluster-secret-file"):
        Membership.of(EngineOptions(**options), Layout(kvp=2))
    assert Membership.of(EngineOptions(**options, allow_without_secret=True), Layout(kvp=2)).keys is None
    monkeypatch.setenv("LONGHELIX_CLUSTER_SECRET", "0123456789abcdef")
    assert Membership.of(EngineOptions(**options), Layout(kvp=2)).keys == keys_of("0123456789abcdef")


def test_keys_follow_from_the_secret_and_differ_by_role(tmp_path, monkeypatch):
    keys, others = keys_of("0123456789abcdef"), keys_of("0123456789abcdeg")
    assert len({key.public for found in (keys, others) for key in (found.first, found.followers)}) == 4
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef\n")
    assert read_secret(file) == "0123456789abcdef"
    file.write_text("short")
    with pytest.raises(UserError, match="has 5 bytes: use a random secret of at least 16"):
        read_secret(file)
    monkeypatch.delenv("LONGHELIX_CLUSTER_SECRET", raising=False)
    assert read_secret(None) is None


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "3", "GROUP_RANK": "2", "MASTER_ADDR": "first"}
SLURM = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (None, None, None)),
        (TORCHRUN, (3, 2, "first")),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, (None, None, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[007-009]"}, (3, 1, "gpu007")),
        (SLURM | {"SLURM_STEP_NODELIST": "a1,b[2,3]"}, (3, 1, "a1")),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[3,5]-x,y"}, (3, 1, "rack3-x")),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, (None, None, None)),
    ],
)
def test_launchers_tell_the_place(environment, place):
    found = with_launcher(EngineOptions(), environment)
    assert (found.nnodes, found.node_rank, found.master_addr) == place


def test_options_win_over_launchers_and_srun_starts_one_task_per_host():
    assert with_launcher(EngineOptions(**TWO), TORCHRUN).nnodes == 2
    with pytest.raises(UserError, match="srun started 6 tasks on 3 hosts: start one task per host"):
        with_launcher(EngineOptions(), SLURM | {"SLURM_STEP_NUM_TASKS": "6"})


def test_settings_in_common_leave_out_what_may_differ():
    assert common_settings(EngineOptions(**TWO, interface="lo")) == common_settings(
        EngineOptions(**TWO | {"node_rank": 0})
    )
    assert "kv_dtype=int8" in common_settings(EngineOptions(kv_dtype="int8"))
    served = EngineOptions(allow_without_key=True, kv_events_endpoint="tcp://*:5557", kv_events_topic="kv@here")
    assert common_settings(served) == common_settings(EngineOptions())


def test_all_parts_of_a_split_gguf_model_count_for_its_fingerprint(tmp_path):
    parts = [tmp_path / f"toy-0000{part}-of-00002.gguf" for part in (1, 2)]
    for part in parts:
        part.write_bytes(b"1234")
    first = model_fingerprint(parts[0])
    assert first == model_fingerprint(parts[1])
    parts[1].write_bytes(b"1235")
    assert first != model_fingerprint(parts[0])


def test_a_model_with_other_weights_has_another_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    first = model_fingerprint(tmp_path)
    assert first == model_fingerprint(tmp_path)
    weights.write_bytes(b"1235")
    assert first != model_fingerprint(tmp_path)
    weights.write_bytes(bytes(2**24))
    large = model_fingerprint(tmp_path)
    with open(weights, "r+b") as file:
        file.seek(2**23)
        file.write(b"1" * 2**20)
    assert large != model_fingerprint(tmp_path)
    weights.write_bytes(b"12345")
    assert first != model_fingerprint(tmp_path)
