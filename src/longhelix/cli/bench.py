"""`longhelix bench`: what this machine can do, what longhelix makes of it, and its peers beside it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from longhelix.cli.options import BenchFlags, given
from longhelix.cli.values import Flag, Size
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

if TYPE_CHECKING:  # what measures brings torch: each command loads it when it is called
    from longhelix.compute.runner.config import EngineConfig
    from longhelix.measure.bench.report import Report
    from longhelix.measure.bench.suite import Suite

app = App(name="bench")

_many = Parameter(consume_multiple=True, negative=())
Sizes = Annotated[tuple[Size, ...], _many]
Numbers = Annotated[tuple[int, ...], _many]
Names = Annotated[tuple[str, ...], _many]

_TABLE_WIDTH = 200  # where standard output is no terminal


def check_out(out: Path, kind: str, example: str) -> None:
    """Make the folder of a file to be written. Raises UserError where it cannot be, or is named unlike `example`."""
    if out.suffix != Path(example).suffix or out.is_dir():
        raise UserError(f"--out is {out}: give the name of a {kind} file, such as {example}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent} cannot be made: {error.strerror}") from error
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"{out.parent} cannot be written to: set --out to a file elsewhere")


def show(report: "Report") -> None:
    """Print a report's tables."""
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for shown in report.shown():
        console.print(shown, "", markup=False)


@Parameter(name="*", group="Peers")
@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Other engines that are measured in the same run."""

    peers: Path = Path("build/peers")
    "The peers' environments, made by benchmarks/peers/install.sh; absent peers are left out."
    no_peers: Flag = False
    "Run no peers."

    @property
    def directory(self) -> Path | None:
        return None if self.no_peers else self.peers


@Parameter(name="*", group="Output")
@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where results go."""

    out: Path | None = None
    "Write a Markdown report there; JSON, and plots where matplotlib is installed, beside it."
    json: Flag = False
    "Print one JSON object in place of tables."

    def start(self, peers: Path | None) -> "Suite":
        """A suite with the peers found in a directory. Raises UserError, before all work, for a bad --out."""
        if self.out is not None:
            check_out(self.out, "Markdown", "report.md")
        from longhelix.measure.bench.suite import Suite

        date = datetime.now().astimezone().isoformat(timespec="seconds")
        return Suite(date, peers, lambda line: print(line, file=sys.stderr))

    def finish(self, suite: "Suite") -> None:
        """Write and print what the suite has measured."""
        report = suite.finish()
        if self.out is not None:
            report.write(self.out)
        if self.json:
            print(report.as_json())
            return
        show(report)


@Parameter(name="*", group="Model and layout")
@dataclass(frozen=True, kw_only=True)
class BenchModelOptions:
    """Which model, and how it is laid out over ranks."""

    model: str = "builtin"
    "A folder in Hugging Face format, a GGUF file of the llama architecture, or `builtin`."
    kvp: int = 1
    "Ranks that share the request's KV along the sequence."
    tpa: int = 1
    "Ranks that share its attention heads."
    threads: int | None = None
    "Threads of a rank. [default: cores / ranks]"

    def config(self, lengths: Sequence[int], **settings: Any) -> "EngineConfig":
        from longhelix.measure.configuration import configure

        return configure(self.model, Layout(kvp=self.kvp, tpa=self.tpa), lengths, threads=self.threads, **settings)


