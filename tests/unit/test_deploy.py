"""The files in deploy/ that start servers on several hosts name options, routes and metrics that exist."""

import ast
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml

from longhelix.cli.main import app
from longhelix.cli.replicas import application_options
from longhelix.scheduler.config import CacheConfig
from longhelix.serve.metrics import Metrics
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = ["kubernetes/leaderworkerset.yaml", "kubernetes/statefulset.yaml"]
FILES = [*KUBERNETES, "slurm/longhelix.sbatch", "compose/compose.yaml"]


def containers(node):
    """The containers and services in a document, which have arguments."""
    if isinstance(node, dict):
        if "args" in node or "command" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from containers(each)


def hosts(name):
    """The containers of a file and their commands, with the number 1 for each variable."""
    text = (DEPLOY / name).read_text()
    if name.endswith(".sbatch"):
        (words,) = re.findall(r"exec longhelix (.*)'", text.replace("\\\n", " "))
        found = [({}, shlex.split(words.replace('"$@"', "")))]
    else:
        each = containers(list(yaml.safe_load_all(text)))
        found = [(container, container.get("args") or container["command"].split()) for container in each]
    return [(container, [re.sub(r"\$\(?\w+\)?", "1", word) for word in words]) for container, words in found]


def parsed(words):
    _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments["model"], bound.arguments["engine"]


@pytest.mark.parametrize("name", FILES)
def test_commands_have_known_options(name):
    for _, words in hosts(name):
        assert words[0] == "serve"
        assert parsed(words)[1].node_rank is not None


@pytest.mark.parametrize("name", FILES)
def test_hosts_of_a_server_have_the_same_settings(name):
    settings = [parsed(words) for _, words in hosts(name)]
    models = {str(model) for model, _ in settings}
    engines = {str({**vars(engine), "node_rank": None}) for _, engine in settings}
    assert (len(models), len(engines)) == (1, 1)


@pytest.mark.parametrize("name", KUBERNETES)
def test_there_is_a_gpu_for_each_rank(name):
    found = hosts(name)
    model = parsed(found[0][1])[0]
    assert sum(container["resources"]["limits"]["nvidia.com/gpu"] for container, _ in found) == model.kvp * model.tpa


@pytest.mark.parametrize("name", KUBERNETES)
def test_probes_ask_host_0_whether_it_lives_and_whether_it_is_ready(name):
    (host_0, _), (follower, _) = hosts(name)
    paths = {probe: host_0[probe]["httpGet"]["path"] for probe in host_0 if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert not any(probe.endswith("Probe") for probe in follower)


def test_the_secret_has_no_value_that_others_know():
    assert set(yaml.safe_load((DEPLOY / "kubernetes/secret.yaml").read_text())["stringData"].values()) == {""}


def test_llm_d_reads_metrics_that_are_served():
    values = yaml.safe_load((DEPLOY / "llm-d/values.yaml").read_text())["router"]
    config = yaml.safe_load(values["epp"]["pluginsCustomConfig"][values["epp"]["pluginsConfigFile"]])
    parameters = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    (engine,) = parameters["core-metrics-extractor"]["engineConfigs"]
    scheduler = SimpleNamespace(block_tokens=16, num_blocks=8, cache=CacheConfig())
    metrics = Metrics(MagicMock(), SimpleNamespace(layout=Layout(kvp=2), scheduler=scheduler), "small")
    names = {family.name for family in metrics._registry.collect()}
    specs = {name for key, name in engine.items() if key.endswith("Spec")}
    assert len(specs) == 4
    assert specs <= names


def test_ray_starts_an_application_that_exists_with_known_options():
    (application,) = yaml.safe_load((DEPLOY / "ray/longhelix.yaml").read_text())["applications"]
    module, function = application["import_path"].split(":")
    source = ast.parse((ROOT / "src" / module.replace(".", "/") / "__init__.py").read_text())
    assert function in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    options = application_options(application["args"])
    assert options.num_replicas == 1  # a changed argument would restart all replicas
    assert options.replica.num_gpus == 8
    assert options.replica.server.api_key_file is not None  # other machines can reach the proxies
