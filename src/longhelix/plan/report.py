"""Format a plan as JSON, as CSV, as tables for a terminal, and as a YAML layout file."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TypeVar

import numpy as np
from rich.table import Table

from longhelix.perf.layouts import Array
from longhelix.perf.setting import Setting
from longhelix.plan import deployment
from longhelix.plan.answer import Plan
from longhelix.plan.candidate import Candidate, degrees, in_words
from longhelix.plan.choice import Choice
from longhelix.plan.crossover import Crossover
from longhelix.plan.deployment import Deployment
from longhelix.plan.links import group_links, hosts_of
from longhelix.plan.question import Question
from longhelix.plan.reasons import Neighbour, Rejection
from longhelix.plan.service import CHUNKS
from longhelix.plan.space import STRATEGIES
from longhelix.spec.weights import num_parameters
from longhelix.units import count, digits, duration, size

_TITLES = {strategy.name: strategy.title for strategy in STRATEGIES}
_MOST_HOSTS = 4  # hosts whose ranks a title names
_MOST_ROWS = 12
_Row = TypeVar("_Row")


def as_json(
    plan: Plan, seconds: float, neighbours: list[Neighbour], rejections: list[Rejection], crossovers: list[Crossover]
) -> dict[str, object]:
    """Return the JSON document that `longhelix plan --json` prints."""
    question, headline = plan.question, plan.headline
    return {
        "model_parameters": num_parameters(question.setting.model),
        **setting_as_json(question.setting),
        "context": question.context,
        "max_gpus": question.max_gpus,
        "targets": {
            "ttl_s": question.ttl_s,
            "ttl_with_prefill_s": question.ttl_with_prefill_s,
            "ttft_s": question.ttft_s,
            "users": question.users,
            "rate_per_s": question.rate_per_s,
            "fewest_gpus": question.fewest_gpus,
        },
        "gpu_hour": question.gpu_hour,
        "any_shape": question.any_shape,
        "configurations": plan.configurations,
        "seconds": seconds,
        "frontier": [asdict(candidate) for candidate in plan.frontier],
        "baseline": [asdict(candidate) for candidate in plan.baseline],
        "strategies": {name: [asdict(candidate) for candidate in found] for name, found in plan.strategies.items()},
        "headline": headline
        and {
            "interactivity_gain": headline.interactivity,
            "throughput_gain": headline.throughput,
            "throughput_gain_at_tokens_per_s_per_user": headline.at_user_tokens_per_s,
        },
        "at_ttl": plan.at_ttl
        and {
            "throughput_gain": plan.at_ttl.ratio,
            "helix_tokens_per_s_per_gpu": plan.at_ttl.gpu_tokens_per_s,
            "others_tokens_per_s_per_gpu": plan.at_ttl.base_gpu_tokens_per_s,
        },
        "best": plan.best and asdict(plan.best),
        "nearest": [asdict(choice) for choice in plan.nearest],
        "apart": plan.disaggregated and asdict(plan.disaggregated),
        "users_at_ttl": [asdict(each) for each in plan.users_at_ttl],
        "latencies": _latencies(plan),
        "neighbours": [asdict(neighbour) for neighbour in neighbours],
        "rejected": [asdict(rejection) for rejection in rejections],
        "crossovers": [asdict(crossover) | {"pays": crossover.pays} for crossover in crossovers],
    }


def setting_as_json(setting: Setting) -> dict[str, object]:
    """Return the system, the dtypes and the draft tokens of a setting as JSON."""
    return {
        "system": setting.system.name,
        "weight_dtype": setting.weights_in,
        "expert_dtype": setting.experts_in,
        "kv_dtype": setting.dtypes.kv,
        "attention_dtype": setting.attends_in,
        "draft_tokens": setting.drafts.tokens,
        "accepted_tokens": setting.drafts.accepted,
    }


def _latencies(plan: Plan) -> dict[str, object] | None:
    """Return the frontier of TTFT against the time between tokens.

    If both targets are set, the result also contains the fewest GPUs that meet them.
    """
    found, question = plan.latencies, plan.question
    if found is None:
        return None
    frontier = [_latency(plan, int(index)) for index in found.frontier()]
    if question.ttl_with_prefill_s is None or question.ttft_s is None:
        return {"frontier": frontier}
    fewest = found.fewest_gpus(question.ttft_s, question.ttl_with_prefill_s)
    return {"frontier": frontier, "fewest_gpus": None if fewest is None else _latency(plan, fewest)}


def _latency(plan: Plan, flat: int) -> dict[str, object]:
    found = plan.latencies
    assert found is not None
    index, column = divmod(flat, len(CHUNKS))
    return {
        "strategy": STRATEGIES[plan.sweep.space.strategy[index]].name,
        "layout": degrees(plan.sweep.space.layouts, index),
        "gpus": int(found.gpus[index]),
        "chunk": CHUNKS[column],
        "ttft_s": float(found.ttft_s[index, column]),
        "tbt_s": float(found.tbt_s[index, column]),
    }


def as_csv(plan: Plan) -> str:
    """Return the frontiers of all strategies as CSV, with one configuration per line."""
    text = io.StringIO()
    names = ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas", "placement")
    writer = csv.writer(text, lineterminator="\n")
    measures = ("gpus", "batch", "tokens_per_s_per_user", "tokens_per_s_per_gpu", "memory_bytes_per_gpu")
    writer.writerow(["strategy", *names, *measures])
    for strategy, found in plan.strategies.items():
        for candidate in found:
            values = [candidate.layout[name] for name in names]
            writer.writerow([strategy, *values, *(getattr(candidate, name) for name in measures)])
    return text.getvalue()


def deployed(plan: Plan) -> Deployment | None:
    """Return one replica of the answer as a deployment: of the best layout, or of the one closest to the targets."""
    best, question = plan.answer, plan.question
    if best is None:
        return None
    setting = question.setting
    return Deployment(
        model=setting.model,
        layout=best.layout,
        weight_dtype=setting.weights_in,
        kv_dtype=setting.dtypes.kv,
        device="cpu" if setting.system.shared else "cuda",
        context=question.context,
        users=best.batch,
        chunk_tokens=best.chunk_tokens,
        hop_b=best.strategy != "helix_exposed",
        other_tokens=None if question.demand is None else math.ceil(question.demand.held_tokens),
        accepted_tokens=setting.drafts.accepted,
        expert_dtype=None if setting.experts_in == setting.weights_in else setting.experts_in,
        packed=setting.keeps_packed and setting.dtypes.experts is None,
        host_ranks=None if setting.system.shared else setting.system.network.node_ranks,
    )


def as_yaml(plan: Plan, model_name: str) -> str:
    """Return the text of a layout file for `serve --layout` and `generate --layout`, empty without an answer."""
    best, found, question = plan.answer, deployed(plan), plan.question
    if best is None or found is None:
        return ""
    unmet = [f"This is the closest layout. It misses: {', '.join(best.violates)}"] if best.violates else []
    sentences = [
        *unmet,
        f"{model_name} on {best.gpus // best.replicas} GPUs of {question.setting.system.name}: {in_words(best.layout)}"
        f", {best.batch} requests of {count(question.context)} tokens",
        f"TTFT {duration(best.ttft_s)}, TPOT {duration(best.ttl_s)} ({duration(best.ttl_p95_s)} during a prefill), "
        f"{digits(best.tokens_per_s_per_gpu)} tokens/s/GPU, {size(best.memory_bytes_per_gpu)} per GPU",
    ]
    runnable = deployment.runnable(found)
    lines = [line for sentence in sentences for line in deployment.comment(sentence)]
    return "\n".join(lines) + "\n" + deployment.as_yaml(runnable)


def frontier_table(plan: Plan) -> Table:
    """Return a table with the frontier over all strategies, with at most _MOST_ROWS rows."""
    table = _table(f"frontier of {plan.configurations:,} configurations", "strategy", "layout")
    for name in ("GPUs", "batch", "tokens/s/user", "tokens/s/GPU", "GB/GPU"):
        table.add_column(name, justify="right")
    for candidate in _thinned(plan.frontier):
        table.add_row(*_row(candidate))
    return table


def strategy_table(plan: Plan) -> Table:
    """Return a table with the best tokens/s/user and the best tokens/s/GPU of each strategy."""
    table = _table("strategies", "strategy")
    for name in ("max tokens/s/user", "at batch", "max tokens/s/GPU", "at tokens/s/user"):
        table.add_column(name, justify="right")
    for name, found in plan.strategies.items():
        if found:
            fastest, cheapest = found[-1], found[0]
            table.add_row(
                _TITLES[name],
                f"{fastest.tokens_per_s_per_user:.1f}",
                f"{fastest.batch}",
                f"{cheapest.tokens_per_s_per_gpu:.2f}",
                f"{cheapest.tokens_per_s_per_user:.1f}",
            )
    return table


def users_table(plan: Plan) -> Table:
    """Return a table with the maximum number of users that each strategy serves within each TPOT."""
    budgets_s = list(dict.fromkeys(each.ttl_s for each in plan.users_at_ttl))
    table = _table("users served within a TPOT", "strategy")
    for budget_s in budgets_s:
        table.add_column(f"{1e3 * budget_s:g} ms", justify="right")
    for strategy in STRATEGIES:
        most = [each.most for each in plan.users_at_ttl if each.strategy == strategy.name]
        if any(most):
            table.add_row(strategy.title, *("-" if each is None else f"{each.batch}" for each in most))
    return table


def neighbours_table(best: Choice, found: Iterable[Neighbour]) -> Table:
    """Return a table of the best layout's neighbours, with the TPOT of each neighbour and the cost items that grow."""
    table = _table(f"alternatives to {in_words(best.layout)}, batch {best.batch}", "change", "layout")
    table.add_column("TPOT, ms", justify="right")
    table.add_column("why")
    for neighbour in found:
        ttl = "does not fit" if neighbour.ttl_s is None else f"{1e3 * neighbour.ttl_s:.2f}"
        table.add_row(neighbour.change, neighbour.layout, ttl, neighbour.reason)
    return table


