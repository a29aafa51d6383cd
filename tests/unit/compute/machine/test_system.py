"""The system that the engine's own decisions are priced on: which constants stand for this machine."""

import msgspec
import pytest

from longhelix.compute.machine import system as machine_module
from longhelix.compute.machine.system import machine
from longhelix.compute.runner.config import EngineConfig
from longhelix.errors import UserError
from longhelix.measure.configuration import configure
from longhelix.spec import KV_DTYPES
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system, local_system_path, write_system

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def data_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def test_cpus_are_the_calibrated_system_where_there_is_one():
    assert machine("cpu") == load_system("cpu")
    write_system(load_system("cpu").replaced({"step_s": 0.5}, "measured"), local_system_path())
    assert (machine("cpu").name, machine("cpu").fixed.step_s) == ("local", 0.5)


def test_a_broken_calibration_is_refused_with_its_file():
    local_system_path().parent.mkdir()
    local_system_path().write_text("step_s = ")
    with pytest.raises(UserError, match=str(local_system_path())):
        machine("cpu")


@pytest.mark.parametrize(
    ("names", "system"),
    [
        (["NVIDIA H100 80GB HBM3", "NVIDIA H200"], "h100"),
        (["NVIDIA H200"], "h200"),
        (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA B200"], "b200"),
        (["NVIDIA GB200"], "gb200"),
        (["NVIDIA GB300"], "gb300"),
        (["AMD Instinct MI300X"], "mi300x"),
        (["NVIDIA L4"], "h100"),
        ([], "h100"),
    ],
)
def test_gpus_are_the_preset_in_their_name(monkeypatch, names, system):
    monkeypatch.setattr(machine_module, "gpu_names", lambda: names)
    found = machine("cuda")
    assert (found.name, found.memory.bytes_per_s) == (system, load_system(system).memory.bytes_per_s)
    assert all(found.rate(dtype) > 0 for dtype in KV_DTYPES)


def test_the_configuration_carries_the_machine_to_the_ranks():
    config = configure("builtin", Layout(), [64], weight_dtype=None, kv_dtype=None)
    assert config.machines.system == load_system("cpu")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert sent == config
    assert sent.machines.system.sources == config.machines.system.sources
