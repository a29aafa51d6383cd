"""The setting of a cost estimate: a model in some dtypes on a system."""

from collections import Counter
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import numpy as np

from longhelix.errors import UserError
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.runs import Runs
from longhelix.perf.stored_layers import (
    LayerPart,
    StoredLayer,
    StoredModel,
    StoredWeights,
    as_packed,
    in_dtypes,
    stored_model,
)
from longhelix.spec import FORMATS, HardwareSpec, LinearAttention, ModelSpec, number_format
from longhelix.spec.layer import FFN, Attention, Mixer
from longhelix.spec.layout import HeadShape
from longhelix.spec.weights import WeightDtype

ACTIVATION_DTYPE = "bfloat16"
ACTIVATION_BYTES = FORMATS[ACTIVATION_DTYPE].bits / 8
LSE_BYTES = 4.0
STATE_BYTES = 4.0  # float32, as Qwen3-Next is to be served (vLLM pull request 34489)
LOGIT_BYTES = 4.0
MOST_DRAFTS = 64
CANDIDATE_BYTES = 12.0  # a token that may be chosen: its logit and its id
# Weight of the KV of layers with a limit, relative to layers without one, when stages are compared.
_LIMITED_WEIGHT = 1e-6
CANDIDATES_SUM_BYTES = 8.0  # the sum of the weights of all tokens of a row


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of weights and KV, and of attention's arithmetic. Activations are bfloat16.

    Attributes:
        weights: Dtype of the weights. If `packed`, of those that the checkpoint does not pack.
        kv: Dtype of keys and values.
        attention: Dtype of attention's arithmetic. None: `kv`, but fp8 or bfloat16 for four-bit KV, because no kernel
            is known that attends in four bits.
        experts: Dtype of experts' weights. None: as other weights, or if `packed`, as the checkpoint has them.
        packed: Weights that a quantised checkpoint packs stay in its formats, and are counted as the engine keeps them.
            Otherwise, all are in `weights` and `experts`, whatever the checkpoint has.
    """

    weights: str
    kv: str
    attention: str | None = None
    experts: str | None = None
    packed: bool = False


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding: a step verifies draft tokens of each decoding request, each in its own row.

    Attributes:
        tokens: Draft tokens of a request in a step.
        accepted: Average number of tokens that such a step gives a request, including its own one.

    Raises:
        UserError: A number is out of range.
    """

    tokens: int = 0
    accepted: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= MOST_DRAFTS:
            raise UserError(f"draft-tokens is {self.tokens}: set it to a number from 0 to {MOST_DRAFTS}")
        most = 1 + self.tokens
        if not 1 <= self.accepted <= most:
            raise UserError(
                f"accepted-tokens is {self.accepted:g}, and a step with {self.tokens} draft tokens gives 1 to {most}: "
                "set accepted-tokens to one of these, or draft-tokens to more"
            )


