"""Runs the benchmarks of longhelix and of peers, and collects their tables in one report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longhelix.compute.machine import host
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.places import Places
from longhelix.errors import UserError
from longhelix.measure import host_link, link, progress
from longhelix.measure.bench import (
    accuracy,
    collectives,
    decode,
    host_layouts,
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
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.memory import check_native
from longhelix.measure.prefill import PrefillJob
from longhelix.measure.sequence_parallelism import Pair, SequenceParallelismJob
from longhelix.spec import KV_DTYPES
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class SuiteScope:
    """The points that `Suite.all` measures, and the number of repeats."""

    kv_context: int  # number of KV tokens that attention kernels read
    groups: tuple[int, ...]  # query heads per KV head
    kernel_repeats: int
    contexts: tuple[int, ...]
    decode_repeats: int
    prompts: tuple[int, ...]
    prefill_repeats: int
    ranks: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    collective_repeats: int
    planner_repeats: int


SHORT = SuiteScope(
    kv_context=131072,
    groups=(4,),
    kernel_repeats=5,
    contexts=(1024, 8192),
    decode_repeats=11,
    prompts=(1024,),
    prefill_repeats=3,
    ranks=(2,),
    sizes_bytes=(2048, 16384, 262144),
    collective_repeats=100,
    planner_repeats=3,
)
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
    """A run of benchmarks. Each benchmark has a method, which adds tables to the report.

    These methods raise UserError if a value is out of range or if a case cannot be measured.
    """

    def __init__(
        self, date: str, peers: Path | None, tell: Callable[[str], None], hosts: MeasuringHosts | None = None
    ) -> None:
        """Check that the native kernels are installed, and start a report.

        Args:
            date: date and time for the report.
            peers: folder of the peers' virtual environments. With None, no peers are measured.
            tell: callback that receives one line of text for each measured point.
            hosts: hosts that run the ranks. None for this host alone.
        """
        check_native()
        self._hosts = hosts
        self._report = BenchReport(environment(date))
        if hosts is not None and peers is not None:
            self._report.remarks.append("No other engine was measured, because they run on one host.")
        self._peers = None if peers is None or hosts is not None else Peers(peers)
        self._tell = tell
        self._on_point = progress.by_name(tell)

    @property
    def node_rank(self) -> int | None:
        """Number of this host, if several hosts run the ranks."""
        return None if self._hosts is None else self._hosts.node_rank

    def kernels(
        self,
        context: int,
        kv_dtypes: Sequence[str],
        head_sizes: Sequence[int],
        groups: Sequence[int],
        threads: Sequence[int],
        repeats: int,
    ) -> None:
        """Measure attention over `context` tokens, and matrix products.

        If `threads` is empty, the kernels run on all cores.
        """
        threads = threads or (host.cores(),)
        check_positive("context", context)
        check_positive("head-size", *head_sizes)
        check_positive("group", *groups)
        check_threads(*threads)
        check_positive("repeats", repeats)
        unknown = next((dtype for dtype in kv_dtypes if dtype not in KV_DTYPES), None)
        if unknown is not None:
            raise UserError(f"kv-dtype {unknown!r} is not known: use one of {', '.join(KV_DTYPES)}")
        job = kernels.KernelsJob(
            context=context,
            kv_dtypes=tuple(kv_dtypes),
            head_sizes=tuple(head_sizes),
            groups=tuple(groups),
            threads=tuple(threads),
            repeats=repeats,
        )
        self._report.sections += kernels.sections(job, self._on_point("kernels"))
        if self._peers:
            self._report.sections += self._peers.attention(context, threads)

    def decode(self, configs: Sequence[EngineConfig], contexts: Sequence[int], repeats: int) -> None:
        """Measure one decode step at each context, with each of `configs` and with each peer."""
        check_positive("repeats", repeats)
        jobs = [DecodeJob(config, tuple(sorted(contexts)), repeats) for config in configs]
        self._use_model(configs[0])
        section = decode.section(jobs, self._on_point("decode"), self._hosts)
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("decode", configs[0], sorted(contexts), section.rows)

    def prefill(self, configs: Sequence[EngineConfig], prompts: Sequence[int], repeats: int) -> None:
        """Measure the prefill of each prompt, with each of `configs` and with each peer."""
        check_positive("repeats", repeats)
        jobs = [PrefillJob(config, tuple(sorted(prompts)), repeats) for config in configs]
        self._use_model(configs[0])
        section = prefill.section(jobs, self._on_point("prefill"), self._hosts)
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("prefill", configs[0], sorted(prompts), section.rows)

    def layouts(self, model: str, ranks: int, points: Sequence[tuple[int, int]], repeats: int) -> None:
        """Measure decode and prefill of several requests. All strategies run in turn on `ranks` ranks."""
        configs = layouts.strategies(ranks, _configured(model, ranks, points, repeats, None))
        job = layouts.LayoutsJob(configs, tuple(points), repeats)
        self._report.sections.append(layouts.section(job, self._on_point("layouts")))

    def host_layouts(
        self,
        model: str,
        ranks: int,
        points: Sequence[tuple[int, int]],
        rates_mbit: Sequence[float] | None,
        repeats: int,
    ) -> None:
        """Measure decode of several requests on several hosts, and predict it.

        Before that, measure the hosts and the links between them, to fit the constants of the predictions.

        Args:
            rates_mbit: rates of a link between two hosts, which are then network namespaces of this machine. None uses
                the hosts of the suite.

        Raises:
            UserError: the ranks are not as many on each host, or this process cannot create a link.
        """
        nnodes = 2 if self._hosts is None else self._hosts.nnodes
        if ranks % nnodes:
            raise UserError(
                f"--ranks is {ranks}, but there must be as many on each of {nnodes} hosts: set it to {nnodes}"
            )
        rates: tuple[float | None, ...] = (None,)
        places = self.places(ranks)
        if places is None:
            lacking = link.missing()
            if lacking is not None:
                raise UserError(f"--rates-mbit needs two hosts on this machine, but {lacking}")
            rates = tuple(dict.fromkeys(map(link.checked_rate_mbit, rates_mbit or ())))
            places = _halves(ranks)
        configs = host_layouts.strategies(ranks, _configured(model, ranks, points, repeats, places))
        self._use_model(configs[host_layouts.HOP_B])
        scope = measurements.FULL
        single = scope.config(Layout(), "bfloat16")
        measured = measurements.Measurements.take(scope, [single], self._on_point, self._hosts)
        system = local_system(measured, single, scope)
        all_hosts = system.of_machines(1 if self._hosts is None else nnodes)
        links, systems = host_link.measure(all_hosts, places.hosts, rates, self._on_point("links"), self._hosts)
        parts = host_layouts.chosen_parts(configs[host_layouts.HOP_B], systems, points)
        job = host_layouts.HostLayoutsJob(
            configs=configs, points=tuple(points), rates_mbit=rates, parts=parts, repeats=repeats
        )
        on_point = self._on_point("layouts")
        self._report.sections += host_layouts.sections(
            job, links, systems, system.fixed.kernel_s, on_point, self._hosts
        )

    def collectives(self, ranks: Sequence[int], sizes_bytes: Sequence[int], repeats: int) -> None:
        """Measure each collective at each size, with each number of ranks."""
        check_positive("bytes", *sizes_bytes)
        check_positive("repeats", repeats)
        section = collectives.section(ranks, tuple(sizes_bytes), repeats, self._on_point("collectives"))
        self._report.sections.append(section)

    def sequence_parallelism(
        self, pairs: dict[str, Pair], prompts: Sequence[int], rates_mbit: Sequence[float], repeats: int
    ) -> None:
        """Measure the prefill of each prompt with both configurations of each pair, at each link rate.

        If this process cannot create a link, the ranks use loopback. A progress line and a remark in the report then
        give the reason.
        """
        check_positive("repeats", repeats)
        if not rates_mbit:
            raise UserError("--rates-mbit is empty: set it to one or more rates in Mbit/s")
        rates_mbit = tuple(dict.fromkeys(link.checked_rate_mbit(rate) for rate in rates_mbit))
        lacking = link.missing()
        if lacking is not None:
            self._tell(f"sp: --rates-mbit is ignored and the ranks use plain loopback, because {lacking}")
            self._report.remarks.append(
                f"The ranks used plain loopback without a rate limit, because {lacking}. The sent bytes include the "
                "loopback traffic of all programs on this host."
            )
            rates_mbit = ()
        job = SequenceParallelismJob(pairs, tuple(sorted(set(prompts))), rates_mbit, repeats)
        self._report.sections.append(sequence_parallelism.section(job, self._on_point("sp")))

    def accuracy(
        self, model: str, files: Sequence[Path], window: int, tokens: int, vary: Sequence[str], threads: int | None
    ) -> None:
        """Score a text in every number format that the engine offers on this machine.

        Args:
            files: text files. If there are none, the text is longhelix's documentation.
            window: tokens per window, of which the second half is scored.
            tokens: number of scored tokens, rounded up to whole windows.
            vary: what to change, from `accuracy.PARTS`.
            threads: number of threads. None uses all cores.
        """
        text = accuracy.AccuracyText.of(model, files, window, tokens)
        configs, remarks = accuracy.configured(model, vary, len(text.windows[0]), threads)
        self._report.remarks += remarks
        self._report.sections.append(accuracy.section(configs, text, self._on_point("accuracy")))

    def planner(self, repeats: int) -> None:
        """Measure the speed of the planner and of its peers."""
        check_positive("repeats", repeats)
        self._report.sections += planner.sections(repeats, self._peers, self._on_point("planner"))

    def all(self, short: bool) -> None:
        """Run the main benchmarks with the built-in model: in bfloat16, in int8, and on two ranks.

        Args:
            short: measure fewer points.
        """
        scope = SHORT if short else FULL
        configs = [
            configure("builtin", Layout(), scope.contexts, weight_dtype=dtype, kv_dtype=dtype)
            for dtype in ("bfloat16", "int8")
        ]
        self.kernels(
            scope.kv_context,
            kv_dtypes=("bfloat16", "int8", "int4"),
            head_sizes=(64, 128),
            groups=scope.groups,
            threads=(),
            repeats=scope.kernel_repeats,
        )
        ranks = configure("builtin", Layout(kvp=2), scope.contexts, weight_dtype="bfloat16", kv_dtype=None)
        self.decode([*configs, ranks], scope.contexts, scope.decode_repeats)
        self.prefill(configs, scope.prompts, scope.prefill_repeats)
        self.collectives(scope.ranks, scope.sizes_bytes, scope.collective_repeats)
        self.planner(scope.planner_repeats)

    def predict(self) -> None:
        """Calibrate this machine, and compare predictions with measurements of other lengths, layouts and dtypes."""
        scope = predictions.SCOPE
        configs = [scope.config(layout, "bfloat16") for layout in predictions.LAYOUTS] + [
            scope.config(Layout(), "int8")
        ]
        fitted = measurements.FULL
        measured = measurements.Measurements.take(scope, configs, self._on_point)
        system = local_system(measured, configs[0], fitted)
        self._report.sections += predictions.sections(system, measured, [configs[0], configs[-1]], fitted)

    def places(self, ranks: int) -> Places | None:
        """Place ranks on the hosts of the suite. Returns None for this host alone."""
        return None if self._hosts is None else self._hosts.places(ranks)

    def _use_model(self, config: EngineConfig) -> None:
        if self._hosts is not None:
            self._hosts.use_model(config.model_path)

    def finish(self) -> BenchReport:
        """Return the report, including the remarks on peers."""
        if self._peers:
            self._report.remarks += dict.fromkeys(self._peers.remarks)
        return self._report


def _halves(ranks: int) -> Places:
    """Place ranks on two hosts that each have half of this machine."""
    hosts = Hosts.in_order([ranks // 2] * 2)
    cores, free_bytes = max(host.cores() // 2, 1), host.available_bytes() // 2
    return Places(hosts, [cores] * 2, [free_bytes] * 2, gpu_bytes=[[]] * 2, gpu_capabilities=[[]] * 2)


def _configured(
    model: str, ranks: int, points: Sequence[tuple[int, int]], repeats: int, places: Places | None
) -> Callable[[Layout], EngineConfig]:
    """Check the arguments of a comparison of layouts. Returns a function that configures a layout for its points."""
    check_positive("ranks", ranks)
    check_positive("repeats", repeats)
    check_positive("a number of requests", *(requests for requests, _ in points))
    longest = max(requests * context for requests, context in points)
    return lambda layout: configure(model, layout, (longest,), places=places, weight_dtype=None, kv_dtype=None)
