"""What is to run: a plan's answer, and the settings with which this engine runs it, or the nearest that it can."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from longhelix.errors import UserError
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec import FORMATS, ModelSpec, NumberFormat, number_format
from longhelix.spec.family import PLANNED_FAMILIES
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.weights import Dim, Split, WeightDtype, layer_weights
from longhelix.values import one_of, refused, whole

_DEGREES = ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")
_MOST_USERS = 2**16  # the engine's own bound of requests at a time
_LANES = 16  # of the native CPU kernels: channels, and inputs of products without scales, come in so many
_FEW_RANKS = 64  # more of them are refused on the CPUs of one host, unless it has a core for every four
_ONE_HOST_GPUS = 8
_WIDTH = 118


@dataclass(frozen=True)
class Deployment:
    """A model in a layout, for so many requests at a time of so many tokens each, or one of so many and others of
    `other_tokens`.

    layout: as a plan's candidates have it: the degrees of `Layout` in each of "dp" groups of KVP ranks that have
    requests of their own and share the FFN, and "placement", striped or local. weight_dtype, kv_dtype: names of number
    formats; expert_dtype: that of experts, where it is another one than that of all other weights. device: "cpu" or
    "cuda", for which it was planned. chunk_tokens: those of a prompt in one step; None: nobody chose. hop_b: whether
    parts of a batch are exchanged while others attend. accepted_tokens: that speculative decoding gives a request in a
    step. Raises UserError for a layout that no engine could have, and for numbers out of range.
    """

    model: ModelSpec
    layout: Mapping[str, int | str]
    weight_dtype: str
    kv_dtype: str
    device: str
    context: int
    users: int
    chunk_tokens: int | None = None
    hop_b: bool = True
    other_tokens: int | None = None
    accepted_tokens: float = 1.0
    expert_dtype: str | None = None

    def __post_init__(self) -> None:
        number_format(self.weight_dtype, "weight_dtype")
        number_format(self.expert_dtype or self.weight_dtype, "expert_dtype")
        number_format(self.kv_dtype, "kv_dtype")
        one_of("device", self.device, ("cpu", "cuda"))
        one_of("placement", self.layout.get("placement"), ("striped", "local"))
        whole("context", self.context, 1, MOST_TOKENS)
        whole("users", self.users, 1, _MOST_USERS)
        if self.other_tokens is not None:
            whole("other_tokens", self.other_tokens, 1, self.context)
        if self.chunk_tokens is not None:
            whole("chunk_tokens", self.chunk_tokens, 1, MOST_TOKENS)
        self.degrees.check(self.heads, self.model.num_layers)
        self._check_ffn()

    def _check_ffn(self) -> None:
        degrees = self.degrees
        check_experts(self.model, degrees.ep)
        if self.tied and (degrees.ep > 1 or degrees.ffn_replicas != degrees.kvp):
            raise UserError(
                f"the tied layout has a copy of the FFN on each of {degrees.kvp} KVP ranks: set ffn_replicas to "
                f"{degrees.kvp} and ep to 1",
                "invalid_layout",
            )
        if self.tied and self.groups > 1:
            raise UserError(
                "KVP ranks that share neither requests nor the FFN are one server each: set placement to striped, or "
                "plan for one server",
                "invalid_layout",
            )

    @cached_property
    def degrees(self) -> Layout:
        """Those of all groups as one."""
        missing = [name for name in _DEGREES if name not in self.layout]
        if missing:
            raise UserError(f"the layout has no {missing[0]}: give a number for each of {', '.join(_DEGREES)}")
        dp, kvp, tpa, tpf, ep, pp, ffn_replicas = (whole(name, self.layout[name], 1, MOST_TOKENS) for name in _DEGREES)
        return Layout(dp * kvp, tpa, tpf, ep, pp, ffn_replicas)

    @cached_property
    def heads(self) -> HeadShape:
        return HeadShape(self.model.num_query_heads, self.model.num_kv_heads)

    @cached_property
    def product_inputs(self) -> frozenset[int]:
        """Of how many inputs the matrices of products are, on any rank."""
        kinds = {self.model.has_experts(layer) for layer in (0, self.model.num_layers - 1)}
        weights = [weight for kind in kinds for weight in layer_weights(self.model, with_experts=kind)]
        columns = {weight.columns for weight in weights if weight.columns and weight.stored is WeightDtype.PRODUCT}
        return frozenset(
            _held(dim, self.degrees, self.heads, rank) * dim.unit
            for dim in columns
            for rank in range(self.degrees.num_ranks)
        )

    @property
    def groups(self) -> int:
        """Groups of ranks that have requests of their own and share the FFN."""
        return self.degrees.kvp if self.layout["placement"] == "local" else int(self.layout["dp"])

    @property
    def kvp(self) -> int:
        """KVP ranks of a group, which share each of its requests' KV."""
        return self.degrees.kvp // self.groups

    @property
    def group_ranks(self) -> int:
        return self.degrees.num_ranks // self.groups

    @property
    def grouped(self) -> bool:
        """Whether attention is data parallel over groups of ranks."""
        return self.groups > 1

    @property
    def local(self) -> bool:
        """Whether each request lies on one KVP rank of several."""
        return self.grouped and not self.sharded

    @property
    def tied(self) -> bool:
        """Whether each KVP rank has a copy of the FFN."""
        return self.degrees.ffn_replicas > 1

    @property
    def sharded(self) -> bool:
        """Whether KVP ranks share each request's KV."""
        return self.kvp > 1

    @property
    def users_of_a_group(self) -> int:
        """Requests of one group of ranks that has whole requests."""
        return -(-self.users // self.groups)


def check_experts(model: ModelSpec, ep: int) -> None:
    """Raises UserError where more ranks share experts than a layer has; a dense FFN counts as one."""
    most = 1 if model.moe is None else model.moe.num_experts
    if ep > most:
        raise refused("ep", ep, f"at most {most}, the model's experts", "invalid_layout")


@dataclass(frozen=True)
class Runnable:
    """The engine's settings by name, as `--layout FILE` takes them, and in sentences what they do not keep of the
    plan."""

    settings: Mapping[str, int | str | bool]
    missing: tuple[str, ...]


def runnable(deployment: Deployment) -> Runnable:
    """What this version of the engine runs of a deployment; the nearest, where it lacks a number format."""
    degrees = deployment.degrees
    formats, missing = _formats(deployment)
    window = deployment.model.sliding_window
    longest_tokens = deployment.context if window is None else min(deployment.context, window)
    settings: dict[str, int | str | bool] = {name: getattr(degrees, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
    if deployment.tied:
        settings["tied"] = True
    settings["placement"] = str(deployment.layout["placement"])
    settings |= formats
    settings |= {"max_model_len": longest_tokens, "kv_cache_tokens": _pool_tokens(deployment, longest_tokens)}
    if deployment.users > SchedulerConfig.max_running:
        settings["max_running"] = deployment.users
    if deployment.chunk_tokens is not None:
        settings["chunk_tokens"] = deployment.chunk_tokens
    if deployment.sharded and not deployment.hop_b:
        settings["hop_b"] = 1
    return Runnable(settings, (*missing, *_limits(deployment, longest_tokens, str(formats.get("device", "")))))


def as_yaml(found: Runnable) -> str:
    """The text of a layout file: what is missing in comments, then a setting a line."""
    lines = [line for sentence in found.missing for line in comment(f"Not as planned: {sentence}")]
    for name, value in found.settings.items():
        lines.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines) + "\n"


def comment(sentence: str) -> list[str]:
    """A sentence as lines that YAML and shells pass over."""
    lines = textwrap.wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" if position == 0 else f"#   {line}" for position, line in enumerate(lines)]


def _pool_tokens(deployment: Deployment, tokens: int) -> int:
    """Tokens over all KVP ranks that hold all requests, each in whole KV blocks on every rank that has a part of it;
    where requests are on one rank each, the longest may be on any."""
    kvp, block_tokens = deployment.degrees.kvp, SchedulerConfig.block_tokens
    others = tokens if deployment.other_tokens is None else min(deployment.other_tokens, tokens)
    if deployment.local:
        more = (deployment.users_of_a_group - 1) * _rounded_up(others, block_tokens)
        return kvp * (_rounded_up(tokens, block_tokens) + more)
    unit = block_tokens * kvp
    return _rounded_up(tokens, unit) + (deployment.users - 1) * _rounded_up(others, unit)


def _rounded_up(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


def _limits(deployment: Deployment, longest_tokens: int, device: str) -> Iterable[str]:
    """What the engine refuses or cannot yet, beside number formats."""
    ranks = deployment.degrees.world_size
    if deployment.grouped and deployment.sharded:
        yield (
            f"{deployment.groups} groups of {deployment.kvp} KVP ranks with requests of their own, which longhelix "
            f"plans and does not run: all {deployment.degrees.kvp} KVP ranks share every request here"
        )
    if deployment.accepted_tokens > 1:
        yield (
            f"the plan counts on {deployment.accepted_tokens:g} tokens of every step (speculative decoding), and "
            f"longhelix decodes one: tokens take {deployment.accepted_tokens:g} times as long as planned, or a little "
            f"less"
        )
    if deployment.model.architecture in PLANNED_FAMILIES:
        yield f"longhelix plans for {deployment.model.architecture} and does not run it"
    elif longest_tokens < deployment.context:
        yield (
            f"the model attends within a sliding window of {longest_tokens} tokens, which longhelix does not run yet: "
            f"requests are of up to {longest_tokens} tokens, in place of {deployment.context}"
        )
    if device != "cpu" and deployment.device == "cuda" and ranks > _ONE_HOST_GPUS:
        yield f"ranks on several hosts do not run yet: all {ranks} GPUs have to be of one host"
    if ranks > _FEW_RANKS:
        yield (
            f"on CPUs each of the {ranks} ranks is a process of one host, which needs {-(-ranks // 4)} cores or more "
            f"for that many"
        )


def _formats(deployment: Deployment) -> tuple[dict[str, int | str | bool], list[str]]:
    """The settings of the number formats, and what they do not keep of those planned with."""
    weights, kv = FORMATS[deployment.weight_dtype], FORMATS[deployment.kv_dtype]
    device = deployment.device
    if not (_keeps_weights(deployment, weights, device) and _keeps_kv(deployment.model, kv, device)):
        device = "cpu"  # which keeps more formats
    own_weights, own_kv = _nearest_weights(deployment, weights, device), _nearest_kv(deployment.model, kv, device)
    missing = []
    if own_weights is not weights:
        missing.append(f"weights are planned in {weights.name}, {_weights_reason(weights)}: {own_weights.name} here")
    if deployment.expert_dtype is not None:
        missing.append(
            f"experts are planned in {deployment.expert_dtype}, and the engine keeps all weights in one format: "
            f"{own_weights.name} here"
        )
    if own_kv is not kv:
        missing.append(f"the KV cache is planned in {kv.name}, {_kv_reason(kv, device)}: {own_kv.name} here")
    found: dict[str, int | str | bool] = {}
    other = "cpu" if device == "cuda" else "cuda"
    if not (_keeps_weights(deployment, own_weights, other) and _keeps_kv(deployment.model, own_kv, other)):
        if device == "cpu":
            found["device"] = "cpu"  # "auto" would take GPUs that are there, and refuse the formats
        missing += _elsewhere(deployment, other) if device == "cuda" or deployment.device == "cuda" else []
    return found | _weight_settings(own_weights) | {"kv_dtype": own_kv.name}, missing


def _elsewhere(deployment: Deployment, device: str) -> list[str]:
    """With which formats it would run on the other device."""
    weights = _nearest_weights(deployment, FORMATS[deployment.weight_dtype], device)
    kv = _nearest_kv(deployment.model, FORMATS[deployment.kv_dtype], device)
    settings = _weight_settings(weights) | {"kv_dtype": kv.name, "device": device}
    here, there = ("CPUs", "GPUs") if device == "cuda" else ("GPUs", "CPUs")
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    return [f"these formats run on {here} alone; on {there}, set {words}"]


def _weights_reason(weights: NumberFormat) -> str:
    if not weights.weights:
        return "which no version of the engine stores yet"
    return "which the engine keeps on CPUs alone, for inputs of products that come in whole blocks on every rank"


def _kv_reason(kv: NumberFormat, device: str) -> str:
    if not kv.kv:
        return "which no version of the engine stores yet"
    return "which the engine does not keep for this model " + ("on CPUs" if device == "cpu" else "on GPUs")


def _weight_settings(weights: NumberFormat) -> dict[str, int | str | bool]:
    if weights.rounds_inputs:
        return {"weight_dtype": "int8", "activation_dtype": "int8"}
    # Weights as wide as activations are in the activations' dtype, which else is the checkpoint's.
    own: dict[str, int | str | bool] = {"dtype": weights.name} if weights.activation else {}
    return own | {"weight_dtype": weights.name}


def _nearest_weights(deployment: Deployment, planned: NumberFormat, device: str) -> NumberFormat:
    if _keeps_weights(deployment, planned, device):
        return planned
    kept = (each for each in FORMATS.values() if _keeps_weights(deployment, each, device) and not each.rounds_inputs)
    return _narrowest(kept, planned)


def _nearest_kv(model: ModelSpec, planned: NumberFormat, device: str) -> NumberFormat:
    if _keeps_kv(model, planned, device):
        return planned
    return _narrowest((each for each in FORMATS.values() if _keeps_kv(model, each, device)), planned)


def _narrowest(kept: Iterable[NumberFormat], planned: NumberFormat) -> NumberFormat:
    """The narrowest that has at least as many bits as planned; of those that are as wide, bfloat16."""
    return min((each for each in kept if each.bits >= planned.bits), key=lambda each: (each.bits, each.name))


def _keeps_weights(deployment: Deployment, weights: NumberFormat, device: str) -> bool:
    """Whether ranks keep their weights so (`kernels.weight`: plain ones anywhere, panels on CPUs)."""
    if "plain" in weights.weights:
        return True
    if not weights.weights or device == "cuda":
        return False
    unit = weights.weight_scales.numbers or _LANES
    return all(inputs % unit == 0 for inputs in deployment.product_inputs)


def _keeps_kv(model: ModelSpec, kv: NumberFormat, device: str) -> bool:
    """Whether ranks keep the model's KV so (`kernels.layer`).

    As rows or tiles: tiles on CPUs alone, and narrow numbers there in tiles alone, which have a key and a value each.
    """
    if device == "cuda" or "tiles" not in kv.kv or not kv.kv["tiles"].bits:
        return "rows" in kv.kv
    entries = model.cache_entries
    return not any(entry.shared_values or entry.key_size % _LANES or entry.value_size % _LANES for entry in entries)


def _held(dim: Dim, layout: Layout, heads: HeadShape, rank: int) -> int:
    """Items of a product's columns that a rank has."""
    match dim.split:
        case Split.OUTPUT_HEADS:
            return len(layout.output_heads(heads, rank))
        case Split.FFN_COLUMNS | Split.SHARED_COLUMNS:
            return len(layout.ffn_columns(dim.count, rank))
        case Split.EXPERT_COLUMNS:
            return len(layout.expert_columns(dim.count, rank))
    assert dim.split is Split.WHOLE
    return dim.count
