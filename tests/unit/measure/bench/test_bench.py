"""The benchmarks: reports, peers, refusals; a tiny real run of each sub-command."""

import json

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from longhelix.cli.main import main
from longhelix.compute.kernels import native
from longhelix.measure import memory
from longhelix.measure.bench import kernels, peers, suite
from longhelix.measure.bench.peers import Peers, with_relative_times
from longhelix.measure.bench.report import BenchReport
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.configuration import configure
from longhelix.measure.link import link_label
from longhelix.spec.layout import Layout
from tiers import few

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="bench measures the native kernels, which are not built here"),
]

ENVIRONMENT = {"date": "2000-01-01", "cpu": "a CPU", "instruction_set": "a set", "cores": 2, "commit": None}
ENVIRONMENT |= {"memory_bytes": 8e9, "available_memory_bytes": 4e9, "load_average": [0.1, 0.0, 0.0]}
ENVIRONMENT |= {"system": "a system", "python": "3", "torch": "2", "longhelix": "0"}


@pytest.fixture(scope="module")
def config():
    return configure("builtin", Layout(), [64], weight_dtype=None, kv_dtype=None)


# What is told


def report():
    columns = (Column("n", "tokens", ",d"), Column("t_s", "time, ms", ".1f", 1e3), Column("kind", "kind"))
    rows = [
        {"n": 1000, "t_s": 0.0123, "spread": 0.1, "kind": "a"},
        {"n": 2000, "t_s": 0.02, "spread": 0.3, "kind": "a"},
    ]
    section = Section("part", "A part", "As it was measured.", columns, rows, Plot(("t_s",), ("kind",), x="n"))
    return BenchReport(dict(ENVIRONMENT), [section], ["A peer was left out."])


def test_markdown_has_the_conditions_the_tables_and_what_was_noisy():
    text = report().as_markdown({"part": "part.png"})
    for line in (
        "| tokens | time, ms | kind |",
        "|--:|--:|---|",
        "| 1,000 | 12.3 | a |",
        "- A peer was left out.",
        "- 1 of 2 medians are noisy: their quartiles are more than 20% of the median apart.",
        "![A part](part.png)",
    ):
        assert line in text.splitlines()
    assert "a CPU, 2 cores, a set kernels; 8 GB of memory, 4 GB free" in text
    assert "not idle" not in text


def test_one_time_has_no_spread_and_counts_as_no_median():
    once = report()
    once.sections[0].rows[1]["spread"] = None
    assert not any("noisy" in sentence for sentence in once.sentences)
    once.sections[0].rows[0]["spread"] = 0.3
    assert any("1 of 1 medians are noisy" in sentence for sentence in once.sentences)
    assert Column("spread", "spread, %", ".0f", 100).show({"spread": None}) == ""


def test_a_busy_machine_is_said_to_be_one():
    busy = report()
    busy.environment["load_average"] = [3.0, 0.0, 0.0]
    assert any("not idle: its load was 3.0" in sentence for sentence in busy.sentences)


def test_json_keeps_the_units_of_the_rows():
    record = json.loads(report().as_json())
    assert record["environment"]["cores"] == 2
    assert record["part"]["rows"][0] == {"n": 1000, "t_s": 0.0123, "spread": 0.1, "kind": "a"}


def test_a_report_is_written_with_or_without_plots(tmp_path):
    written = report()
    written.write(tmp_path / "report.md")
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    text = (tmp_path / "report.md").read_text()
    assert ("report-part.png" in text) == (plots == ["report-part.png"])
    assert ("matplotlib is not installed" in text) == (not plots)
    assert json.loads((tmp_path / "report.json").read_text())["part"]


def test_peers_are_compared_with_the_first_row_of_their_context():
    rows = [{"context": context, "time_s": time_s} for context, time_s in ((8, 1.0), (9, 2.0), (8, 3.0), (9, 1.0))]
    assert [(row["context"], row["relative"]) for row in with_relative_times(rows)] == [
        (8, 1.0),
        (8, 3.0),
        (9, 1.0),
        (9, 0.5),
    ]


