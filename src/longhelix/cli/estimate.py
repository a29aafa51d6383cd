"""`longhelix estimate`: predicts the cost items of a step of one configuration."""

import json as json_module
from dataclasses import asdict
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from longhelix.cli.planning import DraftOptions, GroupedLayout, PlannedModel, parse_layout, stdout
from longhelix.cli.values import Flag, Size
from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.plan.candidate import drafts_in_words, in_words
from longhelix.plan.estimate import Estimate
from longhelix.plan.estimate import estimate as estimate_layout
from longhelix.plan.report import setting_as_json
from longhelix.units import count, digits, duration, size

_NO_DRAFTS = DraftOptions()


def estimate(
    model: PlannedModel,
    drafts: DraftOptions = _NO_DRAFTS,
    *,
    context: Size,
    batch: Size = 1,
    dp: int = 1,
    kvp: int = 1,
    tpa: int = 1,
    tpf: int | None = None,
    ep: int = 1,
    pp: int = 1,
    tied: Flag = False,
    hop_b: bool = True,
    placement: Literal["striped", "local"] = "striped",
    chunk: Size = 2048,
    compare: Annotated[tuple[str, str] | None, Parameter(negative=(), show_default=False)] = None,
    json: Flag = False,
) -> None:
    """Predict the cost of one configuration: each cost item of a decode step, TPOT, TTFT, memory and utilisation. Uses
    the same performance model as `longhelix plan`.

    Parameters
    ----------
    context
        Tokens of KV per request.
    batch
        Number of requests that decode together, over all GPUs.
    dp
        Data parallelism of attention: groups of kvp * tpa GPUs with separate requests and a common FFN.
    kvp
        KV parallelism: GPUs that split each request's KV cache along the sequence.
    tpa
        Tensor parallelism of attention: GPUs that split the heads.
    tpf
        Tensor parallelism of the FFN: GPUs that split its columns. [default: dp * kvp * tpa / ep]
    ep
        Expert parallelism: GPUs that split the experts.
    pp
        Number of pipeline stages.
    tied
        Replicate the FFN on every KVP instance, with tpf = tpa (Medha's layout).
    hop_b
        Overlap the exchange of partial attention results with attention (HOP-B).
    placement
        How KV is spread over KVP ranks: striped over all of them, or local to one rank per request (data-parallel
        attention).
    chunk
        Prompt tokens per prefill step, for TTFT and for the time between tokens of requests that decode in the same
        steps.
    compare
        Two layouts to compare instead of the degrees above, such as `--compare kvp=8,tpa=8 kvp=1,tpa=64`.
    json
        Print one JSON object instead of tables.
    """
    setting = drafts.added(model.setting())
    if context < 1 or batch < 1 or chunk < 1:
        raise UserError(f"--context {context}, --batch {batch} and --chunk {chunk} must all be 1 or more")
    if compare is None:
        asked = [
            GroupedLayout.of(
                dp, kvp=kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp, tied=tied, local=placement == "local", hop_b=hop_b
            )
        ]
    else:
        asked = [parse_layout(text) for text in compare]
    found = [
        estimate_layout(setting, each.layout, context=context, batch=batch, chunk=chunk, dp=each.dp, local=each.local,
                        hop_b=each.hop_b)
        for each in asked
    ]  # fmt: skip
    if json:
        objects = [_object(setting, each) for each in found]
        print(json_module.dumps(objects[0] if compare is None else {"compared": objects}))
        return
    for each in found:
        show(each, stdout())
    if len(found) == 2:
        stdout().print(_compared(*found))


def _object(setting: Setting, found: Estimate) -> dict[str, Any]:
    """Convert an estimate to a JSON object, in which the cost items are named `parts`."""
    written = setting_as_json(setting) | asdict(found)
    written["parts"] = written.pop("items")
    return written


def show(found: Estimate, console: Console) -> None:
    """Print a summary line, and a table of the cost items of a step."""
    fits = "fits" if found.fits else "DOES NOT FIT"
    drafts = f" ({drafts_in_words(found.draft_tokens, found.accepted_tokens)})" if found.draft_tokens else ""
    windows = f", of which windows {size(found.windows_bytes_per_gpu)}" if found.windows_bytes_per_gpu else ""
    console.print(
        f"TPOT {duration(found.ttl_s)}{drafts}, {duration(found.ttl_p95_s)} during a prefill, "
        f"{digits(found.tokens_per_s_per_user)} tokens/s/user, {digits(found.tokens_per_s_per_gpu)} tokens/s/GPU; TTFT "
        f"{duration(found.ttft_s)} in chunks of {count(found.chunk_tokens)}; MFU {found.mfu:.1%}, "
        f"MBU {found.mbu:.1%}; {size(found.memory_bytes_per_gpu)} on the fullest GPU (weights "
        f"{size(found.weights_bytes_per_gpu)}, KV {size(found.kv_bytes_per_gpu)}{windows}): {fits}",
        highlight=False,
        style="bold",
        soft_wrap=True,
    )
    table = Table(title=f"{in_words(found.layout)}: {found.gpus} GPUs, batch {found.batch}", title_justify="left")
    for name in ("cost item", "ms", "share", "GFLOP", "HBM, MB", "sent, kB"):
        table.add_column(name, justify="left" if name == "cost item" else "right")
    table.add_column("from")
    for item in sorted(found.items, key=lambda item: -item.seconds):
        table.add_row(
            item.name,
            f"{1e3 * item.seconds:.3f}",
            f"{item.seconds / found.step_s:.0%}",
            f"{item.flops / 1e9:,.2f}",
            f"{item.hbm_bytes / 1e6:,.1f}",
            f"{item.net_bytes / 1e3:,.1f}",
            item.source,
        )
    console.print(table)


def _compared(first: Estimate, second: Estimate) -> Table:
    """Return a table of the cost items of both layouts and their differences."""
    table = Table(title="second layout compared with the first", title_justify="left")
    for name in ("cost item", "first, ms", "second, ms", "difference, ms"):
        table.add_column(name, justify="left" if name == "cost item" else "right")
    seconds = [{item.name: item.seconds for item in each.items} for each in (first, second)]
    names = dict.fromkeys([*seconds[0], *seconds[1]])
    rows = [(name, seconds[0].get(name, 0.0), seconds[1].get(name, 0.0)) for name in names]
    rows.append(("step", first.step_s, second.step_s))
    for name, before_s, after_s in rows:
        table.add_row(name, f"{1e3 * before_s:.3f}", f"{1e3 * after_s:.3f}", f"{1e3 * (after_s - before_s):+.3f}")
    return table
