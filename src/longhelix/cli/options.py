"""Options that several commands share, and the objects that are built from these options."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from longhelix.cli.help import ANSWER, ENGINE, MODEL, RARE_ANSWER, rare
from longhelix.cli.layout_file import read_layout
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag, Seconds, Size, SizeOrAuto, tied_layout
from longhelix.compute.cache.context_folder import ContextFolder
from longhelix.compute.models.model_files import is_gguf, model_spec
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.hub.download import find
from longhelix.engine.llm import LLM
from longhelix.engine.options import (
    Count,
    CountOrAuto,
    EngineOptions,
    Words,
    compilation,
    endpoint,
    path,
    rope_settings,
    weights,
)
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.kv.windows import KVWindow
from longhelix.scheduler.request import MOST_TOKENS, SamplingParams
from longhelix.spec.layout import Layout, widest_ep
from longhelix.units import count, digits
from longhelix.values import above_zero, flag, seconds, text

stderr = Console(stderr=True)


_KINDS = {
    flag: bool,
    path: Path,
    text: str,
    endpoint: str,
    rope_settings: str,
    weights: str,
    compilation: str,
    seconds: Seconds,
    above_zero: float,
}


def _type(setting: Field) -> Any:
    """Return the annotated type of the flag for a setting. The default None means that the flag was not given."""
    check, help_text = setting.metadata["check"], setting.metadata["documentation"]
    if setting.default is not None and setting.default is not False:
        help_text += f" [default: {setting.default}]"
    kind: Any = _KINDS.get(check)
    if isinstance(check, Words):
        kind = Literal[check.known]
    elif isinstance(check, CountOrAuto):
        kind = SizeOrAuto
    elif isinstance(check, Count):
        kind = Size if check.tokens else int
    name, negative = setting.metadata["flag"], setting.metadata["negative"]
    named = {"name": f"--{name}"} if name else {}
    negative = f"--{negative}" if negative else ()
    group = ENGINE if setting.name in _COMMON else rare(ENGINE)
    parameter = Parameter(help=help_text, negative=negative, show_default=False, group=group, **named)
    return Annotated[kind | None, parameter]


def _flags(name: str, settings: Iterable[Field]) -> type:
    """Create a dataclass with one flag per setting. Flags that were not given are None."""
    flags = [(setting.name, _type(setting), None) for setting in settings]
    record = make_dataclass(name, flags, namespace={"__module__": __name__}, frozen=True, kw_only=True)
    return Parameter(name="*", group=ENGINE)(record)


# Engine options that `--help` shows. `--help-all` shows the others too.
_COMMON = (
    "weight_dtype",
    "kv_dtype",
    "max_model_len",
    "kv_cache_tokens",
    "policy",
    "max_running",
    "device",
)
_OBJECTS = {
    "rope_scaling": '{"rope_type": "linear", "factor": 2}',
    "client_weights": '{"batch": 0.5}',
    "compilation_config": '{"pass_config": {"enable_sp": true}}',
}
GenerationConfig = Literal["auto", "none"]
_GUIDES = ("json_object", "json_schema", "regex", "grammar", "choice")
_MEASURED = ("weight_dtype", "activation_dtype", "kv_dtype", "attention_dtype", "execution")
_HOSTS = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "interface",
    "cluster_secret_file",
    "allow_without_secret",
)
_SIMULATED = (
    "max_running",
    "block_tokens",
    "kvp_threshold_tokens",
    "growth_limit_tokens",
    "tbt_target_s",
    "slo_scale",
    "client_weights",
    "prefix_cache",
    "swap_tokens",
)
EngineFlags = _flags("EngineFlags", fields(EngineOptions))
ContextsFlags = _flags(
    "ContextsFlags", (setting for setting in fields(EngineOptions) if setting.name == "contexts_dir")
)
BenchFlags = _flags("BenchFlags", (setting for setting in fields(EngineOptions) if setting.name in _MEASURED))
HostFlags = _flags("HostFlags", (setting for setting in fields(EngineOptions) if setting.name in _HOSTS))
SimulateFlags = _flags("SimulateFlags", (setting for setting in fields(EngineOptions) if setting.name in _SIMULATED))


def given(flags: Any) -> dict[str, Any]:
    """Return the settings that the user gave, by name."""
    settings = {name: value for name, value in vars(flags).items() if value is not None}
    for name, example in _OBJECTS.items():
        if name in settings:
            settings[name] = parsed_object(name, settings[name], example)
    return settings


def contexts_folder(flags: Any) -> ContextFolder:
    """Return the folder of saved contexts: the value of `--contexts-dir`, or the default folder."""
    return ContextFolder(given(flags).get("contexts_dir"))


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class ModelOptions:
    """Options for the model to load and its layout over ranks."""

    model: str
    """Model to load: `builtin`, a folder in Hugging Face format, a GGUF file, or a model on the Hugging Face Hub such
    as Qwen/Qwen3-8B."""
    _: KW_ONLY
    revision: Annotated[str | None, Parameter(group=rare(MODEL))] = None
    "Branch, tag or commit of a model on the hub. [default: main]"
    layout: str | None = None
    """YAML file of degrees and settings, as `longhelix plan --out` writes, or `auto` for one rank with all cores.
    Options on the command line override the file."""
    kvp: int | None = None
    "KV parallelism: ranks that split each request's KV cache along the sequence. [default: 1]"
    tpa: int | None = None
    "Tensor parallelism of attention: ranks that split the heads. [default: 1]"
    tpf: Annotated[int | None, Parameter(group=rare(MODEL))] = None
    "Tensor parallelism of the FFN: ranks that split its columns. [default: kvp * tpa / ep]"
    ep: int | None = None
    "Expert parallelism: ranks that split the experts. [default: the largest divisor of both kvp * tpa and the experts]"
    pp: int | None = None
    "Number of pipeline stages. [default: 1]"
    tied: Annotated[bool | None, Parameter(group=rare(MODEL), negative=(), show_default=False)] = None
    """Replicate the FFN on every KVP instance, with tpf = tpa (Medha's layout). With placement growing, local or auto,
    instances that share no request run their steps independently."""
    config: Annotated[Path | None, Parameter(group=rare(MODEL))] = None
    "YAML file of options by name. Options on the command line override it."

    def found(self, tell: Callable[[str], None] | None = None) -> "ModelOptions":
        """Return the options with the path of the model, which is downloaded from the hub if needed.

        Args:
            tell: receives one line before a download. None prints it to standard error.
        """
        return replace(self, model=find(self.model, self.revision, tell or _print), revision=None)

    def start(
        self,
        engine: EngineFlags,
        tell: Callable[[EngineConfig], None] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> LLM:
        """Start the engine, and show the loading progress on standard error.

        Args:
            engine: engine flags of the command line.
            tell: callback that receives the resolved configuration. None prints a description to standard error.
            defaults: values for settings that are in neither the flags nor the layout file.
        """
        model, settings = self.found()._composed(engine)
        settings = {**(defaults or {}), **settings}
        llm = model._start(settings)
        (tell or _print_described)(llm.config)
        return llm

    def layout_and_settings(self, engine: EngineFlags) -> tuple[Layout, dict[str, Any]]:
        """Return the layout, and the settings in the engine flags and in the layout file, before the model is read."""
        model, settings = self._composed(engine)
        return model._layout(), settings

    def _composed(self, engine: EngineFlags) -> tuple["ModelOptions", dict[str, Any]]:
        """Merge these options and the given settings with the layout file. Given values override those in the file."""
        settings = given(engine)
        if self.layout in (None, "auto"):
            return self, settings
        degrees, read = read_layout(Path(self.layout))
        left_open = {name: value for name, value in degrees.items() if getattr(self, name) is None}
        return replace(self, layout=None, **left_open), read | settings

    def _start(self, settings: dict[str, Any]) -> LLM:
        # Even a hidden progress bar would write a line end to a pipe or a file.
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            bar = progress.add_task("loading weights", total=1.0)
            warm_up = progress.add_task("warming up", total=1.0, visible=False)
            return LLM(
                self.model,
                self._layout(),
                on_load=lambda share: progress.update(bar, completed=share),
                on_warm_up=lambda share: progress.update(warm_up, completed=share, visible=True),
                **settings,
            )

    def _layout(self) -> Layout:
        degrees = {name: getattr(self, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
        degrees = {name: degree for name, degree in degrees.items() if degree is not None}
        if self.layout == "auto" and degrees:
            raise UserError(
                f"--layout auto chooses every degree, but --{next(iter(degrees))} is set: leave one of them out",
                "invalid_layout",
            )
        if self.tied:
            return tied_layout(**degrees)
        num_ranks = Layout(**degrees).num_ranks
        if num_ranks > 1 and not degrees.keys() & {"tpf", "ep"} and (is_gguf(self.model) or Path(self.model).is_dir()):
            num_experts = [moe.num_experts for moe in model_spec(self.model).moes]
            degrees["ep"] = widest_ep(num_ranks, math.gcd(*num_experts)) if num_experts else 1
        return Layout(**degrees)


def parsed_object(name: str, text: str, example: str) -> dict[str, Any]:
    option = f"--{name.replace('_', '-')}"
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers with too many digits raise a plain ValueError
        raise UserError(
            f"{option} is not valid JSON ({error}): give a JSON object in quotes, such as {example}"
        ) from error
    if not isinstance(settings, dict):
        raise UserError(f"{option} must be a JSON object, such as {example}")
    return settings


@Parameter(name="*", group=ANSWER)
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options that decide how new tokens are sampled."""

    max_new_tokens: Size = 128
    "Maximum number of new tokens."
    temperature: float = 0.0
    "Sampling temperature. 0 always takes the most likely token; higher values make answers more varied."
    top_k: Annotated[int, RARE_ANSWER] = 0
    "Sample only from the k most likely tokens. 0 turns this off."
    top_p: float = 1.0
    "Sample only from the most likely tokens that together reach this probability. 1 turns this off."
    min_p: Annotated[float, RARE_ANSWER] = 0.0
    "Sample only from tokens with at least this probability relative to the most likely one. 0 turns this off."
    repetition_penalty: Annotated[float, RARE_ANSWER] = 1.0
    "Penalty for tokens that occur in the prompt or the answer. Values above 1 make them less likely."
    presence_penalty: Annotated[float, RARE_ANSWER] = 0.0
    "Amount subtracted from the logit of each token that the answer already contains."
    frequency_penalty: Annotated[float, RARE_ANSWER] = 0.0
    "Amount subtracted from a token's logit for each time that the answer contains it."
    logit_bias: Annotated[str | None, RARE_ANSWER] = None
    """Numbers to add to the logits of token ids, as a JSON object such as '{"42": -100}'. [default: none]"""
    seed: int | None = None
    "Seed for sampling. Set it to get the same answer each time. [default: random]"
    stop: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    "Text that ends the answer and is left out of it. May be given several times."
    stop_token_ids: Annotated[tuple[int, ...], Parameter(group=rare(ANSWER), negative=(), show_default=False)] = ()
    "Token ID that ends the answer. May be given several times."
    ignore_eos: Annotated[Flag, RARE_ANSWER] = False
    "Continue after the model's end-of-sequence token. Use it to benchmark answers of a fixed length."
    include_stop_str_in_output: Annotated[Flag, RARE_ANSWER] = False
    "Include the stop text, or the text of the stop token, in the answer."
    skip_special_tokens: Annotated[
        bool, Parameter(group=rare(ANSWER), negative="--show-special-tokens", show_default=False)
    ] = True
    "Leave special tokens out of the text of the answer (default). --show-special-tokens keeps them."
    min_tokens: Annotated[Size, RARE_ANSWER] = 0
    "Minimum number of new tokens before the answer may end. Stop texts are ignored until then."
    logprobs: Annotated[int | None, RARE_ANSWER] = None
    "Return log probabilities of the N most likely tokens for each new token. [default: off]"
    prompt_logprobs: Annotated[int | None, RARE_ANSWER] = None
    """Return log probabilities of the N most likely tokens for each prompt token. The whole prompt is then computed,
    and --max-new-tokens may be 0. [default: off]"""
    json_object: Annotated[Flag, RARE_ANSWER] = False
    "Constrain the answer to a JSON object."
    json_schema: Annotated[Path | None, RARE_ANSWER] = None
    "File with a JSON schema that the answer must match."
    regex: Annotated[str | None, RARE_ANSWER] = None
    "Regular expression that the whole answer must match."
    grammar: Annotated[Path | None, RARE_ANSWER] = None
    "File with a grammar that the answer must follow, in GBNF or llguidance's Lark."
    choice: Annotated[tuple[str, ...], Parameter(group=rare(ANSWER), negative=(), show_default=False)] = ()
    "Allowed answer. Repeat the option to allow several."

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return the sampling parameters. `defaults` has values for options that are None."""
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _GUIDES}
        for name, default in (defaults or {}).items():
            settings[name] = default if settings[name] is None else settings[name]
        settings = {name: value for name, value in settings.items() if value is not None}
        return SamplingParams(**settings | {"logit_bias": self._biases(), "guide": self._guide()})

    def _guide(self) -> Guide | None:
        asked = [name for name in _GUIDES if getattr(self, name)]
        if len(asked) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise UserError(f"{flags} all constrain the answer: give only one of them")
        match asked:
            case ["json_object"]:
                return Guide("json")
            case ["choice"]:
                return Guide.of_choices(self.choice)
            case ["regex"]:
                return Guide("regex", self.regex)
            case ["json_schema" | "grammar" as kind]:
                return Guide(kind, read_text(getattr(self, kind)))
        return None

    def _biases(self) -> dict[int | str, Any]:
        """Parse --logit-bias. Keys are strings in JSON, so keys that look like integers are converted to int."""
        if self.logit_bias is None:
            return {}
        parsed = parsed_object("logit_bias", self.logit_bias, '{"42": -100}')
        return {int(key) if re.fullmatch("[0-9]{1,10}", key) else key: bias for key, bias in parsed.items()}


@Parameter(name="*", group=ANSWER)
@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """Sampling options for a conversation. By default, the length of answers is not limited."""

    max_new_tokens: Annotated[Size, Parameter(show_default=False)] = MOST_TOKENS
    "Maximum number of new tokens per answer. [default: the free rest of the context]"
    temperature: float | None = None
    "Sampling temperature. 0 always takes the most likely token. [default: the model's setting, or 0]"
    top_p: float | None = None
    """Sample only from the most likely tokens that together reach this probability. 1 turns this off. [default: the
    model's setting, or 1]"""
    top_k: Annotated[int | None, RARE_ANSWER] = None
    "Sample only from the k most likely tokens. 0 turns this off. [default: the model's setting, or 0]"
    min_p: Annotated[float | None, RARE_ANSWER] = None
    """Sample only from tokens with at least this probability relative to the most likely one. 0 turns this off.
    [default: the model's setting, or 0]"""
    repetition_penalty: Annotated[float | None, RARE_ANSWER] = None
    """Penalty for tokens that occur in the prompt or the answer. Values above 1 make them less likely. [default: the
    model's setting, or 1]"""


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def _print_described(config: EngineConfig) -> None:
    for line in describe(config):
        _print(line)


def describe(config: EngineConfig) -> list[str]:
    """Describe the resolved configuration in a few lines, with terms that operators can search for in logs."""
    layout, scheduler = config.layout, config.scheduler
    tokens = held_tokens(config)
    where = "1 GPU" if config.machines.device == "cuda" else f"{min(config.machines.threads_per_rank)} threads"
    placement = scheduler.placement.name
    if placement == "auto":
        placement = f"auto: requests of up to {count(scheduler.placement.kvp_threshold_tokens)} tokens on one rank"
    attention = f", attention {config.formats.attention_dtype}" if config.formats.attention_dtype else ""
    weights = (
        f"{config.weight_formats}, activations {config.formats.activation_dtype}"
        if config.formats.activation_dtype
        else config.weight_formats
    )
    return [
        f"layout: kvp {layout.kvp} x tpa {layout.tpa} = tpf {layout.tpf} x ep {layout.ep}, "
        f"{layout.world_size} ranks x {where}, {config.execution.mode}; {config.formats.dtype}, "
        f"weights {weights}, KV {config.formats.kv_dtype}{attention}",
        f"KV cache holds {count(tokens)} tokens ({placement}, blocks of {scheduler.block_tokens}); "
        f"max_model_len {count(scheduler.max_model_len)}; chunks of {'up to ' if scheduler.steps.adaptive else ''}"
        f"{count(scheduler.steps.chunk_tokens)} tokens; "
        f"maximum concurrency at {count(scheduler.max_model_len)} tokens: {digits(tokens / scheduler.max_model_len)}",
        *map(_window, scheduler.cache.windows),
    ]


def _window(window: KVWindow) -> str:
    """Describe the KV blocks of layers with a limit."""
    seen = window.visibility
    what = (
        f"chunks of {count(seen.chunk_tokens)}" if seen.chunk_tokens else f"windows of {count(seen.limit_tokens or 0)}"
    )
    return f"layers with {what} tokens: {count(window.num_blocks)} KV blocks of their own on each rank"


def held_tokens(config: EngineConfig) -> int:
    """Return the capacity of the KV cache in tokens, over all KVP ranks."""
    return config.scheduler.num_blocks * config.scheduler.block_tokens * config.layout.kvp
