"""The answer of a plan in at most 25 lines: what to run, how it compares, what limits it, and what the words mean."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from longhelix.perf.cost_item import CostItem
from longhelix.perf.layouts import Layouts
from longhelix.perf.step import decode_items
from longhelix.plan.answer import Plan
from longhelix.plan.candidate import as_layouts, drafts_in_words, in_words
from longhelix.plan.choice import Choice
from longhelix.plan.service import ServiceLoad, service
from longhelix.plan.space import OVERLAPPED, STRATEGIES
from longhelix.units import count, digits, duration, size

Line = tuple[str, str]  # a label and a text
_TITLES = {strategy.name: strategy.title for strategy in STRATEGIES}
_ROUNDING = 1e-6  # relative difference of throughputs that counts as equal
_WORDS = (
    "KVP splits each request's KV cache over ranks, TPA splits the heads of attention, and TPF splits the FFN. HOP-B "
    "overlaps the exchange after attention with attention."
)


def headline(plan: Plan, model: str) -> str:
    """Return the answer in one sentence, or the closest layout if nothing meets all targets."""
    on, choice = f"{model} on {plan.question.setting.system.name}", plan.answer
    if choice is None:
        return f"{on}: no configuration meets all targets."
    words = (
        f"{_layout(choice)}, {_users(choice)} at {duration(choice.ttl_s)} per token, first token after "
        f"{duration(choice.ttft_s)}"
    )
    if plan.best is not None:
        return f"{on}: {words}."
    return f"{on}: no configuration meets all targets. Closest: {words}; misses {', '.join(choice.violates)}."


def _users(choice: Choice) -> str:
    return "1 user" if choice.users == 1 else f"{choice.users:,} users"


def lines(plan: Plan) -> list[Line]:
    """Return the answer as labels and texts, the most important line first."""
    choice = plan.answer
    if choice is None:
        return [("Asked", _asked(plan)), ("Terms", _WORDS)]
    return [
        ("Asked", _asked(plan)),
        *_choice(plan, choice),
        *(("Also close", f"{_layout(each)}; misses {', '.join(each.violates)}") for each in plan.nearest[1:]),
        *_compared(plan),
        ("Limited by", limit(plan, choice)),
        *_disaggregated(plan),
        ("Terms", _WORDS),
    ]


def _asked(plan: Plan) -> str:
    """Return the requests and the targets of the question."""
    question = plan.question
    targets = [f"{count(question.context)} tokens", f"up to {question.max_gpus} GPUs"]
    if question.users > 1:
        targets.append(f"at least {question.users:,} users")
    if question.rate_per_s is not None:
        targets.append(f"{digits(question.rate_per_s)} requests/s")
    for name, seconds in (
        ("TPOT", question.ttl_s),
        ("time between tokens during a prefill", question.ttl_with_prefill_s),
        ("TTFT", question.ttft_s),
    ):
        if seconds is not None:
            targets.append(f"{name} at most {duration(seconds)}")
    if question.fewest_gpus:
        targets.append("the fewest GPUs")
    return ", ".join(targets)


def _layout(choice: Choice) -> str:
    copies = f"{choice.replicas} x " if choice.replicas > 1 else ""
    gpus = "1 GPU" if choice.gpus == 1 else f"{choice.gpus} GPUs"
    return f"{_TITLES[choice.strategy]} ({copies}{in_words(choice.layout)}) on {gpus}"


def _choice(plan: Plan, choice: Choice) -> Iterator[Line]:
    rate = "" if choice.rate_per_s is None else f", {digits(choice.rate_per_s)} requests/s"
    yield "Users", f"{choice.users:,} at the same time{rate}"
    drafts = f"; {drafts_in_words(choice.draft_tokens, choice.accepted_tokens)}" if choice.draft_tokens else ""
    with_chunk = f"{duration(choice.ttl_p95_s)} in steps that also compute a chunk of a prompt"
    yield "TPOT", f"{duration(choice.ttl_s)}; {with_chunk}{drafts}"
    prompt = max(kind.input_tokens for kind in _load(plan).kinds)
    yield (
        "TTFT",
        f"{duration(choice.ttft_s)} for a prompt of {count(prompt)} tokens, in chunks of {count(choice.chunk_tokens)}",
    )
    yield (
        "Throughput",
        f"{digits(choice.tokens_per_s_per_gpu)} tokens/s/GPU, {digits(choice.tokens_per_s_per_user)} tokens/s/user",
    )
    yield (
        "Memory",
        f"{size(choice.memory_bytes_per_gpu)} per GPU, {size(choice.headroom_bytes)} free on the fullest",
    )
    if choice.cost_per_million_tokens is not None:
        cost = digits(choice.cost_per_million_tokens)
        yield "Cost", f"{cost} per million tokens, at {plan.question.gpu_hour:g} per GPU hour"


def _load(plan: Plan) -> ServiceLoad:
    question = plan.question
    return ServiceLoad(question.setting, question.context, question.demand, question.ttft_s)


def _compared(plan: Plan) -> Iterator[Line]:
    """Compare Helix with the best other strategy, in decode: at the TPOT target, and the largest gain anywhere."""
    gain, found, ttl_s = plan.headline, plan.at_ttl, plan.question.ttl_s
    if gain is None:
        return
    texts = []
    if found is not None and ttl_s is not None:
        at, ours, others = f"at {duration(ttl_s)}", found.gpu_tokens_per_s, found.base_gpu_tokens_per_s
        if found.ratio is not None:
            texts.append(
                f"{at}, Helix has {digits(found.ratio)}x the tokens/s/GPU of the best other strategy ({digits(ours)} "
                f"and {digits(others)})"
            )
        else:
            texts.append(f"{at}, only Helix runs" if ours else f"{at}, neither Helix nor another strategy runs")
    texts.append(
        f"largest gain of Helix {digits(gain.throughput)}x tokens/s/GPU, at {digits(gain.at_user_tokens_per_s)} "
        f"tokens/s/user; its maximum tokens/s/user is {digits(gain.interactivity)}x"
    )
    yield "Compared", "; ".join(texts) + " (decode only)"


def _disaggregated(plan: Plan) -> Iterator[Line]:
    """Describe separate instances for prefill and decode, compared with the best layout that does both."""
    found, best = plan.disaggregated, plan.best
    if found is None:
        return
    over = "" if best is None else f" ({digits(found.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu)}x the answer)"
    cost = "" if found.cost_per_million_tokens is None else f", {digits(found.cost_per_million_tokens)} per million"
    yield (
        "Disaggregated",
        f"prefill on {found.prefills} x {in_words(found.prefill_layout)} with chunks of {count(found.chunk_tokens)}, "
        f"decode on {found.decodes} x {in_words(found.decode_layout)} with {found.batch} requests each, {found.gpus} "
        f"GPUs: {digits(found.rate_per_s)} requests/s, TTFT {duration(found.ttft_s)} with {duration(found.transfer_s)} "
        f"for the KV, TPOT {duration(found.ttl_s)}, {digits(found.tokens_per_s_per_gpu)} tokens/s/GPU{over}{cost}",
    )


def limit(plan: Plan, choice: Choice) -> str:
    """Describe why the choice has no more users, and what takes most of its decode step."""
    load, layouts = _load(plan), as_layouts(choice.layout, hop_b=choice.strategy in OVERLAPPED)
    items = decode_items(load.setting, layouts, float(choice.batch), load.kv_tokens)
    total_s = sum(_seconds(item) for item in items)
    largest = sorted(items, key=_seconds, reverse=True)[:3]
    shares = ", ".join(f"{item.name} {100 * _seconds(item) / total_s:.0f}%" for item in largest)
    return f"{_next_user(plan, load, layouts, choice)}; most of a decode step is {shares}"


def _seconds(item: CostItem) -> float:
    return float(item.seconds[0])


def _next_user(plan: Plan, load: ServiceLoad, layouts: Layouts, choice: Choice) -> str:
    """Describe what one more request per stage and group would exceed."""
    question, chunk = plan.question, np.array([float(choice.chunk_tokens)])
    more = choice.batch + layouts.pp * layouts.dp
    short_bytes = float((load.memory_bytes(layouts, more, chunk) - load.setting.capacity_bytes(layouts))[0])
    if short_bytes > 0:
        return f"memory: {more[0]:.0f} requests lack {size(short_bytes)} per GPU"
    now = service(load, layouts, np.array([float(choice.batch)]), chunk)
    then = service(load, layouts, more, chunk)
    for name, seconds, target_s in (
        ("TPOT", then.ttl_s, question.ttl_s),
        ("steps with a chunk", then.ttl_p95_s, question.ttl_with_prefill_s),
        ("TTFT", then.ttft_s, question.ttft_s),
    ):
        if target_s is not None and seconds[0] > target_s:
            return f"{name}: {more[0]:.0f} requests take {duration(float(seconds[0]))}"
    if service(replace(load, ttft_s=None), layouts, more, chunk).users[0] > then.users[0] * (1 + _ROUNDING):
        return "TTFT: with more requests, prompts wait too long"
    if question.rate_per_s is not None or question.fewest_gpus:
        return "the question: more GPUs or users were not asked for"
    if then.tokens_per_s[0] <= now.tokens_per_s[0] * (1 + _ROUNDING):
        return f"compute: {more[0]:.0f} requests have no more tokens/s"
    if question.has_targets:
        return "the batch sizes that the search tries"
    return "the balance of tokens/s/user and tokens/s/GPU, because the question has no target"
