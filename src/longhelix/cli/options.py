"""Options that verbs share, and what they make of them."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from longhelix.cli.layout_file import read_layout
from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag, Seconds, Size, SizeOrAuto, tied_layout
from longhelix.compute.cache.context_folder import ContextFolder
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.llm import LLM
from longhelix.engine.options import Count, CountOrAuto, EngineOptions, Words, compilation, path, rope_settings, weights
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import MOST_TOKENS, SamplingParams
from longhelix.spec.layout import Layout, widest_ep
from longhelix.spec.presets import load_model
from longhelix.values import above_zero, flag, seconds

stderr = Console(stderr=True)


_KINDS = {
    flag: bool,
    path: Path,
    rope_settings: str,
    weights: str,
    compilation: str,
    seconds: Seconds,
    above_zero: float,
}


def _type(setting: Field) -> Any:
    """The type of a setting's flag, whose default is None: not given."""
    check, said = setting.metadata["check"], setting.metadata["documentation"]
    if setting.default is not None and setting.default is not False:
        said += f" [default: {setting.default}]"
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
    return Annotated[kind | None, Parameter(help=said, negative=negative, show_default=False, **named)]


def _flags(name: str, settings: Iterable[Field]) -> type:
    """A record with one flag for each setting, None where it is not given."""
    flags = [(setting.name, _type(setting), None) for setting in settings]
    record = make_dataclass(name, flags, namespace={"__module__": __name__}, frozen=True, kw_only=True)
    return Parameter(name="*", group="Engine")(record)


_OBJECTS = {
    "rope_scaling": '{"rope_type": "linear", "factor": 2}',
    "client_weights": '{"batch": 0.5}',
    "compilation_config": '{"pass_config": {"enable_sp": true}}',
}
_GUIDES = ("json_object", "json_schema", "regex", "grammar", "choice")
_MEASURED = ("weight_dtype", "activation_dtype", "kv_dtype", "attention_dtype", "execution")
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
SimulateFlags = _flags("SimulateFlags", (setting for setting in fields(EngineOptions) if setting.name in _SIMULATED))


def given(flags: Any) -> dict[str, Any]:
    """The settings that were given, by name."""
    settings = {name: value for name, value in vars(flags).items() if value is not None}
    for name, example in _OBJECTS.items():
        if name in settings:
            settings[name] = parsed_object(name, settings[name], example)
    return settings


def contexts_folder(flags: Any) -> ContextFolder:
    """The folder of saved contexts, as flags say."""
    return ContextFolder(given(flags).get("contexts_dir"))