def rejections_table(found: Iterable[Rejection]) -> Table:
    """Return a table of the layouts with too little memory: their number and the smallest lack, by strategy."""
    table = _table("layouts in which one request does not fit", "strategy")
    table.add_column("layouts", justify="right")
    table.add_column("why")
    for rejection in found:
        table.add_row(_TITLES[rejection.strategy], f"{rejection.rejected} of {rejection.layouts}", rejection.reason)
    return table


def crossover_table(found: list[Crossover]) -> Table:
    """Return a table of Helix's best TPOT relative to the best TPOT of all other strategies, by context and batch."""
    batches = list(dict.fromkeys(each.batch for each in found))
    title = f"best TPOT of Helix / best TPOT of others, {found[0].gpus} GPUs: below 1, KVP pays"
    table = _table(title, "context")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    for context in dict.fromkeys(each.context for each in found):
        table.add_row(f"{context:,}", *(_ratio(each) for each in found if each.context == context))
    return table


def latency_table(plan: Plan) -> Table:
    """Return a table of TTFT against the time between tokens during a prefill, with at most _MOST_ROWS rows."""
    assert plan.latencies is not None
    title = f"TTFT against time between tokens during a prefill, {plan.question.users} users"
    table = _table(title, "strategy", "layout")
    for name in ("GPUs", "chunk", "TTFT, s", "between tokens, ms"):
        table.add_column(name, justify="right")
    flat = [int(index) for index in plan.latencies.frontier()]
    for index in _thinned(flat):
        layout, column = divmod(index, len(CHUNKS))
        table.add_row(
            _TITLES[STRATEGIES[plan.sweep.space.strategy[layout]].name],
            in_words(degrees(plan.sweep.space.layouts, layout)),
            f"{int(plan.latencies.gpus[layout])}",
            f"{CHUNKS[column]}",
            f"{plan.latencies.ttft_s[layout, column]:.2f}",
            f"{1e3 * plan.latencies.tbt_s[layout, column]:.2f}",
        )
    return table


