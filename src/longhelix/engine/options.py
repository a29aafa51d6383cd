"""The settings of an engine. Each one is declared once, with its type, default, check and documentation.

Python, the command line, YAML files and benchmarks all read the settings from here.
"""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from longhelix.errors import UserError
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec import DTYPES, KV_DTYPES, WEIGHT_DTYPES
from longhelix.values import above_zero, flag, one_of, refused, seconds, text, weight, whole

_MOST_POOL_TOKENS = 2**62  # over all ranks
_MOST_RUNNING = 2**16
# Largest adaptive chunk. More tokens use more memory and make no matrix product faster.
MOST_CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class Words:
    """Check that accepts one of a few words."""

    known: tuple[str, ...]

    def __call__(self, name: str, value: object) -> str:
        return one_of(name, value, self.known)


@dataclass(frozen=True)
class Count:
    """Check that accepts a whole number."""

    least: int = 1
    most: int = MOST_TOKENS
    tokens: bool = True  # whether it counts tokens; the command line accepts those with a unit

    def __call__(self, name: str, value: object) -> int:
        return whole(name, value, self.least, self.most)


@dataclass(frozen=True)
class CountOrAuto:
    """Check that accepts a number of tokens, or "auto"."""

    most: int = MOST_TOKENS

    def __call__(self, name: str, value: object) -> int | str:
        if isinstance(value, str) and str.__str__(value) == "auto":
            return "auto"
        return whole(name, value, 1, self.most, ', or "auto"')


def weights(name: str, value: object) -> dict[str, float]:
    """Check the weights of clients. Returns them by client."""
    if not isinstance(value, Mapping):
        raise refused(name, value, 'numbers by client, such as {"batch": 0.5}')
    return {text("a client", client): weight(f"the weight of {client!r}", each) for client, each in value.items()}


def rope_settings(name: str, value: object) -> dict[str, Any]:
    """Check that RoPE settings are a mapping. The model's spec checks their values."""
    if not isinstance(value, Mapping):
        raise refused(name, value, 'settings by name, such as {"rope_type": "linear", "factor": 2}')
    return dict(value)


def compilation(name: str, value: object) -> dict[str, Any]:
    """Check settings as vLLM spells them. Returns split points and the settings of the pass, in one flat mapping."""
    example = 'settings such as {"pass_config": {"enable_sp": true}}'
    if not isinstance(value, Mapping):
        raise refused(name, value, example)
    check_names(value, ("pass_config", "compile_ranges_split_points"))
    passes, splits = value.get("pass_config", {}), value.get("compile_ranges_split_points", ())
    if not isinstance(passes, Mapping):
        raise refused("pass_config", passes, 'settings such as {"enable_sp": true}')
    check_names(passes, ("enable_sp", "sp_min_token_num"))
    if isinstance(splits, str) or not isinstance(splits, Sequence):
        raise refused("compile_ranges_split_points", splits, "a list of token counts, such as [512, 4096]")
    found = {"compile_ranges_split_points": sorted({whole("a split point", split, 1, MOST_TOKENS) for split in splits})}
    if passes.get("enable_sp") is not None:
        found["enable_sp"] = flag("enable_sp", passes["enable_sp"])
    if passes.get("sp_min_token_num") is not None:
        found["sp_min_token_num"] = whole("sp_min_token_num", passes["sp_min_token_num"], 1, MOST_TOKENS)
    return found


def path(name: str, value: object) -> Path:
    """Check a path."""
    if not isinstance(value, str | os.PathLike):
        raise refused(name, value, "a path")
    return Path(value)


Check = Callable[[str, object], Any]