@dataclass(frozen=True)
class Setting:
    """A model, its dtypes, and the system that runs it.

    Attributes:
        model: The model.
        system: The system.
        dtypes: Dtypes of the weights, the KV and attention's arithmetic.
        drafts: The draft tokens of a step, and how many of them are accepted.
        evenly_chosen: The tokens that an indexer chooses are spread evenly over KVP ranks. Otherwise, one rank may have
            all of them.

    Raises:
        UserError: The system has no arithmetic in one of the dtypes.
    """

    model: ModelSpec
    system: HardwareSpec
    dtypes: Dtypes
    _: KW_ONLY
    drafts: Drafts = Drafts()
    evenly_chosen: bool = True

    def __post_init__(self) -> None:
        dtypes = self.dtypes
        self._check(dtypes.weights, "weights are", "--weight-dtype")
        if dtypes.experts is not None:
            self._check(dtypes.experts, "experts are", "--expert-dtype")
        attends = "--kv-dtype" if dtypes.attention is None else "--attention-dtype"
        self._check(self.attends_in, "attention computes", attends)

    def _check(self, dtype: str, used: str, option: str) -> None:
        if not self.system.computes_in(dtype):
            raise UserError(
                f"the system {self.system.name} has no arithmetic in {dtype}, in which {used}: set {option} to one of "
                f"{', '.join(self.system.arithmetic.flops_per_s)}",
                "unsupported_dtype",
            )

    @cached_property
    def weights_in(self) -> str:
        """The format of most weights of the last layer, besides experts."""
        return _most(self.stored.layers[-1].weights, experts=False)

    @cached_property
    def experts_in(self) -> str:
        """The format of the experts' weights. Without experts, `weights_in`."""
        layers = (layer for layer in reversed(self.stored.layers) if any(each.spec.is_expert for each in layer.weights))
        layer = next(layers, None)
        return self.weights_in if layer is None else _most(layer.weights, experts=True)

    @property
    def request_rows(self) -> int:
        """Rows of a decoding request in a step: one for its last token, and one for each draft token."""
        return 1 + self.drafts.tokens

    @cached_property
    def attends_in(self) -> str:
        """The dtype of attention's arithmetic."""
        dtypes = self.dtypes
        if dtypes.attention is not None:
            return dtypes.attention
        if number_format(dtypes.kv).arithmetic.format or dtypes.kv == "fp4":
            return "fp8" if "fp8" in self.system.arithmetic.flops_per_s else "bfloat16"
        return dtypes.kv

    @property
    def indexes_in(self) -> str:
        """The dtype of an indexer's arithmetic: FP8 (TensorRT-LLM, tech blog 15) where the system has it."""
        return "fp8" if self.system.computes_in("fp8") else "bfloat16"

    @cached_property
    def parts(self) -> tuple[Mixer | FFN, ...]:
        """The different mixers and FFNs of the model."""
        layers = dict.fromkeys(self.model.layers)
        return tuple(dict.fromkeys(part for layer in layers for part in (*layer.mixers, *layer.ffns)))

    @property
    def keeps_packed(self) -> bool:
        """Whether weights stay in the formats in which a quantised checkpoint packs them."""
        return self.dtypes.packed and self.model.checkpoint.quantisation is not None

    @cached_property
    def stored(self) -> StoredModel:
        """The weights of the model in their formats."""
        quantisation, weights, experts = self.model.checkpoint.quantisation, self.dtypes.weights, self.dtypes.experts
        if not self.keeps_packed or quantisation is None:
            return stored_model(self.model, in_dtypes(weights, experts or weights))
        unpacked = {
            WeightDtype.ACTIVATION: ACTIVATION_DTYPE,
            WeightDtype.PRODUCT: weights,
            WeightDtype.FLOAT32: "float32",
        }
        return stored_model(self.model, as_packed(quantisation, unpacked, experts))

    @cached_property
    def norms_per_layer(self) -> float:
        """Norms of hidden states in a layer, on average."""
        layers = self.model.layers
        return 2 * sum(layer.norms.before + layer.norms.after for layer in layers) / len(layers)

    @cached_property
    def _mixers_of_layers(self) -> Runs[tuple[LayerPart[Mixer], ...]]:
        return Runs([layer.mixers for layer in self.stored.layers])

    @cached_property
    def layers(self) -> Runs[StoredLayer]:
        """The different layers of the model."""
        return Runs(self.stored.layers)

    def mixers_of_stages(self, layouts: Layouts) -> list[tuple[tuple[LayerPart[Mixer], ...], Array]]:
        """Return the mixers of each different layer, and how many such layers the stage with the most KV has.

        Layers that see everything have by far the most KV in long contexts. Stages with equal KV in such layers are
        compared by the KV of their other layers.
        """
        runs = self._mixers_of_layers
        amounts = {mixers: self._kept(layouts, mixers) for mixers in runs.kinds}
        counts = runs.fullest(amounts, layouts.stage_layers(self.model.num_layers))
        return [(mixers, counts[mixers]) for mixers in sorted(runs.kinds, key=_attended)]

    def _kept(self, layouts: Layouts, mixers: tuple[LayerPart[Mixer], ...]) -> Array:
        """Return bytes of KV of one token. Layers with a limit hardly count."""
        kept = layouts.zeros
        for mixer in (each.spec for each in mixers):
            if not isinstance(mixer, LinearAttention):
                weight = 1.0 if mixer.visibility.limit_tokens is None else _LIMITED_WEIGHT
                kept = kept + weight * self.token_bytes(layouts, mixer)
        return kept

    def token_bytes(self, layouts: Layouts, attention: Attention) -> Array:
        """Return bytes of KV of one token in one layer on the fullest rank."""
        return layouts.kv_heads(attention.heads) * self.kv_head_bytes(attention) + index_bytes(attention)

    def as_scheduled(self, *, even: bool) -> "Setting":
        """Return the setting for the `Work` of schedulers, which does not contain the length of single requests.

        So layers with a window count as if their rows saw everything.

        even: whether all KV is spread evenly over KVP ranks. Otherwise, one rank may have all tokens that an indexer
            chooses.
        """
        model = self.model
        if any(attention.visibility.indexer is not None for attention in model.attentions):
            return replace(self, evenly_chosen=even)
        if not model.views:
            return self
        return replace(self, model=model.without_windows())

    @property
    def weight_bytes(self) -> float:
        """Bytes of one number of a weight."""
        return number_format(self.dtypes.weights).weight_bytes

    def kv_head_bytes(self, attention: Attention) -> float:
        """Return bytes that one layer keeps for one token and KV head, for attention."""
        number, device = number_format(self.dtypes.kv), "cpu" if self.system.shared else "cuda"
        return attention.cache_entry.head_bytes(number, device)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes that all layers keep for one token, for all KV heads, and for an indexer."""
        counts = Counter(layer.attention for layer in self.model.layers if layer.attention is not None)
        return sum(
            count * (attention.heads.num_kv_heads * self.kv_head_bytes(attention) + index_bytes(attention))
            for attention, count in counts.items()
        )

    def capacity_bytes(self, layouts: Layouts) -> Array:
        """Return the memory in bytes that a rank may fill."""
        return self.system.usable_bytes * self.share(layouts)

    def priced_amount(self, layouts: Layouts, fullest: Array, mean: Array) -> Array:
        """Return the amount of something that each rank is priced with.

        This is the amount of the fullest rank, because the other ranks wait for it. If more ranks share a machine than
        it has cores, they take turns. Then it is the mean, or the fullest rank's share of a turn if that is more.
        """
        if not self.system.shared:
            return fullest
        return np.maximum(mean, fullest / np.maximum(layouts.world_size / self.system.cores, 1.0))

    def kv_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """Return the KV heads that a rank is priced with (`priced_amount`)."""
        return self.priced_amount(layouts, layouts.kv_heads(heads), np.maximum(heads.num_kv_heads / layouts.tpa, 1.0))

    def query_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """Return the query heads that a rank is priced with (`priced_amount`)."""
        return self.priced_amount(layouts, layouts.query_heads(heads), heads.num_query_heads / layouts.tpa)

    def merged_query_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """Return the query heads that a rank is priced with in the output projection (`priced_amount`)."""
        return self.priced_amount(
            layouts, layouts.merged_query_heads(heads), heads.num_query_heads / layouts.output_ranks
        )

    def share(self, layouts: Layouts) -> Array:
        """Return a rank's share of memory, bandwidth and arithmetic: 1, or 1/N if N ranks share a machine."""
        return 1 / layouts.world_size if self.system.shared else layouts.ones


def _most(weights: StoredWeights, *, experts: bool) -> str:
    """Return the format of most numbers of products, of experts or of other weights."""
    numbers = Counter[str]()
    for weight in weights:
        if weight.spec.stored is WeightDtype.PRODUCT and weight.spec.is_expert == experts:
            numbers[weight.dtype] += weight.spec.num_elements
    return numbers.most_common(1)[0][0]


def _attended(mixers: tuple[LayerPart[Mixer], ...]) -> int:
    """Return 0 if a row sees everything, 1 if it sees only some tokens, 2 if there are no keys and values."""
    specs = (mixer.spec for mixer in mixers)
    seen = [mixer.visibility.limit_tokens for mixer in specs if not isinstance(mixer, LinearAttention)]
    return 2 if not seen else int(None not in seen)


def index_bytes(attention: Attention) -> float:
    """Return bytes that one layer keeps for one token for an indexer."""
    indexer = attention.visibility.indexer
    return 0.0 if indexer is None else indexer.key_bytes
