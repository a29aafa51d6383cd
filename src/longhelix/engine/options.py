"""The settings of an engine. Each setting is declared once, with its type, default, check and documentation.

Python, the command line, YAML files and benchmarks all read the settings from here.
"""

import difflib
import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from longhelix.errors import UserError
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec import ACTIVATION_DTYPES, DTYPES, KV_DTYPES, WEIGHT_DTYPES
from longhelix.values import above_zero, flag, one_of, refused, seconds, text, weight, whole

_MOST_POOL_TOKENS = 2**62  # total over all ranks
_MOST_RUNNING = 2**16
# Largest adaptive chunk. Larger chunks use more memory but do not make matrix products faster.
MOST_CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class Words:
    """A check that accepts only the given words."""

    known: tuple[str, ...]

    def __call__(self, name: str, value: object) -> str:
        return one_of(name, value, self.known)


@dataclass(frozen=True)
class Count:
    """A check that accepts only integers."""

    least: int = 1
    most: int = MOST_TOKENS
    tokens: bool = True  # True if the value counts tokens; the command line accepts token counts with a unit

    def __call__(self, name: str, value: object) -> int:
        return whole(name, value, self.least, self.most)


@dataclass(frozen=True)
class CountOrAuto:
    """A check that accepts a number of tokens or "auto"."""

    most: int = MOST_TOKENS

    def __call__(self, name: str, value: object) -> int | str:
        if isinstance(value, str) and str.__str__(value) == "auto":
            return "auto"
        return whole(name, value=value, least=1, most=self.most, note=', or "auto"')


def weights(name: str, value: object) -> dict[str, float]:
    """Check the weights of clients and return them by client."""
    if not isinstance(value, Mapping):
        raise refused(name, value, 'numbers by client, such as {"batch": 0.5}')
    return {text("a client", client): weight(f"the weight of {client!r}", each) for client, each in value.items()}


def rope_settings(name: str, value: object) -> dict[str, Any]:
    """Check that RoPE settings are a mapping. The model's spec checks their values."""
    if not isinstance(value, Mapping):
        raise refused(name, value, 'settings by name, such as {"rope_type": "linear", "factor": 2}')
    return dict(value)


def compilation(name: str, value: object) -> dict[str, Any]:
    """Check compilation settings in vLLM's format.

    Returns the split points and the settings of the pass in one flat mapping.
    """
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
    """Check a path and return it as a `Path`."""
    if not isinstance(value, str | os.PathLike):
        raise refused(name, value, "a path")
    return Path(value)


def endpoint(name: str, value: object) -> str:
    """Check an address that a ZeroMQ socket can bind."""
    given = text(name, value)
    scheme, _, place = given.partition("://")
    host, _, port = place.rpartition(":")
    if scheme == "ipc" and place:
        return given
    if scheme == "tcp" and _is_host(host) and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536:
        return given
    raise refused(
        name,
        value,
        "tcp://ADDRESS:PORT with an IP address of this host or * for all of them, such as tcp://127.0.0.1:5557, or to "
        "ipc://PATH",
    )


def _is_host(host: str) -> bool:
    try:
        return host == "*" or (ipaddress.ip_address(host.strip("[]")).version == 6) == host.startswith("[")
    except ValueError:
        return False


Check = Callable[[str, object], Any]


