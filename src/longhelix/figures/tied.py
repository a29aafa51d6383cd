"""Medha's engine as the model sees it: tied layouts of TP, stages and KVP; times of prefills, chunks and decodes."""

from dataclasses import dataclass, field
from math import ceil

import numpy as np

from longhelix.figures.prefills import adaptive_prefill, ring_seconds
from longhelix.perf.flops import model_flops
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.memory import memory
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds, step_items, step_seconds
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout
from longhelix.spec.weights import num_parameters

SERVER = 8
_P95 = 0.95
_NODES = 32


@dataclass(frozen=True)
class TiedDeployment:
    """A model on KVP groups of `stages` servers (or fractions of servers) of `tp` GPUs each."""

    setting: Setting
    stages: int = 1
    kvp: int = 1
    tp: int = SERVER
    layouts: Layouts = field(init=False)

    def __post_init__(self) -> None:
        tied = Layout(kvp=self.kvp, tpa=self.tp, tpf=self.tp, ffn_replicas=self.kvp, pp=self.stages)
        object.__setattr__(self, "layouts", Layouts.of([tied], hop_b=False))

    @property
    def gpus(self) -> int:
        return self.stages * self.kvp * self.tp

    def prefill_s(self, tokens: float, chunk: float) -> float:
        """Time to first token."""
        return _number(prefill_seconds(self.setting, self.layouts, tokens, chunk))

    def decode_s(self, context: float) -> float:
        """Time between tokens of one request."""
        return _number(decode_seconds(self.setting, self.layouts, 1.0, context))

    def chunk_s(self, chunk: float, prefix: float, decodes: int = 0, decode_context: float = 1000.0) -> float:
        """One step of a chunk after `prefix` tokens and of `decodes` short requests, through all stages."""
        work = Work.chunk(chunk, prefix)
        if decodes:
            work = work + Work.decode(float(decodes), decode_context)
        return _number(step_seconds(self.setting, self.layouts, work))

    def p95_s(self, tokens: float, chunk: float, decodes: int = 0) -> float:
        """P95 of the steps of a prefill: they grow with the prefix, so it is the one after 95% of the tokens."""
        return self.chunk_s(chunk, _P95 * tokens, decodes)

    def longest_s(self, tokens: float, chunk: float) -> float:
        """The last, longest step of a prefill."""
        return self.chunk_s(chunk, tokens - chunk)

    def attention_s(self, tokens: float, chunk: float) -> float:
        """Attention's share of a prefill (its steps grow linearly: a mean over prefixes times their number)."""
        steps = [Work.chunk(chunk, (node + 0.5) / _NODES * tokens) for node in range(_NODES)]
        found = [item for work in steps for item in step_items(self.setting, self.layouts, work)]
        return sum(_number(item.seconds) for item in found if item.name == "attention") / _NODES * tokens / chunk

    def adaptive(self, tokens: float, target_s: float) -> tuple[float, float]:
        """Seconds of a prefill whose steps take `target_s` at most, and its longest step."""
        found = adaptive_prefill(self.setting, self.layouts, tokens, target_s, nodes=_NODES)
        return _number(found.seconds), float(found.steps_s.max())

    def striped_s(self, tokens: float, *, striped: bool = True) -> float:
        """Prefill by ring attention over as many servers, one copy of the model on each."""
        servers = Layout(kvp=self.stages, tpa=self.tp, tpf=self.tp, ffn_replicas=self.stages)
        return _number(ring_seconds(self.setting, Layouts.of([servers]), tokens, striped=striped))

    def fits(self, tokens: float, chunk: float = 1.0) -> bool:
        needed = memory(self.setting, self.layouts, 1.0, tokens, chunk).total_bytes
        return bool(needed[0] <= self.setting.system.usable_bytes)

    def mfu(self, tokens: float, chunk: float, *, causal: bool = False) -> float:
        """Model FLOPs utilisation of a prefill; counted without the causal mask unless `causal`."""
        peak = self.setting.system.rate(self.setting.weight_dtype) * self.gpus
        return model_flops(self.setting.model, tokens, tokens, causal=causal) / self.prefill_s(tokens, chunk) / peak

    def mbu(self, context: float) -> float:
        """Model bandwidth utilisation of a decode: weights of every copy and KV, over what all GPUs could read."""
        model = self.setting.model
        weights_bytes = self.kvp * num_parameters(model) * self.setting.weight_bytes
        read = weights_bytes + context * self.setting.kv_token_bytes
        # Stages read one after the other.
        return read / self.decode_s(context) / (self.setting.system.memory_bytes_per_s * self.gpus / self.stages)


@dataclass(frozen=True)
class Growth:
    """A prefill whose KVP groups join one by one: at each prefix the groups, and the seconds of a chunk's step."""

    prefixes: Array
    kvp: Array
    steps_s: Array
    alone_s: Array


def growth(
    setting: Setting, tokens: float, chunk: float, *, stages: int, most_kvp: int, nodes: int = 2 * _NODES
) -> Growth:
    """The next group joins when the last one holds its share of `tokens`, as the engine's growing placement has it;
    `alone_s`: the first one keeps all."""
    limit = tokens / most_kvp
    prefixes = (np.arange(nodes) + 0.5) / nodes * tokens
    groups = [ceil((prefix + chunk) / limit) for prefix in prefixes]
    steps = []
    for prefix, kvp in zip(prefixes, groups, strict=True):
        work = Work.growing_chunk(chunk, float(prefix), kvp, limit)
        steps.append(_number(step_seconds(setting, TiedDeployment(setting, stages, kvp).layouts, work)))
    alone = [TiedDeployment(setting, stages).chunk_s(chunk, float(prefix)) for prefix in prefixes]
    return Growth(prefixes, np.array(groups, dtype=np.float64), np.array(steps), np.array(alone))


def tokens_for(setting: Setting, seconds: float, gpus: int) -> float:
    """The prompt whose FLOPs (not causal) `gpus` do in `seconds` at their peak."""
    fixed = model_flops(setting.model, 1.0, 0.0)
    square = model_flops(setting.model, 1.0, 1.0) - fixed
    work = seconds * gpus * setting.system.rate(setting.weight_dtype)
    return float((np.sqrt(fixed**2 + 4 * square * work) - fixed) / (2 * square))


def gpus_for(setting: Setting, tokens: float, seconds: float) -> float:
    """GPUs that do the FLOPs (not causal) of a prompt in `seconds` at their peak."""
    return model_flops(setting.model, tokens, tokens) / seconds / setting.system.rate(setting.weight_dtype)


def _number(values: Array) -> float:
    return float(np.asarray(values)[0])
