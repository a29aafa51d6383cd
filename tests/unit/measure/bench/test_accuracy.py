"""The accuracy benchmark: a tiny model scored in this process, with the numbers of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longhelix.cli.main import main
from longhelix.compute.kernels import native
from longhelix.compute.machine.devices import multiplies_integers
from longhelix.compute.models import attention
from longhelix.errors import UserError
from longhelix.measure import accuracy as scoring
from longhelix.measure.bench import accuracy
from longhelix.measure.bench.accuracy import DOCUMENTATION, PARTS, AccuracyText
from longhelix.spec import DTYPES, KV_DTYPES, WEIGHT_DTYPES
from oracle import VOCAB, WITH_EXPERTS, make_oracle, save_tokenizer_files

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="bench measures the native kernels, which are not built here"),
]

WINDOW, TOKENS = 48, 60
CONTEXT = WINDOW // 2


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a model and a tokenizer, in which each word is a token."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer_files(folder)
    return str(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Two text files with 50 words each."""
    ids = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    folder = tmp_path_factory.mktemp("text")
    files = folder / "first.txt", folder / "second.txt"
    for path, part in zip(files, (ids[:50], ids[50:]), strict=True):
        path.write_text(" ".join(f"w{token}" for token in part) + "\n")
    return files, ids


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Run jobs here: processes take seconds to start."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(
        scoring, "collect", lambda job, size, on_point: [[row] for row in job.measure(0, Path("nowhere"))]
    )
    yield
    native.set_num_threads(threads)


def scored(toy, words, vary=("kv",)):
    """The rows of the table by case."""
    text = AccuracyText.of(toy, words[0], WINDOW, TOKENS)
    configs, _ = accuracy.configured(toy, vary, WINDOW, threads=1)
    section = accuracy.section(configs, text, lambda row: None)
    return {row["case"]: row for row in section.rows}


def test_perplexity_in_float32_is_that_of_transformers(toy, words):
    """Each token is scored once, by the window in whose second half it is."""
    files, ids = words
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32).eval()
    text = AccuracyText.of(toy, files, WINDOW, TOKENS)
    assert [window[0] for window in text.windows] == [ids[0], ids[24], ids[48]]
    assert sum((window[-text.scored :] for window in text.windows), ()) == tuple(ids[CONTEXT : CONTEXT + 72])
    losses, best = [], []
    for window in text.windows:
        with torch.no_grad():
            logits = model(torch.tensor([window])).logits[0, CONTEXT - 1 : -1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[CONTEXT:]), reduction="none"))
        best.append(logits.argmax(-1))
    configs, _ = accuracy.configured(toy, ["kv"], WINDOW, threads=1)
    reference = {name: configs[name] for name in ("all: float32", "all: bfloat16")}
    found = scoring.measure(reference, text.windows, text.scored, lambda name, scores: None)["all: float32"]
    assert found.losses_S == pytest.approx(torch.cat(losses).numpy(), abs=1e-4)
    assert found.best_S.tolist() == torch.cat(best).tolist()
    assert found.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    assert (found.attention_error, found.logits_error) == (0, 0)


def test_latent_attention_and_experts_are_scored_as_well(tmp_path):
    made = make_oracle(WITH_EXPERTS["deepseek_v3"], tmp_path, prompt_lengths=(41,), new_tokens=1)
    configs, _ = accuracy.configured(str(tmp_path), ["kv"], 41, threads=1)
    chosen = {name: configs[name] for name in ("all: float32", "all: bfloat16")}
    exact, rounded = scoring.measure(chosen, made.prompts, 20, lambda name, scores: None).values()
    logprobs = torch.from_numpy(made.logits[0][20:40]).double().log_softmax(-1)
    expected = -logprobs.gather(1, torch.tensor(made.prompts[0][21:]).unsqueeze(1)).squeeze(1)
    assert exact.losses_S == pytest.approx(expected.numpy(), abs=1e-3)
    assert 0 < rounded.attention_error < 0.2 > rounded.logits_error > 0


def test_narrower_formats_have_larger_errors(toy, words):
    rows = scored(toy, words)
    for error in ("attention_error", "logits_error"):
        errors = [rows[case][error] for case in ("all: float32", "all: bfloat16", "kv: int8", "kv: int4")]
        assert errors == sorted(errors)
        assert 0 == errors[0] < errors[1] < 0.05 < errors[3]
        assert rows["kv: fp8"][error] > rows["kv: int8"][error]
    assert rows["all: float32"]["top1_agreement"] == 1
    assert rows["all: bfloat16"]["increase"] == rows["all: bfloat16"]["uncertainty"] == 0
    assert rows["kv: int4"]["uncertainty"] > rows["kv: int8"]["uncertainty"] > 0


