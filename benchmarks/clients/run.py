"""Clients of OpenAI's interface, each against a server of ours: whether they work, and what they see.

python benchmarks/clients/run.py DIRECTORY [--only openai guidellm ...] [--cases 100] [--out benchmarks/clients.md]

DIRECTORY: the environments that install.sh has made; clients that it lacks are passed over. The model is the built-in
one; clients that need its tokenizer, or its weights to compare with, get a folder that transformers writes. The exit
status is 1 where a client failed, or found what it should not.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.measure.bench.environment import environment

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
VARIABLES = {
    "OPENAI_API_KEY": "none",
    "COLUMNS": "200",
    "MODEL": "builtin",
    "SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("schemathesis_hooks.py").resolve()),
}
PROMPT_TOKENS, NEW_TOKENS, STREAMS, REQUESTS = 64, 16, 4, 20
LIMIT_S, END_S = 1800, 90
# Conditions that are others for each client: those that do not run keep their rows.
OF_ROWS = (
    "date",
    "cpu",
    "instruction_set",
    "last_level_cache_bytes",
    "available_memory_bytes",
    "load_average",
    "commit",
)
NEAR = 0.02  # of log-likelihoods, natural
SERVED = {"model": "builtin", "kvp": "2", "max-model-len": "2048"}
CHANGED = {
    "schemathesis": {"kvp": "1", "max-model-len": "64"},  # where it gives no limit, answers are as long as may be
    "lm-eval": {"dtype": "float32"},
}
QUESTIONS = [
    ("The capital of France is", ["Paris", "Oslo", "Lima"], 0),
    ("Two and two are", ["nine", "four", "none"], 1),
    ("The opposite of hot is", ["tall", "green", "cold"], 2),
    ("Water freezes and becomes", ["ice", "gold", "bread"], 0),
    ("Monday, Tuesday,", ["October", "Wednesday", "seven"], 1),
    ("A cat says", ["moo", "bark", "meow"], 2),
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOOSE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
WRITE = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_punctuation: true}]"""