def _setting(default: Any, check: Check, documentation: str, flag: str = "", negative: str = "") -> Any:
    """Return the dataclass field of one setting.

    Args:
        default: value of the setting if the user does not give one.
        check: validates a value and returns it as a plain Python value.
        documentation: help text on the command line.
        flag: name of the setting on the command line, if it differs from the field's name.
        negative: name of the command line flag that sets the setting to False.
    """
    metadata = {"check": check, "documentation": documentation, "flag": flag, "negative": negative}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engine settings as a user gives them. If a setting is None, the engine chooses its value.

    This class checks each value alone. The engine also checks at its start that the settings fit the model, the layout
    and the machine.

    Raises:
        UserError: a value is invalid for every engine.
    """

    dtype: str | None = _setting(
        None, Words(DTYPES), "Dtype of activations and weights. [default: the checkpoint's; bfloat16 for GGUF]"
    )
    weight_dtype: str | None = _setting(
        None,
        Words(WEIGHT_DTYPES),
        "Dtype of the weight matrices. Formats of 8 and 4 bits quantise those of a plain checkpoint while loading, to "
        "save memory and bandwidth. Weights of a GGUF file are expanded first. "
        "[default: as the checkpoint packs them, or else the value of --dtype]",
    )
    activation_dtype: str | None = _setting(
        None,
        Words(tuple(ACTIVATION_DTYPES)),
        "int8 and fp8 round the inputs of matrix products to 8 bits as well, for faster but less exact prompts and "
        "batches. int8 needs CPUs. It keeps packed weights whose codes are integers, and makes int8 of the weights of "
        "checkpoints that are not packed. fp8 needs an FP8 checkpoint and GPUs that multiply FP8. "
        "[default: the value of --dtype]",
    )
    kv_dtype: str | None = _setting(
        None,
        Words(KV_DTYPES),
        "Dtype of the KV cache. int8, nvfp4 and int4 hold more tokens but are less exact. [default: the value of "
        "--dtype]",
    )
    attention_dtype: str | None = _setting(
        None,
        Words(("int8",)),
        "int8 rounds queries and softmax weights to 8 bits in attention over int8 or int4 KV, which is faster but less "
        "exact. Needs a CPU with AVX-512 VNNI, VBMI and BF16. [default: no rounding]",
    )
    max_model_len: int | None = _setting(
        None,
        Count(),
        "Maximum number of tokens in prompt and answer together. [default: the model's maximum context length]",
    )
    rope_scaling: Mapping[str, Any] | None = _setting(
        None,
        rope_settings,
        'RoPE scaling as a JSON object, such as {"rope_type": "yarn", "factor": 4}. Set it to extend the context of a '
        "model. [default: the model's own settings]",
    )
    kv_cache_tokens: int | str | None = _setting(
        None,
        CountOrAuto(most=_MOST_POOL_TOKENS),
        "Capacity of the KV cache in tokens, over all KVP ranks. auto takes max-running requests of max-model-len, "
        "limited by free memory (half of it on CPUs). [default: one request of max-model-len]",
    )
    policy: str = _setting(
        "fcfs",
        Words(POLICIES),
        "Which prompt runs next: first come first served (fcfs), earliest deadline first (edf), shortest remaining "
        "prefill first (srpt), or least slack relative to prompt length (lars).",
    )
    chunk_tokens: int | str = _setting(
        "auto",
        CountOrAuto(),
        "Maximum number of prompt tokens per step. auto takes the number that the performance model predicts to finish "
        f"within the TBT target, at most {MOST_CHUNK_TOKENS}.",
    )
    tbt_target_s: float | None = _setting(
        None,
        seconds,
        "Target time between two tokens of a running request while prompts are prefilled in the same steps. Used by "
        "--chunk-tokens auto. [default: 80 ms, or twice the time of a step without prompts]",
        flag="tbt-target",
    )
    slo_scale: float = _setting(
        2.0,
        above_zero,
        "Deadline for the first token of a request that sets none, as a multiple of its predicted prefill time when "
        "it runs alone. The deadline is at least 1 s.",
    )
    client_weights: Mapping[str, float] | None = _setting(
        None,
        weights,
        'Relative shares of competing clients, as a JSON object such as {"batch": 0.5}. [default: 1 each]',
    )
    prefix_cache: bool = _setting(
        True,
        flag,
        "Keep the KV of earlier requests, for new requests that start with the same tokens. Turn it off to measure "
        "without reuse.",
        negative="no-prefix-cache",
    )
    swap_tokens: int = _setting(
        0,
        Count(least=0, most=_MOST_POOL_TOKENS),
        "Tokens of evicted KV to keep in pinned memory (GPUs) or temporary files (CPUs), over all KVP ranks. KV is "
        "kept only if reading it back is predicted to be faster than computing it again.",
    )
    max_running: int = _setting(
        64,
        Count(most=_MOST_RUNNING, tokens=False),
        "Maximum number of requests that run at the same time. Others wait.",
    )
    block_tokens: int = _setting(16, Count(tokens=False), "Number of tokens in one KV block.")
    placement: str | None = _setting(
        None,
        Words((*PLACEMENTS, "auto")),
        "How a request's KV blocks are spread over KVP ranks. auto keeps short requests local, stripes long ones, and "
        "uses growing for those that may outgrow the KVP threshold. [default: striped; auto if --kvp-threshold is set]",
    )
    kvp_threshold_tokens: int | None = _setting(
        None,
        Count(least=0),
        "Longest request, in tokens, that stays on one KVP rank. [default with --placement auto: the length at which "
        "the performance model predicts a 5% loss of speed]",
        flag="kvp-threshold",
    )
    growth_limit_tokens: int | str = _setting(
        4096,
        CountOrAuto(),
        "With --placement growing, number of tokens on one rank before the next rank joins. auto takes the number "
        "that the performance model predicts a decode step to read in half of the request's time between tokens.",
    )
    batch_invariant: bool = _setting(
        False,
        flag,
        "Make answers bit-identical for every batch, chunk size and thread count. Settings that would break this are "
        "rejected.",
    )
    device: str = _setting(
        "auto", Words(("auto", "cpu", "cuda")), "Device for the ranks. auto uses GPUs if there is one for each rank."
    )
    execution: str = _setting(
        "recorded",
        Words(("recorded", "compiled", "eager")),
        "How layers run: recorded replays a tape (CPU) or CUDA graphs, compiled uses torch.compile, eager runs op by "
        "op. Use eager for debugging.",
    )
    enable_sp: bool | None = _setting(
        None,
        flag,
        "Run the sequence-parallel compiler pass, which shards the tokens of prompt steps between matrix products. "
        "Needs --execution compiled. [default: off; on for dense models if --sp-min-token-num is set]",
        negative="no-enable-sp",
    )
    sp_min_token_num: int | None = _setting(
        None, Count(), "Minimum number of tokens in a sequence-parallel step. [default: 1000; 1 with experts]"
    )
    flash_comm_v1: bool = _setting(
        False,
        flag,
        "Sequence parallelism inside the layers, for any --execution, in steps with prompts and at least "
        "sp-min-token-num tokens. Layers gather latents and router scores instead of hidden states.",
    )
    compilation_config: Mapping[str, Any] | None = _setting(
        None,
        compilation,
        "vLLM's JSON form of --enable-sp and --sp-min-token-num, such as "
        '{"pass_config": {"enable_sp": true, "sp_min_token_num": 512}}. '
        '"compile_ranges_split_points" lists the token counts at which a separate compiled graph starts.',
    )
    attention: str = _setting(
        "own",
        Words(("own", "flashinfer")),
        "Decode attention kernel on GPUs. flashinfer needs the package flashinfer-python.",
    )
    hop_b: int | None = _setting(
        None,
        Count(tokens=False),
        "Number of parts that HOP-B splits a batch into, or fewer for small batches, to overlap the exchange of one "
        "part with the attention of the next; 1 turns it off. [default: the number that the performance model predicts "
        "to be fastest, for each step]",
    )
    nnodes: int | None = _setting(
        None,
        Count(tokens=False, most=1024),
        "Number of hosts that run the ranks of the layout. Run the same command on each host, with its --node-rank. "
        "[default: 1, or what torchrun or srun has started]",
    )
    node_rank: int | None = _setting(
        None,
        Count(least=0, tokens=False, most=1023),
        "Number of this host, from 0. Host 0 runs the engine and answers requests; the others only run ranks.",
    )
    master_addr: str | None = _setting(None, text, "Name or IPv4 address of host 0, as the other hosts reach it.")
    master_port: int = _setting(
        29501, Count(tokens=False, most=65535), "TCP port on which host 0 waits for the other hosts."
    )
    rank_mapping: str | None = _setting(
        None,
        text,
        "Ranks of each host, such as 0-3,8;4-7. [default: consecutive ranks on each host, as many on all of them as "
        "possible]",
    )
    interface: str | None = _setting(
        None,
        text,
        "Network interface that connects this host to the others, such as eth0. [default: the one on the way to "
        "--master-addr]",
    )
    cluster_secret_file: Path | None = _setting(  # noqa: RUF009 - `_setting` returns a field
        None,
        path,
        "File with a secret that all hosts share, which encrypts the connections between engine and hosts. [default: "
        "$LONGHELIX_CLUSTER_SECRET]",
    )
    allow_without_secret: bool = _setting(
        False,
        flag,
        "Connect hosts without a cluster secret. Anybody in the network can then send messages to the ranks.",
    )
    allow_without_key: bool = _setting(
        False,
        flag,
        "Accept HTTP clients and readers of KV events without a key on addresses that other machines can reach. Use it "
        "only behind a proxy that checks keys.",
    )
    kv_events_endpoint: str | None = _setting(
        None,
        endpoint,
        "Address at which to publish the changes of the prefix cache over ZeroMQ, in vLLM's form, such as "
        "tcp://127.0.0.1:5557. Routers use them to send each request to the server that has cached most of it. "
        "[default: no events]",
    )
    kv_events_replay_endpoint: str | None = _setting(
        None,
        endpoint,
        "Address at which routers ask for KV events that they have missed. [default: no replays]",
    )
    kv_events_topic: str | None = _setting(
        None,
        text,
        "Topic of KV events, which readers subscribe to. llm-d needs kv@POD@MODEL. [default: an empty topic]",
    )
    contexts_dir: Path | None = _setting(  # noqa: RUF009 - `_setting` returns a field
        None, path, "Folder of saved contexts. [default: longhelix/contexts in $XDG_DATA_HOME or ~/.local/share]"
    )
    trace: Path | None = _setting(  # noqa: RUF009 - `_setting` returns a field
        None,
        path,
        "File to write a timeline of every rank to, for chrome://tracing or ui.perfetto.dev. On GPUs this disables "
        "CUDA graphs, which is slower; compiled layers appear as one event.",
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
