"""Turn a plan's answer into a deployment, and a deployment into the closest engine settings."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from longhelix.errors import UserError
from longhelix.scheduler.config import SchedulerConfig, StepConfig
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.spec import FORMATS, WEIGHT_DTYPES, ModelSpec, NumberFormat, number_format
from longhelix.spec.layout import Layout
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.weights import Dim, Split, WeightDtype, layer_weights
from longhelix.values import one_of, refused, whole

_DEGREES = ("dp", "kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")
_MOST_USERS = 2**16  # the engine's limit on running requests
_LANES = 16  # native CPU kernels need multiples of this for channels and for inputs of unscaled products
_FEW_RANKS = 64  # with more CPU ranks on one host, the engine requires one core per four ranks
_WIDTH = 118


@dataclass(frozen=True)
class Deployment:
    """A model in a layout, with the requests that it must serve.

    Raises:
        UserError: the layout is impossible, or a number is out of range.
    """

    model: ModelSpec
    layout: Mapping[str, int | str]  # as in `Candidate`: degrees of each "dp" group, and "placement"
    weight_dtype: str  # name of a number format
    kv_dtype: str  # name of a number format
    device: str  # device of the plan: "cpu" or "cuda"
    context: int  # tokens of the longest request
    users: int  # number of requests that run at the same time
    chunk_tokens: int | None = None  # prompt tokens in one step; None if not chosen
    hop_b: bool = True  # whether the exchange of one part of a batch overlaps with attention of the next part
    other_tokens: int | None = None  # tokens of each request except the longest; None for `context`
    accepted_tokens: float = 1.0  # new tokens per step and request, with speculative decoding
    expert_dtype: str | None = None  # number format of experts; None for `weight_dtype`
    packed: bool = False  # whether weights stay in the formats in which the checkpoint packs them
    host_ranks: int | None = None  # GPUs of one host; None if one host has all of them

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
        self.model.check(self.degrees)
        self._check_ffn()

    def _check_ffn(self) -> None:
        degrees = self.degrees
        check_experts(self.model, degrees.ep)
        if self.tied and (degrees.ep > 1 or degrees.ffn_replicas != degrees.kvp):
            raise UserError(
                f"the tied layout has one copy of the FFN on each of {degrees.kvp} KVP ranks: set ffn_replicas to "
                f"{degrees.kvp} and ep to 1",
                "invalid_layout",
            )
        if self.tied and self.groups > 1:
            raise UserError(
                "KVP ranks that share neither requests nor the FFN are separate servers: set placement to striped, or "
                "plan a single server",
                "invalid_layout",
            )

    @cached_property
    def degrees(self) -> Layout:
        """Parallel degrees of all groups merged into one layout."""
        missing = [name for name in _DEGREES if name not in self.layout]
        if missing:
            raise UserError(f"the layout has no {missing[0]}: give a number for each of {', '.join(_DEGREES)}")
        dp, kvp, tpa, tpf, ep, pp, ffn_replicas = (whole(name, self.layout[name], 1, MOST_TOKENS) for name in _DEGREES)
        return Layout(kvp=dp * kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp, ffn_replicas=ffn_replicas)

    @cached_property
    def product_inputs(self) -> frozenset[int]:
        """Input sizes of the weight matrices of all ranks."""
        layers = dict.fromkeys(self.model.layers)
        weights = [weight for layer in layers for weight in layer_weights(self.model, layer)]
        columns = {weight.columns for weight in weights if weight.columns and weight.stored is WeightDtype.PRODUCT}
        return frozenset(
            _held(dim, self.degrees, rank) * dim.unit for dim in columns for rank in range(self.degrees.num_ranks)
        )

    @property
    def groups(self) -> int:
        """Number of groups of ranks that each serve their own requests. All groups share the FFN."""
        return self.degrees.kvp if self.layout["placement"] == "local" else int(self.layout["dp"])

    @property
    def kvp(self) -> int:
        """Number of KVP ranks per group. They share the KV of each request of the group."""
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
        """Whether there are several KVP ranks, but each request is on only one of them."""
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
        """Number of requests per group, rounded up."""
        return -(-self.users // self.groups)


def check_experts(model: ModelSpec, ep: int) -> None:
    """Raise UserError if `ep` exceeds the number of experts per layer. A dense FFN counts as one expert."""
    if ep > model.num_experts:
        raise refused("ep", ep, f"at most {model.num_experts}, the model's experts", "invalid_layout")


@dataclass(frozen=True)
class Runnable:
    """Engine settings that run a deployment, and how they differ from the plan."""

    settings: Mapping[str, int | str | bool]  # settings by name, as in a file for `--layout`
    missing: tuple[str, ...]  # one sentence for each difference from the plan


def runnable(deployment: Deployment) -> Runnable:
    """Return the engine settings of a deployment, with the closest number formats that the engine supports."""
    degrees = deployment.degrees
    formats, missing = _formats(deployment)
    longest_tokens = deployment.context
    settings: dict[str, int | str | bool] = {name: getattr(degrees, name) for name in ("kvp", "tpa", "tpf", "ep", "pp")}
    if deployment.tied:
        settings["tied"] = True
    settings["placement"] = str(deployment.layout["placement"])
    settings |= formats
    settings |= {"max_model_len": longest_tokens, "kv_cache_tokens": _pool_tokens(deployment, longest_tokens)}
    if deployment.host_ranks is not None and degrees.world_size > deployment.host_ranks:
        settings["nnodes"] = -(-degrees.world_size // deployment.host_ranks)
    if deployment.users > StepConfig.max_running:
        settings["max_running"] = deployment.users
    if deployment.chunk_tokens is not None:
        settings["chunk_tokens"] = deployment.chunk_tokens
    if deployment.sharded and not deployment.hop_b:
        settings["hop_b"] = 1
    return Runnable(settings, (*missing, *_limits(deployment)))


def as_yaml(found: Runnable) -> str:
    """Return the text of a layout file: the differences from the plan as comments, then one setting per line."""
    lines = [line for sentence in found.missing for line in comment(f"Not as planned: {sentence}")]
    for name, value in found.settings.items():
        lines.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines) + "\n"


def comment(sentence: str) -> list[str]:
    """Format a sentence as comment lines for YAML files and shell scripts."""
    lines = textwrap.wrap(sentence, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" if position == 0 else f"#   {line}" for position, line in enumerate(lines)]


def _pool_tokens(deployment: Deployment, tokens: int) -> int:
    """Return the KV capacity in tokens, over all KVP ranks, that all requests need.

    A request occupies whole KV blocks on every rank that stores a part of it. With local placement, every rank has room
    for the longest request.
    """
    kvp, block_tokens = deployment.degrees.kvp, SchedulerConfig.block_tokens
    others = tokens if deployment.other_tokens is None else min(deployment.other_tokens, tokens)
    if deployment.local:
        more = (deployment.users_of_a_group - 1) * _rounded_up(others, block_tokens)
        return kvp * (_rounded_up(tokens, block_tokens) + more)
    unit = block_tokens * kvp
    return _rounded_up(tokens, unit) + (deployment.users - 1) * _rounded_up(others, unit)


def _rounded_up(tokens: int, unit: int) -> int:
    return -(-tokens // unit) * unit


def _limits(deployment: Deployment) -> Iterable[str]:
    """Describe what the engine refuses or does not support yet, except for number formats."""
    ranks = deployment.degrees.world_size
    if deployment.grouped and deployment.sharded:
        yield (
            f"the plan has {deployment.groups} groups of {deployment.kvp} KVP ranks with separate requests, which "
            f"longhelix cannot run: here all {deployment.degrees.kvp} KVP ranks share every request"
        )
    if deployment.accepted_tokens > 1:
        yield (
            f"the plan assumes {deployment.accepted_tokens:g} tokens per step (speculative decoding), but longhelix "
            f"decodes one: each token takes up to {deployment.accepted_tokens:g} times as long as planned"
        )
    if missing := missing_parts(deployment.model):
        yield (
            f"longhelix can plan for this {deployment.model.architecture} model, but cannot run it, because these "
            f"parts are not implemented: {', '.join(missing)}"
        )
    if deployment.device == "cpu" and ranks > _FEW_RANKS:
        yield f"all {ranks} ranks are processes on one host: it needs {-(-ranks // 4)} cores or more"


def _formats(deployment: Deployment) -> tuple[dict[str, int | str | bool], list[str]]:
    """Return the settings of the number formats and descriptions of the differences from the planned formats."""
    weights, kv = FORMATS[deployment.weight_dtype], FORMATS[deployment.kv_dtype]
    device = deployment.device
    own_weights, own_kv = _own_weights(deployment, device), _nearest_kv(deployment.model, kv, device)
    missing = []
    if own_weights is not weights:
        missing.append(f"weights are planned in {weights.name}, {_weights_reason(weights)}: {own_weights.name} here")
    if deployment.expert_dtype is not None and not deployment.packed:
        missing.append(
            f"experts are planned in {deployment.expert_dtype}, but the engine stores all weights in one format: "
            f"{own_weights.name} here"
        )
    if own_kv is not kv:
        missing.append(f"the KV cache is planned in {kv.name}, {_kv_reason(kv, device)}: {own_kv.name} here")
    if missing and device == "cuda":
        missing += _on_cpus(deployment, own_weights, own_kv)
    return {"device": device} | _weight_settings(deployment, own_weights) | {"kv_dtype": own_kv.name}, missing


def _on_cpus(deployment: Deployment, own_weights: NumberFormat, own_kv: NumberFormat) -> list[str]:
    """Return a sentence with the formats that run on CPUs, if these are closer to the plan."""
    weights = _own_weights(deployment, "cpu")
    kv = _nearest_kv(deployment.model, FORMATS[deployment.kv_dtype], "cpu")
    if (weights, kv) == (own_weights, own_kv):
        return []
    settings = {"device": "cpu"} | _weight_settings(deployment, weights) | {"kv_dtype": kv.name}
    words = ", ".join(f"{name} {value}" for name, value in settings.items())
    return [f"formats closer to the plan run on CPUs only: set {words}"]


def _weights_reason(weights: NumberFormat) -> str:
    if not weights.weights:
        return "which the engine cannot store yet"
    return "which the engine stores only on CPUs, and only if every rank's inputs of products are whole blocks"


def _kv_reason(kv: NumberFormat, device: str) -> str:
    if not kv.kv:
        return "which the engine cannot store yet"
    return "which the engine cannot store for this model " + ("on CPUs" if device == "cpu" else "on GPUs")


def _weight_settings(deployment: Deployment, weights: NumberFormat) -> dict[str, int | str | bool]:
    """Return the settings for weights in this format. The engine keeps what a checkpoint packs without any."""
    if deployment.packed:
        return {}
    if weights.arithmetic.rounds_inputs:
        return {"weight_dtype": "int8", "activation_dtype": "int8"}
    # If activations can have this format, they use it too. Otherwise they keep the checkpoint's dtype.
    own: dict[str, int | str | bool] = {"dtype": weights.name} if weights.arithmetic.activation else {}
    return own | {"weight_dtype": weights.name}


def _own_weights(deployment: Deployment, device: str) -> NumberFormat:
    """Return the engine's format for the planned weights, or the nearest one that it has."""
    planned = FORMATS[deployment.weight_dtype]
    if deployment.packed or _keeps_weights(deployment, planned, device):
        return planned
    # Integers in products, and formats of checkpoints, are used only where they are planned.
    common = (each for each in FORMATS.values() if not each.arithmetic.rounds_inputs and each.codes is None)
    return _narrowest((each for each in common if _keeps_weights(deployment, each, device)), planned)