def test_a_broken_format_has_larger_errors_than_a_sound_one(toy, words, monkeypatch):
    """Values of int8 KV lose a fifth on their way into the cache."""
    sound = scored(toy, words)["kv: int8"]
    rotate_and_write = attention.rotate_and_write

    def broken(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T):
        if layer.format.dtype == "int8":
            qkv_TX = qkv_TX.clone()
            qkv_TX[:, -layer.format.num_kv_heads * layer.format.value_size :] *= 0.8
        return rotate_and_write(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T)

    monkeypatch.setattr(attention, "rotate_and_write", broken)
    found = scored(toy, words)
    assert found["kv: int8"]["attention_error"] > 0.1 > 2 * sound["attention_error"]
    assert found["kv: int8"]["logits_error"] > 1.5 * sound["logits_error"]
    assert found["all: bfloat16"]["attention_error"] < 0.05


def test_the_table_has_every_format(toy, words, capfd, tmp_path):
    arguments = ["--model", toy, "--window", str(WINDOW), "--tokens", str(TOKENS), "--threads", "1"]
    out = tmp_path / "report.md"
    status = main(["bench", "accuracy", "--text", *map(str, words[0]), *arguments, "--json", "--out", str(out)])
    shown, err = capfd.readouterr()
    assert status == 0, err
    report = json.loads(shown)
    cases = [row["case"] for row in report["accuracy"]["rows"]]
    assert cases[:2] == ["all: float32", "all: bfloat16"]
    expected = {f"all: {name}" for name in DTYPES} | {f"kv: {name}" for name in KV_DTYPES if name != "bfloat16"}
    expected |= {f"weights: {name}" for name in WEIGHT_DTYPES if name not in DTYPES} | {"activations: int8"}
    if multiplies_integers():
        expected |= {"attention: int8 over int8", "attention: int8 over int4"}
    assert set(cases) == expected
    assert any(remark.startswith("Left out: activations: fp8, because ") for remark in report["remarks"])
    note = report["accuracy"]["note"]
    assert "Text: first.txt, second.txt." in note
    assert "the same 72 tokens. Number of windows: 3, of 48 tokens each." in note
    assert "a context of 24 to 47 tokens" in note
    markdown = out.read_text()
    assert "| kv: int4 | bfloat16 | bfloat16 |  | int4 |" in markdown
    assert "Times are medians" not in markdown
    assert json.loads(out.with_suffix(".json").read_text())["accuracy"] == report["accuracy"]


def test_the_documentation_is_long_enough_for_the_defaults():
    text = AccuracyText.of("builtin", (), 2048, 20480)
    assert (len(text.windows), text.scored, {len(window) for window in text.windows}) == (20, 1024, {2048})
    assert DOCUMENTATION.stat().st_size < 100_000


def test_each_window_starts_with_a_bos_where_the_tokenizer_adds_one(toy, words, monkeypatch):
    class WithBOS:
        def encode(self, text):
            return [7, *self.encode_more(text)]

        def encode_more(self, text):
            return [int(word[1:]) for word in text.split()]

    monkeypatch.setattr(accuracy, "_tokenizer", lambda model: WithBOS())
    text = AccuracyText.of(toy, words[0], WINDOW, TOKENS)
    assert {window[0] for window in text.windows} == {7}
    assert text.windows[1][1:] == tuple(words[1][24:72])


@pytest.mark.parametrize(
    ("window", "tokens", "sentence"),
    [
        (48, 73, "the text has 100 tokens, but --tokens 73 needs 120: set --tokens to 72 or less"),
        (101, 1, "the text has 100 tokens, but one window has 101: set --window to 100 or less"),
        (1, 10, "--window is 1: set it to 2 or more"),
    ],
)
def test_a_text_that_is_too_short_is_refused(toy, words, window, tokens, sentence):
    with pytest.raises(UserError, match=sentence):
        AccuracyText.of(toy, words[0], window, tokens)


def test_a_window_longer_than_the_model_supports_is_refused(toy):
    with pytest.raises(UserError, match="a window has 129 tokens, but the model supports 128: set --window"):
        accuracy.configured(toy, ["kv"], 129, threads=1)


def test_formats_of_one_part_alone():
    names = list(accuracy.cases(["attention"]))
    assert names == [*(f"all: {name}" for name in ("float32", "bfloat16", "float16")),
                     "attention: int8 over int8", "attention: int8 over int4"]  # fmt: skip
    assert set(accuracy.cases(PARTS)) > set(names)


def test_uncertainty_is_that_of_paired_differences():
    losses = np.array([1.0, 2.0, 3.0, 4.0])
    baseline = scoring.AccuracyScores(losses, np.arange(4), 0.1, 0.1, 4)
    shifted = scoring.AccuracyScores(losses + 0.5, np.array([0, 1, 2, 9]), float("nan"), 0.2, 4)
    row = accuracy.compare(shifted, baseline, baseline)
    assert row["increase"] == pytest.approx(np.exp(0.5) - 1)
    assert row["uncertainty"] == pytest.approx(0, abs=1e-12)
    assert (row["top1_agreement"], row["attention_error"]) == (0.75, None)