@dataclass
class Client:
    """One to drive. python: of its environment; folder: for what it writes; models: that has what they have in
    common."""

    python: Path
    url: str
    folder: Path
    models: Path
    cases: int

    @property
    def tokenizer(self) -> Path:
        """The built-in model's, as a folder."""
        from transformers import AutoTokenizer

        folder = self.models / "tokenizer"
        if not folder.exists():
            path = Path(str(open_checkpoint("builtin").path))
            AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
        return folder

    def run(
        self,
        program: str | Path,
        *arguments: object,
        allowed: tuple[int, ...] = (0,),
        more: Mapping[str, str] = OFFLINE,
    ) -> str:
        """What it prints. more: of the environment. Raises RuntimeError with its end where it fails."""
        of_package = isinstance(program, str)
        command = [self.python.with_name(program)] if isinstance(program, str) else [self.python, program]
        paths = os.environ["PATH"] if not of_package else f"{self.python.parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [*map(str, command), *map(str, arguments)],
            cwd=self.folder,
            env=os.environ | VARIABLES | more | {"PATH": paths},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode not in allowed:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise RuntimeError(f"status {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
        return done.stdout


def openai(client: Client) -> tuple[bool, str]:
    found = json.loads(
        client.run(Path(__file__).with_name("openai_run.py").resolve(), client.url, "builtin", allowed=(0, 1))
    )
    good = found["checks"] - len(found["failed"])
    return not found["failed"], f"{good} of {found['checks']} checks" + "".join(f"; {each}" for each in found["failed"])


def schemathesis(client: Client) -> tuple[bool, str]:
    """5xx, undocumented statuses and answers that their schemas do not allow are wrong; the rest is told. /live is left
    out, which does not end."""
    said = client.run(
        "st", "run", f"{client.url}/openapi.json", "--checks", "all", "-n", client.cases, "--seed", 1,
        "--exclude-path", "/live", "--request-timeout", 300, "--continue-on-failure", "--no-color", allowed=(0, 1),
    )  # fmt: skip
    (client.folder / "schemathesis.txt").write_text(said)
    cases = re.findall(r"(\d+) generated", said)
    kinds = re.findall(r"(ST\d+ [^:\n]+): (\d+)", said)
    operations = re.findall(r"Tested: (\d+)", said)
    wrong = [kind for kind, _ in kinds if re.search("Server error|Undocumented|violates|rejected by", kind)]
    told = "; ".join(f"{kind}: {count}" for kind, count in kinds) or "nothing found"
    return (
        bool(cases) and not wrong,
        f"{'+'.join(cases)} cases, {client.cases} drawn at the most, of {'+'.join(operations)} operations; {told}",
    )


def guidellm(client: Client) -> tuple[bool, str]:
    """It ends as soon as all requests have, and does not always read the last one's end (clients.md): what counts is
    that the server has answered all, and guidellm has seen none fail."""
    out = client.folder / "guidellm.json"
    client.run(
        "guidellm", "run", "--backend", f"kind=openai_http,target={client.url}",
        "--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "--tokenizer", f"kind=hf_auto,model={client.tokenizer}", "--output", f"kind=json,path={out}",
        "--disable-console-interactive",
    )  # fmt: skip
    (found,) = json.loads(out.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals = metrics["request_totals"]

    def median(name: str) -> float:
        return metrics[name]["successful"]["median"]

    answered = _answered(client.url)
    failed = totals["errored"] + totals["incomplete"]
    return answered == REQUESTS and not failed and totals["successful"] >= REQUESTS - 1, (
        f"{answered} requests answered, {totals['successful']} counted, {totals['errored']} errors, "
        f"{totals['incomplete']} that it gave up; "
        f"TTFT {median('time_to_first_token_ms'):.0f} ms, "
        f"between tokens {median('inter_token_latency_ms'):.1f} ms, medians"
    )


def _answered(url: str) -> int:
    """By the server's own count, whole answers since it started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=END_S) as page:
        lines = page.read().decode().splitlines()
    whole = re.compile(r'longhelix:request_success_total\{.*finished_reason="(?:stop|length)".*\} (\S+)')
    return sum(int(float(found[1])) for line in lines if (found := whole.match(line)))


def aiperf(client: Client) -> tuple[bool, str]:
    """It fetches nothing where its tokenizer is a folder, and does not start where it is told that it may not."""
    client.run(
        "aiperf", "profile", "--model", "builtin", "--url", client.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", client.tokenizer, "--synthetic-input-tokens-mean", PROMPT_TOKENS,
        "--output-tokens-mean", NEW_TOKENS, "--concurrency", STREAMS, "--request-count", REQUESTS,
        "--no-gpu-telemetry", "--ui", "none", "--artifact-dir", client.folder / "aiperf", more={},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(next((client.folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    done = found["request_count"]["avg"]
    errors = (found.get("error_request_count") or {"avg": 0})["avg"]
    return done == REQUESTS and not errors, (
        f"{done:.0f} requests, {errors:.0f} errors; TTFT {found['time_to_first_token']['p50']:.0f} ms, "
        f"between tokens {found['inter_token_latency']['p50']:.1f} ms, medians"
    )


def lm_eval(client: Client) -> tuple[bool, str]:
    """Log-likelihoods by echo, and greedy texts, beside those that transformers finds of the same weights."""
    file = client.folder / "questions.jsonl"
    rows = ({"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS)
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    for name, more in (("chosen", CHOOSE), ("written", WRITE)):
        (client.folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file, more=more))
    served = (
        f"model=builtin,base_url={client.url}/v1/completions,num_concurrent={STREAMS},tokenizer={client.tokenizer},"
        "max_length=2000"
    )
    own = _scored(client, "local-completions", served)
    gguf = Path(str(open_checkpoint("builtin").path))
    by_transformers = f"pretrained={gguf.parent},gguf_file={gguf.name},tokenizer={client.tokenizer},dtype=float32"
    other = _scored(client, "hf", by_transformers, "--device", "cpu")
    apart = max(abs(mine - its) for mine, its in zip(own.logprobs, other.logprobs, strict=True))
    same = sum(mine == its for mine, its in zip(own.texts, other.texts, strict=True))
    return own.chosen == other.chosen and apart <= NEAR and same == len(QUESTIONS), (
        f"{own.chosen:.0%} of {len(QUESTIONS)} chosen rightly, by transformers {other.chosen:.0%}; {same} of "
        f"{len(QUESTIONS)} texts the same, log-likelihoods of {len(own.logprobs)} answers at most {apart:.1g} apart"
    )


@dataclass
class Scored:
    """What lm-eval found: the share of questions whose right answer is the likeliest, log-likelihoods and texts."""

    chosen: float
    logprobs: list[float]
    texts: list[str]


def _scored(client: Client, kind: str, model: str, *more: str) -> Scored:
    out = client.folder / kind
    client.run(
        "lm_eval", "--model", kind, "--model_args", model, *more, "--tasks", "chosen,written",
        "--include_path", client.folder, "--output_path", out, "--log_samples",
    )  # fmt: skip
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]

    def answers(task: str) -> list[Any]:
        lines = next(out.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        found = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
        return [answer for sample in found for answer in sample["filtered_resps"]]

    return Scored(
        results["chosen"]["acc,none"],
        [float(logprob) for logprob, _ in answers("chosen")],
        answers("written"),
    )


CLIENTS = {"openai": openai, "schemathesis": schemathesis, "guidellm": guidellm, "aiperf": aiperf, "lm-eval": lm_eval}


@contextmanager
def served(options: dict[str, str]) -> Iterator[str]:
    """The address of a server, which ends with it. Raises RuntimeError where none starts."""
    command = [sys.executable, "-m", "longhelix", "serve", "--port", "0", *flags(options)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next((found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line))), None)
        if url is None:
            raise RuntimeError(f"the server ended with status {server.wait()}")
        # A pipe that nobody reads fills with a line for each refusal.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


def flags(options: dict[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def version(python: Path, package: str) -> str:
    program = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def head() -> list[str]:
    """Under which conditions, and the head of the table."""
    conditions = environment(time.strftime("%Y-%m-%d"))
    always = {name: value for name, value in conditions.items() if name not in OF_ROWS}
    changed = (f"{name} with `{' '.join(flags(options))}`" for name, options in CHANGED.items())
    return [
        str(always),
        "",
        f"`longhelix serve {' '.join(flags(SERVED))}`; {', '.join(changed)}. guidellm and aiperf have {STREAMS} "
        f"streams, prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones.",
        "",
        "| client | | what it saw | s | load before | processor, date | commit |",
        "|---|---|---|--:|--:|---|---|",
    ]


def row(directory: Path, name: str, folder: Path, cases: int) -> tuple[bool, str]:
    """Whether a client works, and its row. folder: that clients share."""
    python = (directory / name / "bin" / "python").absolute()
    if not python.exists():
        return True, f"| {name} | not installed | | | | | |"
    conditions, begun_s = environment(time.strftime("%Y-%m-%d")), time.monotonic()
    contexts = {"contexts-dir": str(folder / "contexts")}
    with served(SERVED | CHANGED.get(name, {}) | contexts) as url:
        room = folder / name
        room.mkdir()
        try:
            good, said = CLIENTS[name](Client(python, url, room, folder, cases))
        except Exception as error:
            good, said = False, f"{type(error).__name__}: {error}"
    told = said.replace("|", "/").replace("\n", " ")
    return good, (
        f"| {name} {version(python, name)} | {'good' if good else 'WRONG'} | {told} "
        f"| {time.monotonic() - begun_s:.0f} | {conditions['load_average'][0]} "
        f"| {conditions['cpu']}, {conditions['instruction_set']}, {conditions['date']} | {conditions['commit']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--cases", type=int, default=100, help="that schemathesis makes for each operation")
    parser.add_argument("--out", type=Path, help="rows of other clients, and what is below, stay")
    given = parser.parse_args()
    lines, wrong = head(), 0
    before = given.out.read_text().splitlines() if given.out is not None and given.out.exists() else []
    rows = {name: line for name in CLIENTS for line in before if line.startswith(f"| {name} ")}
    below = before[max((place for place, line in enumerate(before) if line.startswith("|")), default=len(before)) + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            good, rows[name] = row(given.directory, name, Path(folder), given.cases)
            wrong += not good
            print(rows[name], flush=True)
            if given.out is not None:
                table = [rows[each] for each in CLIENTS if each in rows]
                given.out.write_text("\n".join([*lines, *table, *below]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
