"""`longhelix simulate` as users call it: traces and synthetic workloads, comparison, capacity, files, mistakes."""

import json
import re
import subprocess
import sys

import pytest

from longhelix.cli.main import main

pytestmark = pytest.mark.unit

SERVER = ("simulate", "--model", "llama-3.1-405b", "--system", "gb200", "--kvp", "2", "--tpa", "8")
CAPACITY = ("--capacity", "--tbt-slo", "1s")
DRAWN = (*SERVER, "--synthetic", "--requests", "40", "--rate", "4", "--seed", "7")
PERCENTILES = {"p50", "p90", "p99", "max"}


def run(capfd, *arguments):
    status = main(list(arguments))
    out, err = capfd.readouterr()
    return status, out, err


def refusal(capfd, *arguments):
    status, out, _ = run(capfd, *arguments, "--json")
    assert status == 2
    return json.loads(out)["error"]["message"]


def found(capfd, *arguments):
    status, out, err = run(capfd, *arguments, "--json")
    assert status == 0, out + err
    return json.loads(out)


def test_a_drawn_workload_as_json(capfd):
    report = found(capfd, *DRAWN, "--ttft-slo", "5s", "--tbt-slo", "100ms")
    assert (report["requests"], report["finished"], report["policy"]) == (40, 40, "fcfs")
    assert report["ttft_s"].keys() == report["tbt_s"].keys() == PERCENTILES
    assert report["ttft_s"]["p50"] <= report["ttft_s"]["p90"] <= report["ttft_s"]["p99"]
    assert report["slo_attainment"] == pytest.approx(report["goodput_rps"] * report["duration_s"] / 40)
    assert report["steps"] > 0
    assert report["wall_s"] > 0
    assert 0 < report["gpu_s"] <= 16 * report["duration_s"]
    assert max(sample["kv_tokens"] for sample in report["timeline"]) > 0
    assert max(sample["kvp_most"] for sample in report["timeline"]) == 2


def test_the_same_seed_gives_the_same_report(capfd):
    first, second = (found(capfd, *DRAWN) for _ in range(2))
    del first["wall_s"], second["wall_s"]
    assert first == second


@pytest.mark.parametrize(
    ("name", "text", "requests"),
    [
        ("own.csv", "arrival_s,prompt_tokens,output_tokens\n0,1000,5\n0.5,200000,3\n", 2),
        ("own.jsonl", '{"arrival_s": 3, "prompt_tokens": 100, "output_tokens": 5, "prefix_id": "a"}\n', 1),
        ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", 1),
        ("mooncake.jsonl", '{"timestamp": 0, "input_length": 900, "output_length": 7, "hash_ids": [1, 2]}\n', 1),
        ("turns.jsonl", '{"session_id": "a", "input_length": 9, "output_length": 7, "delay": 50}\n' * 3, 3),
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.3,396,109\n", 2),
        ("burst.csv", "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,472,18\n9,GPT-4,81,0\n", 2),
    ],
)
def test_traces_load_as_they_are(capfd, tmp_path, name, text, requests):
    (tmp_path / name).write_text(text)
    report = found(capfd, *SERVER, "--trace", str(tmp_path / name))
    assert report["finished"] == requests


