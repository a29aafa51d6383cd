"""`longhelix generate`: one prompt in, the answer and its measurements out."""

import json as json_module
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from longhelix.cli.options import EngineFlags, ModelOptions, SamplingOptions, stderr
from longhelix.cli.values import Flag
from longhelix.engine.llm import LLM
from longhelix.engine.result import Result
from longhelix.errors import RequestError, UserError
from longhelix.runner.config import EngineConfig


def generate(
    model: ModelOptions,
    engine: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 - frozen
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    chat: Flag = False,
    json: Flag = False,
) -> None:
    """Answer one prompt: the text on standard output as it comes, its measurements on standard error.

    Parameters
    ----------
    prompt
        The prompt, fed as it is.
    prompt_file
        A UTF-8 file to read the prompt from, its last newline included.
    chat
        Apply the model's chat template: the prompt is what the user says.
    json
        Print one JSON object in place of the streamed text.
    """
    text = _prompt(prompt, prompt_file)
    params = sampling.params()
    with model.start(engine) as llm:
        prompt_ids = (
            llm.tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        )
        result = _run(llm, prompt_ids, params, echo=not json)
        load = llm.expert_load()
    if json:
        print(json_module.dumps(_as_json(result) | ({} if load is None else {"expert_load": load})))
    else:
        table = measurements(result, llm.config)
        if load is not None:
            table.add_row("fullest expert", fullest(load))
        stderr.print(table)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UserError("give one of --prompt and --prompt-file")
    if prompt is not None:
        return prompt
    try:
        return prompt_file.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{prompt_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{prompt_file} is not UTF-8 at byte {error.start}: convert it to UTF-8") from error


def _run(llm: LLM, prompt_ids: list[int], params, echo: bool) -> Result:
    for delta in llm.stream(prompt_ids, params):
        if echo:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        if delta.result is not None:
            result = delta.result
    if echo:
        print()
    if result.error is not None:
        raise RequestError(f"the request failed: {result.error}")
    return result


def _as_json(result: Result) -> dict:
    """The result's fields; logprobs only where they were asked for, an error only where there was one."""
    optional = ("logprobs", "error")
    return {name: value for name, value in asdict(result).items() if name not in optional or value is not None}


def fullest(load: list[list[int]]) -> str:
    """The expert with most rows, against the mean: of all experts of all layers that have some."""
    rows = {(layer, expert): count for layer, counts in enumerate(load) for expert, count in enumerate(counts)}
    layer, expert = max(rows, key=rows.__getitem__)
    most, mean = rows[layer, expert], statistics.mean(rows.values())
    return f"{most} rows, {most / mean:.1f} times the mean (layer {layer}, expert {expert})"


def measurements(result: Result, config: EngineConfig) -> Table:
    """A short table of what one request cost."""
    table = Table(show_header=False, box=None, pad_edge=False)

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("prompt tokens", f"{result.prompt_tokens}")
    row("new tokens", f"{len(result.token_ids)} ({result.finish_reason})")
    if result.ttft_s is not None:
        row("TTFT", f"{result.ttft_s:.3f} s ({result.prompt_tokens / result.ttft_s:.0f} prompt tokens/s)")
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
    row("exchanged", f"{result.exchanged_bytes_per_token:.0f} bytes/token, all ranks together")
    if result.hop_b.parts > 1:
        waited = "" if result.hop_b.exposed_s is None else f", {result.hop_b.exposed_s:.3f} s of them not hidden"
        row("HOP-B", f"up to {result.hop_b.parts} parts, {result.hop_b.exchanges} exchanges of each layer{waited}")
    if result.tbt_s:
        weight_bytes = sum(config.weight_bytes_read(rank) for rank in ranks)
        read_bytes = weight_bytes + sum(kv_bytes)
        row("achieved", f"{read_bytes / ttl_s / 1e9:.2f} GB/s (weights {weight_bytes} + KV bytes at the end, per TTL)")
    return table
