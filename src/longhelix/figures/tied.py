"""Model Medha's deployments: tied layouts, and the times of their prefills, chunks and decodes."""

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

SERVER = 8  # GPUs per server
_P95 = 0.95
_NODES = 32  # number of prefixes at which the model evaluates a prefill


@dataclass(frozen=True)
class TiedDeployment:
    """A deployment in which each KVP group has a full copy of the model. TP and pipeline stages shard the copy."""

    setting: Setting
    stages: int = 1  # pipeline stages per KVP group
    kvp: int = 1  # KVP groups
    tp: int = SERVER  # GPUs per stage
    layouts: Layouts = field(init=False)

    def __post_init__(self) -> None:
        tied = Layout(kvp=self.kvp, tpa=self.tp, tpf=self.tp, ffn_replicas=self.kvp, pp=self.stages)
        object.__setattr__(self, "layouts", Layouts.of([tied], hop_b=False))

    @property
    def gpus(self) -> int:
        return self.stages * self.kvp * self.tp

    def prefill_s(self, tokens: float, chunk: float) -> float:
        """Return the time to first token, in seconds."""
        return _number(prefill_seconds(self.setting, self.layouts, tokens, chunk))

    def decode_s(self, context: float) -> float:
        """Return the time between tokens of one request, in seconds."""
        return _number(decode_seconds(self.setting, self.layouts, 1.0, context))

    def chunk_s(self, chunk: float, prefix: float, decodes: int = 0, decode_context: float = 1000.0) -> float:
        """Return the time of a step through all stages.

        The step has a chunk that follows `prefix` tokens, and `decodes` short requests that decode.
        """
        work = Work.chunk(chunk, prefix)
        if decodes:
            work = work + Work.decode(float(decodes), decode_context)
        return _number(step_seconds(self.setting, self.layouts, work))

    def p95_s(self, tokens: float, chunk: float, decodes: int = 0) -> float:
        """Return the P95 of a prefill's step times.

        It is the time of the step after 95% of the tokens, because step times grow with the prefix.
        """
        return self.chunk_s(chunk, _P95 * tokens, decodes)

    def longest_s(self, tokens: float, chunk: float) -> float:
        """Return the time of the last step of a prefill, which is the longest step."""
        return self.chunk_s(chunk, tokens - chunk)

    def attention_s(self, tokens: float, chunk: float) -> float:
        """Return the total attention time of a prefill.

        The estimate is the mean attention time of steps with several prefix lengths, times the number of steps.
        """
        steps = [Work.chunk(chunk, (node + 0.5) / _NODES * tokens) for node in range(_NODES)]
        found = [item for work in steps for item in step_items(self.setting, self.layouts, work)]
        return sum(_number(item.seconds) for item in found if item.name == "attention") / _NODES * tokens / chunk

    def adaptive(self, tokens: float, target_s: float) -> tuple[float, float]:
        """Return the time of a prefill with steps of at most `target_s`, and the time of its longest step."""
        found = adaptive_prefill(self.setting, self.layouts, tokens, target_s, nodes=_NODES)
        return _number(found.seconds), float(found.steps_s.max())

    def striped_s(self, tokens: float, *, striped: bool = True) -> float:
        """Return the time of a prefill by ring attention. Each of `stages` servers has a full copy of the model."""
        servers = Layout(kvp=self.stages, tpa=self.tp, tpf=self.tp, ffn_replicas=self.stages)
        return _number(ring_seconds(self.setting, Layouts.of([servers]), tokens, striped=striped))

    def fits(self, tokens: float, chunk: float = 1.0) -> bool:
        needed = memory(self.setting, layouts=self.layouts, batch=1.0, context=tokens, chunk=chunk).total_bytes
        return bool(needed[0] <= self.setting.system.usable_bytes)

    def mfu(self, tokens: float, chunk: float, *, causal: bool = False) -> float:
        """Return the model FLOPs utilisation of a prefill. If `causal` is False, it ignores the causal mask."""
        peak = self.setting.system.rate(self.setting.dtypes.weights) * self.gpus
        return model_flops(self.setting.model, tokens, tokens, causal=causal) / self.prefill_s(tokens, chunk) / peak

    def mbu(self, context: float) -> float:
        """Return the model bandwidth utilisation of a decode step.

        It is the number of bytes of weights and KV, divided by the number of bytes that the GPUs could read.
        """
        model = self.setting.model
        weights_bytes = self.kvp * num_parameters(model) * self.setting.weight_bytes
        read = weights_bytes + context * self.setting.kv_token_bytes
        # Stages run one after another, so only the GPUs of one stage read memory at a time.
        return read / self.decode_s(context) / (self.setting.system.memory.bytes_per_s * self.gpus / self.stages)


@dataclass(frozen=True)
class Growth:
    """A prefill to which KVP groups are added one by one. Each array has one entry per prefix."""

    prefixes: Array  # number of tokens before the chunk
    kvp: Array  # number of groups that hold KV
    steps_s: Array  # time of the chunk's step
    alone_s: Array  # time of the step if the first group stores the KV of all tokens


def growth(
    setting: Setting, tokens: float, chunk: float, *, stages: int, most_kvp: int, nodes: int = 2 * _NODES
) -> Growth:
    """Predict a prefill of `tokens` tokens on a growing number of KVP groups, as in the engine's growing placement.

    The next group is added when the last group stores the KV of its share of the tokens.
    """
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
    """Return the longest prompt, in tokens, that GPUs prefill in `seconds` at peak FLOP/s without the causal mask."""
    fixed = model_flops(setting.model, 1.0, 0.0)
    square = model_flops(setting.model, 1.0, 1.0) - fixed
    work = seconds * gpus * setting.system.rate(setting.dtypes.weights)
    return float((np.sqrt(fixed**2 + 4 * square * work) - fixed) / (2 * square))


def gpus_for(setting: Setting, tokens: float, seconds: float) -> float:
    """Return the number of GPUs that prefill a prompt in `seconds` at peak FLOP/s, without the causal mask."""
    return model_flops(setting.model, tokens, tokens) / seconds / setting.system.rate(setting.dtypes.weights)


def _number(values: Array) -> float:
    return float(np.asarray(values)[0])