@Parameter(name="*", group="Model and layout")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is laid out over ranks."""

    model: str
    "A folder in Hugging Face format, a GGUF file of the llama architecture, or `builtin`."
    layout: str | None = None
    """`auto`: one rank with all cores, since ranks of one CPU host share its memory bandwidth. Or a YAML file of
    settings and degrees, such as `longhelix plan --out` writes; options beside it win."""
    kvp: int | None = None
    "Ranks that share each request's KV along the sequence. [default: 1]"
    tpa: int | None = None
    "Ranks that share its attention heads. [default: 1]"
    tpf: int | None = None
    "Ranks that share an FFN's columns. [default: kvp * tpa / ep]"
    ep: int | None = None
    "Ranks that share the experts. [default: as many as divide both them and kvp * tpa]"
    pp: int | None = None
    "Pipeline stages. [default: 1]"
    tied: Annotated[bool | None, Parameter(negative=(), show_default=False)] = None
    """The FFN at TP = tpa, a copy on every KVP instance (Medha's layout). With placements growing, local and auto,
    instances that share no request step by themselves."""
    config: Path | None = None
    "A YAML file of flags by their names; those of the command line win."

    def start(
        self,
        engine: EngineFlags,
        tell: Callable[[EngineConfig], None] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> LLM:
        """Start the engine, with progress on standard error, and what it resolved to as well, unless that is told
        `tell`. defaults: settings that neither flags nor a layout file say."""
        model, settings = self._composed(engine)
        settings = {**(defaults or {}), **settings}
        llm = model._start(settings)
        (tell or _print_described)(llm.config)
        return llm

    def _composed(self, engine: EngineFlags) -> tuple["ModelOptions", dict[str, Any]]:
        """These options and the settings that were given, and what a layout file says beside them."""
        settings = given(engine)
        if self.layout in (None, "auto"):
            return self, settings
        degrees, read = read_layout(Path(self.layout))
        left_open = {name: value for name, value in degrees.items() if getattr(self, name) is None}
        return replace(self, layout=None, **left_open), read | settings

    def _start(self, settings: dict[str, Any]) -> LLM:
        # Where nobody looks on, it would still write a line end.
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
            raise UserError(f"--layout auto chooses every degree: leave out --{next(iter(degrees))}", "invalid_layout")
        if self.tied:
            return tied_layout(**degrees)
        num_ranks = Layout(**degrees).num_ranks
        if num_ranks > 1 and not degrees.keys() & {"tpf", "ep"} and Path(self.model).is_dir():
            moe = load_model(self.model).moe
            degrees["ep"] = 1 if moe is None else widest_ep(num_ranks, moe.num_experts)
        return Layout(**degrees)


def parsed_object(name: str, text: str, example: str) -> dict[str, Any]:
    option = f"--{name.replace('_', '-')}"
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of too many digits are other ValueErrors
        raise UserError(f"{option} is not JSON ({error}): give an object in quotes") from error
    if not isinstance(settings, dict):
        raise UserError(f"{option} must be a JSON object, such as {example}")
    return settings


@Parameter(name="*", group="Answer")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How new tokens are chosen."""

    max_new_tokens: Size = 128
    "Most tokens of the answer."
    temperature: float = 0.0
    "0 takes the likeliest token each time."
    top_k: int = 0
    "Keep the k likeliest tokens; 0 keeps all."
    top_p: float = 1.0
    "Keep the likeliest tokens that together reach this probability."
    min_p: float = 0.0
    "Keep tokens at least this likely, relative to the likeliest."
    repetition_penalty: float = 1.0
    "Above 1 makes tokens that have occurred less likely."
    presence_penalty: float = 0.0
    "Subtracted from the logits of tokens that the answer has."
    frequency_penalty: float = 0.0
    "Subtracted from a token's logit as often as the answer has it."
    logit_bias: str | None = None
    """What is added to the logits of token ids, as a JSON object such as '{"42": -100}'."""
    seed: int | None = None
    "The same seed gives the same draws. [default: a new one each time]"
    stop: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    "Text that ends the answer, before itself; may be given several times."
    stop_token_ids: Annotated[tuple[int, ...], Parameter(negative=(), show_default=False)] = ()
    "Token ids that end the answer."
    ignore_eos: Flag = False
    "Go on after the model's end-of-sequence token."
    include_stop_str_in_output: Flag = False
    "Keep the stop text, or the text of the stop token, at the end of the answer."
    skip_special_tokens: Annotated[bool, Parameter(negative="--show-special-tokens", show_default=False)] = True
    "Leave special tokens out of the answer's text. This is the default; --show-special-tokens keeps them."
    min_tokens: Size = 0
    "Among so many tokens of the answer is none that ends it, and no stop text ends it there."
    logprobs: int | None = None
    "Also give the N likeliest tokens and their log-probabilities."
    prompt_logprobs: int | None = None
    "The same for each token of the prompt, which is computed whole for it; --max-new-tokens may then be 0."
    json_object: Flag = False
    "The answer is a JSON object."
    json_schema: Path | None = None
    "A file with a JSON schema: the answer is JSON that it allows."
    regex: str | None = None
    "The answer is text that this regular expression matches as a whole."
    grammar: Path | None = None
    "A file with a grammar, in GBNF or llguidance's Lark: the answer is a text of it."
    choice: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    "The answer is one of these; may be given several times."

    def params(self) -> SamplingParams:
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _GUIDES}
        return SamplingParams(**settings | {"logit_bias": self._biases(), "guide": self._guide()})

    def _guide(self) -> Guide | None:
        asked = [name for name in _GUIDES if getattr(self, name)]
        if len(asked) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise UserError(f"{flags} say what the answer is: give one of them")
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
        """Keys of JSON are strings: those that are whole numbers become some."""
        if self.logit_bias is None:
            return {}
        parsed = parsed_object("logit_bias", self.logit_bias, '{"42": -100}')
        return {int(key) if re.fullmatch("[0-9]{1,10}", key) else key: bias for key, bias in parsed.items()}


@Parameter(name="*", group="Answer")
@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """How new tokens are chosen in a conversation, whose answers end by themselves."""

    max_new_tokens: Annotated[Size, Parameter(show_default=False)] = MOST_TOKENS
    "Most tokens of an answer. [default: what the context leaves]"


def _print_described(config: EngineConfig) -> None:
    for line in describe(config):
        print(line, file=sys.stderr)


def describe(config: EngineConfig) -> list[str]:
    """What the engine resolved to, in words that operators search logs for."""
    layout, scheduler = config.layout, config.scheduler
    tokens = held_tokens(config)
    where = "1 GPU" if config.device == "cuda" else f"{config.threads_per_rank} threads"
    placement = scheduler.placement
    if placement == "auto":
        placement = f"auto: requests of up to {scheduler.kvp_threshold_tokens} tokens on one rank"
    attention = f", attention {config.attention_dtype}" if config.attention_dtype else ""
    weights = (
        f"{config.weight_dtype}, activations {config.activation_dtype}"
        if config.activation_dtype
        else config.weight_dtype
    )
    return [
        f"layout: kvp {layout.kvp} x tpa {layout.tpa} = tpf {layout.tpf} x ep {layout.ep}, "
        f"{layout.world_size} ranks x {where}, {config.execution}; {config.dtype}, "
        f"weights {weights}, KV {config.kv_dtype}{attention}",
        f"KV cache holds {tokens} tokens ({placement}, blocks of {scheduler.block_tokens}); "
        f"max_model_len {scheduler.max_model_len}; chunks of {'up to ' if scheduler.adaptive else ''}"
        f"{scheduler.chunk_tokens} tokens; "
        f"maximum concurrency at {scheduler.max_model_len} tokens: {tokens / scheduler.max_model_len:.2f}",
    ]


def held_tokens(config: EngineConfig) -> int:
    """How many the KV cache holds over all KVP ranks."""
    return config.scheduler.num_blocks * config.scheduler.block_tokens * config.layout.kvp
