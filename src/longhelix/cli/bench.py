"""`longhelix bench`: runs benchmarks of this machine, of longhelix and of other engines."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from longhelix.cli.bench_options import MANY, BenchModelOptions, Names, Numbers, OutputOptions, PeerOptions, Sizes
from longhelix.cli.help import HELP_FLAGS
from longhelix.cli.options import BenchFlags, HostFlags, given
from longhelix.cli.values import Flag, Size
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

app = App(name="bench", help_flags=HELP_FLAGS)


@app.command
def kernels(
    *,
    context: Size = 262144,
    kv_dtype: Names = ("bfloat16", "int8", "int4"),
    head_size: Numbers = (64, 128),
    group: Numbers = (3, 4, 8),
    threads: Annotated[Numbers, Parameter(show_default=False)] = (),
    repeats: int = 11,
    peers: PeerOptions = PeerOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure attention and matrix product kernels. Read bandwidth and torch's products are measured in turn with them.

    Parameters
    ----------
    context
        Number of tokens of KV that decode attention reads.
    kv_dtype
        Dtypes of the KV.
    head_size
        Channels per head.
    group
        Query heads per KV head.
    threads
        Numbers of threads to measure. [default: all cores]
    repeats
        Measured rounds, after a warm-up.
    """
    with output.suite(peers.directory) as suite:
        suite.kernels(context, kv_dtypes=kv_dtype, head_sizes=head_size, groups=group, threads=threads, repeats=repeats)