def test_a_peer_runs_or_is_said_in_a_sentence(tmp_path, config, monkeypatch):
    monkeypatch.setattr(peers, "MODELS", peers.MODELS[:2])
    found = Peers(tmp_path)
    assert found.models("decode", config, [8], []) == []
    assert [remark.split(" was left out")[0] for remark in found.remarks] == ["openvino-genai", "llama.cpp"]
    point = {"peer": "openvino-genai", "version": "1", "context": 8, "threads": 2, "weights": "Q4_1", "kv": "u8"}
    point |= {"decode_s_per_token": 0.02, "prefill_tokens_per_s": None}
    make_python(tmp_path / "openvino", f"echo 'a line'; echo '{json.dumps(point)}'")
    make_python(tmp_path / "llama-cpp", "echo one >&2; echo 'it broke' >&2; exit 3")
    found = Peers(tmp_path)
    ours = {"weight_dtype": "int8", "kv_dtype": "int8", "context": 8, "threads": 1, "ranks": 2, "step_s": 0.01}
    (section,) = found.models("decode", config, [8], [ours])
    assert [(row["program"], row["threads"], row["relative"]) for row in section.rows] == [
        ("longhelix", 2, 1.0),
        ("openvino-genai", 2, 2.0),
    ]
    assert found.remarks == ["llama.cpp failed: it broke"]


def test_rates_that_tc_cannot_tell_apart_are_one_and_others_have_labels_of_their_own(monkeypatch):
    jobs = []
    monkeypatch.setattr(suite.link, "missing", lambda: None)
    monkeypatch.setattr(suite.sequence_parallelism, "section", lambda job, on_point: jobs.append(job))
    suite.Suite("2000-01-01", None, print).sequence_parallelism({}, [64], [100, 100.0001, 100.0, 100.00000001, 1e6], 1)
    assert jobs[0].rates_mbit == (100.0, 100.0001, 1e6)
    labels = [link_label(rate_mbit) for rate_mbit in jobs[0].rates_mbit]
    assert labels == ["100 Mbit/s", "100.0001 Mbit/s", "1,000,000 Mbit/s"]


