"""Presets: models with the published totals, systems with a source for every constant, and names that are wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builtin import builtin
from longhelix.cli.calibrate import calibrate
from longhelix.compute.machine.system import machine
from longhelix.errors import UserError
from longhelix.spec import FORMATS, KV_DTYPES, presets
from longhelix.spec.presets import load_model, load_system, local_system_path, model_names, system_names, write_system
from longhelix.spec.weights import num_active_parameters, num_parameters
from toy_model import attention_of, kv_elements, limit_of

pytestmark = pytest.mark.unit

# Published totals; deepseek-r1's with 58 layers' routing biases of 256, without the layer that predicts a second token.
PARAMETERS = {
    "deepseek-r1": 671_026_404_352 + 58 * 256,
    # That, and an indexer in each of 61 layers: queries of 64 heads of 128 channels from a latent of 1,536, a key and a
    # weight of each head from 7,168, and a norm with a bias.
    "deepseek-v3.2": 671_026_404_352 + 58 * 256 + 61 * (64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128),
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
}
# Published rounded: all parameters, and those that a token meets. The sources count the latter in ways of their own:
# "head": without the head; "embedding": the embedding as well.
ROUNDED = {
    # arXiv 2508.06471, table 1, of Kimi K2; activated: its model card.
    "kimi-k2": (1043e9, 32e9, None),
    # arXiv 2508.06471, table 1: "we include the parameters of MTP layers but not word embeddings and the output layer".
    "glm-4.5": (355e9, 32e9, "head"),
    # arXiv 2508.10925: "unembedding parameters are counted towards active, but not embeddings".
    "gpt-oss-120b": (116.8e9, 5.1e9, None),
    # huggingface.co/blog/llama4-release: "17B active parameters out of ~400B total".
    "llama-4-maverick": (400e9, 17e9, "embedding"),
    # Its model card, "80B in total and 3B activated", which are 3.25 without the head.
    "qwen3-next-80b-a3b": (80e9, None, None),
    # mistral.ai/news/mistral-large-2407, "123 billion parameters"; dense.
    "mistral-large": (123e9, 123e9, None),
}
MINIMAL = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "intermediate_size": 200,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def kv_bytes(model: str, num_tokens: int, dtype: str) -> float:
    return kv_elements(load_model(model)) * num_tokens * FORMATS[dtype].bits / 8


def toml_of(system: str) -> str:
    return (Path(presets.__file__).parent / "systems" / f"{system}.toml").read_text()


def refused(load, name, code: str, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(str(name))
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_models_are_those_with_published_totals_and_the_papers_own():
    assert model_names() == tuple(sorted((*PARAMETERS, *ROUNDED, "helix-figure-1")))


@pytest.mark.parametrize("model", PARAMETERS)
def test_parameters_are_the_published_ones(model):
    assert num_parameters(load_model(model)) == PARAMETERS[model]


@pytest.mark.parametrize("model", ROUNDED)
def test_parameters_are_the_published_ones_to_two_hundredths(model):
    total, active, counting = ROUNDED[model]
    spec = load_model(model)
    assert num_parameters(spec) == pytest.approx(total, rel=0.02)
    if active is None:
        return
    # The head is as large as the embedding.
    more = {None: 0, "head": -1, "embedding": 1}[counting] * spec.vocabulary.size * spec.hidden_size
    assert num_active_parameters(spec) + more == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("model", "windowed"),
    [("gpt-oss-120b", range(0, 36, 2)), ("llama-4-maverick", [layer for layer in range(48) if layer % 4 < 3])],
)
def test_the_layers_with_windows_are_the_models_own(model, windowed):
    spec = load_model(model)
    assert [layer for layer in range(spec.num_layers) if spec.view_of(layer) is not None] == list(windowed)
    assert limit_of(spec) == {"gpt-oss-120b": 128, "llama-4-maverick": 8192}[model]


def test_the_papers_first_figure_has_its_sizes():
    spec = load_model("helix-figure-1")
    assert (
        attention_of(spec).heads.num_query_heads,
        attention_of(spec).heads.num_kv_heads,
        attention_of(spec).head_size,
    ) == (128, 8, 128)
    assert (spec.hidden_size, spec.layers[0].dense.num_columns, spec.num_layers, spec.vocabulary.size) == (
        16_384,
        65_536,
        126,
        128_256,
    )


def test_kv_sizes_are_the_published_ones():
    assert kv_elements(load_model("deepseek-r1")) == 35_136
    assert round(kv_bytes("deepseek-r1", 10**6, "fp4") / 1e9, 2) == 17.57
    assert round(kv_bytes("llama-3.1-405b", 10**6, "fp4") / 1e9, 1) == 129.0
    assert round(kv_bytes("llama-3.1-405b", 10**6, "bfloat16") / 1e9) == 516
    assert kv_bytes("llama-3-70b", 2**20, "bfloat16") == 320 * 2**30


def test_sparse_and_linear_attention_keep_what_they_keep():
    """64 more numbers of a key; two KV heads in 12 of 48 layers."""
    sparse, linear = load_model("deepseek-v3.2"), load_model("qwen3-next-80b-a3b")
    assert kv_elements(sparse) == 61 * (512 + 64 + 128)
    assert kv_elements(linear) == 12 * 2 * 2 * 256


def test_builtin_is_smollm2_with_weights_packed_as_in_its_file():
    spec = load_model("builtin")
    assert spec.expanded() == load_model("smollm2-135m")
    assert spec.checkpoint.quantisation == builtin().spec().checkpoint.quantisation


def test_a_folder_and_a_file_are_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MINIMAL))
    assert load_model(str(tmp_path)) == load_model(str(path))
    assert load_model(str(path)).hidden_size == 96


@pytest.mark.parametrize(
    ("name", "nearest"), [("llama-3-80b", "llama-3-8b"), ("DeepSeek-R1", "deepseek-r1"), ("builtln", "builtin")]
)
def test_an_unknown_model_is_refused_with_the_nearest(name, nearest):
    refused(load_model, name, "unknown_model", repr(name), nearest)


def test_a_name_near_none_is_refused_with_all():
    refused(load_model, "/nowhere/x", "unknown_model", *model_names(), "builtin", "folder")
    refused(load_system, "zzz", "unknown_system", *system_names(), "local", ".toml")


def test_a_folder_without_a_config_is_refused(tmp_path):
    refused(load_model, tmp_path, "unknown_model", str(tmp_path / "config.json"), "is missing")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_broken_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    refused(load_model, tmp_path, "invalid_model", str(tmp_path / "config.json"), "JSON")


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    refused(load_model, tmp_path, "invalid_model", "a JSON object, not a list")


# Vendors' public tables: bytes per second of memory, its bytes, operations per second in bfloat16, fp8 and fp4, bytes
# per second of a GPU and direction in a domain and beyond it, GPUs of a server or tray and of a domain.
TABLES = {
    "a100": (2.04e12, 85.9e9, 0.312e15, None, None, 300e9, 25e9, 8, 8),
    "b200": (7.7e12, 193.3e9, 2.25e15, 4.5e15, 9e15, 900e9, 100e9, 8, 8),
    "gb200": (8.0e12, 198.67e9, 2.5e15, 5e15, 10e15, 900e9, 100e9, 4, 72),
    "gb300": (8.0e12, 298e9, 2.5e15, 5e15, 15e15, 900e9, 100e9, 4, 72),
    "h100": (3.35e12, 85.9e9, 0.989e15, 1.978e15, None, 450e9, 50e9, 8, 8),
    "h200": (4.8e12, 151.4e9, 0.989e15, 1.978e15, None, 450e9, 50e9, 8, 8),
    "mi300x": (5.3e12, 206.2e9, 1.3074e15, 2.6149e15, None, 448e9, 50e9, 8, 8),
    "mi355x": (8.0e12, 309.2e9, 2.5e15, 5e15, 10.1e15, 537.6e9, 50e9, 8, 8),
    # Google Cloud TPU documentation: 95 GiB, 1,200 GBps both ways, 50 Gbps; hosts of four chips, slices of up to 6,144.
    "tpu-v5p": (2.765e12, 102.0e9, 0.459e15, 0.459e15, None, 600e9, 6.25e9, 4, 6144),
}
NVIDIA = [name for name in TABLES if not name.startswith(("mi", "tpu"))]
AMD = [name for name in TABLES if name.startswith("mi")]
# What has no reason to differ between the GPUs of one vendor, and of one generation.
OF_A_VENDOR = ("memory_efficiency", "kernel_s", "collective_s", "step_s", "part_fixed_share", "part_s",
               "scale_up.latency_s", "scale_out.latency_s")  # fmt: skip
OF_A_GENERATION = ("compute_efficiency", "attention_efficiency")


def test_the_systems_are_those_of_the_tables_and_a_machine_of_cpus():
    assert system_names() == tuple(sorted((*TABLES, "cpu")))


@pytest.mark.parametrize("name", TABLES)
def test_systems_hold_the_vendors_figures(name):
    system = load_system(name)
    rates = tuple(system.arithmetic.flops_per_s.get(dtype) for dtype in ("bfloat16", "fp8", "fp4"))
    assert (
        system.memory.bytes_per_s, system.memory.size_bytes, *rates, system.network.scale_up.bytes_per_s,
        system.network.scale_out.bytes_per_s, system.network.node_ranks, system.network.scale_up.ranks,
    ) == TABLES[name]  # fmt: skip
    assert system.rate("int4") == system.rate("bfloat16")
    assert system.computes_in("float16") == (name != "tpu-v5p")
    assert not system.shared


@pytest.mark.parametrize("name", TABLES)
def test_a_tenth_of_a_gpus_memory_is_not_the_models(name):
    system = load_system(name)
    assert system.usable_bytes == pytest.approx(0.9 * system.memory.size_bytes, rel=1e-4)


def test_switches_add_up_from_nvlink_4_on():
    assert [name for name in TABLES if load_system(name).network.in_switch_reduction] == [
        "b200",
        "gb200",
        "gb300",
        "h100",
        "h200",
    ]


@pytest.mark.parametrize("vendor", [NVIDIA, AMD])
def test_a_vendors_gpus_share_what_their_data_sheets_do_not_say(vendor):
    systems = [load_system(name) for name in vendor]
    for constant in OF_A_VENDOR:
        assert len({system.constants[constant] for system in systems}) == 1, constant


@pytest.mark.parametrize("generation", [["h100", "h200"], ["b200", "gb200", "gb300"]])
def test_a_generation_shares_its_efficiencies(generation):
    systems = [load_system(name) for name in generation]
    for constant in OF_A_GENERATION:
        assert len({system.constants[constant] for system in systems}) == 1, constant


def test_what_google_does_not_publish_of_a_tpu_is_said_to_be_assumed():
    system = load_system("tpu-v5p")
    assumed = {name for name, source in system.sources.items() if source.startswith("assumed")}
    assert assumed == {
        *("cores", "reserve_bytes", "memory_efficiency", "compute_efficiency", "attention_efficiency"),
        *("kernel_s", "collective_s", "step_s", "part_fixed_share", "part_s", "swap_bytes_per_s"),
        *("scale_up.latency_s", "scale_out.latency_s"),
    }


@pytest.mark.parametrize("name", TABLES)
def test_no_preset_is_fitted_to_a_paper(name):
    assert not [source for source in load_system(name).sources.values() if source.startswith("fitted")]


@pytest.mark.parametrize("name", system_names())
def test_every_constant_of_a_system_has_its_source(name):
    system = load_system(name)
    assert system.name == name
    assert {f"flops_per_s.{dtype}" for dtype in system.arithmetic.flops_per_s} < set(system.sources)


def test_the_system_of_cpus_runs_what_the_engine_does_and_says_that_it_is_another_machines():
    system = load_system("cpu")
    assert system.shared
    assert set(KV_DTYPES) <= set(system.arithmetic.flops_per_s)
    measured = [source for source in system.sources.values() if not source.startswith("assumed: ")]
    assert measured
    assert all("2 cores of a cloud machine" in source for source in measured)


def test_a_dtype_that_a_system_lacks_is_refused():
    refused(load_system("h100").rate, "fp4", "unsupported_dtype", "h100", "fp4", "fp8")
    refused(load_system("a100").rate, "fp8", "unsupported_dtype", "a100", "bfloat16")


@pytest.mark.parametrize(("name", "nearest"), [("gb20", "gb200"), ("H100", "h100"), ("locale", "local")])
def test_an_unknown_system_is_refused_with_the_nearest(name, nearest):
    refused(load_system, name, "unknown_system", repr(name), nearest)


def test_local_is_the_calibrated_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = local_system_path()
    assert path == tmp_path / "longhelix" / "local.toml"
    refused(load_system, "local", "unknown_system", "longhelix calibrate")
    path.parent.mkdir()
    path.write_text(toml_of("h100"))
    assert load_system("local").memory.size_bytes == load_system("h100").memory.size_bytes
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(local_system_path()) == "/home/someone/.local/share/longhelix/local.toml"


def test_a_user_without_a_home_has_no_local_system_and_calibrates_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert local_system_path() is None
    assert machine("cpu") == load_system("cpu")
    refused(load_system, "local", "unknown_system", "longhelix calibrate")
    with pytest.raises(UserError, match=r"no home .*: set XDG_DATA_HOME, or give --out FILE\.toml$"):
        calibrate()
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_system_is_read_or_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(toml_of("b200"))
    assert load_system(str(path)).name == "mine"
    path.write_text("memory_bytes_per_s = ")
    refused(load_system, path, "invalid_system", str(path), "TOML")
    path.write_bytes(b"\xff")
    refused(load_system, path, "invalid_system", str(path), "TOML")
    path.write_text("memory_bytes_per_s = 5")
    refused(load_system, path, "invalid_system", "mine", "a value and its source")
    refused(load_system, tmp_path / "none.toml", "unknown_system", "none.toml")


@pytest.mark.parametrize("name", system_names())
def test_a_system_that_is_written_is_read_back(name, tmp_path):
    system, path = load_system(name), tmp_path / "new" / f"{name}.toml"
    write_system(system, path)
    again = load_system(str(path))
    assert again == system
    assert again.sources == system.sources


def test_sources_are_written_whatever_they_say(tmp_path):
    source = 'a "quoted" back\\slash, a\nline, \u00fc and \U0001f600'
    write_system(load_system("h100").replaced({"step_s": 1.5e-3}, source), tmp_path / "x.toml")
    assert load_system(str(tmp_path / "x.toml")).sources["step_s"] == source


def test_a_system_that_cannot_be_written_is_refused(tmp_path):
    def write(path):
        write_system(load_system("h100"), Path(path))

    (tmp_path / "file").write_text("")
    refused(write, tmp_path / "file" / "x.toml", "invalid_argument", "cannot be written", "choose another file")
    refused(write, tmp_path, "invalid_argument", "Is a directory")


def test_presets_load_neither_torch_nor_numpy():
    code = (
        "import sys; from longhelix.spec import presets as p; "
        "p.load_model('deepseek-r1'); p.load_system('gb200'); print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()
    assert {"torch", "numpy", "longhelix.engine"}.isdisjoint(modules)