def test_requests_that_begin_alike_share_what_is_computed(capfd, tmp_path):
    lines = [
        {"timestamp": 20_000 * turn, "input_length": 64_000, "output_length": 4, "hash_ids": [*range(124), 500 + turn]}
        for turn in range(4)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = (*SERVER, "--trace", str(tmp_path / "t.jsonl"), "--chunk-tokens", "1024")
    cached, computed = found(capfd, *trace), found(capfd, *trace, "--no-prefix-cache")
    assert cached["ttft_s"]["p50"] < 0.1 * computed["ttft_s"]["p50"]
    assert cached["ttft_s"]["max"] == pytest.approx(computed["ttft_s"]["max"])  # the first has nothing to share
    assert cached["steps"] < 0.5 * computed["steps"]


def test_hash_ids_that_differ_by_a_power_of_two_share_nothing(capfd, tmp_path):
    row = {"timestamp": 0, "input_length": 8192, "output_length": 1, "hash_ids": [2**63 + at for at in range(16)]}
    waits = []
    for shift in (0, 2**30, 2**63):
        later = row | {"timestamp": 60_000, "hash_ids": [at ^ shift for at in row["hash_ids"]]}
        (tmp_path / "t.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(later)}\n")
        waits.append(found(capfd, *SERVER, "--trace", str(tmp_path / "t.jsonl"))["ttft_s"]["p50"])
    assert waits[0] < 0.5 * waits[1]
    assert waits[1] == waits[2]


@pytest.mark.slow
def test_policies_chunks_and_placements_are_compared_in_one_run(capfd):
    lists = ("--policy", "fcfs,lars", "--chunk-tokens", "512,auto", "--placement", "striped,auto")
    compared = found(capfd, *DRAWN, *lists)["compared"]
    assert [(each["policy"], each["chunk_tokens"], each["placement"]) for each in compared] == [
        (policy, chunk, placement)
        for policy in ("fcfs", "lars")
        for chunk in (512, "auto")
        for placement in ("striped", "auto")
    ]
    status, out, _ = run(capfd, *DRAWN, *lists)
    assert status == 0
    assert out.count("lars") == out.count("fcfs") == 8  # a sentence and a column each


def test_a_policy_that_spares_short_requests_does(capfd, tmp_path):
    """A prompt of two million tokens comes first, and short ones while it is computed."""
    lines = ["arrival_s,prompt_tokens,output_tokens", "0,2000000,4"]
    lines += [f"{5 + turn},{1000},4" for turn in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    first, lars = found(capfd, *SERVER, "--trace", str(tmp_path / "t.csv"), "--policy", "fcfs,lars")["compared"]
    assert lars["ttft_s"]["p90"] < 0.05 * first["ttft_s"]["p90"]


def test_the_capacity_lies_between_a_rate_that_is_met_and_one_that_is_not(capfd):
    capacity = found(capfd, *DRAWN, "--ttft-slo", "1s", "--tbt-slo", "50ms", "--capacity")["capacity"]
    rate, trials = capacity["rate_rps"], capacity["trials"]
    met = [trial["rate_rps"] for trial in trials if trial["slo_attainment"] >= capacity["least_attainment"] == 0.99]
    assert rate == max(met)
    assert min({trial["rate_rps"] for trial in trials} - set(met)) <= 1.03 * rate


def test_files(capfd, tmp_path):
    plotly = pytest.importorskip("plotly.offline", reason="needs plotly, of the extra plan")
    folder, trace = tmp_path / "new" / "out", tmp_path / "trace.json"
    status, _, err = run(capfd, *DRAWN, "--out", str(folder), "--chrome-trace", str(trace), *CAPACITY)
    assert status == 0, err
    report = json.loads((folder / "simulation.json").read_text())
    own = (folder / "simulation.html").read_text(encoding="utf-8").replace(plotly.get_plotlyjs(), "")
    assert "default-src 'none'" in own
    for loading in ("https?://", r"\bsrc\s*=", r"\bhref\s*=", r"fetch\(", "XMLHttpRequest", "@import", r"url\(", "{{"):
        assert not re.search(loading, own), loading
    events = json.loads(trace.read_text())
    steps = [event for event in events if event["pid"] == 0]
    assert len(steps) == report["steps"]
    assert sum(event["dur"] for event in steps) == pytest.approx(1e6 * report["gpu_s"] / 16)
    assert sum(event["cat"] == "decode" for event in events) == 40


def test_without_plotly_the_extra_is_named(capfd, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = run(capfd, *DRAWN, "--out", str(tmp_path))
    assert status == 2
    assert "pip install 'longhelix[plan]'" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ttft-slo", "0s"), "ttft_slo is 0.0: set it to a number of seconds above 0"),
        (("--tbt-slo", "0ms"), "tbt_slo is 0.0: set it to a number of seconds above 0"),
        (("--policy", "fastest"), "policy 'fastest' is not known: use one of fcfs, edf, srpt, lars"),
        (("--policy", "fcfs,"), "policy '' is not known"),
        (("--chunk-tokens", "512,many"), '--chunk-tokens: "many" is not a size'),
        (("--chunk-tokens", "0"), "chunk_tokens is 0"),
        (("--placement", "here"), "placement 'here' is not known: use one of striped, growing, local, auto"),
        (("--mix", "50%:book"), "'50%:book' is not a kind of request"),
        (("--rate", "0"), "rate is 0.0: set it to requests per second, above 0"),
        (("--burstiness", "2"), "--burstiness applies only to gamma arrivals"),
        (("--trace", "x.csv"), "set exactly one of --trace FILE and --synthetic"),
        (("--weight-dtype", "bfloat16", "--tpa", "1"), "leaves no memory for KV"),
        (("--kv-cache-tokens", "1G"), "set --kv-cache-tokens to at most"),
        (("--kvp-threshold", "5k", "--placement", "local"), "--kvp-threshold applies only to --placement auto"),
        (
            ("--policy", "fcfs,lars", "--chrome-trace", "t.json"),
            "--chrome-trace records one variant, but 2 are compared",
        ),
        (("--requests", "1", *CAPACITY), "all requests arrive at once"),
        (("--capacity",), "--capacity is the highest rate that meets an SLO, but no request has one: set --ttft-slo"),
    ],
    ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_said_in_a_sentence(capfd, options, said):
    drawn = list(DRAWN)
    for name in ("--requests", "--rate", "--tpa"):
        if name in options:
            at = drawn.index(name)
            del drawn[at : at + 2]
    assert said in refusal(capfd, *drawn, *options)


def test_a_line_that_is_no_request_is_named(capfd, tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,5,-1\n")
    assert "line 3 of the trace is not a request in longhelix's format: output_tokens is -1" in refusal(
        capfd, *SERVER, "--trace", str(tmp_path / "t.csv")
    )
    assert "cannot be read" in refusal(capfd, *SERVER, "--trace", str(tmp_path / "missing.csv"))
    assert "give an uncompressed .csv or .jsonl file" in refusal(capfd, *SERVER, "--trace", str(tmp_path / "t.parquet"))


def test_requests_that_can_never_run_are_counted_and_named(capfd, tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,50000,5\n")
    status, out, err = run(capfd, *SERVER, "--trace", str(tmp_path / "t.csv"), "--kv-cache-tokens", "10k", "--json")
    assert status == 0
    assert (json.loads(out)["refused"], json.loads(out)["finished"]) == (1, 1)
    assert "1 of 2 requests can never run. The first one: 50000 prompt tokens" in err


def test_it_runs_without_torch():
    code = (
        "import sys\nfrom longhelix.cli.main import main\n"
        f"assert main({list(DRAWN)!r}) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
