"""What a model is: its layers, and what comes before and after them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from longhelix.errors import UserError
from longhelix.spec.attention import MultiHeadLatentAttention, Visibility
from longhelix.spec.cache_entry import CacheEntry
from longhelix.spec.ffn import GatedFFN
from longhelix.spec.formats import number_format
from longhelix.spec.layer import Attention, LayerSpec
from longhelix.spec.layout import HeadShape
from longhelix.spec.linear import LinearAttention
from longhelix.spec.mla import MLA
from longhelix.spec.moe import MoE
from longhelix.spec.rope import RopeSpec
from longhelix.spec.sparse import Indexer
from longhelix.spec.vision import VisionSpec


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: `model_type` of its config.json.
        hidden_size: Channels of hidden states.
        vocab_size: Tokens of the vocabulary.
        max_positions: Positions that the model was trained for.
        rms_norm_eps: Added to the mean square in all norms.
        dtype: The dtype of its weights and activations.
        layers: Its layers, in order. Only a few of them differ.
        stored_dtype: Format of most weights of a quantised checkpoint. Empty if it is not quantised.
        stored_experts_alone: Only the experts are in `stored_dtype`.
        tied_embeddings: The head has the embedding's weights.
        eos_token_ids: Tokens that end a sequence.
        vision: What the decoder knows of images. None if the model reads none.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    dtype: str
    layers: tuple[LayerSpec, ...]
    stored_dtype: str = ""
    stored_experts_alone: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    vision: VisionSpec | None = None

    def __post_init__(self) -> None:
        sizes = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size, "max_positions": self.max_positions}
        _check_sizes(sizes | {"num_layers": self.num_layers})
        if all(layer.attention is None for layer in self.layers):
            raise UserError(
                "all layers of the model have linear attention, but longhelix needs at least one with keys and values: "
                "correct layer_types in the model's config",
                "invalid_model",
            )
        for layer in dict.fromkeys(self.layers):
            if layer.attention is not None:
                _check_attention(layer.attention)
            if layer.dense is not None:
                _check_sizes({"ffn_size": layer.dense.num_columns})
        if self.vision is not None:
            self._check_vision(self.vision)

    def _check_vision(self, vision: VisionSpec) -> None:
        if not self.rope.sections:
            raise UserError(
                "the model reads images, but its rope settings have no mrope_section: give the model's own config",
                "invalid_model",
            )
        if vision.num_deepstack > self.num_layers:
            raise UserError(
                f"deepstack_visual_indexes names {vision.num_deepstack} layers of the vision tower, but the model has "
                f"{self.num_layers}: correct it in the model's config",
                "invalid_model",
            )
        beyond = max(vision.image_token_id, vision.start_token_id, vision.end_token_id)
        if beyond >= self.vocab_size:
            raise UserError(
                f"an image token id is {beyond}, but the model's vocabulary has {self.vocab_size} tokens: correct "
                "image_token_id, vision_start_token_id or vision_end_token_id in the model's config",
                "invalid_model",
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def checkpoint_dtypes(self) -> tuple[str, str]:
        """In which the checkpoint has most weights, and experts."""
        stored = self.stored_dtype or self.dtype
        return self.dtype if self.stored_experts_alone else stored, stored

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> "ModelSpec":
        """Return the model with each layer changed."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    @cached_property
    def views(self) -> tuple[Visibility, ...]:
        """What rows see in layers with a limit: each window, and each size of chunks, once."""
        seen = (layer.attention.visibility for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(each for each in seen if each.limit_tokens is not None))

    def view_of(self, layer: int) -> int | None:
        """Which of `views` a layer has. None: its rows see everything."""
        attention = self.layers[layer].attention
        if attention is None or attention.visibility.limit_tokens is None:
            return None
        return self.views.index(attention.visibility)

    def group_of(self, layer: int) -> int:
        """Which KV group a layer's keys and values are in: 0 if its rows see everything, then those of `views`."""
        view = self.view_of(layer)
        return 0 if view is None else 1 + view

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The KV group of each layer."""
        return tuple(map(self.group_of, range(self.num_layers)))

    # Layers with attention are alike but for what their rows see, and so are FFNs of one kind: what follows asks the
    # first of them.

    @cached_property
    def attention(self) -> Attention:
        """The attention of the first layer that has any."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def heads(self) -> HeadShape:
        """Query heads and KV heads of attention."""
        return self.attention.heads

    @property
    def num_query_heads(self) -> int:
        return self.heads.num_query_heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads.num_kv_heads

    @property
    def head_size(self) -> int:
        """Channels of a query head."""
        return self.attention.head_size

    @property
    def rope(self) -> RopeSpec:
        return self.attention.rope

    @property
    def rotated_size(self) -> int:
        """Channels of a head that carry positions."""
        return self.attention.rotated_size

    @cached_property
    def mla(self) -> MLA | None:
        """The sizes of latent attention. None if the model has other attention."""
        return self.attention.latents if isinstance(self.attention, MultiHeadLatentAttention) else None

    @property
    def indexer(self) -> Indexer | None:
        return self.attention.visibility.indexer

    @cached_property
    def linear(self) -> LinearAttention | None:
        """The linear attention of the layers that have it. None if there are none."""
        return next((layer.linear for layer in self.layers if layer.linear is not None), None)

    @cached_property
    def dense(self) -> GatedFFN | None:
        """The FFN of the layers without experts. None if there are none."""
        return next((layer.dense for layer in self.layers if layer.dense is not None), None)

    @cached_property
    def moe(self) -> MoE | None:
        """The FFN of the layers with experts. None if there are none."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    @property
    def ffn_size(self) -> int:
        """Columns of dense FFNs. 0 if there are none."""
        return 0 if self.dense is None else self.dense.num_columns

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's FFN has experts."""
        return self.layers[layer].moe is not None

    @cached_property
    def num_dense_layers(self) -> int:
        """Layers whose FFNs have no experts."""
        return sum(layer.moe is None for layer in self.layers)

    def has_window(self, layer: int) -> bool:
        """Whether the rows of a layer see only some last tokens, or those of their chunk."""
        attention = self.layers[layer].attention
        return attention is not None and attention.visibility.limit_tokens is not None

    @cached_property
    def num_windowed_layers(self) -> int:
        return sum(map(self.has_window, range(self.num_layers)))

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.layers[layer].linear is not None

    @cached_property
    def num_linear_layers(self) -> int:
        return sum(map(self.is_linear, range(self.num_layers)))

    @cached_property
    def sliding_window(self) -> int | None:
        """The most tokens that a row of a layer with a window sees. None if there is no such layer."""
        return next((tokens for tokens in map(_limit_tokens, self.layers) if tokens is not None), None)

    @property
    def mean_window(self) -> float:
        """What a row of a layer with a window sees on average, far into a prompt, in tokens."""
        windowed = next(layer for layer in self.layers if _limit_tokens(layer) is not None)
        assert windowed.attention is not None
        return windowed.attention.visibility.mean_tokens

    def without_windows(self) -> "ModelSpec":
        """Return the model with layers whose rows see all earlier tokens."""
        return self.with_layers(_without_window)

    def within(self, max_tokens: int) -> "ModelSpec":
        """Return the model without the limits that hide nothing in requests of up to `max_tokens` tokens."""
        return self.with_layers(
            lambda layer: _without_window(layer) if (_limit_tokens(layer) or 0) >= max_tokens else layer
        )

    @property
    def scaled_positions(self) -> int:
        """The positions that the model was made for, or those that its rope scaling takes it to, if these are more:
        the original ones times yarn's factor (arXiv 2309.00071)."""
        if self.rope.kind != "yarn":
            return self.max_positions
        return max(self.max_positions, int(self.rope.original_max_positions * self.rope.factor))

    @property
    def cache_entries(self) -> tuple[CacheEntry, ...]:
        """What every layer with attention keeps of a token for it: keys and values, or the latent with its rotated
        key."""
        return (self.attention.cache_entry,)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that all layers keep of one token, for all KV heads; an indexer's keys among them."""
        kept = self.num_kv_heads * sum(sum(entry.vector_sizes) for entry in self.cache_entries)
        keys = 0 if self.indexer is None else self.indexer.head_size
        return (self.num_layers - self.num_linear_layers) * (kept + keys)

    def kv_bytes_per_token(self, kv_dtype: str, num_kv_heads: int, num_layers: int, device: str) -> int:
        """Bytes that the engine keeps of one token on "cpu" or "cuda", for some of the KV heads and layers."""
        number = number_format(kv_dtype)
        head_bytes = sum(entry.head_bytes(number, device) for entry in self.cache_entries)
        return int(num_layers * num_kv_heads * head_bytes)


