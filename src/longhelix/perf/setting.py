"""What is costed: a model in some dtypes on a system."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from longhelix.errors import UserError
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.runs import Runs
from longhelix.spec import FORMATS, HardwareSpec, LayerSpec, LinearAttention, ModelSpec, number_format
from longhelix.spec.layer import FFN, Attention, Mixer
from longhelix.spec.layout import HeadShape
from longhelix.spec.weights import WeightSpec, part_weights

ACTIVATION_DTYPE = "bfloat16"
ACTIVATION_BYTES = FORMATS[ACTIVATION_DTYPE].bits / 8
LSE_BYTES = 4.0
STATE_BYTES = 4.0  # float32, as Qwen3-Next is to be served (vLLM pull request 34489)
LOGIT_BYTES = 4.0
MOST_DRAFTS = 64
CANDIDATE_BYTES = 12.0  # a token that may be chosen: its logit and its id
# A layer with a limit keeps this share of what one without keeps, when stages are compared.
_LIMITED_WEIGHT = 1e-6
CANDIDATES_SUM_BYTES = 8.0  # the weight of all tokens of a row


@dataclass(frozen=True)
class Setting:
    """A model, the dtypes of its weights and KV, and the system that runs it. Activations are bfloat16.

    attention_dtype: in which attention computes; None: in the KV's, and in fp8 or bfloat16 on keys and values of four
    bits, as no kernel is known that attends in these. expert_dtype: that of the weights of experts; None: that of all
    others. draft_tokens: those of a decoding request that a step verifies, each in a row of its own (speculative
    decoding); accepted_tokens: that such a step gives it on average, its own one included. evenly_chosen: the tokens
    that an indexer chooses lie over KVP ranks as evenly as all; otherwise one of these may have all of them. Raises
    UserError where the system has no arithmetic in one of the dtypes, and for numbers out of range.
    """

    model: ModelSpec
    system: HardwareSpec
    weight_dtype: str
    kv_dtype: str
    attention_dtype: str | None = None
    expert_dtype: str | None = None
    draft_tokens: int = 0
    accepted_tokens: float = 1.0
    evenly_chosen: bool = True

    def __post_init__(self) -> None:
        self._check(self.weight_dtype, "weights are", "--weight-dtype")
        self._check(self.experts_in, "experts are", "--expert-dtype")
        attends = "--kv-dtype" if self.attention_dtype is None else "--attention-dtype"
        self._check(self.attends_in, "attention computes", attends)
        if not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise UserError(f"draft-tokens is {self.draft_tokens}: set it to a number from 0 to {MOST_DRAFTS}")
        if not 1 <= self.accepted_tokens <= self.request_rows:
            raise UserError(
                f"accepted-tokens is {self.accepted_tokens:g}, and a step with {self.draft_tokens} draft tokens gives "
                f"1 to {self.request_rows}: set accepted-tokens to one of these, or draft-tokens to more"
            )

    def _check(self, dtype: str, used: str, option: str) -> None:
        if not self.system.computes_in(dtype):
            raise UserError(
                f"the system {self.system.name} has no arithmetic in {dtype}, in which {used}: set {option} to one of "
                f"{', '.join(self.system.flops_per_s)}",
                "unsupported_dtype",
            )

    @property
    def experts_in(self) -> str:
        """The dtype of the experts' weights."""
        return self.weight_dtype if self.expert_dtype is None else self.expert_dtype

    @property
    def request_rows(self) -> int:
        """Rows of a decoding request in a step: its last token's, and those of drafts."""
        return 1 + self.draft_tokens

    @cached_property
    def attends_in(self) -> str:
        """The dtype of attention's arithmetic."""
        if self.attention_dtype is not None:
            return self.attention_dtype
        if number_format(self.kv_dtype).arithmetic or self.kv_dtype == "fp4":
            return "fp8" if "fp8" in self.system.flops_per_s else "bfloat16"
        return self.kv_dtype

    @property
    def indexes_in(self) -> str:
        """The dtype of an indexer's arithmetic: FP8 (TensorRT-LLM, tech blog 15) where the system has it."""
        return "fp8" if self.system.computes_in("fp8") else "bfloat16"

    @cached_property
    def weights(self) -> dict[Mixer | FFN, tuple[WeightSpec, ...]]:
        """The weights of each different mixer and FFN, with the norms before them."""
        parts = (part for layer in dict.fromkeys(self.model.layers) for part in (*layer.mixers, *layer.ffns))
        return {part: part_weights(self.model, part) for part in dict.fromkeys(parts)}

    @cached_property
    def _mixers_of_layers(self) -> Runs[tuple[Mixer, ...]]:
        return Runs([layer.mixers for layer in self.model.layers])

    @cached_property
    def layers(self) -> Runs[LayerSpec]:
        """The different layers of the model."""
        return Runs(self.model.layers)

    def mixers_of_stages(self, layouts: Layouts) -> list[tuple[tuple[Mixer, ...], Array]]:
        """The mixers of each different layer, and how many such layers the stage with the most KV has.

        Layers that see everything have by far the most KV in long contexts. Among stages with equally much, those with
        the most KV in other layers count.
        """
        runs = self._mixers_of_layers
        amounts = {mixers: self._kept(layouts, mixers) for mixers in runs.kinds}
        counts = runs.fullest(amounts, layouts.stage_layers(self.model.num_layers))
        return [(mixers, counts[mixers]) for mixers in sorted(runs.kinds, key=_attended)]

    def _kept(self, layouts: Layouts, mixers: tuple[Mixer, ...]) -> Array:
        """Bytes of KV of one token. Those of layers with a limit hardly count."""
        kept = layouts.zeros
        for mixer in mixers:
            if not isinstance(mixer, LinearAttention):
                weight = 1.0 if mixer.visibility.limit_tokens is None else _LIMITED_WEIGHT
                kept = kept + weight * self.token_bytes(layouts, mixer)
        return kept

    def token_bytes(self, layouts: Layouts, attention: Attention) -> Array:
        """KV of one token in one layer on the fullest rank."""
        return layouts.kv_heads(attention.heads) * self.kv_head_bytes(attention) + index_bytes(attention)

    def as_scheduled(self, *, even: bool) -> "Setting":
        """The same as schedulers price steps: their `Work` is counted for the fullest rank, and does not say how long
        single requests are. So layers with a window count as if their rows saw everything. even: all KV is spread
        evenly over KVP ranks; otherwise nothing says on how many of them the tokens lie that an indexer chooses."""
        model = self.model
        if any(attention.visibility.indexer is not None for attention in model.attentions):
            return replace(self, evenly_chosen=even)
        if not model.views:
            return self
        return replace(self, model=model.without_windows())

    @property
    def weight_bytes(self) -> float:
        """Bytes of one number of a weight."""
        return number_format(self.weight_dtype).weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes of one number of an expert's weight."""
        return number_format(self.experts_in).weight_bytes

    def kv_head_bytes(self, attention: Attention) -> float:
        """Bytes of what one layer keeps of one token and KV head, for attention."""
        number, device = number_format(self.kv_dtype), "cpu" if self.system.shared else "cuda"
        return attention.cache_entry.head_bytes(number, device)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of what all layers keep of one token, for all KV heads, and for an indexer."""
        counts = Counter(layer.attention for layer in self.model.layers if layer.attention is not None)
        return sum(
            count * (attention.heads.num_kv_heads * self.kv_head_bytes(attention) + index_bytes(attention))
            for attention, count in counts.items()
        )

    def capacity_bytes(self, layouts: Layouts) -> Array:
        """Memory that a rank may fill."""
        return self.system.usable_bytes * self.share(layouts)

    def priced_amount(self, layouts: Layouts, fullest: Array, mean: Array) -> Array:
        """How much of something each rank is priced with: as much as the fullest has, for which the others wait.

        Where ranks share a machine and there are more than its cores, they take turns: the mean, or as much of the
        fullest as it takes while others have their turns, if that is more.
        """
        if not self.system.shared:
            return fullest
        return np.maximum(mean, fullest / np.maximum(layouts.world_size / self.system.cores, 1.0))

    def kv_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """KV heads of a rank, see `priced_amount`."""
        return self.priced_amount(layouts, layouts.kv_heads(heads), np.maximum(heads.num_kv_heads / layouts.tpa, 1.0))

    def query_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """Query heads of a rank, see `priced_amount`."""
        return self.priced_amount(layouts, layouts.query_heads(heads), heads.num_query_heads / layouts.tpa)

    def merged_query_heads(self, layouts: Layouts, heads: HeadShape) -> Array:
        """Query heads of a rank in the output projection, see `priced_amount`."""
        return self.priced_amount(
            layouts, layouts.merged_query_heads(heads), heads.num_query_heads / layouts.output_ranks
        )

    def share(self, layouts: Layouts) -> Array:
        """A rank's share of the system's memory, bandwidth and arithmetic: all, or 1/N where ranks share a machine."""
        return 1 / layouts.world_size if self.system.shared else layouts.ones


def _attended(mixers: tuple[Mixer, ...]) -> int:
    """0 if a row sees everything, 1 if only some tokens, 2 if there are no keys and values."""
    seen = [mixer.visibility.limit_tokens for mixer in mixers if not isinstance(mixer, LinearAttention)]
    return 2 if not seen else int(None not in seen)


def index_bytes(attention: Attention) -> float:
    """Bytes of what one layer keeps of one token for an indexer."""
    indexer = attention.visibility.indexer
    return 0.0 if indexer is None else indexer.key_bytes
