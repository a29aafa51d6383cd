"""`longhelix plan`: finds the best layout of a model on a system."""

import json as json_module
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from longhelix.cli.demand import DemandOptions
from longhelix.cli.planning import DraftOptions, PlannedModel, make_folder, stdout
from longhelix.cli.values import Flag, Seconds, Size
from longhelix.compute.models.model_files import is_gguf
from longhelix.engine.hub.model import HubModel
from longhelix.plan import peers, report, summary, terminal
from longhelix.plan.answer import Plan, answer
from longhelix.plan.crossover import Crossover, crossovers
from longhelix.plan.positions import beyond_positions
from longhelix.plan.question import Question
from longhelix.plan.reasons import Neighbour, Rejection, neighbours, rejections

_NO_DEMAND, _NO_DRAFTS = DemandOptions(), DraftOptions()


def plan(
    model: PlannedModel,
    requests: DemandOptions = _NO_DEMAND,
    drafts: DraftOptions = _NO_DRAFTS,
    *,
    max_gpus: int = 64,
    ttl: Annotated[Seconds | None, Parameter(show_default=False)] = None,
    ttl_with_prefill: Annotated[Seconds | None, Parameter(show_default=False)] = None,
    ttft: Annotated[Seconds | None, Parameter(show_default=False)] = None,
    users: Size = 1,
    min_gpus: Flag = False,
    gpu_hour: Annotated[float | None, Parameter(show_default=False)] = None,
    any_shape: Flag = False,
    out: Path | None = None,
    json: Flag = False,
    explain_placement: Flag = False,
    verbose: Flag = False,
) -> None:
    """Find the best layout on up to --max-gpus GPUs that meets all targets. Prints the answer, how it compares with
    other strategies, and what limits it.

    Parameters
    ----------
    max_gpus
        Maximum number of GPUs, up to 1024.
    ttl
        Maximum mean time between two tokens of a request (TPOT), such as 20ms. [default: no target]
    ttl_with_prefill
        Maximum time between two tokens in a step that also computes a chunk of another prompt, such as 100ms. Small
        values need small chunks, which make the time to first token long. [default: no target]
    ttft
        Maximum time to first token of the longest prompt, such as 30s. [default: no target]
    users
        Minimum number of requests that run at the same time.
    min_gpus
        Choose the layout with the fewest GPUs that meets the targets, instead of the max tokens/s/GPU.
    gpu_hour
        Price of one GPU for one hour, in any currency. Set it to get the cost of a million tokens.
    any_shape
        Also search numbers of GPUs and degrees that are neither powers of two nor whole servers, or that do not divide
        heads and experts.
    out
        Folder to write the plan to: plan.json, plan.html, frontier.csv, .png and .svg, plan.yaml (for --layout of
        `serve` and `generate`), and commands.txt with the commands of other engines for the same layout.
    json
        Print one JSON object instead of text.
    explain_placement
        Also print which groups of ranks communicate over which links, and what that costs in a decode step.
    verbose
        Also print the Pareto frontier, a table of each strategy, and why other layouts are slower or do not fit.
    """
    start_s = time.perf_counter()
    context, demand = requests.load()
    setting = drafts.added(model.setting())
    question = Question(
        setting=setting,
        context=context,
        max_gpus=max_gpus,
        ttl_s=ttl,
        ttl_with_prefill_s=ttl_with_prefill,
        ttft_s=ttft,
        users=users,
        fewest_gpus=min_gpus,
        demand=demand,
        gpu_hour=gpu_hour,
        any_shape=any_shape,
    )
    if out is not None:
        make_folder(out)
    found = answer(question)
    warned = beyond_positions(setting.model, context)
    if warned is not None:
        warnings.warn(warned, stacklevel=2)
    others = neighbours(question, found.best) if found.best else []
    rejected = rejections(question, found.sweep)
    crossed = crossovers(question, found.sweep.space, max_gpus)
    seconds = time.perf_counter() - start_s
    as_object = {"model": model.model} | report.as_json(
        found, seconds=seconds, neighbours=others, rejections=rejected, crossovers=crossed
    )
    if out is not None:  # before anything is printed, because the reader of a pipe may leave early
        _write(out, found, model, as_object)
    if json:
        print(json_module.dumps(as_object))
    else:
        _show_answer(found, model.model)
        if explain_placement and found.answer is not None:
            stdout().print(report.links_table(question, found.answer))
        if verbose:
            _show_tables(found, others, rejected, crossed)


_PLAN_FILES = ("plan.json", "plan.html", "frontier.csv", "frontier.png", "frontier.svg")
_LAYOUT_FILES = ("plan.yaml", "commands.txt", peers.CONFIG_FILE)


def _show_answer(found: Plan, model: str) -> None:
    console = stdout()
    console.print(summary.headline(found, model), highlight=False, style="bold", soft_wrap=True)
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for label, text in summary.lines(found):
        grid.add_row(label, text)
    console.print(grid, highlight=False)


def _show_tables(found: Plan, others: list[Neighbour], rejected: list[Rejection], crossed: list[Crossover]) -> None:
    console = stdout()
    console.print()
    console.print(terminal.draw_frontier(report.series(found), ttl_s=found.question.ttl_s))
    console.print(report.frontier_table(found), report.strategy_table(found), report.users_table(found))
    if found.latencies is not None:
        console.print(report.latency_table(found))
    console.print(report.crossover_table(crossed))
    rejected = [each for each in rejected if each.strategy in found.strategies]
    if rejected:
        console.print(report.rejections_table(rejected))
    if found.best is not None and others:
        console.print(report.neighbours_table(found.best, others))


def _write(folder: Path, found: Plan, planned: PlannedModel, as_object: dict[str, object]) -> None:
    """Write all files of a plan. Only this function imports matplotlib."""
    from longhelix.plan import page, plots

    question, model = found.question, planned.model
    setting = question.setting
    title = f"{model} on {setting.system.name}, {question.context:,} tokens, up to {question.max_gpus} GPUs"
    plots.draw_frontier(folder / "frontier", report.series(found), title, ttl_s=question.ttl_s)
    page.write_page(folder / "plan.html", found, as_object)
    (folder / "plan.json").write_text(json_module.dumps(as_object, indent=1) + "\n")
    (folder / "frontier.csv").write_text(report.as_csv(found))
    for name in _LAYOUT_FILES:  # remove files of an earlier plan in this folder
        (folder / name).unlink(missing_ok=True)
    deployment = report.deployed(found)
    if deployment is not None:
        (folder / "plan.yaml").write_text(report.as_yaml(found, model))
        is_loadable = (
            Path(model).is_dir() or is_gguf(model) or HubModel.of(model) is not None
        )  # a preset has no weights
        loaded = model if is_loadable else "MODEL"
        commands = peers.commands(deployment, loaded)
        text = "\n".join(command.as_text() for command in commands)
        if planned.revision is not None:
            text = f"# The plan is for revision {planned.revision} of {model}: add --revision to a command.\n\n" + text
        if found.best is None:
            text = "# No configuration meets all targets. These commands are for the closest layout.\n\n" + text
        (folder / "commands.txt").write_text(text)
        for command in commands:
            if command.config:
                (folder / peers.CONFIG_FILE).write_text(command.config_yaml())
    written = [name for name in (*_PLAN_FILES, *_LAYOUT_FILES) if (folder / name).exists()]
    print(f"wrote {', '.join(sorted(written))} to {folder}", file=sys.stderr)
