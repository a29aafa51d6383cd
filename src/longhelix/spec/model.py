"""The description of a model: its layers, and what comes before and after them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from longhelix.errors import UserError
from longhelix.spec.attention import MultiHeadLatentAttention, Visibility
from longhelix.spec.layer import FFN, Attention, LayerSpec
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.moe import MoE
from longhelix.spec.quantised_modules import Quantisation
from longhelix.spec.rope import Rotation
from longhelix.spec.vision import VisionSpec
from longhelix.spec.vocabulary import Vocabulary


@dataclass(frozen=True)
class CheckpointFormat:
    """How a checkpoint stores its weights.

    Attributes:
        dtype: The dtype of activations, and of the weights that are not quantised.
        quantisation: Which modules are quantised, and how. None: none is.
    """

    dtype: str
    quantisation: Quantisation | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: `model_type` of its config.json.
        hidden_size: Channels of hidden states.
        max_positions: Positions that the model was trained for.
        rms_norm_eps: Added to the mean square in all norms.
        layers: Its layers, in order. Only a few of them differ.
        vocabulary: Its tokens, and how they become hidden states and logits.
        checkpoint: How its weights are stored.
        vision: What the decoder knows of images. None if the model reads none.
    """

    architecture: str
    hidden_size: int
    max_positions: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    vocabulary: Vocabulary
    checkpoint: CheckpointFormat
    vision: VisionSpec | None = None

    def __post_init__(self) -> None:
        _check_sizes(
            {
                "hidden_size": self.hidden_size,
                "vocab_size": self.vocabulary.size,
                "max_positions": self.max_positions,
                "num_layers": self.num_layers,
            }
        )
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
        if any(not rotation.rope.sections for rotation in self.rotations):
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
        if beyond >= self.vocabulary.size:
            raise UserError(
                f"an image token id is {beyond}, but the model's vocabulary has {self.vocabulary.size} tokens: correct "
                "image_token_id, vision_start_token_id or vision_end_token_id in the model's config",
                "invalid_model",
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def quantised_by(self, quantisation: Quantisation | None) -> "ModelSpec":
        """Return the model with a checkpoint that is quantised in this way."""
        return replace(self, checkpoint=replace(self.checkpoint, quantisation=quantisation))

    def expanded(self) -> "ModelSpec":
        """Return the model with numbers in place of a GGUF file's blocks."""
        quantisation = self.checkpoint.quantisation
        return self.quantised_by(None) if quantisation is not None and quantisation.gguf else self

    def on_gpus(self) -> "ModelSpec":
        """Return the model as GPUs keep it. Their products have one dtype, so numbers of other dtypes are converted."""
        quantisation = self.checkpoint.quantisation
        return self if quantisation is None else self.quantised_by(quantisation.without_numbers())

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> "ModelSpec":
        """Return the model with each layer changed."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    @cached_property
    def views(self) -> tuple[Visibility, ...]:
        """The different visibilities of layers with a limit: each window, and each size of chunks, once."""
        seen = (layer.attention.visibility for layer in self.layers if layer.attention is not None)
        return tuple(dict.fromkeys(visibility for visibility in seen if visibility.limit_tokens is not None))

    def view_of(self, layer: int) -> int | None:
        """Return the index in `views` of a layer's visibility. None if its rows see everything."""
        attention = self.layers[layer].attention
        if attention is None or attention.visibility.limit_tokens is None:
            return None
        return self.views.index(attention.visibility)

    def group_of(self, layer: int) -> int:
        """Return the KV group of a layer's keys and values: 0 if its rows see everything, otherwise one of 1 and up."""
        attention = self.layers[layer].attention
        return 0 if attention is None else self.group_of_view(attention.visibility)

    def group_of_view(self, visibility: Visibility) -> int:
        """Return the KV group of layers with this visibility."""
        return 0 if visibility.limit_tokens is None else 1 + self.views.index(visibility)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The KV group of each layer."""
        return tuple(map(self.group_of, range(self.num_layers)))

    def check(self, layout: Layout) -> None:
        """Raise UserError if the layers and their heads cannot be split like this."""
        for heads in dict.fromkeys(attention.heads for attention in self.attentions):
            layout.check(heads, self.num_layers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The different attentions of its layers."""
        attentions = (layer.attention for layer in self.layers)
        return tuple(dict.fromkeys(attention for attention in attentions if attention is not None))

    @cached_property
    def rotations(self) -> tuple[Rotation, ...]:
        """The different rotations of its layers."""
        return tuple(dict.fromkeys(attention.rotation for attention in self.attentions))

    def rotation_of(self, layer: int) -> int:
        """Return the index in `rotations` of a layer's rotation. The layer must have attention."""
        attention = self.layers[layer].attention
        assert attention is not None
        return self.rotations.index(attention.rotation)

    @cached_property
    def fewest_heads(self) -> HeadShape:
        """The fewest query heads and the fewest KV heads of any layer."""
        shapes = [attention.heads for attention in self.attentions]
        return HeadShape(min(shape.num_query_heads for shape in shapes), min(shape.num_kv_heads for shape in shapes))

    @cached_property
    def has_latents(self) -> bool:
        """Whether any layer has latent attention."""
        return any(isinstance(attention, MultiHeadLatentAttention) for attention in self.attentions)

    @cached_property
    def ffns(self) -> tuple[FFN, ...]:
        """The different FFNs of its layers."""
        return tuple(dict.fromkeys(ffn for layer in self.layers for ffn in layer.ffns))

    @cached_property
    def moes(self) -> tuple[MoE, ...]:
        """The different FFNs with experts. Empty if no layer has experts."""
        return tuple(ffn for ffn in self.ffns if isinstance(ffn, MoE))

    @property
    def num_experts(self) -> int:
        """The fewest experts of any layer with experts. 1 if no layer has experts."""
        return min((moe.num_experts for moe in self.moes), default=1)

    def without_windows(self) -> "ModelSpec":
        """Return the model with layers whose rows see all earlier tokens."""
        return self.with_layers(_without_window)

    def within(self, max_tokens: int) -> "ModelSpec":
        """Return the model without the limits that have no effect on requests of up to `max_tokens` tokens."""
        return self.with_layers(
            lambda layer: _without_window(layer) if (_limit_tokens(layer) or 0) >= max_tokens else layer
        )

    @property
    def scaled_positions(self) -> int:
        """The positions that the model was trained for, or more if its rope scaling extends them.

        Yarn extends the original positions by its factor (arXiv 2309.00071).
        """
        scalings = (rotation.rope.scaling for rotation in self.rotations)
        scaled = [int(each.original_max_positions * each.factor) for each in scalings if each.kind == "yarn"]
        return max([self.max_positions, *scaled])


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
