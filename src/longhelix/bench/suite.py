"""Benchmarks put together: each part adds its tables, and those of its peers, to one report."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longhelix.bench import calibration, collectives, decode, kernels, layouts, planner, predictions, prefill
from longhelix.bench.environment import environment
from longhelix.bench.memory import check_native
from longhelix.bench.peers import Peers
from longhelix.bench.report import Report
from longhelix.bench.world import Row
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.layout import Layout
from longhelix.machine import host
from longhelix.models.model_files import open_checkpoint
from longhelix.runner.config import EngineConfig
from longhelix.spec import KV_DTYPES, HardwareSpec


@dataclass(frozen=True)
class Extent:
    """How much `Suite.all` measures, with every part's own repeats."""

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


SHORT = Extent(131072, (4,), 5, (1024, 8192), 11, (1024,), 3, (2,), (2048, 16384, 262144), 100, 3)
FULL = Extent(
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
# Of a point, what its line of progress leaves out: all that is measured or counted.
_UNSHOWN = {"part", "flops", "read_bytes", "peak_rss_bytes", "formula_bytes"}


class Suite:
    """One report in the making. `peers`: where their environments are, or None to run none; `tell` hears of each point
    as it is measured. Raises UserError for what cannot be measured."""

    def __init__(self, date: str, peers: Path | None, tell: Callable[[str], None]) -> None:
        check_native()
        self._report = Report(environment(date))
        self._peers = None if peers is None else Peers(peers)
        self._tell = tell

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
        _check_positive("context", context)
        _check_positive("head-size", *head_sizes)
        _check_positive("group", *groups)
        _check_positive("threads", *threads)
        _check_positive("repeats", repeats)
        unknown = next((dtype for dtype in kv_dtypes if dtype not in KV_DTYPES), None)
        if unknown is not None:
            raise UserError(f"kv-dtype {unknown!r} is not known: use one of {', '.join(KV_DTYPES)}")
        job = kernels.KernelsJob(context, tuple(kv_dtypes), tuple(head_sizes), tuple(groups), tuple(threads), repeats)
        self._report.sections += kernels.sections(job, self._on_point("kernels"))
        if self._peers:
            self._report.sections += self._peers.attention(context, threads)

    def decode(self, configs: Sequence[EngineConfig], contexts: Sequence[int], repeats: int) -> None:
        """One step at each context, with each of `configs`; peers once."""
        _check_positive("repeats", repeats)
        jobs = [decode.DecodeJob(config, tuple(sorted(contexts)), repeats) for config in configs]
        section = decode.section(jobs, self._on_point("decode"))
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("decode", configs[0], sorted(contexts), section.rows)

    def prefill(self, configs: Sequence[EngineConfig], prompts: Sequence[int], repeats: int) -> None:
        """Each prompt with each of `configs`; peers once."""
        _check_positive("repeats", repeats)
        jobs = [prefill.PrefillJob(config, tuple(sorted(prompts)), repeats) for config in configs]
        section = prefill.section(jobs, self._on_point("prefill"))
        self._report.sections.append(section)
        if self._peers:
            self._report.sections += self._peers.models("prefill", configs[0], sorted(prompts), section.rows)

    def layouts(self, model: str, ranks: int, points: Sequence[tuple[int, int]], repeats: int) -> None:
        """Decode and prefill of several requests, with the strategies that `ranks` ranks can take in turn."""
        _check_positive("ranks", ranks)
        _check_positive("repeats", repeats)
        _check_positive("a number of requests", *(requests for requests, _ in points))
        longest = max(requests * context for requests, context in points)

        def configured(layout: Layout) -> EngineConfig:
            return configure(model, layout, (longest,), weight_dtype=None, kv_dtype=None)

        job = layouts.LayoutsJob(layouts.strategies(ranks, configured), tuple(points), repeats)
        self._report.sections.append(layouts.section(job, self._on_point("layouts")))

    def collectives(self, ranks: Sequence[int], sizes_bytes: Sequence[int], repeats: int) -> None:
        """Every collective at every size, in a world of each number of ranks."""
        _check_positive("bytes", *sizes_bytes)
        _check_positive("repeats", repeats)
        section = collectives.section(ranks, tuple(sizes_bytes), repeats, self._on_point("collectives"))
        self._report.sections.append(section)

    def planner(self, repeats: int) -> None:
        """The planner's speed, and its peers'."""
        _check_positive("repeats", repeats)
        self._report.sections += planner.sections(repeats, self._peers, self._on_point("planner"))

    def all(self, short: bool) -> None:
        """Everything, with the built-in model in bfloat16, in int8, and over two ranks; `short`: less of it."""
        extent = SHORT if short else FULL
        configs = [
            configure("builtin", Layout(), extent.contexts, weight_dtype=dtype, kv_dtype=dtype)
            for dtype in ("bfloat16", "int8")
        ]
        self.kernels(
            extent.kv_context, ("bfloat16", "int8", "int4"), (64, 128), extent.groups, (), extent.kernel_repeats
        )
        ranks = configure("builtin", Layout(kvp=2), extent.contexts, weight_dtype=None, kv_dtype=None)
        self.decode([*configs, ranks], extent.contexts, extent.decode_repeats)
        self.prefill(configs, extent.prompts, extent.prefill_repeats)
        self.collectives(extent.ranks, extent.sizes_bytes, extent.collective_repeats)
        self.planner(extent.planner_repeats)

    def calibrate(self, short: bool) -> HardwareSpec:
        """The system "local", fitted to runs of the built-in model; `short`: to shorter ones."""
        extent = calibration.SHORT if short else calibration.FULL
        return self._predict(extent, extent, [_builtin(extent, Layout(), "bfloat16")])

    def predict(self) -> None:
        """As a calibration, with more lengths, layouts and dtypes, to which nothing is fitted."""
        extent = predictions.EXTENT
        configs = [_builtin(extent, layout, "bfloat16") for layout in predictions.LAYOUTS]
        self._predict(extent, calibration.FULL, [*configs, _builtin(extent, Layout(), "int8")])

    def _predict(
        self, extent: calibration.Extent, fitted: calibration.Extent, configs: Sequence[EngineConfig]
    ) -> HardwareSpec:
        measured = calibration.Measured.by(extent, configs, self._on_point)
        system = measured.system(configs[0], fitted)
        dtypes = {(config.weight_dtype, config.kv_dtype): config for config in configs}
        rows: list[Row] = []
        for config in dtypes.values():
            rows += predictions.predicted(system, config, measured.runs, fitted)
        self._report.sections += predictions.sections(system, measured.products, rows)
        return system

    def finish(self) -> Report:
        """The report, with what the peers had to say."""
        if self._peers:
            self._report.remarks += dict.fromkeys(self._peers.remarks)
        return self._report

    def _on_point(self, name: str) -> Callable[[Row], None]:
        def on_point(row: Row) -> None:
            shown = (key for key, value in row.items() if isinstance(value, (str, int)) and key not in _UNSHOWN)
            self._tell(f"{name}: {', '.join(f'{key} {row[key]}' for key in shown)}")

        return on_point


def _builtin(extent: calibration.Extent, layout: Layout, dtype: str) -> EngineConfig:
    return configure("builtin", layout, (*extent.contexts, *extent.prompts), weight_dtype=dtype, kv_dtype=dtype)


def configure(
    model: str,
    layout: Layout,
    lengths: Sequence[int],
    *,
    threads: int | None = None,
    **settings: Any,
) -> EngineConfig:
    """The engine's configuration, with `settings` of `EngineOptions`, for one request as long as the longest of
    `lengths`. Raises UserError."""
    _check_positive("a context or prompt", *lengths)
    longest = max(lengths)
    with warnings.catch_warnings():
        # Nobody reads the answers, and a KV that does not fit is refused below.
        warnings.filterwarnings("ignore", message="max_model_len .* goes beyond|memory holds")
        options = EngineOptions(max_model_len=longest, device="cpu", **settings)
        config = resolve(open_checkpoint(model), layout, options)
    held_tokens = config.scheduler.num_blocks * config.scheduler.block_tokens * layout.kvp
    if held_tokens < longest:
        raise UserError(
            f"{longest} tokens of {config.kv_dtype} KV do not fit in memory: give at most {held_tokens} tokens, or a "
            "smaller --kv-dtype",
            "out_of_memory",
        )
    if threads is None:
        return config
    _check_positive("threads", threads)
    return replace(config, threads_per_rank=threads)


def _check_positive(name: str, *values: int) -> None:
    """Refuse numbers below 1, and none at all."""
    if not values or min(values) < 1:
        raise UserError(f"{name} is {min(values) if values else 'empty'}: give 1 or more")
