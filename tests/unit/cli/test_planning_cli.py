"""The planning verbs as users call them: files, JSON, mistakes."""

import json
import re
import subprocess
import sys

import pytest

from gguf_metadata import BY_FAMILY, write_metadata
from longhelix.cli.layout_file import read_layout
from longhelix.cli.main import main
from longhelix.cli.options import EngineFlags, ModelOptions
from longhelix.errors import UserError
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system, write_system

pytestmark = pytest.mark.unit

FORMATS = ("--weight-dtype", "fp4", "--kv-dtype", "fp4")
MODEL = ("--model", "llama-3.1-405b", "--system", "gb200")
PLAN = ("plan", *MODEL, "--context", "1M", "--max-gpus", "16", *FORMATS)
ENDING = ("plan", *MODEL, "--isl", "100k", "--osl", "1k", "--max-gpus", "16", *FORMATS)
ESTIMATE = ("estimate", *MODEL, "--context", "1M", "--batch", "4", *FORMATS)


def changed(arguments, **options):
    """A command line with other values of its options."""
    found = list(arguments)
    for name, value in options.items():
        found[found.index(f"--{name.replace('_', '-')}") + 1] = value
    return tuple(found)


def run(capfd, *arguments):
    status = main(list(arguments))
    out, err = capfd.readouterr()
    return status, out, err


