"""Options that verbs share, and what they make of them."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from longhelix.cli.layout_file import read_layout
from longhelix.cli.values import Flag, Size, tied_layout
from longhelix.engine.config import EngineConfig
from longhelix.engine.llm import LLM
from longhelix.errors import UserError
from longhelix.layout import Layout, widest_ep
from longhelix.presets import load_model
from longhelix.request import SamplingParams

stderr = Console(stderr=True)


@Parameter(name="*", group="Model and layout")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is laid out over ranks."""

    model: str
    "A folder in Hugging Face format, a GGUF file of the llama architecture, or `builtin`."
    layout: str | None = None
    """`auto`: one rank with all cores, since ranks of one CPU host share its memory bandwidth. Or a YAML file, as
    `longhelix plan --out` writes it; options beside it win."""
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
    tied: Flag = False
    "The FFN at TP = tpa, a copy on every KVP instance (Medha's layout, a baseline)."
    dtype: str | None = None
    "float32, bfloat16 or float16. [default: the checkpoint's; bfloat16 for GGUF]"
    weight_dtype: str | None = None
    "int8 or int4 to quantise the weights of products. [default: dtype]"
    kv_dtype: str | None = None
    "The KV cache's dtype: float32, bfloat16, float16, fp8, int8 or int4. [default: dtype]"
    max_model_len: Size | None = None
    "Most tokens of prompt and answer. [default: the model's positions]"
    rope_scaling: str | None = None
    'RoPE settings as JSON, such as {"rope_type": "yarn", "factor": 4}. [default: the model\'s own]'
    kv_cache_tokens: Size | None = None
    "Tokens that the KV cache holds over all KVP ranks. [default: one request of max-model-len]"
    chunk_tokens: Size = 512
    "Prompt tokens that run in one step."
    block_tokens: int = 16
    "Tokens of a KV block."
    placement: Literal["striped", "growing", "local", "auto"] | None = None
    """Which KVP rank takes a request's next KV block; `auto`: short requests are local, long ones striped, those that
    may outgrow `--kvp-threshold` growing. [default: striped]"""
    kvp_threshold: Size | None = None
    """Tokens up to which a request stays on one KVP rank; implies `--placement auto`. [default with auto: as many as
    cost it 5% of its speed by the cost model]"""
    growth_limit_tokens: Size = 4096
    "With growing placement: tokens on a rank before the next one joins."
    batch_invariant: Flag = False
    "Refuse what would let a request's bits depend on its batch, its chunks or the number of threads."

    device: Literal["auto", "cpu", "cuda"] = "auto"
    "Where ranks run; `auto`: on GPUs where there is one for each rank."
    execution: Literal["recorded", "compiled", "eager"] = "recorded"
    "Layers from tapes (CPU) or CUDA graphs, compiled by torch.compile, or op by op."

    attention: Literal["own", "flashinfer"] = "own"
    "On GPUs, whose decode attention: the package flashinfer-python has one as well."
    hop_b: int | None = None
    """HOP-B: the most parts of a batch, of which each is exchanged while the next attends; 1 is off. [default: for each
    step as many as take the fewest seconds by the performance model]"""

    def start(self, trace: Path | None = None) -> LLM:
        """Start the engine, with progress and what it resolved to on standard error."""
        return self._composed()._start(trace)

    def _composed(self) -> "ModelOptions":
        """These options, and what a layout file sets beside them."""
        if self.layout in (None, "auto"):
            return self
        read = read_layout(Path(self.layout))
        left_open = {key: value for key, value in read.items() if getattr(self, key) is None or key == "tied"}
        return replace(self, layout=None, **left_open)

    def _start(self, trace: Path | None) -> LLM:
        with Progress(console=stderr, transient=True) as progress:
            bar = progress.add_task("loading weights", total=1.0)
            warm_up = progress.add_task("warming up", total=1.0, visible=False)
            llm = LLM(
                self.model,
                self._layout(),
                dtype=self.dtype,
                weight_dtype=self.weight_dtype,
                kv_dtype=self.kv_dtype,
                max_model_len=self.max_model_len,
                rope_scaling=self._rope_scaling(),
                kv_cache_tokens=self.kv_cache_tokens,
                chunk_tokens=self.chunk_tokens,
                block_tokens=self.block_tokens,
                placement=self.placement or ("striped" if self.kvp_threshold is None else "auto"),
                kvp_threshold_tokens=self.kvp_threshold,
                growth_limit_tokens=self.growth_limit_tokens,
                batch_invariant=self.batch_invariant,
                device=self.device,
                execution=self.execution,
                attention=self.attention,
                hop_b=self.hop_b,
                trace=trace,
                on_load=lambda share: progress.update(bar, completed=share),
                on_warm_up=lambda share: progress.update(warm_up, completed=share, visible=True),
            )
        for line in describe(llm.config):
            print(line, file=sys.stderr)
        return llm

    def _layout(self) -> Layout:
        given = {name: getattr(self, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
        given = {name: degree for name, degree in given.items() if degree is not None}
        if self.layout == "auto" and given:
            raise UserError(f"--layout auto chooses every degree: leave out --{next(iter(given))}", "invalid_layout")
        if self.tied:
            return tied_layout(**given)
        num_ranks = Layout(**given).num_ranks
        if num_ranks > 1 and not given.keys() & {"tpf", "ep"} and Path(self.model).is_dir():
            moe = load_model(self.model).moe
            given["ep"] = 1 if moe is None else widest_ep(num_ranks, moe.num_experts)
        return Layout(**given)

    def _rope_scaling(self) -> dict[str, Any] | None:
        if self.rope_scaling is None:
            return None
        try:
            settings = json.loads(self.rope_scaling)
        except json.JSONDecodeError as error:
            raise UserError(f"--rope-scaling is not JSON ({error}): give an object in quotes") from error
        if not isinstance(settings, dict):
            raise UserError('--rope-scaling must be a JSON object, such as {"rope_type": "linear", "factor": 2}')
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
    seed: int | None = None
    "The same seed gives the same draws. [default: a new one each time]"
    stop: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    "Text that ends the answer, before itself; may be given several times."
    stop_token_ids: Annotated[tuple[int, ...], Parameter(negative=(), show_default=False)] = ()
    "Token ids that end the answer."
    ignore_eos: Flag = False
    "Go on after the model's end-of-sequence token."
    logprobs: int | None = None
    "Also give the N likeliest tokens and their log-probabilities."

    def params(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in self.__dataclass_fields__})


def describe(config: EngineConfig) -> list[str]:
    """What the engine resolved to, in words that operators search logs for."""
    layout, scheduler = config.layout, config.scheduler
    held_tokens = scheduler.num_blocks * scheduler.block_tokens * layout.kvp
    where = "1 GPU" if config.device == "cuda" else f"{config.threads_per_rank} threads"
    placement = scheduler.placement
    if placement == "auto":
        placement = f"auto: requests of up to {scheduler.kvp_threshold_tokens} tokens on one rank"
    return [
        f"layout: kvp {layout.kvp} x tpa {layout.tpa} = tpf {layout.tpf} x ep {layout.ep}, "
        f"{layout.world_size} ranks x {where}, {config.execution}; {config.dtype}, "
        f"weights {config.weight_dtype}, KV {config.kv_dtype}",
        f"KV cache holds {held_tokens} tokens ({placement}, blocks of {scheduler.block_tokens}); "
        f"max_model_len {scheduler.max_model_len}; chunks of {scheduler.chunk_tokens} tokens; "
        f"maximum concurrency at {scheduler.max_model_len} tokens: {held_tokens / scheduler.max_model_len:.2f}",
    ]
