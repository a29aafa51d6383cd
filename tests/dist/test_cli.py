"""The command line as a user meets it: answers, JSON, and one sentence for each mistake."""

import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
import torch
from pseudo_terminal import PseudoTerminal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longhelix.cli.generate import _prompt as read_prompt
from longhelix.cli.main import main
from oracle import FAMILIES, WITH_EXPERTS, greedy, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = pytest.mark.dist

PROMPT = " ".join(f"w{i}" for i in range(1, 38))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(made.path)
    return made


@pytest.fixture
def model(oracle, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(oracle.path, tmp_path / "model")


def ranks_here():
    """The children of this process's children, which are fork servers."""
    return set(psutil.Process().children(recursive=True)) - set(psutil.Process().children())


def run(capfd, *arguments):
    """Exit status, standard output and standard error of the command line in this process."""
    before = ranks_here()  # other tests keep worlds of ranks
    status = main([str(argument) for argument in arguments])
    assert ranks_here() <= before, "a worker is still there"
    return status, *capfd.readouterr()


def refusal(capfd, *arguments):
    """The one sentence that a mistake gets, checked to be one line with exit status 2."""
    status, out, err = run(capfd, *arguments)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert "Traceback" not in err
    return lines[0]


def generate(model, *more):
    return ["generate", "--model", model, "--prompt", PROMPT, "--max-new-tokens", 8, *more]


def test_json_has_the_documented_fields_and_nothing_else_on_stdout(capfd, oracle):
    status, out, err = run(capfd, *generate(oracle.path, "--kvp", 2, "--json", "--logprobs", 1))
    result = json.loads(out)
    assert status == 0
    assert set(result) == {
        "text", "token_ids", "prompt_tokens", "finish_reason", "ttft_s", "tbt_s", "layout", "kv_tokens_per_rank",
        "cached_tokens", "preemptions", "recomputed_tokens", "swapped_tokens", "moved_tokens", "moved_bytes", "moved_s",
        "exchanged_bytes_per_token", "logprobs", "token_texts", "hop_b",
    }  # fmt: skip
    assert result["hop_b"] == {"parts": 1, "exchanges": 8, "exposed_s": None}  # ranks share memory
    assert result["layout"] == {"kvp": 2, "tpa": 1, "tpf": 2, "ep": 1, "pp": 1}
    assert (result["prompt_tokens"], len(result["token_ids"]), len(result["tbt_s"])) == (37, 8, 7)
    assert sum(result["kv_tokens_per_rank"]) == 37 + 8 - 1
    assert all(str(token) in logprobs for token, logprobs in zip(result["token_ids"], result["logprobs"], strict=True))
    assert "".join(result["token_texts"]) == result["text"]
    assert "KV cache holds" in err


def test_json_has_log_probabilities_of_the_prompt_where_asked_for(capfd, oracle):
    asked = ["generate", "--model", oracle.path, "--prompt", PROMPT, "--max-new-tokens", 0]
    status, out, _ = run(capfd, *asked, "--prompt-logprobs", 2, "--json")
    result = json.loads(out)
    assert (status, result["token_ids"], result["finish_reason"]) == (0, [], "length")
    first, *rest = result["prompt_logprobs"]
    assert (first, len(rest)) == (None, result["prompt_tokens"] - 1)
    assert all(len(entry) in (2, 3) for entry in rest)
    assert "logprobs" not in result
    status, out, err = run(capfd, *asked, "--prompt-logprobs", 2)
    assert (status, out.strip()) == (0, "")
    assert "0 (length)" in err
    assert "max_new_tokens is 0" in refusal(capfd, *asked)


def test_a_trace_is_written_beside_the_answer(capfd, oracle, tmp_path):
    status, out, err = run(capfd, *generate(oracle.path, "--kvp", 2, "--json", "--trace", tmp_path / "t.json"))
    assert status == 0
    assert len(json.loads(out)["token_ids"]) == 8
    assert "recorded" in err
    assert {event["pid"] for event in json.loads((tmp_path / "t.json").read_text())} == {0, 1}
    words = refusal(capfd, *generate(oracle.path, "--trace", tmp_path))
    assert "choose another file for the trace" in words


def test_text_streams_to_stdout_and_the_table_to_stderr(capfd, oracle):
    status, out, err = run(capfd, *generate(oracle.path))
    assert status == 0
    assert len(out.split()) == 8
    for name in ("prompt tokens", "TTFT", "TPOT", "tokens/s", "KV on rank 0", "exchanged", "achieved"):
        assert name in err


def test_sharded_weights_give_the_same_tokens(capfd, oracle, tmp_path):
    folder = shutil.copytree(oracle.path, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(oracle.path).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    whole, sharded = (run(capfd, *generate(path, "--kvp", 2)) for path in (oracle.path, folder))
    assert (whole[0], sharded[0]) == (0, 0), whole[2] + sharded[2]
    assert sharded[1] == whole[1]


@pytest.mark.slow
def test_without_native_kernels_the_command_runs_and_says_so_once(oracle, tmp_path):
    """As in an install without a compiler: Python's start-up hides the module, in workers as well."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['longhelix._native'] = None\n")
    done = subprocess.run(
        [sys.executable, "-m", "longhelix", *map(str, generate(oracle.path, "--kvp", 2, "--json"))],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == expected_tokens(oracle.path, list(range(1, 38)), 8)
    (warning,) = [line for line in done.stderr.splitlines() if "native" in line]
    assert warning.startswith("warning: the native CPU kernels are missing")


def test_prompt_file_is_fed_as_it_is(capfd, oracle, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b" w1 w2\r\n\n")
    assert read_prompt(None, file) == " w1 w2\r\n\n"
    file.write_text(PROMPT)
    by_file = run(capfd, "generate", "--model", oracle.path, "--prompt-file", file, "--max-new-tokens", 8)
    by_text = run(capfd, *generate(oracle.path))
    assert (by_file[0], by_text[0]) == (0, 0)
    assert by_file[1] == by_text[1]


def test_sizes_take_units_and_are_echoed_resolved(capfd, oracle):
    _, _, err = run(capfd, *generate(oracle.path, "--kv-cache-tokens", "2Ki", "--max-model-len", "1k"))
    assert "KV cache holds 2,048 tokens" in err
    assert "max_model_len 1000" in err
    assert "warning: max_model_len 1000 exceeds the 128 positions" in err


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_gives_the_same_tokens(oracle):
    arguments = [str(argument) for argument in generate(oracle.path, "--kvp", 2, "--json")]
    plain = subprocess.run([sys.executable, "-m", "longhelix", *arguments], capture_output=True, timeout=240)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    by_torchrun = subprocess.run([*torchrun, "-m", "longhelix", *arguments], capture_output=True, timeout=240)
    assert by_torchrun.returncode == 0, by_torchrun.stderr.decode()
    assert json.loads(by_torchrun.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


@contextmanager
def generating(oracle, *more):
    """A command that generates for minutes, once its engine is up. It and its ranks end with the test."""
    endless = ["--kvp", 2, "--max-model-len", "100k", "--ignore-eos"]
    arguments = [str(argument) for argument in generate(oracle.path, *endless, *more)]
    arguments[arguments.index("8")] = "50000"
    command = subprocess.Popen(
        [sys.executable, "-m", "longhelix", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        while b"KV cache holds" not in (line := command.stderr.readline()):
            assert line, "the command has ended"
        yield command
    finally:
        command.kill()
        command.communicate()


@pytest.mark.parametrize("as_json", few([True, False]))
def test_killed_worker_ends_the_command_with_status_1_and_leaves_nothing(oracle, as_json):
    with generating(oracle, *(["--json"] if as_json else [])) as command:
        (server,) = psutil.Process(command.pid).children()
        workers = server.children()
        workers[1].kill()
        out, err = command.communicate(timeout=120)
        assert command.returncode == 1
        message = json.loads(out)["error"]["message"] if as_json else err.decode().splitlines()[-1]
        assert "SIGKILL" in message
        assert "rank" in message
        assert not any(process.is_running() for process in (server, *workers))


MISTAKES = {
    "kvp is 0": (["--kvp", 0], "kvp is 0: set it to an integer from 1"),
    "tpa above the query heads": (["--tpa", 10], "tpa is 10, but the model has 9 query heads: set tpa to 9 or less"),
    "products do not match": (["--kvp", 2, "--tpf", 3], "both must give the same number; set tpf to 2"),
    "a threshold beside a placement": (
        ["--kvp", 2, "--placement", "local", "--kvp-threshold", 100],
        "set placement to auto, or leave one of them out",
    ),
    "a threshold that is not a size": (["--kvp-threshold", "-1"], "is not a size"),
    "experts in a dense model": (["--kvp", 2, "--ep", 2], "the model has no experts: set ep to 1"),
    "more stages than layers": (["--pp", 3], "pp is 3, but the model has 2 layers: set pp to 2 or less"),
    "auto beside a degree": (["--layout", "auto", "--kvp", 2], "but --kvp is set: leave one of them out"),
    "beyond max-model-len": (["--max-model-len", 40], "37 prompt tokens plus 8 new tokens exceed --max-model-len 40"),
    "beyond the pool": (["--kv-cache-tokens", 16], "set --kv-cache-tokens to at least 48"),
    "pool beyond memory": (["--kv-cache-tokens", "1000G"], "set --kv-cache-tokens to at most"),
    "no block": (["--block-tokens", 0], "block_tokens is 0: set it to an integer from 1"),
    "no chunk": (["--chunk-tokens", 0], "chunk_tokens is 0: set it to an integer from 1"),
    "no pool": (["--kv-cache-tokens", 0], "kv_cache_tokens is 0"),
    "a limit inside a block": (
        ["--placement", "growing", "--growth-limit-tokens", 20],
        "a multiple of the KV block, 16",
    ),
    "unknown dtype": (["--dtype", "int3"], 'Choose from: "float32", "bfloat16", "float16"'),
    "unknown flag": (["--kpv", 2], "--kvp"),
    "size with a wrong unit": (["--max-model-len", "8x"], '"8x" is not a size'),
    "rope settings that are not JSON": (["--rope-scaling", "{yarn"], "--rope-scaling is not valid JSON"),
    "unknown rope type": (["--rope-scaling", '{"type": "spiral"}'], "use one of default, linear, dynamic, llama3"),
    "unknown rope key": (["--rope-scaling", '{"rope_tipe": "linear"}'], "unknown rope setting 'rope_tipe'"),
    "negative temperature": (["--temperature", -1], "temperature is -1.0: set it to 0 (greedy), or"),
    "both prompts": (["--prompt-file", "x"], "give exactly one of --prompt and --prompt-file"),
    "no chat template": (["--chat"], "no chat template"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gets_one_sentence(capfd, oracle, mistake):
    arguments, words = MISTAKES[mistake]
    assert words in refusal(capfd, *generate(oracle.path, *arguments))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    made = make_oracle(WITH_EXPERTS["mixtral"], tmp_path_factory.mktemp("mixtral"), prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    return made


EXPERT_MISTAKES = {
    "more groups than experts": (["--kvp", 6, "--ep", 6], "ep is 6, but the model has 5 experts: set ep to 5 or less"),
    "tied with an EP": (["--kvp", 2, "--tied", "--ep", 2], "--tied fixes tpf = tpa = 1 and ep = 1"),
    "bits that no batch changes": (["--batch-invariant"], "products with an input size that is not a multiple of 16"),
}


@pytest.mark.parametrize("mistake", EXPERT_MISTAKES)
def test_mistakes_with_experts_get_one_sentence(capfd, experts, mistake):
    arguments, words = EXPERT_MISTAKES[mistake]
    assert words in refusal(capfd, *generate(experts.path, *arguments))


def test_experts_that_the_config_does_not_name_are_refused(capfd, experts, tmp_path):
    folder = shutil.copytree(experts.path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for count in (4, 6):
        (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": count}))
        words = f"gate.weight' has shape [5, 90], but the model's config requires [{count}, 90]"
        assert words in refusal(capfd, *generate(folder))


def test_experts_spread_over_as_many_ranks_as_divide_them(capfd, tmp_path):
    made = make_oracle(WITH_EXPERTS["deepseek_v2"], tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    status, out, _ = run(capfd, *generate(made.path, "--kvp", 2, "--json"))
    assert status == 0
    assert json.loads(out)["layout"] == {"kvp": 2, "tpa": 1, "tpf": 1, "ep": 2, "pp": 1}


def test_expert_load_counts_the_rows_of_each_expert(capfd, experts):
    """The same over any ranks: of 37 + 8 - 1 rows each takes two of five experts in both layers."""

    def load(*more):
        status, out, _ = run(capfd, *generate(experts.path, "--json", "--ignore-eos", *more))
        assert status == 0
        return json.loads(out)["expert_load"]

    alone = load()
    assert [(len(layer), sum(layer)) for layer in alone] == [(5, 2 * (37 + 8 - 1))] * 2
    assert load("--kvp", 2, "--ep", 2) == load("--kvp", 2, "--tied") == alone
    status, _, err = run(capfd, *generate(experts.path, "--ignore-eos"))
    most = max(max(layer) for layer in alone)
    assert status == 0
    assert f"{most} rows, {most / (2 * 44 / 5):.1f} times the mean" in err


def test_latent_attention_keeps_no_bits_over_batches(capfd, tmp_path):
    made = make_oracle(WITH_EXPERTS["deepseek_v2"], tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    words = refusal(capfd, *generate(made.path, "--batch-invariant"))
    assert "batch_invariant does not work for models with latent attention" in words


def test_mistake_in_json_form(capfd, oracle):
    status, out, _ = run(capfd, *generate(oracle.path, "--tpa", 10, "--json"))
    error = json.loads(out)["error"]
    assert status == 2
    assert error["code"] == "invalid_layout"
    assert "9 query heads" in error["message"]


def test_empty_prompt_and_broken_prompt_files(capfd, oracle, tmp_path):
    def words(content):
        file = tmp_path / "prompt"
        file.write_bytes(content)
        return refusal(capfd, "generate", "--model", oracle.path, "--prompt-file", file)

    assert "the prompt is empty" in words(b"")
    assert "the prompt is empty" in refusal(capfd, "generate", "--model", oracle.path, "--prompt", "")
    assert "is not UTF-8 at byte 2" in words(b"ab\xff")
    missing = refusal(capfd, "generate", "--model", oracle.path, "--prompt-file", tmp_path / "none")
    assert "cannot be read (No such file" in missing


def test_unknown_verb_names_the_nearest(capfd):
    assert 'Did you mean "generate"?' in refusal(capfd, "generat")


@pytest.mark.slow
def test_terminated_command_leaves_nothing(oracle):
    with generating(oracle) as command:
        processes = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        command.communicate(timeout=120)
        assert command.returncode == 143
        assert len(processes) == 3  # two ranks, and the one that they are forked from
        assert not any(process.is_running() for process in processes)


@pytest.mark.slow
def test_torchrun_with_the_wrong_number_of_ranks_is_told_the_right_one(oracle):
    arguments = [str(argument) for argument in generate(oracle.path, "--kvp", 2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run([*torchrun, "-m", "longhelix", *arguments], capture_output=True, timeout=240)
    assert done.returncode != 0
    assert b"set --nproc-per-node 2" in done.stderr


def test_missing_model(capfd, tmp_path):
    assert "there is no model at" in refusal(capfd, *generate(tmp_path / "none"))


def test_unknown_architecture_names_the_known_ones(capfd, model):
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mamba"}
    (model / "config.json").write_text(json.dumps(config))
    assert "'mamba': longhelix knows arcee, deepseek_v2, deepseek_v3, kimi_k2" in refusal(capfd, *generate(model))


def test_weights_that_do_not_fit_the_config(capfd, model):
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"

    def words(changed):
        save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
        return refusal(capfd, *generate(model))

    assert f"no tensor '{name}'" in words({n: w for n, w in weights.items() if n != name})
    assert "has shape [90, 76], but the model's config requires [90, 77]" in words(
        weights | {name: weights[name][:, :76].contiguous()}
    )
    assert "has dtype int64" in words(weights | {name: weights[name].to(torch.int64)})
    assert "'model.layers.7.extra'" in words(weights | {"model.layers.7.extra": torch.zeros(1)})


def test_damaged_safetensors(capfd, model):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "model.safetensors" in refusal(capfd, *generate(model))
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    first, second, *_ = (name for name in header if name != "__metadata__")
    header[second]["data_offsets"] = header[first]["data_offsets"]
    changed = json.dumps(header).encode().ljust(length)
    file.write_bytes(struct.pack("<Q", len(changed)) + changed + whole[8 + length :])
    assert "not a valid safetensors file" in refusal(capfd, *generate(model))
    file.unlink()
    assert "model.safetensors" in refusal(capfd, *generate(model))


@pytest.fixture
def chat_folder(oracle, tmp_path):
    """The model with a chat template that writes messages one after the other."""
    folder = shutil.copytree(oracle.path, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    return folder


def test_chat_over_a_pipe_keeps_the_conversation(chat_folder, tmp_path):
    (tmp_path / "file.txt").write_text("w7 w8 w9")
    lines = ["w1 w2", "", "w3", "/stats", "/reset", "w1 w2", f"/file {tmp_path}/file.txt", "/fiel", "/exit", "w5"]
    done = subprocess.run(
        [sys.executable, "-m", "longhelix", "chat", "--model", str(chat_folder), "--max-new-tokens", "3"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    first, second, again = (
        [int(word[1:]) for word in answer.split()] for answer in done.stdout.removesuffix("\n").split("\n")
    )
    assert first == again == expected_tokens(chat_folder, [1, 2], 3)
    assert second == expected_tokens(chat_folder, [1, 2, *first, 3], 3)
    assert done.stderr.count("[The answer is incomplete: it reached --max-new-tokens 3.]") == 3
    for words in ("TTFT", "9 of 128 tokens", "Attached file.txt to your next message", "did you mean /file?"):
        assert words in done.stderr


def test_chat_in_a_terminal(chat_folder):
    """A paste is one message, lines are recalled, Ctrl-C ends an answer, and the chat at an empty prompt."""
    arguments = ["chat", "--model", str(chat_folder), "--max-model-len", "100k"]
    with PseudoTerminal([sys.executable, "-m", "longhelix", *arguments]) as terminal:
        terminal.wait_for("or /help")
        processes = psutil.Process(terminal.pid).children(recursive=True)
        terminal.type("\x1b[200~w1\rw2 w3\x1b[201~")
        terminal.wait_for("w2 w3")
        terminal.type("\r")
        tokens = expected_tokens(chat_folder, [1, 2, 3], 3)
        terminal.wait_for(" ".join(f"w{token}" for token in tokens))
        terminal.type("\x03")
        terminal.wait_for("[Stopped after")
        terminal.wait_for("or /help")
        terminal.type("/stats\r")
        terminal.wait_for("prompt tokens  3 ")
        terminal.wait_for("context ")
        terminal.wait_for("or /help")
        terminal.type("\x1b[A")
        terminal.wait_for("/stats")
        terminal.type("\x03")
        terminal.wait_for("or /help")
        terminal.type("\x03")
        terminal.wait_for("Press Ctrl-C again or type /exit to quit.")
        terminal.wait_for("or /help")
        terminal.type("\x03")
        assert terminal.wait_for_end() == 0
        assert len(processes) == 2  # a rank, and the process that it is forked from
        assert not any(process.is_running() for process in processes)


def expected_tokens(folder, ids, count):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return greedy(model, ids, count)[0]