def _setting(default: Any, check: Check, documentation: str, flag: str = "", negative: str = "") -> Any:
    """Return the field of one setting.

    Args:
        default: its value if the user does not give one.
        check: validates a value and returns it as a plain Python value.
        documentation: its help on the command line.
        flag: its name on the command line, if that differs from the field's.
        negative: the name of the command line flag that sets it to False.
    """
    metadata = {"check": check, "documentation": documentation, "flag": flag, "negative": negative}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings as a user gives them. None leaves the choice to the engine.

    The engine checks at its start whatever depends on the model, the layout or the machine.

    Raises:
        UserError: a value is invalid for every engine.
    """

    dtype: str | None = _setting(
        None, Words(DTYPES), "Of activations and weights. [default: the checkpoint's; bfloat16 for GGUF]"
    )
    weight_dtype: str | None = _setting(
        None, Words(WEIGHT_DTYPES), "int8 or int4 to quantise the weights of products. [default: dtype]"
    )
    activation_dtype: str | None = _setting(
        None,
        Words(("int8",)),
        "int8: products round their inputs to 8 bits, too, and multiply integers: faster for prompts and batches, less "
        "exact; with weight-dtype int8, on CPUs. [default: dtype]",
    )
    kv_dtype: str | None = _setting(None, Words(KV_DTYPES), "The KV cache's dtype. [default: dtype]")
    attention_dtype: str | None = _setting(
        None,
        Words(("int8",)),
        "int8: attention over int8 and int4 KV rounds queries and softmax weights to 8 bits, which is faster and less "
        "exact; on CPUs with AVX-512 and its VNNI, VBMI and BF16. [default: as exact as the kernels have it]",
    )
    max_model_len: int | None = _setting(
        None, Count(), "Most tokens of prompt and answer. [default: the model's positions]"
    )
    rope_scaling: Mapping[str, Any] | None = _setting(
        None, rope_settings, 'RoPE settings, such as {"rope_type": "yarn", "factor": 4}. [default: the model\'s own]'
    )
    kv_cache_tokens: int | str | None = _setting(
        None,
        CountOrAuto(most=_MOST_POOL_TOKENS),
        "Tokens that the KV cache holds over all KVP ranks; auto: max-running requests of max-model-len, or as many as "
        "memory has room for, on CPUs half of what is free. [default: one request of max-model-len]",
    )
    policy: str = _setting(
        "fcfs",
        Words(POLICIES),
        "Which request's prompt runs next: that which came first, that with the earliest deadline, that with the least "
        "left, or that with the least slack beside its length (lars).",
    )
    chunk_tokens: int | str = _setting(
        "auto",
        CountOrAuto(),
        "Prompt tokens that run in one step; auto: as many as it computes within the TBT target by the performance "
        f"model, at most {MOST_CHUNK_TOKENS}.",
    )
    tbt_target_s: float | None = _setting(
        None,
        seconds,
        "Time between two tokens that adaptive chunks leave to requests that decode beside them. [default: 80 ms, or "
        "twice what these take alone]",
        flag="tbt-target",
    )
    slo_scale: float = _setting(
        2.0, above_zero, "Deadline of a request without one: so many predicted prefills of it alone, at least 1 s."
    )
    client_weights: Mapping[str, float] | None = _setting(
        None, weights, 'Shares of clients that compete, such as {"batch": 0.5}. [default: 1 each]'
    )
    prefix_cache: bool = _setting(
        True, flag, "Keep the KV of what has run, for requests that begin alike.", negative="no-prefix-cache"
    )
    swap_tokens: int = _setting(
        0,
        Count(least=0, most=_MOST_POOL_TOKENS),
        "Tokens over all KVP ranks whose KV the prefix cache keeps elsewhere once others need its room, where that is "
        "predicted to cost less than computing it again: in pinned memory for GPUs, else in temporary files.",
    )
    max_running: int = _setting(
        64, Count(most=_MOST_RUNNING, tokens=False), "Requests that run at once; others wait for one of them to end."
    )
    block_tokens: int = _setting(16, Count(tokens=False), "Tokens of a KV block.")
    placement: str | None = _setting(
        None,
        Words((*PLACEMENTS, "auto")),
        "Which KVP rank takes a request's next KV block; auto: short requests are local, long ones striped, those that "
        "may outgrow the KVP threshold growing. [default: striped; auto where a KVP threshold is set]",
    )
    kvp_threshold_tokens: int | None = _setting(
        None,
        Count(least=0),
        "Tokens up to which a request stays on one KVP rank. [default with placement auto: as many as cost it 5% of "
        "its speed by the cost model]",
        flag="kvp-threshold",
    )
    growth_limit_tokens: int | str = _setting(
        4096,
        CountOrAuto(),
        "With growing placement: tokens on a rank before the next one joins; auto: as many as a request's own decode "
        "reads in half of its time between tokens by the performance model.",
    )
    batch_invariant: bool = _setting(
        False,
        flag,
        "Refuse what would let a request's bits depend on its batch, its chunks or the number of threads.",
    )
    device: str = _setting(
        "auto", Words(("auto", "cpu", "cuda")), "Where ranks run; auto: on GPUs where there is one for each rank."
    )
    execution: str = _setting(
        "recorded",
        Words(("recorded", "compiled", "eager")),
        "Layers from tapes (CPU) or CUDA graphs, compiled by torch.compile, or op by op.",
    )
    enable_sp: bool | None = _setting(
        None,
        flag,
        "Sequence parallelism in compiled layers: steps with prompts keep token shards between products. [default: "
        "off, but on for dense models where sp-min-token-num is set]",
        negative="no-enable-sp",
    )
    sp_min_token_num: int | None = _setting(
        None, Count(), "The fewest tokens of a step that is sequence-parallel. [default: 1000; 1 with experts]"
    )
    flash_comm_v1: bool = _setting(
        False,
        flag,
        "Sequence parallelism by the layers themselves, compiled or not: steps with prompts keep token shards, from "
        "sp-min-token-num on; latents and router scores are gathered in place of hidden states.",
    )
    compilation_config: Mapping[str, Any] | None = _setting(
        None,
        compilation,
        'The same as vLLM spells it, such as {"pass_config": {"enable_sp": true, "sp_min_token_num": 512}}, and '
        '"compile_ranges_split_points": token counts from which on steps have a compiled graph of their own.',
    )
    attention: str = _setting(
        "own",
        Words(("own", "flashinfer")),
        "On GPUs, whose decode attention: the package flashinfer-python has one as well.",
    )
    hop_b: int | None = _setting(
        None,
        Count(tokens=False),
        "HOP-B: the most parts of a batch, of which each is exchanged while the next attends; 1 is off. [default: for "
        "each step as many as take the fewest seconds by the performance model]",
    )
    contexts_dir: Path | None = _setting(  # noqa: RUF009 - `_setting` returns a field
        None, path, "The folder of saved contexts. [default: longhelix/contexts in $XDG_DATA_HOME or ~/.local/share]"
    )
    trace: Path | None = _setting(  # noqa: RUF009 - `_setting` returns a field
        None,
        path,
        "Write what every rank did from when to when, for chrome://tracing or ui.perfetto.dev. Compiled layers are one "
        "event. On GPUs all others run op by op, without CUDA graphs, which is slower.",
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                object.__setattr__(self, setting.name, setting.metadata["check"](setting.name, value))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return options from settings by name. Raises UserError for an unknown name."""
        check_names(settings, [setting.name for setting in fields(cls)])
        return cls(**settings)


def check_names(settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise UserError for a name that is not in `known`. The error suggests the nearest known name."""
    known = sorted(known)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            instead = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
            raise UserError(f"unknown setting {name!r}: {instead}", "unknown_setting")