def make_python(environment, script):
    program = environment / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decode", "--contexts", "0"], "a context or prompt is 0"),
        (["decode", "--contexts", "many"], '"many"'),
        (["decode", "--contexts", "1G"], "do not fit in memory"),
        (["decode", "--kv-dtype", "int3"], 'Invalid value "int3" for --kv-dtype'),
        (["decode", "--model", "nowhere"], "there is no model at"),
        (["decode", "--threads", "0"], "threads is 0"),
        (["decode", "--tpa", "10"], "set tpa to 9 or less"),
        (["prefill", "--repeats", "0"], "repeats is 0"),
        (["prefill", "--chunk-tokens", "0"], "chunk_tokens is 0"),
        (["prefill", "--threads", "100000"], "threads is 100000: set it to an integer from 1 to "),
        (["kernels", "--threads", "1", "100000"], "threads is 100000: set it to an integer from 1 to "),
        (["kernels", "--kv-dtype", "int3"], "kv-dtype 'int3' is not known"),
        (["kernels", "--group", "0"], "group is 0"),
        (["collectives", "--ranks", "1"], "--ranks has 1, but collectives need at least two ranks"),
        (["collectives", "--bytes", "6", "--ranks", "2"], "set it to multiples of 4"),
        (["layouts", "--ranks", "0"], "ranks is 0"),
        *few(
            [
                (["sp", "--variants", "sp"], "variant 'sp' is not known: use one or more of flash-comm-v1, "),
                (["sp", "--rates-mbit", "1000", "0"], "rates_mbit is 0.0: set it to a number from 0.001 to 1,000,000"),
                (["sp", "--kvp", "2"], "the layout has 4 ranks"),
                (["sp", "--prompts", "512", "9k"], "--prompts has 9000 tokens, but the model supports 8192"),
                (["sp", "--rates-mbit", "1e-9"], "rates_mbit is 1e-09: set it to a number from 0.001 to 1,000,000"),
                (["sp", "--rates-mbit", "1e300"], "rates_mbit is 1e+300"),
                (["sp", "--rates-mbit", "inf"], "rates_mbit is inf"),
                (["sp", "--tpa", "1"], "the layout has 1 ranks, but the link joins exactly two"),
                (["sp", "--prompts", "0"], "a context or prompt is 0"),
                (["sp", "--prompts", "1G"], "--prompts has 1000000000 tokens, but the model supports 8192"),
                (["sp", "--repeats", "0"], "repeats is 0"),
                (["sp", "--threads", "0"], "threads is 0"),
                (["sp", "--threads", "100000"], "threads is 100000: set it to an integer from 1 to "),
                (["sp", "--chunk-tokens", "0"], "chunk_tokens is 0: set it to an integer from 1 to "),
                (["sp", "--sp-min-token-num", "0"], "sp_min_token_num is 0"),
            ],
            4,
        ),
        (["layouts", "--requests", "1", "--contexts", "1k", "2k"], "give the same number of both"),
        (["accuracy", "--vary", "bits"], "--vary is 'bits', which is not known: use one or more of weights, "),
        (["accuracy", "--tokens", "0"], "tokens is 0: set it to 1 or more"),
        (["accuracy", "--window", "1"], "--window is 1: set it to 2 or more"),
        (["accuracy", "--tokens", "1M"], "tokens, but --tokens 1000000 needs "),
        (["accuracy", "--text", "/nowhere.txt"], "--text /nowhere.txt cannot be read (No such file or directory)"),
        (["accuracy", "--threads", "0"], "threads is 0"),
        (["all", "--out", "report.txt"], "is not the name of a Markdown file"),
        (["all", "--out", "/proc/nowhere/report.md"], "cannot be created"),
        (["fast"], "fast"),
    ],
)
def test_a_mistake_gets_one_sentence_and_starts_nothing(arguments, sentence, capfd):
    status = main(["bench", *arguments])
    out, err = capfd.readouterr()
    assert (status, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert '"auto"' not in errors[0]  # no option of these takes it
    assert main(["bench", *arguments, "--json"]) == 2
    assert sentence in json.loads(capfd.readouterr().out)["error"]["message"]


# The real thing, tiny


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with a model of two small layers, whose heads are those of the built-in one."""
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=144, intermediate_size=96, vocab_size=1000, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def ranks_here():
    """The children of this process's children, which are fork servers."""
    return set(psutil.Process().children(recursive=True)) - set(psutil.Process().children())


def run(capfd, *arguments):
    """The JSON of a sub-command; no rank that it started is left."""
    before = ranks_here()  # other tests keep worlds of ranks
    status = main(["bench", *arguments, "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    assert ranks_here() <= before, "a rank is still there"
    return json.loads(out)


def test_every_kernel_is_timed_beside_its_bounds(monkeypatch, tmp_path):
    """In this process, and of sizes that take a moment."""
    for name, sizes in {
        "LATENT_QUERY_HEADS": (2,), "WEIGHT_SHAPES": ((48, 32),), "CHUNK_HEADS": ((6, 2, 32),), "CHUNK_ROWS": 20,
        "CHUNK_CONTEXT": 64,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernels, name, sizes)
    monkeypatch.setattr(memory, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "SQUARE", 64)
    threads = torch.get_num_threads()
    job = kernels.KernelsJob(64, ("int8",), (32,), (3,), (1,), repeats=1)
    try:
        rows = list(job.measure(0, tmp_path))
    finally:
        native.set_num_threads(threads)
    attends = ["", "int8"] if native.module.instruction_set() == "avx512" else [""]
    assert [row["attention_dtype"] for row in rows if row["part"] == "attention"] == attends
    assert [row["part"] for row in rows] == [
        *["attention"] * len(attends), "latent", *["products"] * 4, "chunk_attention", *["chunk_products"] * 4
    ]  # fmt: skip
    attention, latent, product = rows[0], *rows[len(attends) : len(attends) + 2]
    assert attention["read_bytes"] == 64 * 2 * 2 * (32 + 2)  # tokens, KV heads, keys and values, channels and a scale
    assert latent["read_bytes"] == 64 * 576 * 2
    assert product["read_bytes"] == 48 * 32 * 2
    assert attention["fraction"] == pytest.approx(attention["bytes_per_s"] / attention["memory_bytes_per_s"])
    assert all(row["speedup"] > 0 for row in rows if "products" in row["part"])
    # Bounds are measured with the sizes that they are counted with. Of each the best, on a machine that is busy.
    assert 1e8 < max(row["memory_bytes_per_s"] for row in rows if "memory_bytes_per_s" in row) < 1e13
    for dtype in memory.DTYPES:
        assert 1e6 < max(row[f"{dtype}_flops_per_s"] for row in rows if "flops" in row) < 1e13


@pytest.mark.slow  # minutes on processors whose torch multiplies bfloat16 number by number
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_kernels(capfd, monkeypatch):
    found = run(capfd, "kernels", "--context", "4096", "--kv-dtype", "int8", "--head-size", "64", "--group", "3",
                "--repeats", "1", "--no-peers")  # fmt: skip
    row, *rounded = found["kernels_attention"]["rows"]
    assert [each["attention_dtype"] for each in rounded] == ["int8"] * (native.module.instruction_set() == "avx512")
    assert row["read_bytes"] == 4096 * 2 * 2 * (64 + 2)  # tokens, KV heads, keys and values, channels and a scale
    assert row["fraction"] == pytest.approx(row["bytes_per_s"] / row["memory_bytes_per_s"])
    assert {row["num_query_heads"] for row in found["kernels_latent"]["rows"]} == {16, 32, 64, 128}
    assert all(row["speedup"] > 0 for row in found["kernels_products"]["rows"])


@pytest.mark.dist
@pytest.mark.parametrize("layout", [(), ("--kvp", "2", "--threads", "1")])
def test_decode(capfd, toy, layout):
    found = run(capfd, "decode", "--model", toy, "--contexts", "40", "1k", "--kv-dtype", "int4", "--repeats", "2",
                "--no-peers", *layout)  # fmt: skip
    short, long = found["decode"]["rows"]
    # Tokens, layers, KV heads, keys and values, channels and a scale: on two ranks each keeps half of them.
    assert long["read_bytes"] - short["read_bytes"] == (1000 - 40) * 2 * 3 * 2 * (64 // 2 + 2)
    assert short["native_s"] > 0 < short["outside_s"]
    assert short["layout"] == ("2 x 1" if layout else "1 x 1")


@pytest.mark.dist
def test_prefill(capfd, toy):
    found = run(capfd, "prefill", "--model", toy, "--prompts", "80", "--chunk-tokens", "32", "--repeats", "1",
                "--no-peers")  # fmt: skip
    (row,) = found["prefill"]["rows"]
    assert row["tokens_per_s"] == pytest.approx(80 / row["prefill_s"])
    assert row["attention_s"] > 0 < row["products_s"]


@pytest.mark.dist
def test_collectives(capfd):
    rows = run(capfd, "collectives", "--ranks", "2", "--bytes", "2048", "--repeats", "3")["collectives"]["rows"]
    assert [row["collective"] for row in rows] == ["all-reduce", "all-to-all", "all-gather", "reduce-scatter"]
    assert all(row["shm_s"] > 0 < row["gloo_s"] for row in rows)


@pytest.mark.dist
def test_layouts(capfd, toy):
    """Bytes of the exchange, counted in the transport: 9 heads of 64 numbers of 2 bytes and an LSE, 2 layers."""
    found = run(capfd, "layouts", "--model", toy, "--requests", "2", "--contexts", "64", "--repeats", "1")
    rows = {row["strategy"]: row for row in found["layouts"]["rows"]}
    assert list(rows) == ["Helix", "local", "TP", "tied"]
    row_bytes = 2 * 9 * (64 * 2 + 4)  # of one row: each rank sends the heads that it does not keep
    assert rows["Helix"]["exchanged_bytes"] == 2 * row_bytes
    assert rows["local"]["exchanged_bytes"] == row_bytes  # each rank has one of the rows
    assert rows["TP"]["exchanged_bytes"] == 0
    assert rows["tied"]["exchanged_bytes"] == 2 * row_bytes + 2 * 2 * 9 * 64 * 2
    assert rows["Helix"]["over_helix"] == rows["Helix"]["prefill_over_helix"] == 1
    assert all(row["step_s"] > 0 < row["prefill_s"] for row in rows.values())


@pytest.mark.dist
def test_layouts_whose_ranks_hold_different_shares(capfd, toy):
    """One request of 33 blocks over two ranks, 17 and 16: their schedulers have pools of one size all the same."""
    found = run(capfd, "layouts", "--model", toy, "--requests", "1", "--contexts", "520", "--repeats", "1")
    assert [row["strategy"] for row in found["layouts"]["rows"]] == ["Helix", "local", "TP", "tied"]
