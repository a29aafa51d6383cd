"""Benchmarks put together: each adds its tables, and those of its peers, to one report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longhelix.compute.machine import host
from longhelix.compute.runner.config import EngineConfig
from longhelix.errors import UserError
from longhelix.measure import link, progress
from longhelix.measure.bench import (
    collectives,
    decode,
    kernels,
    layouts,
    planner,
    predictions,
    prefill,
    sequence_parallelism,
)
from longhelix.measure.bench.environment import environment
from longhelix.measure.bench.peers import Peers
from longhelix.measure.bench.report import BenchReport
from longhelix.measure.calibrate import measurements
from longhelix.measure.calibrate.system import local_system
from longhelix.measure.configuration import check_positive, check_threads, configure
from longhelix.measure.decode import DecodeJob
from longhelix.measure.memory import check_native
from longhelix.measure.prefill import PrefillJob
from longhelix.measure.sequence_parallelism import Pair, SequenceParallelismJob
from longhelix.spec import KV_DTYPES
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class SuiteScope:
    """How much `Suite.all` measures, with the repeats of each benchmark."""

    kv_context: int
    groups: tuple[int, ...]
    kernel_repeats: int
    contexts: tuple[int, ...]
    decode_repeats: int
    prompts: tuple[int, ...]
    prefill_repeats: int
    ranks: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    collective_repeats: int
    planner_repeats: int


SHORT = SuiteScope(131072, (4,), 5, (1024, 8192), 11, (1024,), 3, (2,), (2048, 16384, 262144), 100, 3)
FULL = SuiteScope(
    kv_context=262144,
    groups=(3, 4, 8),
    kernel_repeats=11,
    contexts=(1024, 8192, 32768, 131072),
    decode_repeats=21,
    prompts=(1024, 8192),
    prefill_repeats=3,
    ranks=(2, 4),
    sizes_bytes=(2048, 4096, 16384, 65536, 262144, 1048576),
    collective_repeats=25,
    planner_repeats=5,
)


class Suite:
    """A report that is being made: each method runs one benchmark and adds its tables.

    `peers`: the folder of their environments, None to run none. `tell` is called with a line for each point. Methods
    raise UserError for what cannot be measured.
    """

    def __init__(self, date: str, peers: Path | None, tell: Callable[[str], None]) -> None:
        check_native()
        self._report = BenchReport(environment(date))
        self._peers = None if peers is None else Peers(peers)
        self._tell = tell
        self._on_point = progress.by_name(tell)

    def kernels(
        self,
        context: int,
        kv_dtypes: Sequence[str],
        head_sizes: Sequence[int],
        groups: Sequence[int],
        threads: Sequence[int],
        repeats: int,
    ) -> None:
        """Attention over `context` tokens and products; `threads`: all cores if empty."""
        threads = threads or (host.cores(),)
        check_positive("context", context)
        check_positive("head-size", *head_sizes)
        check_positive("group", *groups)
        check_threads(*threads)
        check_positive("repeats", repeats)
        unknown = next((dtype for dtype in kv_dtypes if dtype not in KV_DTYPES), None)
        if unknown is not None:
            raise UserError(f"kv-dtype {unknown!r} is not known: use one of {', '.join(KV_DTYPES)}")
        job = kernels.KernelsJob(context, tuple(kv_dtypes), tuple(head_sizes), tuple(groups), tuple(threads), repeats)
        self._report.sections += kernels.sections(job, self._on_point("kernels"))
        if self._peers:
            self._report.sections += self._peers.attention(context, threads)

    def decode(self, configs: Sequence[EngineConfig], contexts: Sequence[int], repeats: int) -> None:
        """One step at each context, with each of `configs`, and by each peer."""
        check_positive("repeats", repeats)
        jobs = [DecodeJob(config, tuple(sorted(contexts)), repeats) for config in configs]
        section = decode.section(jobs, self._on_point("decode"))
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("decode", configs[0], sorted(contexts), section.rows)

    def prefill(self, configs: Sequence[EngineConfig], prompts: Sequence[int], repeats: int) -> None:
        """Each prompt with each of `configs`, and by each peer."""
        check_positive("repeats", repeats)
        jobs = [PrefillJob(config, tuple(sorted(prompts)), repeats) for config in configs]
        section = prefill.section(jobs, self._on_point("prefill"))
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("prefill", configs[0], sorted(prompts), section.rows)

    def layouts(self, model: str, ranks: int, points: Sequence[tuple[int, int]], repeats: int) -> None:
        """Decode and prefill of several requests, with the strategies that `ranks` ranks can take in turn."""
        check_positive("ranks", ranks)
        check_positive("repeats", repeats)
        check_positive("a number of requests", *(requests for requests, _ in points))
        longest = max(requests * context for requests, context in points)

        def configured(layout: Layout) -> EngineConfig:
            return configure(model, layout, (longest,), weight_dtype=None, kv_dtype=None)

        job = layouts.LayoutsJob(layouts.strategies(ranks, configured), tuple(points), repeats)
        self._report.sections.append(layouts.section(job, self._on_point("layouts")))

    def collectives(self, ranks: Sequence[int], sizes_bytes: Sequence[int], repeats: int) -> None:
        """Every collective at every size, in a world of each number of ranks."""
        check_positive("bytes", *sizes_bytes)
        check_positive("repeats", repeats)
        section = collectives.section(ranks, tuple(sizes_bytes), repeats, self._on_point("collectives"))
        self._report.sections.append(section)

    def sequence_parallelism(
        self, pairs: dict[str, Pair], prompts: Sequence[int], rates_mbit: Sequence[float], repeats: int
    ) -> None:
        """The prefill of each prompt with both of each pair, over a link of each rate; over loopback, as is
        told at once, where this process can make no link."""
        check_positive("repeats", repeats)
        if not rates_mbit:
            raise UserError("rates_mbit is empty: give one number or more, in Mbit/s")
        rates_mbit = tuple(dict.fromkeys(link.checked_rate_mbit(rate) for rate in rates_mbit))
        lacking = link.missing()
        if lacking is not None:
            self._tell(f"sp: rates_mbit is ignored, and the ranks are joined by plain loopback, because {lacking}")
            self._report.remarks.append(
                f"The ranks were joined by plain loopback, at no limited rate, because {lacking}. Its count of bytes "
                "has those of all programs of this host."
            )
            rates_mbit = ()
        job = SequenceParallelismJob(pairs, tuple(sorted(set(prompts))), rates_mbit, repeats)
        self._report.sections.append(sequence_parallelism.section(job, self._on_point("sp")))

    def planner(self, repeats: int) -> None:
        """The speed of the planner and of its peers."""
        check_positive("repeats", repeats)
        self._report.sections += planner.sections(repeats, self._peers, self._on_point("planner"))

    def all(self, short: bool) -> None:
        """All of it, with the built-in model in bfloat16, in int8, and over two ranks. `short`: fewer points."""
        scope = SHORT if short else FULL
        configs = [
            configure("builtin", Layout(), scope.contexts, weight_dtype=dtype, kv_dtype=dtype)
            for dtype in ("bfloat16", "int8")
        ]
        self.kernels(scope.kv_context, ("bfloat16", "int8", "int4"), (64, 128), scope.groups, (), scope.kernel_repeats)
        ranks = configure("builtin", Layout(kvp=2), scope.contexts, weight_dtype=None, kv_dtype=None)
        self.decode([*configs, ranks], scope.contexts, scope.decode_repeats)
        self.prefill(configs, scope.prompts, scope.prefill_repeats)
        self.collectives(scope.ranks, scope.sizes_bytes, scope.collective_repeats)
        self.planner(scope.planner_repeats)

    def predict(self) -> None:
        """Calibrate, and measure more lengths, layouts and dtypes, to which no constant is fitted."""
        scope = predictions.SCOPE
        configs = [scope.config(layout, "bfloat16") for layout in predictions.LAYOUTS] + [
            scope.config(Layout(), "int8")
        ]
        fitted = measurements.FULL
        measured = measurements.Measurements.take(scope, configs, self._on_point)
        system = local_system(measured, configs[0], fitted)
        self._report.sections += predictions.sections(system, measured, [configs[0], configs[-1]], fitted)

    def finish(self) -> BenchReport:
        """The report, with the remarks on peers."""
        if self._peers:
            self._report.remarks += dict.fromkeys(self._peers.remarks)
        return self._report