def test_plan_writes_json_alone(capfd):
    targets = "--ttl", "30ms", "--ttl-with-prefill", "30ms", "--ttft", "200s", "--users", "2"
    status, out, _ = run(capfd, *PLAN, *targets, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["best"]["batch"] >= 2
    assert found["best"]["ttl_s"] < found["best"]["ttl_p95_s"] <= 0.03
    assert found["best"]["ttft_s"] <= 200
    assert found["best"]["violates"] == []
    assert (found["nearest"], found["apart"]) == ([], None)
    assert found["latencies"]["fewest_gpus"]["ttft_s"] <= 200
    assert found["headline"]["interactivity_gain"] > 0
    assert {held["ttl_s"] for held in found["users_at_ttl"]} == {0.03}
    assert found["neighbours"]
    assert found["rejected"]
    assert found["crossovers"]


def test_a_plan_of_a_number_of_gpus_that_no_layout_has(capfd):
    """Three GPUs are neither a power of two nor whole servers."""
    asked = ("plan", "--model", "llama-3-8b", "--system", "h100", "--context", "4k", "--max-gpus", "3")
    status, out, err = run(capfd, *asked, "--verbose")
    assert (status, err) == (0, "")
    assert "best TPOT of Helix / best TPOT of others, 2 GPUs" in " ".join(out.split())
    status, out, _ = run(capfd, *asked, "--json")
    assert status == 0
    assert {each["gpus"] for each in json.loads(out)["crossovers"]} == {2}


def test_accepted_drafts_are_told_with_the_plan(capfd, tmp_path):
    drafts = ("--draft-tokens", "1", "--accepted-tokens", "1.8")
    asked = "plan", "--model", "llama-3-8b", "--system", "h100", "--context", "32k", "--ttl", "20ms", "--max-gpus", "2"
    _, plain, _ = run(capfd, *asked, "--json")
    _, out, _ = run(capfd, *asked, *drafts, "--json", "--out", str(tmp_path))
    found = json.loads(out)
    assert (found["draft_tokens"], found["accepted_tokens"], found["best"]["accepted_tokens"]) == (1, 1.8, 1.8)
    fastest = [json.loads(each)["frontier"][-1]["tokens_per_s_per_user"] for each in (plain, out)]
    assert 1.5 < fastest[1] / fastest[0] < 1.8
    assert "assumes 1.8 tokens per step" in (tmp_path / "plan.yaml").read_text()
    _, out, _ = run(capfd, *asked, *drafts)
    assert "assumes 1.8 tokens per step (1 drafted)" in " ".join(out.split())


def test_plan_prints_the_answer_first_and_tables_on_request(capfd):
    targets = "--ttft", "300s", "--ttl", "50ms"
    status, out, _ = run(capfd, *PLAN, *targets)
    assert status == 0
    lines = out.splitlines()
    assert len(lines) <= 25
    answer = (
        r"llama-3\.1-405b on gb200: .+ on \d+ GPUs, \d+ users at [0-9.]+ ms per token, first token after [0-9.]+ s\."
    )
    assert re.fullmatch(answer, lines[0])
    labels = [line.split("  ")[0] for line in lines[2:] if not line.startswith(" ")]
    assert labels == ["Asked", "Users", "TPOT", "TTFT", "Throughput", "Memory", "Compared", "Limited by", "Terms"]
    asked = "1M tokens, up to 16 GPUs, TPOT at most 50 ms, TTFT at most 300 s"
    assert lines[2].split(maxsplit=1)[1].strip() == asked
    status, out, _ = run(capfd, *PLAN, *targets, "--verbose")
    assert out.startswith("\n".join(lines))
    expected = (
        "tokens/s per GPU against tokens/s per user",
        "frontier of",
        "users served within a TPOT",
        "TTFT against time between tokens during a prefill",
        "below 1, KVP pays",
        "layouts in which one request does not fit",
        "alternatives to ",
    )
    for words in expected:
        assert words in out


def test_a_demand_has_a_rate_a_cost_and_two_sides(capfd):
    asked = (*ENDING, "--ttl", "50ms", "--ttft", "60s", "--prefix-hit", "0.5", "--gpu-hour", "2.5")
    found = json.loads(run(capfd, *asked, "--json")[1])
    best, apart = found["best"], found["apart"]
    assert best["rate_per_s"] * 1000 == pytest.approx(best["tokens_per_s_per_gpu"] * best["gpus"])
    assert best["cost_per_million_tokens"] == pytest.approx(2.5 / 3600e-6 / best["tokens_per_s_per_gpu"])
    assert apart["gpus"] <= 16
    assert apart["ttft_s"] <= 60
    assert apart["ttl_s"] <= 0.05
    more = json.loads(run(capfd, *asked, "--rate", str(2 * best["rate_per_s"]), "--json")[1])
    assert more["best"] is None or more["best"]["replicas"] >= 2
    _, out, _ = run(capfd, *asked)
    assert "Disaggregated prefill on " in " ".join(out.split())
    assert "per million tokens" in " ".join(out.split())


def test_lengths_come_from_a_mix_or_a_trace(capfd, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1000,100\n1,1000,100\n40,200000,300\n")
    asked = ("plan", *MODEL, *FORMATS, "--max-gpus", "8", "--json")
    for way in (("--mix", "2:1000:100,1:200k:300"), ("--trace", str(trace), "--rate", "0.01")):
        status, out, err = run(capfd, *asked, *way)
        assert status == 0, err
        assert json.loads(out)["context"] == 200_300


def test_what_no_configuration_keeps_is_said_with_what_comes_nearest(capfd, tmp_path):
    status, out, _ = run(capfd, *PLAN, "--ttl", "1ms", "--ttft", "1s", "--out", str(tmp_path))
    assert status == 0
    said = " ".join(out.split())
    assert said.startswith("llama-3.1-405b on gb200: no configuration meets all targets. Closest: ")
    assert re.search(r"misses TPOT [0-9.]+ ms instead of 1 ms, TTFT [0-9.]+ s instead of 1 s\.", said)
    degrees, _ = read_layout(tmp_path / "plan.yaml")
    nearest = json.loads((tmp_path / "plan.json").read_text())["nearest"][0]["layout"]
    assert (degrees["tpa"], degrees["pp"]) == (nearest["tpa"], nearest["pp"])
    assert (tmp_path / "plan.yaml").read_text().startswith("# This is the closest layout. It misses: TPOT ")
    assert (tmp_path / "commands.txt").read_text().startswith("# No configuration meets all targets.")


def test_small_chunks_are_chosen_only_to_keep_steps_with_them_short(capfd):
    chunks = []
    for targets in ((), ("--ttl", "50ms"), ("--ttl", "50ms", "--ttl-with-prefill", "60ms")):
        best = json.loads(run(capfd, *PLAN, *targets, "--json")[1])["best"]
        chunks.append(best["chunk_tokens"])
    assert min(chunks[:2]) >= 256 > chunks[2]
    assert best["ttl_p95_s"] <= 0.06


def test_strategies_that_are_the_same_are_one_row(capfd):
    """On this system HOP-B gains nothing, so that Helix with and without it are the same."""
    asked = "plan", "--model", "llama-3.1-405b", "--system", "h200", "--context", "256k", "--max-gpus", "16"
    _, out, _ = run(capfd, *asked, "--verbose")
    assert "Helix" in out
    assert "Helix without HOP-B" not in out
    assert "helix_exposed" not in json.loads(run(capfd, *asked, "--json")[1])["strategies"]


def test_products_in_bytes_are_planned_with_and_read_back(capfd, tmp_path):
    asked = "plan", "--model", "builtin", "--system", "cpu", "--context", "8k", "--ttl", "1s", "--max-gpus", "2"
    formats = "--weight-dtype", "w8a8", "--kv-dtype", "int8"
    status, _, err = run(capfd, *asked, *formats, "--out", str(tmp_path))
    assert status == 0, err
    _, settings = read_layout(tmp_path / "plan.yaml")
    assert {name: settings[name] for name in ("weight_dtype", "activation_dtype", "kv_dtype")} == {
        "weight_dtype": "int8",
        "activation_dtype": "int8",
        "kv_dtype": "int8",
    }


def test_the_yaml_of_a_plan_is_read_back(capfd, tmp_path):
    status, _, err = run(capfd, *PLAN, "--out", str(tmp_path / "new" / "plan"))
    assert status == 0, err
    folder = tmp_path / "new" / "plan"
    best = json.loads((folder / "plan.json").read_text())["best"]
    degrees, settings = read_layout(folder / "plan.yaml")
    groups, kvp = best["layout"]["dp"], best["layout"]["kvp"]
    assert degrees == {name: best["layout"][name] for name in ("tpa", "tpf", "ep", "pp")} | {"kvp": groups * kvp}
    assert settings["placement"] == best["layout"]["placement"]
    assert (settings["device"], settings["max_model_len"]) == ("cuda", 1_000_000)
    assert (settings["weight_dtype"], settings["kv_dtype"]) == ("bfloat16", "nvfp4")  # the engine has no fp4
    assert "# Not as planned: weights are planned in fp4" in (folder / "plan.yaml").read_text()
    assert settings["chunk_tokens"] == best["chunk_tokens"]
    assert "# vLLM" in (folder / "commands.txt").read_text()
    assert (folder / "frontier.csv").read_text().startswith("strategy,dp,kvp,tpa")
    assert (folder / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "frontier.svg").read_text()
    assert json.loads((folder / "plan.json").read_text())["model"] == "llama-3.1-405b"
    assert "longhelix plan" in (folder / "plan.html").read_text()


def test_estimate_has_the_parts_of_a_step(capfd):
    status, out, _ = run(capfd, *ESTIMATE, "--kvp", "8", "--tpa", "8", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["ttl_s"] == pytest.approx(sum(item["seconds"] for item in found["parts"]))
    assert set(found["parts"][0]) == {"name", "seconds", "flops", "hbm_bytes", "net_bytes", "source"}
    assert found["fits"] is True
    assert {"ttft_s", "tokens_per_s_per_user", "tokens_per_s_per_gpu", "mfu", "mbu", "memory_bytes_per_gpu"} <= set(
        found
    )


@pytest.mark.parametrize("family", BY_FAMILY)
def test_estimate_reads_gguf_files(capfd, tmp_path, family):
    path = write_metadata(tmp_path / "toy.gguf", family)
    status, out, err = run(capfd, "estimate", str(path), "--system", "h100", "--context", "1k", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["ttl_s"] > 0


def test_plan_reads_gguf_files(capfd, tmp_path):
    path = write_metadata(tmp_path / "toy.gguf", "qwen3_moe")
    asked = "plan", str(path), "--system", "h100", "--context", "1k", "--max-gpus", "2", "--out", str(tmp_path / "out")
    status, out, _ = run(capfd, *asked)
    assert status == 0
    assert out.startswith(f"{path} on h100: ")
    assert str(path) in (tmp_path / "out" / "commands.txt").read_text()


def test_estimate_refuses_a_gguf_file_without_a_setting(capfd, tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"GGUF")
    status, _, err = run(capfd, "estimate", str(path), "--system", "h100", "--context", "1k")
    assert (status, err.count("\n")) == (2, 1)
    assert f"{path} is not a valid GGUF file" in err


def test_estimate_compares_two_layouts(capfd):
    status, out, _ = run(capfd, *ESTIMATE, "--compare", "kvp=8,tpa=8", "kvp=8,tpa=8,tied", "--json")
    ours, tied = json.loads(out)["compared"]
    assert status == 0
    assert tied["ttl_s"] > ours["ttl_s"]
    degrees = {"dp": 1, "kvp": 8, "tpa": 8, "tpf": 8, "ep": 1, "pp": 1, "ffn_replicas": 8}
    assert tied["layout"] == degrees | {"placement": "striped"}
    _, out, _ = run(capfd, *ESTIMATE, "--compare", "kvp=8,tpa=8,no-hop-b", "kvp=1,tpa=64")
    assert "second layout compared with the first" in out


def test_groups_are_compared_with_one_and_have_requests_of_their_own(capfd):
    _, out, _ = run(capfd, *ESTIMATE, "--compare", "dp=2,kvp=4,tpa=8", "kvp=8,tpa=8", "--json")
    groups, one = json.loads(out)["compared"]
    _, out, _ = run(capfd, *ESTIMATE, "--dp", "2", "--kvp", "4", "--tpa", "8", "--json")
    assert json.loads(out) == groups
    assert (groups["layout"]["dp"], groups["layout"]["kvp"], groups["layout"]["tpf"]) == (2, 4, 64)
    assert (groups["gpus"], groups["batch"], groups["kv_bytes_per_gpu"]) == (64, 4, one["kv_bytes_per_gpu"])
    items = [{item["name"]: item for item in each["parts"]} for each in (groups, one)]
    assert "gather before FFN" in items[0]
    assert "gather before FFN" not in items[1]
    _, out, _ = run(capfd, *ESTIMATE, "--dp", "2", "--kvp", "4", "--tpa", "8")
    assert "DP 2 x KVP 4 x TPA 8, TPF 64: 64 GPUs, batch 4" in out


def test_drafts_make_an_estimate_of_steps_one_of_tokens(capfd):
    drafts = ("--draft-tokens", "1", "--accepted-tokens", "1.8")
    plain, drafted = (
        json.loads(run(capfd, *ESTIMATE, "--kvp", "8", "--tpa", "8", *more, "--json")[1]) for more in ((), drafts)
    )
    assert drafted["step_s"] == pytest.approx(sum(item["seconds"] for item in drafted["parts"]))
    assert drafted["step_s"] > plain["step_s"] == pytest.approx(plain["ttl_s"])
    assert drafted["ttl_s"] == pytest.approx(drafted["step_s"] / 1.8)
    assert drafted["tokens_per_s_per_user"] == pytest.approx(1 / drafted["ttl_s"])
    # Useful work is that of tokens; what a step reads, it reads in a step.
    assert drafted["mfu"] * drafted["ttl_s"] == pytest.approx(plain["mfu"] * plain["ttl_s"])
    read = [sum(item["hbm_bytes"] for item in each["parts"]) / each["step_s"] for each in (plain, drafted)]
    assert drafted["mbu"] / plain["mbu"] == pytest.approx(read[1] / read[0])
    _, out, _ = run(capfd, *ESTIMATE, "--kvp", "8", "--tpa", "8", *drafts)
    assert "assumes 1.8 tokens per step (1 drafted)" in " ".join(out.split())


def test_experts_in_a_dtype_of_their_own_are_estimated(capfd):
    asked = ("estimate", "--model", "qwen3-30b-a3b", "--system", "gb200", "--context", "32k", "--tpa", "4")
    plain, narrow = (
        json.loads(run(capfd, *asked, "--weight-dtype", "fp8", *more, "--json")[1])
        for more in ((), ("--expert-dtype", "fp4"))
    )
    assert (plain["expert_dtype"], narrow["expert_dtype"], narrow["weight_dtype"]) == ("fp8", "fp4", "fp8")
    assert narrow["weights_bytes_per_gpu"] < plain["weights_bytes_per_gpu"]
    seconds = [{item["name"]: item["seconds"] for item in each["parts"]} for each in (plain, narrow)]
    assert {name for name in seconds[0] if seconds[0][name] != seconds[1][name]} == {"experts"}


def test_hop_b_and_tied_are_options(capfd, tmp_path):
    """Where parts of an exchange divide its latency: HOP-B hides it."""
    system = tmp_path / "fused.toml"
    write_system(load_system("gb200").replaced({"part_fixed_share": 0.0}, "assumed: as in arXiv 2507.07120"), system)
    seconds = {}
    for options in ((), ("--no-hop-b",), ("--tied",), ("--placement", "local")):
        _, out, _ = run(capfd, *changed(ESTIMATE, system=str(system)), "--kvp", "4", "--tpa", "8", *options, "--json")
        seconds[options] = json.loads(out)["ttl_s"]
    assert seconds[()] < seconds["--no-hop-b",] < seconds["--tied",]
    assert len(set(seconds.values())) == 4


MISTAKES = {
    "unknown model": (changed(PLAN, model="deepseek-r2"), "deepseek-r1"),
    "unknown system": (changed(PLAN, system="gb20"), "gb200"),
    "no time at all": ((*PLAN, "--ttl", "0ms"), "ttl is 0.0 s: set it above 0"),
    "no time beside a prompt": ((*PLAN, "--ttl-with-prefill", "0ms"), "ttl-with-prefill is 0.0 s: set it above 0"),
    "no time to the first token": ((*PLAN, "--ttft", "0s"), "ttft is 0.0 s: set it above 0"),
    "no context": (changed(PLAN, context="0"), "context is 0"),
    "no lengths": (("plan", *MODEL), "set one of --context, --isl with --osl, --mix and --trace"),
    "two lengths": ((*PLAN, "--mix", "chat"), "set one of --context, --isl with --osl, --mix and --trace"),
    "half a length": (("plan", *MODEL, "--isl", "1k"), "only one is set: set both"),
    "a rate of what never ends": ((*PLAN, "--rate", "1"), "set --isl and --osl instead of --context"),
    "no rate": ((*ENDING, "--rate", "0"), "rate is 0.0: set it to a number above 0"),
    "all is there": ((*ENDING, "--prefix-hit", "1"), "prefix-hit is 1.0"),
    "more than drafts": ((*PLAN, "--draft-tokens", "1", "--accepted-tokens", "2.5"), "accepted-tokens is 2.5"),
    "no drafts": ((*PLAN, "--accepted-tokens", "1.8"), "a step with 0 draft tokens gives 1 to 1"),
    "drafts of unknown worth": (
        (*PLAN, "--draft-tokens", "2"),
        "set it to the average that you measured for your model and text, from 1 to 3",
    ),
    "no price": ((*PLAN, "--gpu-hour", "0"), "gpu-hour is 0.0"),
    "no trace": (("plan", *MODEL, "--trace", "/dev/null"), "give an uncompressed .csv or .jsonl file"),
    "fp4 without it": (changed(PLAN, system="h100"), "h100 has no arithmetic in fp4"),
    "unknown dtype": (changed(PLAN, kv_dtype="fp5"), "kv-dtype 'fp5' is not known: use one of"),
    "time without a unit": ((*PLAN, "--ttl", "20"), '"20" is not a time: give a number with a unit, such as 20ms'),
    "products do not match": ((*ESTIMATE, "--kvp", "8", "--tpf", "3"), "both must give the same number"),
    "experts of a dense model": ((*ESTIMATE, "--tpa", "8", "--ep", "2"), "ep is 2: set it to at most 1"),
    "too many heads": ((*ESTIMATE, "--tpa", "256"), "tpa is 256, but the model has 128 query heads"),
    "tied with experts": ((*ESTIMATE, "--kvp", "8", "--tied", "--ep", "2"), "leave out --tpf and --ep"),
    "no groups": ((*ESTIMATE, "--dp", "0"), "dp is 0: set it to an integer from 1 to 1024"),
    "tied groups": ((*ESTIMATE, "--compare", "dp=2,kvp=8,tied", "kvp=1"), "set dp to 1, or leave out tied"),
    "tied FFNs": ((*ESTIMATE, "--compare", "kvp=8,tpf=2,tied", "kvp=1"), "leave out --tpf and --ep"),
    "an estimate of unknown drafts": ((*ESTIMATE, "--draft-tokens", "2"), "--accepted-tokens is not set"),
    "an estimate of more than drafts": ((*ESTIMATE, "--accepted-tokens", "1.8"), "accepted-tokens is 1.8"),
    "an estimate of experts that are not there": ((*ESTIMATE, "--expert-dtype", "fp8"), "leave out --expert-dtype"),
    "half a layout": ((*ESTIMATE, "--compare", "kvp=8,tpx=8", "kvp=1"), "contains 'tpx=8'"),
    "a digit that is no number": ((*ESTIMATE, "--compare", "kvp=²", "kvp=1"), "contains 'kvp=²'"),
    "nothing fits": (changed(PLAN, max_gpus="1"), "does not fit on 1 GPU"),
    "out is a file": ((*PLAN, "--out", __file__), "cannot be created (File exists)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence(capfd, mistake):
    arguments, words = MISTAKES[mistake]
    status, out, err = run(capfd, *arguments)
    assert status == 2
    assert out == ""
    assert words in err
    assert len(err.splitlines()) == 1


def test_mistakes_as_json(capfd):
    status, out, _ = run(capfd, *changed(PLAN, model="lama-3-8b"), "--json")
    assert status == 2
    assert json.loads(out)["error"]["code"] == "unknown_model"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kvx: 2", "unknown setting 'kvx': did you mean kvp?"),
        ("1: 2", "unknown setting 1: use one of "),
        ("kvp: two", "kvp is 'two': set it to an integer"),
        ("kvp: true", "kvp is True: set it to an integer"),
        ("kv_dtype: 8", "kv_dtype 8 is not known: use one of float32"),
        ("tied: 1", "tied is 1: set it to True or False"),
        ("- kvp", "has no options"),
        ("{kvp", "is not valid YAML"),
    ],
)
def test_layout_files_that_are_none(tmp_path, content, words):
    file = tmp_path / "layout.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=words):
        read_layout(file)


def test_a_layout_file_makes_the_layout_that_it_says_and_options_beside_it_win(tmp_path):
    file = tmp_path / "layout.yaml"
    file.write_text("kvp: 4\ntpa: 2\ntpf: 2\nep: 1\ntied: true\nkv_dtype: int8\nplacement: local\n")
    model, settings = ModelOptions(model="builtin", layout=str(file))._composed(EngineFlags(kv_dtype="bfloat16"))
    assert model._layout() == Layout(4, 2, 2, ffn_replicas=4)
    assert model.layout is None
    assert settings == {"kv_dtype": "bfloat16", "placement": "local"}
    zero, _ = ModelOptions(model="builtin", layout=str(file), kvp=0, tied=False)._composed(EngineFlags())
    assert (zero.kvp, zero.tied) == (0, False)


def test_a_missing_layout_file(tmp_path):
    with pytest.raises(UserError, match="give `auto` or a YAML file"):
        read_layout(tmp_path / "none.yaml")


def test_planning_loads_no_torch():
    program = (
        f"import sys; from longhelix.cli.main import main; main({[*PLAN, '--json']!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
