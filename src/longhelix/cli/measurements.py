"""Table of measurements of one request."""

import statistics
from typing import Any

from rich.table import Table

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.result import Result


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
        row("TTFT", f"{result.ttft_s:.3f} s ({result.prompt_tokens / result.ttft_s:.0f} prompt tokens/s)")
    if result.preemptions:
        row("preempted", f"{result.preemptions} times, {result.recomputed_tokens} tokens recomputed")
    if result.swapped_tokens:
        row("swapped in", f"{result.swapped_tokens} tokens")
    if result.moved_tokens:
        row("moved between ranks", f"{result.moved_tokens} tokens, {result.moved_bytes} bytes, {result.moved_s:.3f} s")
    if result.tbt_s:
        ttl_s = statistics.median(result.tbt_s)
        p95_s = sorted(result.tbt_s)[int(0.95 * (len(result.tbt_s) - 1))]
        row("TTL", f"median {1e3 * ttl_s:.1f} ms, p95 {1e3 * p95_s:.1f} ms")
        row("decode", f"{1 / ttl_s:.2f} tokens/s")
    ranks = range(config.layout.world_size)
    kv_tokens = [result.kv_tokens_per_rank[config.layout.kvp_rank(rank)] for rank in ranks]
    kv_bytes = [tokens * config.kv_bytes_per_token(rank) for rank, tokens in zip(ranks, kv_tokens, strict=True)]
    for rank in ranks:
        row(f"KV on rank {rank}", f"{kv_tokens[rank]} tokens, {kv_bytes[rank]} bytes")
    row("exchanged", f"{result.exchanged_bytes_per_token:.0f} bytes/token, over all ranks")
    if result.hop_b.parts > 1:
        waited = "" if result.hop_b.exposed_s is None else f", {result.hop_b.exposed_s:.3f} s not hidden by attention"
        row("HOP-B", f"up to {result.hop_b.parts} parts, {result.hop_b.exchanges} exchanges per layer{waited}")
    if result.tbt_s:
        weight_bytes = sum(config.weight_bytes_read(rank) for rank in ranks)
        read_bytes = weight_bytes + sum(kv_bytes)
        row("achieved", f"{read_bytes / ttl_s / 1e9:.2f} GB/s (weights of {weight_bytes} bytes and final KV, per TTL)")
    return table


def plain_table() -> Table:
    """Create a table for names and values, without a header and borders."""
    return Table(show_header=False, box=None, pad_edge=False)
