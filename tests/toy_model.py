"""Small models for tests, described by a few numbers."""

from dataclasses import replace

from longhelix.spec import (
    MLA,
    MLP,
    GroupedQueryAttention,
    HeadNorms,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MoE,
    MultiHeadLatentAttention,
    Projections,
    RopeSpec,
    Visibility,
)
from longhelix.spec.layout import HeadShape
from longhelix.spec.model import CheckpointFormat
from longhelix.spec.vision import VisionSpec
from longhelix.spec.vocabulary import Vocabulary

EVERYTHING = Visibility()


def toy_model(
    architecture: str = "llama",
    *,
    num_layers: int,
    hidden_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    ffn_size: int,
    vocab_size: int,
    max_positions: int,
    rms_norm_eps: float = 1e-6,
    rope: RopeSpec = RopeSpec(),  # noqa: B008 - frozen
    dtype: str = "float32",
    visibility: Visibility = EVERYTHING,
    full_layers: tuple[int, ...] = (),
    qkv_bias: bool = False,
    attention_output_bias: bool = False,
    ffn_bias: bool = False,
    qk_norm: bool = False,
    mla: MLA | None = None,
    moe: MoE | None = None,
    num_dense_layers: int = 0,
    layer_step: int = 1,
    linear: LinearAttention | None = None,
    output_gate: bool = False,
    tied_embeddings: bool = False,
    eos_token_ids: tuple[int, ...] = (),
    vision: VisionSpec | None = None,
) -> ModelSpec:
    """Return a model.

    Args:
        visibility: what rows see in layers other than `full_layers`.
        full_layers: layers whose rows see everything, if others do not or have linear attention.
        mla: latent attention in place of grouped-query attention; `num_kv_heads` and `head_size` then do not count.
        moe: experts in each `layer_step`-th layer after the first `num_dense_layers`.
        linear: linear attention in all layers but `full_layers`.
    """

    def attention(visible: Visibility) -> GroupedQueryAttention | MultiHeadLatentAttention:
        common = {"rope": rope, "visibility": visible}
        biases = {"qkv_bias": qkv_bias, "output_bias": attention_output_bias}
        if mla is not None:
            return MultiHeadLatentAttention(heads=HeadShape(num_query_heads, 1), latents=mla, **common, **biases)
        return GroupedQueryAttention(
            heads=HeadShape(num_query_heads, num_kv_heads),
            head_size=head_size,
            rotated_size=head_size,
            projections=Projections(**biases, output_gate=output_gate),
            norms=HeadNorms(qk=qk_norm),
            **common,
        )

    def layer(index: int) -> LayerSpec:
        full = index in full_layers
        mixer = linear if linear is not None and not full else attention(EVERYTHING if full else visibility)
        has_experts = moe is not None and index >= num_dense_layers and (index + 1) % layer_step == 0
        return LayerSpec((mixer,), (moe if has_experts else MLP(ffn_size, ffn_bias),))

    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        max_positions=max_positions,
        rms_norm_eps=rms_norm_eps,
        layers=tuple(map(layer, range(num_layers))),
        vocabulary=Vocabulary(vocab_size, eos_token_ids, tied_embeddings),
        checkpoint=CheckpointFormat(dtype),
        vision=vision,
    )


def with_attention(spec: ModelSpec, **changes) -> ModelSpec:
    """Return a model with changed fields of the attention of all layers."""
    return spec.with_layers(lambda layer: layer.with_attention(**changes))


def with_ffns(spec: ModelSpec, *ffns: MLP | MoE) -> ModelSpec:
    """Return a model of one layer for each FFN."""
    layers = tuple(LayerSpec(spec.layers[0].mixers, (ffn,)) for ffn in ffns)
    return replace(spec, layers=layers)


def attention_of(spec: ModelSpec) -> GroupedQueryAttention | MultiHeadLatentAttention:
    """Return the attention of the first layer that has any."""
    return spec.attentions[0]


def latents_of(spec: ModelSpec) -> MLA | None:
    """Return the sizes of latent attention. None if the first layer with attention has another kind."""
    attention = attention_of(spec)
    return attention.latents if isinstance(attention, MultiHeadLatentAttention) else None


def moe_of(spec: ModelSpec) -> MoE | None:
    """Return the experts of the first layer that has any. None if there is none."""
    return next(iter(spec.moes), None)


def limit_of(spec: ModelSpec) -> int | None:
    """Return the most tokens that a row of the first layer with a window or chunks sees. None: no layer has any."""
    return spec.views[0].limit_tokens if spec.views else None


def num_dense(spec: ModelSpec) -> int:
    """Return the number of layers without experts."""
    return sum(layer.moe is None for layer in spec.layers)


def kv_elements(spec: ModelSpec) -> int:
    """Return how many numbers all layers keep of one token, for all KV heads; keys of an indexer among them."""
    found = 0
    for attention in (layer.attention for layer in spec.layers if layer.attention is not None):
        indexer = attention.visibility.indexer
        found += attention.heads.num_kv_heads * sum(attention.cache_entry.vector_sizes)
        found += 0 if indexer is None else indexer.head_size
    return found
