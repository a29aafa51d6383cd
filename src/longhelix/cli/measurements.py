"""Table of measurements of one request."""

import statistics
from typing import Any

from rich.table import Table

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.result import Result
from longhelix.units import count, digits, duration, size


def fullest(load: list[list[int]]) -> str:
    """Describe the busiest expert of all layers: its number of rows, and the ratio to the mean over all experts."""
    rows = {(layer, expert): count for layer, counts in enumerate(load) for expert, count in enumerate(counts)}
    layer, expert = max(rows, key=rows.__getitem__)
    most, mean = rows[layer, expert], statistics.mean(rows.values())
    return f"{most} rows, {most / mean:.1f} times the mean (layer {layer}, expert {expert})"


def scattered(report: dict[str, Any]) -> str:
    """Describe how many all-reduces of compiled graphs the sequence-parallel pass turned into reduce-scatters."""
    before, after = (report["collectives"][when].get("all_reduce", 0) for when in ("before", "after"))
    why = "; --json gives the reasons for the others" if after else ""
    return f"{before - after} of {before} all-reduces in compiled graphs became reduce-scatters{why}"


def measurements(result: Result, config: EngineConfig) -> Table:
    """Return a table of the tokens, times and bytes of one request."""
    table = plain_table()

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("prompt tokens", f"{result.prompt_tokens}")
    if result.cached_tokens:
        row("cached prompt tokens", f"{result.cached_tokens}")
    row("new tokens", f"{len(result.token_ids)} ({result.finish_reason})")
    if result.ttft_s is not None:
        speed = digits(result.prompt_tokens / result.ttft_s)
        row("TTFT", f"{duration(result.ttft_s)} ({speed} prompt tokens/s)")
    if result.preemptions:
        row("preempted", f"{result.preemptions} times, {result.recomputed_tokens} tokens recomputed")
    if result.swapped_tokens:
        row("swapped in", f"{result.swapped_tokens} tokens")
    if result.moved_tokens:
        moved = f"{count(result.moved_tokens)} tokens, {size(result.moved_bytes)}, {duration(result.moved_s)}"
        row("moved between ranks", moved)
    if result.tbt_s:
        ttl_s = statistics.median(result.tbt_s)
        p95_s = sorted(result.tbt_s)[int(0.95 * (len(result.tbt_s) - 1))]
        row("TPOT", f"median {duration(ttl_s)}, p95 {duration(p95_s)}")
        row("decode", f"{digits(1 / ttl_s)} tokens/s")
    ranks = range(config.layout.world_size)
    kv_tokens = [result.kv_tokens_per_rank[config.layout.kvp_rank(rank)] for rank in ranks]
    kv_bytes = list(map(config.kv_bytes, ranks, kv_tokens))
    for rank in ranks:
        row(f"KV on rank {rank}", f"{count(kv_tokens[rank])} tokens, {size(kv_bytes[rank])}")
    sent = size(result.exchanged_bytes_per_token)
    row("exchanged", f"{sent} per token, sent by all ranks together in the exchanges after attention")
    if result.hop_b.parts > 1:
        exposed_s = result.hop_b.exposed_s
        waited = "" if exposed_s is None else f", {duration(exposed_s)} not hidden by attention"
        row("HOP-B", f"up to {result.hop_b.parts} parts, {result.hop_b.exchanges} exchanges per layer{waited}")
    if result.tbt_s:
        weight_bytes = sum(config.weight_bytes_read(rank) for rank in ranks)
        read_bytes = weight_bytes + sum(kv_bytes)
        row("achieved", f"{size(read_bytes / ttl_s)}/s ({size(weight_bytes)} of weights and the final KV, per TPOT)")
    return table


def plain_table() -> Table:
    """Create a table for names and values, without a header and borders."""
    return Table(show_header=False, box=None, pad_edge=False)