def _check_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"the model's {name} is {size}: it must be 1 or more", "invalid_model")


def _check_attention(attention: Attention) -> None:
    heads = attention.heads
    _check_sizes(
        {
            "num_query_heads": heads.num_query_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_size": attention.head_size,
        }
    )
    if heads.num_query_heads % heads.num_kv_heads:
        raise UserError(
            f"{heads.num_query_heads} query heads are not a multiple of {heads.num_kv_heads} KV heads: correct "
            "num_attention_heads or num_key_value_heads in the model's config",
            "invalid_model",
        )
    if attention.rotated_size % 2:
        whole = attention.rotated_size == attention.head_size
        what = f"head size {attention.head_size}" if whole else f"the rotated part of a head, {attention.rotated_size},"
        raise UserError(f"{what} is odd: rotary embedding needs an even size", "invalid_model")
    if attention.visibility.indexer is not None and not (
        isinstance(attention, MultiHeadLatentAttention) and attention.latents.q_lora_rank is not None
    ):
        raise UserError(
            "the model has an indexer but no q_lora_rank, which the indexer's queries need: give the model's own "
            "config",
            "invalid_model",
        )


def _limit_tokens(layer: LayerSpec) -> int | None:
    return None if layer.attention is None else layer.attention.visibility.limit_tokens


def _without_window(layer: LayerSpec) -> LayerSpec:
    indexer = None if layer.attention is None else layer.attention.visibility.indexer
    return layer.with_attention(visibility=Visibility(indexer=indexer))