@app.command
def kernels(
    *,
    context: Size = 262144,
    kv_dtype: Names = ("bfloat16", "int8", "int4"),
    head_size: Numbers = (64, 128),
    group: Numbers = (3, 4, 8),
    threads: Annotated[Numbers, Parameter(show_default=False)] = (),
    repeats: int = 11,
    peers: PeerOptions = PeerOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure attention and products one by one, in turn with the read bandwidth and torch's matrix products.

    Parameters
    ----------
    context
        Tokens of KV that decode attention reads.
    kv_dtype
        Dtypes of that KV.
    head_size
        Channels of a head.
    group
        Query heads of each KV head.
    threads
        Numbers of threads. [default: all cores]
    repeats
        Rounds that count, after the warm-up.
    """
    suite = output.start(peers.directory)
    suite.kernels(context, kv_dtype, head_size, group, threads, repeats)
    output.finish(suite)


@app.command
def decode(
    *,
    contexts: Sizes = (1024, 8192, 32768),
    repeats: int = 21,
    model: BenchModelOptions = BenchModelOptions(),
    engine: BenchFlags = BenchFlags(),  # noqa: B008 - frozen
    peers: PeerOptions = PeerOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure one step of one long request, whose KV is filled with random numbers.

    Parameters
    ----------
    contexts
        Tokens in the KV cache.
    repeats
        Steps that count, after the warm-up.
    """
    suite = output.start(peers.directory)
    suite.decode([model.config(contexts, **given(engine))], contexts, repeats)
    output.finish(suite)


@app.command
def prefill(
    *,
    prompts: Sizes = (1024, 8192),
    chunk_tokens: Size = 512,
    repeats: int = 3,
    model: BenchModelOptions = BenchModelOptions(),
    engine: BenchFlags = BenchFlags(),  # noqa: B008 - frozen
    peers: PeerOptions = PeerOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure prompts of random tokens, from their first chunk to the first new token.

    Parameters
    ----------
    prompts
        Tokens of each prompt. Peers take minutes for 32K.
    chunk_tokens
        Prompt tokens that run in one step.
    repeats
        Prefills that count, after the warm-up.
    """
    suite = output.start(peers.directory)
    suite.prefill([model.config(prompts, chunk_tokens=chunk_tokens, **given(engine))], prompts, repeats)
    output.finish(suite)


@app.command
def layouts(
    *,
    model: str = "builtin",
    ranks: int = 2,
    requests: Numbers = (8, 1),
    contexts: Sizes = (1024, 32768),
    repeats: int = 21,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure Helix, local placement, tensor parallelism and the tied layout on the same ranks, in turn.

    Parameters
    ----------
    model
        A folder in Hugging Face format, a GGUF file of the llama architecture, or `builtin`.
    ranks
        Ranks of each layout.
    requests
        Requests that decode together, one number for each context.
    contexts
        Tokens that each of them has.
    repeats
        Steps that count, after the warm-up.
    """
    if len(requests) != len(contexts):
        raise UserError(f"--requests has {len(requests)} numbers for {len(contexts)} of --contexts: give as many")
    suite = output.start(peers=None)
    suite.layouts(model, ranks, list(zip(requests, contexts, strict=True)), repeats)
    output.finish(suite)


@app.command
def collectives(
    *,
    ranks: Numbers = (2, 4),
    sizes_bytes: Annotated[Sizes, Parameter(name="--bytes")] = (2048, 4096, 16384, 65536, 262144, 1048576),
    repeats: int = 25,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure all-reduce, all-to-all, all-gather and reduce-scatter over shared memory and gloo.

    Parameters
    ----------
    ranks
        Processes, one world of each number.
    sizes_bytes
        Sizes of the whole tensor.
    repeats
        Turns of each, of 12 calls, of which the last 8 count.
    """
    suite = output.start(peers=None)
    suite.collectives(ranks, sizes_bytes, repeats)
    output.finish(suite)


@app.command
def sp(
    *,
    variants: Annotated[Names, Parameter(show_default=False)] = (
        "flash-comm-v1",
        "flash-comm-v1-int8",
        "enable-sp",
        "enable-sp-int8",
    ),
    prompts: Sizes = (512, 1024, 4096),
    rates_mbit: Annotated[tuple[float, ...], _many, Parameter(show_default=False)] = (1000.0, 10000.0),
    chunk_tokens: Size = 2048,
    sp_min_token_num: Annotated[Size | None, Parameter(show_default=False)] = None,
    repeats: int = 3,
    model: str = "builtin",
    kvp: int = 1,
    tpa: int = 2,
    threads: int | None = None,
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure what sequence parallelism saves of a prefill, in time and in bytes, over links of given rates.

    Two ranks run in network namespaces of their own, joined by a link that tc slows down. That needs root, and the
    programs ip and tc; without them the ranks are joined by plain loopback, and the report says so. The default takes
    tens of minutes on two cores, some of them for compilers; `--variants flash-comm-v1 flash-comm-v1-int8` compile
    nothing.

    Parameters
    ----------
    variants
        What is measured, each in turn with its baseline, the same without sequence parallelism: flash-comm-v1, the
        layers themselves, op by op; enable-sp, a compiler pass over compiled layers; flash-comm-v1-int8 and
        enable-sp-int8, with int8 weights and activations. [default: all four]
    prompts
        Tokens of each prompt. Steps of fewer than sp-min-token-num run as without sequence parallelism.
    rates_mbit
        Rates of the link, in Mbit/s, in each direction, from 0.001 to 1,000,000. [default: 1000 10000]
    chunk_tokens
        Prompt tokens that run in one step.
    sp_min_token_num
        The fewest tokens of a step that is sequence-parallel. [default: 1000; 1 with experts]
    repeats
        Prefills that count, after the warm-up, which compiles.
    model
        A folder in Hugging Face format, a GGUF file of the llama architecture, or `builtin`.
    kvp
        Ranks that share the request's KV along the sequence; kvp * tpa is 2.
    tpa
        Ranks that share its attention heads.
    threads
        Threads of a rank. [default: cores / 2]
    """
    suite = output.start(peers=None)
    from longhelix.measure.sequence_parallelism import pairs

    layout = Layout(kvp=kvp, tpa=tpa)
    settings = {"chunk_tokens": chunk_tokens, "sp_min_token_num": sp_min_token_num, "threads": threads}
    suite.sequence_parallelism(pairs(model, layout, variants, prompts, **settings), prompts, rates_mbit, repeats)
    output.finish(suite)


@app.command
def predictions(*, output: OutputOptions = OutputOptions()) -> None:
    """Calibrate, and measure beside its predictions other lengths and layouts than it was fitted to: ten minutes."""
    suite = output.start(peers=None)
    suite.predict()
    output.finish(suite)


@app.command
def planner(*, repeats: int = 5, peers: PeerOptions = PeerOptions(), output: OutputOptions = OutputOptions()) -> None:
    """Measure the planner: configurations per second, a plan with its start-up, its import; and other planners.

    Parameters
    ----------
    repeats
        Processes of each.
    """
    suite = output.start(peers.directory)
    suite.planner(repeats)
    output.finish(suite)


@app.command(name="all")
def everything(
    *,
    short: Flag = False,
    peers: PeerOptions = PeerOptions(),
    output: OutputOptions = OutputOptions(),
) -> None:
    """Measure all of this with the built-in model, in bfloat16 and in int8.

    Parameters
    ----------
    short
        Fewer points and repeats: under five minutes on an idle machine.
    """
    suite = output.start(peers.directory)
    suite.all(short)
    output.finish(suite)