def _nearest_kv(model: ModelSpec, planned: NumberFormat, device: str) -> NumberFormat:
    if _keeps_kv(model, planned, device):
        return planned
    return _narrowest((each for each in FORMATS.values() if _keeps_kv(model, each, device)), planned)


def _narrowest(kept: Iterable[NumberFormat], planned: NumberFormat) -> NumberFormat:
    """Return the narrowest format with at least as many bits as planned.

    At equal width, prefer one with the arithmetic of the planned format, then bfloat16.
    """
    wide_enough = (each for each in kept if each.bits >= planned.bits)
    return min(wide_enough, key=lambda each: (each.bits, each.arithmetic.format != planned.name, each.name))


def _keeps_weights(deployment: Deployment, weights: NumberFormat, device: str) -> bool:
    """Whether ranks can store weights in this format, made from those of a plain checkpoint.

    All devices support plain formats, and the packed formats in which the engine quantises. Other formats need panels.
    """
    if "plain" in weights.weights:
        return True
    if weights.codes is not None:
        return weights.name in WEIGHT_DTYPES
    if not weights.weights or device == "cuda":
        return False
    unit = weights.weight_scales.numbers or _LANES
    return all(inputs % unit == 0 for inputs in deployment.product_inputs)


def _keeps_kv(model: ModelSpec, kv: NumberFormat, device: str) -> bool:
    """Whether ranks can store the model's KV in this format.

    GPUs store rows. CPUs store rows or tiles. On CPUs, narrow formats need tiles. Tiles with one scale for each vector
    require separate keys and values.
    """
    entries = [attention.cache_entry for attention in model.attentions]
    if device == "cuda" or "tiles" not in kv.kv or not kv.kv["tiles"].bits:
        numbers = kv.kv["rows"].numbers if "rows" in kv.kv else None
        whole = numbers is None or not any(size % numbers for entry in entries for size in entry.vector_sizes)
        return "rows" in kv.kv and whole
    if kv.kv["tiles"].numbers is None and any(entry.shared_values for entry in entries):
        return False
    return not any(entry.key_size % _LANES or entry.value_size % _LANES for entry in entries)


def _held(dim: Dim, layout: Layout, rank: int) -> int:
    """Return how many items of a dimension a rank has."""
    match dim.split:
        case Split.OUTPUT_HEADS:
            return len(layout.output_heads(dim.all_heads, rank))
        case Split.FFN_COLUMNS | Split.SHARED_COLUMNS:
            return len(layout.ffn_columns(dim.count, rank))
        case Split.EXPERT_COLUMNS:
            return len(layout.expert_columns(dim.count, rank))
    assert dim.split is Split.WHOLE
    return dim.count
