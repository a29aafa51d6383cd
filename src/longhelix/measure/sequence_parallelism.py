"""Measures the time of a prefill and the bytes that two ranks send, with and without sequence parallelism."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from longhelix.compute.kernels import native
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.rank import meet, new_pool, new_runner
from longhelix.compute.runner.runner import ModelRunner
from longhelix.errors import UserError
from longhelix.measure.configuration import configure
from longhelix.measure.formulas import prefill_sent_bytes
from longhelix.measure.link import LOOPBACK, RANKS, RankLink, burst_bytes, join, link_label
from longhelix.measure.model import RankModel, prefill_steps
from longhelix.measure.timing import interleave
from longhelix.measure.world import Row, collect
from longhelix.spec.layout import Layout

_BYTES = {"weight_dtype": "int8", "activation_dtype": "int8"}
# For each variant, the settings that it shares with its baseline, and the setting that enables sequence parallelism.
_SETTINGS: Mapping[str, tuple[dict[str, Any], str]] = {
    "flash-comm-v1": ({"execution": "eager"}, "flash_comm_v1"),
    "flash-comm-v1-int8": ({"execution": "eager"} | _BYTES, "flash_comm_v1"),
    "enable-sp": ({"execution": "compiled"}, "enable_sp"),
    "enable-sp-int8": ({"execution": "compiled"} | _BYTES, "enable_sp"),
}
VARIANTS = tuple(_SETTINGS)
OFF = "off"
WARM_UP = 1
_TIMEOUT_S = 3600.0  # time limit for one point; the first point includes compilation


class Pair(msgspec.Struct, frozen=True):
    """The engine configurations of a variant and of its baseline."""

    off: EngineConfig  # the baseline, without sequence parallelism
    on: EngineConfig  # the variant


class SequenceParallelismJob(msgspec.Struct, frozen=True):
    """Job of both ranks. At each link rate, it measures the prefill of each prompt with all configurations in turn.

    Each point has one row per configuration.
    """

    pairs: dict[str, Pair]  # by name of the variant
    prompts: tuple[int, ...]  # lengths in tokens
    rates_mbit: tuple[float, ...]  # rates of the link in Mbit/s; empty for loopback without a link
    repeats: int  # number of measured prefills, after a warm-up

    @property
    def configs(self) -> list[tuple[str, EngineConfig]]:
        """Names and configurations: each baseline, named OFF, followed by its variant."""
        return [named for variant, pair in self.pairs.items() for named in ((OFF, pair.off), (variant, pair.on))]

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        _, first = self.configs[0]
        native.set_num_threads(first.machines.threads_of(rank))
        link = join(rank, directory) if self.rates_mbit else LOOPBACK
        meet(len(RANKS), rank, directory, interface=link.device)
        mesh = Mesh.build(first.layout, rank, "gloo")
        models = [RankModel(config, mesh) for _, config in self.configs]
        pool = new_pool(
            first, rank, max(models[0].blocks_per_rank(max(self.prompts)))
        )  # shared by all configurations, because only one runs at a time
        prefills = [TimedPrefill(model, new_runner(model.config, mesh, model.decoder, pool), link) for model in models]
        for rate_mbit in self.rates_mbit or (None,):
            if rate_mbit is not None:
                link.limit(rate_mbit)
            for prompt in self.prompts:
                yield from self._point(prefills, rate_mbit, prompt)

    def _point(self, prefills: "Sequence[TimedPrefill]", rate_mbit: float | None, prompt: int) -> Iterator[Row]:
        vocab_size = self.configs[0][1].spec.vocabulary.size
        token_ids = tuple(torch.randint(vocab_size, (prompt,)).tolist())
        calls = {str(index): partial(prefill, token_ids) for index, prefill in enumerate(prefills)}
        timings = interleave(calls, self.repeats, WARM_UP, alternate=True).values()
        for (name, config), prefill, timing in zip(self.configs, prefills, timings, strict=True):
            yield {
                "link": link_label(rate_mbit),
                "rate_mbit": rate_mbit,
                "burst_bytes": None if rate_mbit is None else burst_bytes(rate_mbit),
                "prompt": prompt,
                "variant": name,
                "execution": config.execution.mode,
                "activation_dtype": config.formats.activation_dtype or config.formats.dtype,
                **timing.row("prefill_s"),
                "sent_bytes": prefill.sent_bytes,
            }


class TimedPrefill:
    """Prefills prompts with one configuration, and counts the bytes that this rank sends per prefill."""

    def __init__(self, model: RankModel, runner: ModelRunner, link: RankLink) -> None:
        self.sent_bytes = 0  # bytes of the last prefill, from the counter of this rank's link
        self._model, self._runner, self._link = model, runner, link
        self._prompts = 0

    def __call__(self, token_ids: tuple[int, ...]) -> None:
        """Prefill a prompt. Return as soon as both ranks have its first token."""
        before = self._link.sent_bytes()
        for step in prefill_steps(self._model, self._prompts, token_ids):
            self._runner.execute(step)
        self._prompts += 1
        dist.barrier()
        self.sent_bytes = self._link.sent_bytes() - before


def pairs(
    model: str,
    layout: Layout,
    variants: Sequence[str],
    prompts: Sequence[int],
    *,
    chunk_tokens: int,
    sp_min_token_num: int | None = None,
    threads: int | None = None,
) -> dict[str, Pair]:
    """Create the configurations of each variant and its baseline, by name of the variant.

    Args:
        model: path of a model, or `builtin`.
        layout: layout on two ranks.
        variants: names from VARIANTS.
        prompts: lengths of prompts in tokens.
        chunk_tokens: maximum number of prompt tokens per step.
        sp_min_token_num: minimum number of tokens in a sequence-parallel step. None uses the default.
        threads: threads per rank. None divides the cores among the ranks.

    Raises:
        UserError: a variant is unknown, the layout does not have two ranks, or a prompt is too long.
    """
    unknown = next((variant for variant in variants if variant not in VARIANTS), None)
    if unknown is not None or not variants:
        problem = "--variants is empty" if unknown is None else f"variant {unknown!r} is not known"
        raise UserError(f"{problem}: use one or more of {', '.join(VARIANTS)}")
    if layout.world_size != len(RANKS) or layout.ffn_ranks != len(RANKS):
        raise UserError(
            f"the layout has {layout.world_size} ranks, but the link joins exactly two: set --kvp and --tpa to 1 and "
            "2, or to 2 and 1",
            "invalid_layout",
        )
    configured = partial(configure, model, layout, threads=threads, chunk_tokens=chunk_tokens)
    longest, positions = max(prompts, default=0), configured((1,)).spec.max_positions
    if longest > positions:  # checked first, because no setting makes a longer prompt possible
        raise UserError(f"--prompts has {longest} tokens, but the model supports {positions}: use at most {positions}")
    found = {}
    for variant in variants:
        settings, switch = _SETTINGS[variant]
        on = {switch: True, "sp_min_token_num": sp_min_token_num}
        found[variant] = Pair(configured(prompts, **settings), configured(prompts, **settings, **on))
    return found


def measure(job: SequenceParallelismJob, on_point: Callable[[Row], None]) -> list[Row]:
    """Run the job on two ranks. Returns a row for each point with each configuration."""
    rows: list[Row] = []
    points = collect(job, len(RANKS), on_point, _TIMEOUT_S)
    for index, ranks in enumerate(points):
        _, config = job.configs[index % len(job.configs)]
        row = combine(ranks, config)
        off = row if row["variant"] == OFF else rows[-1]
        row["time_over_off"] = row["prefill_s"] / off["prefill_s"]
        row["bytes_over_off"] = row["sent_bytes"] / off["sent_bytes"]
        rows.append(row)
    return rows


def combine(ranks: list[Row], config: EngineConfig) -> Row:
    """Combine the rows of both ranks into one row: the times of rank 0, all sent bytes, and the predicted bytes.

    Over loopback, the byte count of one rank already includes the bytes of both ranks.
    """
    row = ranks[0]
    whole, rest = divmod(row["prompt"], config.scheduler.steps.chunk_tokens)
    chunks = [config.scheduler.steps.chunk_tokens] * whole + [rest] * bool(rest)
    shards = config.execution.token_ranges.shards
    sent_bytes = sum(rank["sent_bytes"] for rank in ranks) if row["rate_mbit"] is not None else row["sent_bytes"]
    formula_bytes = prefill_sent_bytes(config, chunks)
    return row | {
        "layout": f"{config.layout.kvp} x {config.layout.tpa}",
        "threads": config.machines.threads_of(0),
        "chunk_tokens": config.scheduler.steps.chunk_tokens,
        "sharded_tokens": sum(rows for rows in chunks if shards(rows, decodes=rows == 1)),
        "sent_bytes": sent_bytes,
        "formula_bytes": formula_bytes,
        "over_formula": None if formula_bytes is None else sent_bytes / formula_bytes,
    }
