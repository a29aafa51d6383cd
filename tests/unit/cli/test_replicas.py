"""Options of the application for Ray Serve: what each replica needs, and what is refused."""

import pytest

from longhelix.cli.options import given
from longhelix.cli.replicas import application_options
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

CPU = {"model": "builtin", "device": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "num_replicas", "num_cpus", "num_gpus"),
    [
        (CPU, 1, 1, 0),
        (CPU | {"num_replicas": 3, "kvp": 2, "tpa": 2, "threads_per_rank": 4}, 3, 16, 0),
        (CPU | {"num_replicas": "2", "kvp": "2", "threads_per_rank": "3"}, 2, 6, 0),  # as `serve run` passes them
        (CPU | {"device": "cuda", "kvp": 4, "pp": 2}, 1, 8, 8),
    ],
)
def test_a_replica_has_cores_and_gpus_for_its_ranks(arguments, num_replicas, num_cpus, num_gpus):
    found = application_options(arguments)
    assert (found.num_replicas, found.replica.num_cpus, found.replica.num_gpus) == (num_replicas, num_cpus, num_gpus)


def test_options_are_those_of_the_command_line():
    found = application_options(
        CPU
        | {
            "max_model_len": "4Ki",
            "prefix-cache": "false",
            "client_weights": {"batch": 0.5},
            "served_model_name": "small",
            "drain": "30s",
            "max_running": 5,
            "allow_without_key": "true",
        }
    ).replica
    settings = given(found.engine)
    assert (settings["max_model_len"], settings["prefix_cache"]) == (4096, False)
    assert settings["client_weights"] == {"batch": 0.5}
    assert (found.server.served_model_name, found.server.drain) == ("small", 30)
    assert (settings["max_running"], found.allow_without_key) == (5, True)


@pytest.mark.parametrize("name", ["0123", "on", "2026-11-29", "1e3", "[" * 9999, "a: b", "null"])
def test_text_stays_as_it_is(name):
    assert application_options(CPU | {"served_model_name": name}).replica.server.served_model_name == name


def test_two_numbers_of_replicas_have_replicas_with_the_same_options():
    found = [application_options(CPU | {"num_replicas": number}).replica for number in (1, 2)]
    assert found[0] == found[1]


def test_a_replica_does_not_join_the_hosts_that_slurm_started_ray_on():
    assert given(application_options(CPU).replica.engine)["nnodes"] == 1


def test_a_layout_file_counts(tmp_path):
    path = tmp_path / "layout.yaml"
    path.write_text("kvp: 2\ntpa: 2\n")
    assert application_options(CPU | {"layout": str(path)}).replica.num_cpus == 4


WRONG = [
    ({"device": "cpu"}, "the application has no model"),
    ({"kv_dtyp": "int8"}, "unknown setting 'kv-dtyp': did you mean kv-dtype?"),
    ({"num_replica": 2}, "unknown setting 'num-replica': did you mean num-replicas?"),
    ({"host": "0.0.0.0"}, "unknown setting 'host'"),
    ({"port": 8000}, "unknown setting 'port'"),
    ({"kvp": "two"}, "kvp is 'two': set it to an integer"),
    ({"num_replicas": 0}, "num_replicas is 0"),
    ({"threads_per_rank": "1.5"}, "threads-per-rank is '1.5': set it to an integer"),
    ({"kv_dtype": "int3"}, "int3"),
    ({"drain": "soon"}, '"soon" is not a time'),
    ({"max_waiting_requests": 0}, "max_waiting_requests is 0"),
    ({"block_tokens": 0}, "block_tokens is 0"),
    ({"device": "auto"}, "set device to cuda or cpu"),
    ({"nnodes": 2}, "nnodes is 2, but all ranks of a replica run on one node of Ray"),
    ({"model": None}, "model has no value"),
    ({"node_rank": 0}, "node_rank is set, but all ranks of a replica run on one node of Ray"),
    ({"kv_events_endpoint": "tcp://127.0.0.1:5557"}, "kv_events_endpoint is set, but Ray's router does not read KV"),
    ({"trace": "/tmp/trace.json"}, "trace is set, but all replicas would write to the same file"),
    ({"api_key_file": "keys"}, "api_key_file is 'keys', but Ray starts processes in other folders"),
    ({"api_key_file": "~/keys"}, "api_key_file is '~/keys', but Ray starts processes in other folders"),
    ({"contexts_dir": "contexts"}, "contexts_dir is 'contexts', but Ray starts processes in other folders"),
    ({"layout": "layout.yaml"}, "layout is 'layout.yaml', but Ray starts processes in other folders"),
    ({"model": "./model"}, "model is 'model', but Ray starts processes in other folders"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_what_is_wrong_is_said_in_a_sentence(wrong, words):
    arguments = wrong if wrong == {"device": "cpu"} else CPU | wrong
    with pytest.raises(UserError) as caught:
        application_options(arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ray_has_to_know_the_device():
    with pytest.raises(UserError, match="device is not set, but Ray reserves GPUs"):
        application_options({"model": "builtin"})