def links_table(question: Question, choice: Choice) -> Table:
    """Return a table of the groups of ranks that communicate, their links, and their costs in a decode step."""
    system = question.setting.system
    hosts = hosts_of(system, choice.gpus // choice.replicas)
    places = "; ".join(f"host {node}: {_range(ranks)}" for node, ranks in enumerate(hosts.ranks[:_MOST_HOSTS]))
    more = "" if len(hosts.ranks) <= _MOST_HOSTS else f"; and {len(hosts.ranks) - _MOST_HOSTS} more"
    table = _table(f"placement of ranks ({places}{more}), and costs in a decode step", "group")
    for name in ("ranks", "hosts", "link", "sent per GPU", "time", "share of the step"):
        table.add_column(name, justify="left" if name == "link" else "right")
    for each in group_links(question, choice):
        link = system.network.scale_up if each.link == "scale-up" else system.network.scale_out
        table.add_row(
            each.name,
            f"{len(each.ranks)}, {each.ranks[1] - each.ranks[0]} apart",
            f"{each.hosts}",
            f"{each.link} ({size(link.bytes_per_s)}/s)",
            size(each.sent_bytes),
            duration(each.seconds),
            f"{100 * each.share:.1f}%",
        )
    return table


def _range(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def series(plan: Plan) -> dict[str, tuple[Array, Array]]:
    """Return each strategy's frontier as arrays (tokens/s/user, tokens/s/GPU), by title, for plots."""
    return {
        _TITLES[name]: (
            np.array([candidate.tokens_per_s_per_user for candidate in found]),
            np.array([candidate.tokens_per_s_per_gpu for candidate in found]),
        )
        for name, found in plan.strategies.items()
        if found
    }


def _thinned(found: list[_Row]) -> list[_Row]:
    """Return at most _MOST_ROWS of the rows, including the first and the last row."""
    if len(found) <= _MOST_ROWS:
        return found
    return [found[round(position * (len(found) - 1) / (_MOST_ROWS - 1))] for position in range(_MOST_ROWS)]


def _row(candidate: Candidate) -> list[str]:
    return [
        _TITLES[candidate.strategy],
        in_words(candidate.layout),
        f"{candidate.gpus}",
        f"{candidate.batch}",
        f"{candidate.tokens_per_s_per_user:.1f}",
        f"{candidate.tokens_per_s_per_gpu:.2f}",
        f"{candidate.memory_bytes_per_gpu / 1e9:.1f}",
    ]


def _ratio(crossover: Crossover) -> str:
    if crossover.helix_s is None or crossover.others_s is None:
        return "-" if crossover.helix_s is None else "only KVP fits"
    return f"{crossover.helix_s / crossover.others_s:.2f}" + (f" (KVP {crossover.kvp})" if crossover.pays else "")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table
