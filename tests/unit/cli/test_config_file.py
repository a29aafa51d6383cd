"""Flags from a YAML file: what wins over what, and what is refused."""

import pytest

from longhelix.cli.main import app, main
from longhelix.cli.options import given

pytestmark = pytest.mark.unit


@pytest.fixture
def parsed(tmp_path):
    """A function: the arguments of a verb by name, as a file and a command line give them."""

    def parse(text, *flags, verb="serve"):
        path = tmp_path / "flags.yaml"
        path.write_text(text)
        _, bound, _ = app.parse_args([verb, "--config", str(path), *flags], exit_on_error=False, print_error=False)
        return bound.arguments

    return parse


def test_flags_win_over_the_file_and_that_over_the_environment(parsed, monkeypatch):
    for name, value in {"PORT": "1", "HOST": "from-env", "KVP": "2", "TPA": "2", "PREFIX_CACHE": "true"}.items():
        monkeypatch.setenv(f"LONGHELIX_{name}", value)
    monkeypatch.setenv("LONGHELIX_API_KEY", "no flag")
    text = "model: m\nport: 2\nkvp: 3\nkv-cache-tokens: 128k\nmax_model_len: 4Ki\nprefix_cache: false\n"
    found = parsed(text, "--port", "3", "--max-model-len", "5")
    model = found["model"]
    assert (found["port"], found["host"], model.model) == (3, "from-env", "m")
    assert (model.kvp, model.tpa, model.tpf) == (3, 2, None)
    assert given(found["engine"]) == {"kv_cache_tokens": 128_000, "max_model_len": 5, "prefix_cache": False}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("no-prefix-cache: true", {"prefix_cache": False}),
        ("no_prefix_cache: false", {"prefix_cache": True}),
        ("chunk_tokens: auto\ntbt-target: 20ms", {"chunk_tokens": "auto", "tbt_target_s": 0.02}),
        ("client-weights: {batch: 0.5}", {"client_weights": {"batch": 0.5}}),
        (
            "compilation_config: {pass_config: {enable_sp: true}}",
            {"compilation_config": {"pass_config": {"enable_sp": True}}},
        ),
        ("rope_scaling: '{\"factor\": 2}'", {"rope_scaling": {"factor": 2}}),
    ],
)
def test_values_are_as_on_the_command_line(parsed, text, settings):
    assert given(parsed(f"model: m\n{text}")["engine"]) == settings


def test_other_verbs_take_their_own_flags(parsed):
    found = parsed("model: m\nstop: [a, b]\nchat: true\ntemperature: 0.5", "--prompt", "x", verb="generate")
    assert found["sampling"].stop == ("a", "b")
    assert (found["sampling"].temperature, found["chat"]) == (0.5, True)


WRONG = [
    ("prt: 1", "unknown setting 'prt': did you mean port?"),
    ("kv_cache_tokenz: 1", "did you mean kv-cache-tokens?"),
    ("config: other.yaml", "unknown setting 'config'"),
    ("1: 2", "unknown setting '1'"),
    ("port: abc", "port is 'abc': set it to an integer"),
    ("port: 1.5", "port is 1.5: set it to an integer"),
    ("port: true", "port is True: set it to an integer"),
    ("port: [1, 2]", "port is [1, 2]"),
    ("port: {a: 1}", "port is '{\"a\": 1}'"),
    ("port:", "port has no value"),
    ("port: 1\nPORT: 2", "unknown setting 'PORT'"),
    ("prefix-cache: true\nprefix_cache: true", "prefix-cache is set twice"),
    ("no-prefix-cache: true\nprefix_cache: true", "prefix-cache is set twice"),
    ("no-prefix-cache: 1", "no-prefix-cache is 1: set it to True or False"),
    ("drain: 30", '"30" is not a time'),
    ("max-waiting-tokens: 12 apples", "is not a size"),
    ("execution: fast", "recorded"),
    ("client_weights: {a: 2020-01-01}", "client-weights cannot be written as JSON"),
    ("- port", "the file has no options"),
    ("", "the file has no options"),
    ("port: [", "the file is not valid YAML"),
    ("[" * 5000, "the file has more than 8 levels"),
    ("\0", "the file is not valid YAML"),
    ("port: !!python/object/apply:os.getpid []", "the file is not valid YAML"),
    ("host: &a x\nserved-model-name: *a", "the file has an alias"),
    ("# " + "x" * 70_000, "the file is larger than 65536 bytes"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, capsys, text, words):
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    assert main(["serve", "--model", "m", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path, capsys, name):
    assert main(["serve", "--model", "m", "--config", str(tmp_path / name)]) == 2
    assert "cannot be read" in capsys.readouterr().err