@app.command
def decode(
    *,
    contexts: Sizes = (1024, 8192, 32768),
    repeats: int = 21,
    model: BenchModelOptions = BenchModelOptions(),  # noqa: B008 - frozen
    engine: BenchFlags = BenchFlags(),  # noqa: B008 - frozen
    hosts: HostFlags = HostFlags(),  # noqa: B008 - frozen
    peers: PeerOptions = PeerOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure one decode step of one long request with random KV.

    Parameters
    ----------
    contexts
        Numbers of tokens in the KV cache to measure.
    repeats
        Measured steps, after a warm-up.
    """
    with output.suite(peers.directory, hosts) as suite:
        suite.decode([model.config(suite, contexts, **given(engine))], contexts, repeats)


@app.command
def prefill(
    *,
    prompts: Sizes = (1024, 8192),
    chunk_tokens: Size = 512,
    repeats: int = 3,
    model: BenchModelOptions = BenchModelOptions(),  # noqa: B008 - frozen
    engine: BenchFlags = BenchFlags(),  # noqa: B008 - frozen
    hosts: HostFlags = HostFlags(),  # noqa: B008 - frozen
    peers: PeerOptions = PeerOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure prefill of random prompts, from the first chunk to the first new token.

    Parameters
    ----------
    prompts
        Prompt lengths to measure, in tokens. Other engines take minutes for 32K.
    chunk_tokens
        Maximum number of prompt tokens per step.
    repeats
        Measured prefills, after a warm-up.
    """
    with output.suite(peers.directory, hosts) as suite:
        suite.prefill([model.config(suite, prompts, chunk_tokens=chunk_tokens, **given(engine))], prompts, repeats)


@app.command
def layouts(
    *,
    model: str = "builtin",
    ranks: int = 2,
    requests: Numbers = (8, 1),
    contexts: Sizes = (1024, 32768),
    rates_mbit: Annotated[tuple[float, ...], MANY, Parameter(show_default=False)] = (),
    repeats: int = 21,
    hosts: HostFlags = HostFlags(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Compare Helix, local placement, tensor parallelism and the tied layout on the same ranks, measured in turn.

    With --nnodes, the ranks are on several hosts: run this command on each of them. With --rates-mbit, the ranks are on
    two network namespaces of this machine, and tc limits the rate of the link between them. This needs root and the
    programs ip and tc. In both cases, Helix with HOP-B and pipeline stages are measured too, and each time is compared
    with its prediction. Before that, it takes three minutes to measure the hosts and the link.

    Parameters
    ----------
    model
        Model to measure: a folder in Hugging Face format, a GGUF file, or `builtin`.
    ranks
        Number of ranks of each layout.
    requests
        Numbers of requests that decode together, one for each of --contexts.
    contexts
        Numbers of tokens per request.
    rates_mbit
        Rates of the link between two hosts in Mbit/s, per direction. [default: one host]
    repeats
        Measured steps, after a warm-up.
    """
    if len(requests) != len(contexts):
        raise UserError(
            f"--requests has {len(requests)} numbers and --contexts has {len(contexts)}: give the same number of both"
        )
    with output.suite(peers=None, hosts=hosts) as suite:
        if rates_mbit and suite.node_rank is not None:
            raise UserError("--rates-mbit makes hosts of this machine, but --nnodes is set: leave one of them out")
        points = list(zip(requests, contexts, strict=True))
        if rates_mbit or suite.node_rank is not None:
            suite.host_layouts(model, ranks, points, rates_mbit, repeats)
        else:
            suite.layouts(model, ranks, points, repeats)


@app.command
def collectives(
    *,
    ranks: Numbers = (2, 4),
    sizes_bytes: Annotated[Sizes, Parameter(name="--bytes")] = (2048, 4096, 16384, 65536, 262144, 1048576),
    repeats: int = 25,
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure all-reduce, all-to-all, all-gather and reduce-scatter over shared memory and gloo.

    Parameters
    ----------
    ranks
        Numbers of processes to measure.
    sizes_bytes
        Sizes of the whole tensor, in bytes.
    repeats
        Rounds per operation. Each round makes 12 calls and measures the last 8.
    """
    with output.suite(peers=None) as suite:
        suite.collectives(ranks, sizes_bytes, repeats)


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
    rates_mbit: Annotated[tuple[float, ...], MANY, Parameter(show_default=False)] = (1000.0, 10000.0),
    chunk_tokens: Size = 2048,
    sp_min_token_num: Annotated[Size | None, Parameter(show_default=False)] = None,
    repeats: int = 3,
    model: str = "builtin",
    kvp: int = 1,
    tpa: int = 2,
    threads: int | None = None,
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure how much time and traffic sequence parallelism saves in prefill, over links of given rates.

    Two ranks run in separate network namespaces, joined by a link that tc slows down. This needs root and the programs
    ip and tc. Without them the ranks use plain loopback, and the report says so. The default takes tens of minutes on
    two cores, partly for compilation; `--variants flash-comm-v1 flash-comm-v1-int8` compile nothing.

    Parameters
    ----------
    variants
        Variants to measure, each in turn with the same run without sequence parallelism: flash-comm-v1 (eager layers)
        and enable-sp (compiler pass), and with int8 weights and activations flash-comm-v1-int8 and enable-sp-int8.
        [default: all four]
    prompts
        Prompt lengths to measure, in tokens. Steps of fewer than sp-min-token-num tokens are not sequence-parallel.
    rates_mbit
        Rates of the link in Mbit/s, per direction, from 0.001 to 1,000,000. [default: 1000 10000]
    chunk_tokens
        Maximum number of prompt tokens per step.
    sp_min_token_num
        Minimum number of tokens in a sequence-parallel step. [default: 1000; 1 with experts]
    repeats
        Measured prefills, after a warm-up that also compiles.
    model
        Model to measure: a folder in Hugging Face format, a GGUF file, or `builtin`.
    kvp
        KV parallelism: ranks that split the request's KV cache along the sequence. kvp * tpa must be 2.
    tpa
        Tensor parallelism of attention: ranks that split the heads.
    threads
        Threads per rank. [default: cores / 2]
    """
    with output.suite(peers=None) as suite:
        from longhelix.measure.sequence_parallelism import pairs

        layout = Layout(kvp=kvp, tpa=tpa)
        settings = {"chunk_tokens": chunk_tokens, "sp_min_token_num": sp_min_token_num, "threads": threads}
        suite.sequence_parallelism(pairs(model, layout, variants, prompts, **settings), prompts, rates_mbit, repeats)


@app.command
def accuracy(
    *,
    text: Annotated[tuple[Path, ...], MANY, Parameter(show_default=False)] = (),
    window: Size = 2048,
    tokens: Size = 20480,
    vary: Names = ("weights", "activations", "kv", "attention"),
    model: str = "builtin",
    threads: int | None = None,
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure what each number format costs in accuracy: perplexity of a text, and errors of attention and logits.

    All formats of weights, activations, KV and attention that this machine supports score the same tokens. The default
    takes tens of minutes on two cores.

    Parameters
    ----------
    text
        Text files in UTF-8 to score, one after the other. [default: paragraphs of longhelix's documentation]
    window
        Tokens per window. The second half of each window is scored, with the tokens before as context.
    tokens
        Number of tokens to score. Rounded up to whole windows.
    vary
        What to change compared with bfloat16: weights, activations, kv and attention. float32 and float16 always run.
    model
        Model to measure: a folder in Hugging Face format, a GGUF file, or `builtin`.
    threads
        Number of threads. [default: all cores]
    """
    with output.suite(peers=None) as suite:
        suite.accuracy(model, text, window, tokens, vary, threads)


@app.command
def predictions(
    *,
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Compare predictions with measurements at lengths and layouts that calibration did not use. Takes ten minutes."""
    with output.suite(peers=None) as suite:
        suite.predict()


@app.command
def planner(
    *,
    repeats: int = 5,
    peers: PeerOptions = PeerOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Measure the speed of the planner and of other planners: configurations per second, a whole plan and the import.

    Parameters
    ----------
    repeats
        Number of measured processes per planner.
    """
    with output.suite(peers.directory) as suite:
        suite.planner(repeats)


@app.command(name="all")
def everything(
    *,
    short: Flag = False,
    peers: PeerOptions = PeerOptions(),  # noqa: B008 - frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008 - frozen
) -> None:
    """Run all benchmarks with the built-in model, in bfloat16 and in int8.

    Parameters
    ----------
    short
        Measure fewer points and repeats, in under five minutes on an idle machine.
    """
    with output.suite(peers.directory) as suite:
        suite.all(short)
