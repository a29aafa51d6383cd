"""Small models for tests, described by a few numbers."""

from dataclasses import replace

from longhelix.spec import (
    MLA,
    GatedFFN,
    GroupedQueryAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MoE,
    MultiHeadLatentAttention,
    RopeSpec,
    Visibility,
)
from longhelix.spec.layout import HeadShape
from longhelix.spec.vision import VisionSpec

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
    stored_dtype: str = "",
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
        common = {"rope": rope, "visibility": visible, "qkv_bias": qkv_bias, "output_bias": attention_output_bias}
        if mla is not None:
            return MultiHeadLatentAttention(heads=HeadShape(num_query_heads, 1), latents=mla, **common)
        return GroupedQueryAttention(
            heads=HeadShape(num_query_heads, num_kv_heads),
            head_size=head_size,
            rotated_size=head_size,
            qk_norm=qk_norm,
            output_gate=output_gate,
            **common,
        )

    def layer(index: int) -> LayerSpec:
        full = index in full_layers
        mixer = linear if linear is not None and not full else attention(EVERYTHING if full else visibility)
        has_experts = moe is not None and index >= num_dense_layers and (index + 1) % layer_step == 0
        return LayerSpec((mixer,), (moe if has_experts else GatedFFN(ffn_size, ffn_bias),))

    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        rms_norm_eps=rms_norm_eps,
        dtype=dtype,
        layers=tuple(map(layer, range(num_layers))),
        tied_embeddings=tied_embeddings,
        eos_token_ids=eos_token_ids,
        stored_dtype=stored_dtype,
        vision=vision,
    )


def with_attention(spec: ModelSpec, **changes) -> ModelSpec:
    """Return a model with changed fields of the attention of all layers."""
    return spec.with_layers(lambda layer: layer.with_attention(**changes))


def with_ffns(spec: ModelSpec, *ffns: GatedFFN | MoE) -> ModelSpec:
    """Return a model of one layer for each FFN."""
    layers = tuple(LayerSpec(spec.layers[0].mixers, (ffn,)) for ffn in ffns)
    return replace(spec, layers=layers)
