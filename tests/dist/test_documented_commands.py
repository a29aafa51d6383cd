"""Commands, requests and programs in README and docs run with the files that they name."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch
from serving_process import serving
from shown import VISION_LANGUAGE, draw, save_model
from transformers import AutoModelForCausalLM, LlamaConfig

from documented import EVERY_COMMAND, EVERY_PROGRAM, EVERY_REQUEST, NEEDS_NETWORK, RUN_WITHOUT_FILES
from longhelix.cli.main import main
from oracle import VOCAB, save_tokenizer_files
from packed_checkpoints import FORMS, save_packed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMEOUT_S = 540  # compilation beside another test takes minutes on two cores
TEMPLATE = "{% for message in messages %}w5 {% endfor %}w6"
CONTEXTS = ("context save", "context list", "generate", "context load", "context rm")  # in an order that works
# Tests of hosts and of links run such commands.
ON_HOSTS = [command for command in EVERY_COMMAND if {"--nnodes", "--rates-mbit"} & set(command)]
ON_GPUS = [command for command in EVERY_COMMAND if " ".join(command).endswith("--activation-dtype fp8")]
ELSEWHERE = (*RUN_WITHOUT_FILES, *NEEDS_NETWORK, *ON_HOSTS, *ON_GPUS)
WITH_FILES = [command for command in EVERY_COMMAND if command not in ELSEWHERE]
SERVED = [command for command in WITH_FILES if command[0] == "serve"]
ON_CONTEXTS = sorted(
    (each for each in WITH_FILES if each[0] == "context" or (each[0] == "generate" and "--context" in each)),
    key=lambda command: next(place for place, name in enumerate(CONTEXTS) if " ".join(command).startswith(name)),
)
OTHERS = [command for command in WITH_FILES if command not in (*SERVED, *ON_CONTEXTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Toy models: one of text, one that also takes images, and one with weights in INT8."""
    text, images = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("qwen3-vl")
    in_bytes = tmp_path_factory.mktemp("w8a8")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 77, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": VOCAB, "eos_token_id": None}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(text)
    config = copy.deepcopy(VISION_LANGUAGE["qwen3_vl"])
    config.text_config.max_position_embeddings = 1024
    save_model(config, images)
    sizes |= {"hidden_size": 64, "intermediate_size": 96}
    heads |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    save_packed(LlamaConfig(**sizes, **heads), FORMS["int8"], in_bytes)
    folders = text, images, in_bytes / "packed"
    for folder in folders:
        save_tokenizer_files(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folders


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, models):
    """Working directory with every file and folder that the documentation names."""
    text, images, in_bytes = models
    for parent in ("path/to", "Qwen"):
        (tmp_path / parent).mkdir(parents=True)
    for name in ("path/to/folder", "path/to/model", "Qwen/Qwen3-8B"):
        (tmp_path / name).symlink_to(text)
    (tmp_path / "path/to/qwen3-vl-folder").symlink_to(images)
    (tmp_path / "path/to/w8a8-model").symlink_to(in_bytes)
    (tmp_path / "question.txt").write_text("What is a KV cache?")
    (tmp_path / "papers.txt").write_text("Attention reads keys and values of all earlier tokens. " * 20)
    draw(3, 2, 0).save(tmp_path / "cat.jpg")
    requests = [{"timestamp": 500 * place, "input_length": 4000, "output_length": 50} for place in range(5)]
    trace = [json.dumps(request | {"hash_ids": list(range(8))}) for request in requests]
    (tmp_path / "mooncake_trace.jsonl").write_text("\n".join(trace) + "\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands_of_each_kind():
    assert {command[0] for command in OTHERS} >= {"chat", "generate", "plan", "simulate"}
    assert len(ON_CONTEXTS) == len(CONTEXTS)
    assert len(SERVED) > 3
    assert len(EVERY_REQUEST) > 5
    assert len(EVERY_PROGRAM) > 2


@pytest.mark.parametrize("command", OTHERS, ids=" ".join)
def test_commands_with_files_run(command):
    done = subprocess.run(
        [sys.executable, "-m", "longhelix", *command],
        input="Hello\n",  # the message of `chat`
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_commands_on_contexts_run(capfd):
    for command in ON_CONTEXTS:
        assert main(command) == 0, (command, capfd.readouterr())
        capfd.readouterr()


@pytest.mark.parametrize("command", SERVED, ids=" ".join)
def test_servers_start_and_end(command):
    flags = command[1:]
    if "plan/plan.yaml" in command:
        planned = ("plan", "--model", "path/to/model", "--system", "h200", "--max-gpus", "2", "--context", "4k")
        assert main([*planned, "--ttl", "50ms", "--out", "plan/"]) == 0
        flags = (*flags, "--device", "cpu", "--kv-cache-tokens", "8192")  # this machine may have no GPU
    with serving(*flags) as server:
        assert server.end() == 0


def test_requests_are_answered(folder):
    papers = json.dumps((folder / "papers.txt").read_text())  # stands in place of three dots
    with serving("--model", "builtin", "--kvp", "2") as server:
        for line in EVERY_REQUEST:
            here = re.sub(r"http://(127\.0\.0\.1|localhost):\d+", server.url, line).replace('"..."', papers)
            done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=TIMEOUT_S)
            assert done.returncode == 0, (line, done)
            assert done.stdout, line
            assert ("error" in done.stdout and '"error":null' not in done.stdout) == ("repeat_penalty" in line), (
                done.stdout
            )
            while "/v1/contexts/" in line and json.loads(done.stdout)["status"] != "ready":
                done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(("page", "program"), EVERY_PROGRAM, ids=lambda given: getattr(given, "name", ""))
def test_programs_run(page, program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
