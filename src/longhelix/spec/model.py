"""What a model is: its shapes and numbers, read from a checkpoint's configuration.

This room is the only reader of Hugging Face config names and of GGUF metadata names. Pure: mappings in, frozen
specs out; anything that longhelix would have to guess is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.cache_entry import CacheEntry
from longhelix.spec.config import (
    count,
    count_or_none,
    dtype_name,
    full_layers,
    positive,
    replaced,
    rope_mapping,
    sliding_window,
    switch,
    token_ids,
)
from longhelix.spec.config_fields import completed
from longhelix.spec.family import FAMILIES, PLANNED_FAMILIES, Family
from longhelix.spec.formats import number_format
from longhelix.spec.linear import LinearAttention
from longhelix.spec.mla import MLA
from longhelix.spec.moe import MoE
from longhelix.spec.quantisation import stored_dtype, stores_experts_alone
from longhelix.spec.rope import RopeSpec, frequency_divisors
from longhelix.spec.sparse import Indexer
from longhelix.spec.vision import DEFAULT_SECTIONS, VisionSpec, decoder_config
from longhelix.values import shown


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer: GQA attention or `mla`, dense SwiGLU FFNs of `ffn_size` columns or `moe`.

    With `mla` all query heads share one KV head, the latent, and `head_size` is that of a query, rotated channels and
    all. `stored_experts_alone`: the experts are in `stored_dtype`, and all other weights in `dtype`. `eos_token_ids`
    end a sequence; `sliding_window`, where set, is the attention span in tokens beyond which full attention would no
    longer be what the model computes. `full_layers`, ascending, have none; all others see the last tokens alone, a
    row's own among them, or, with `chunked_attention`, what came before a row in its own chunk of so many tokens, or,
    with `linear`, have linear attention. `indexer`: it chooses what attention reads. `vision`: of models that read
    images.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSpec
    dtype: str
    stored_dtype: str = ""
    stored_experts_alone: bool = False
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mla: MLA | None = None
    moe: MoE | None = None
    vision: VisionSpec | None = None
    full_layers: tuple[int, ...] = ()
    chunked_attention: bool = False
    indexer: Indexer | None = None
    linear: LinearAttention | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_query_heads", "num_kv_heads", "head_size", "ffn_size",
                     "vocab_size", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"the model's {name} is {getattr(self, name)}: it must be 1 or more", "invalid_model")
        if self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_query_heads} query heads are not a multiple of {self.num_kv_heads} KV heads: correct "
                "num_attention_heads or num_key_value_heads in the model's config",
                "invalid_model",
            )
        if self.mla is None and self.head_size % 2:
            raise UserError(f"head size {self.head_size} is odd: rotary embedding needs an even size", "invalid_model")
        if self.moe is not None and self.moe.num_dense_layers > self.num_layers:
            raise UserError(
                f"the first {self.moe.num_dense_layers} layers are dense, but the model has {self.num_layers}: correct "
                "first_k_dense_replace in the model's config",
                "invalid_model",
            )
        if self.indexer is not None and (self.mla is None or self.mla.q_lora_rank is None):
            raise UserError(
                "the model has an indexer but no q_lora_rank, which the indexer's queries need: give the model's own "
                "config",
                "invalid_model",
            )
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
    def family(self) -> Family:
        return FAMILIES.get(self.architecture) or PLANNED_FAMILIES[self.architecture]

    @property
    def checkpoint_dtypes(self) -> tuple[str, str]:
        """In which the checkpoint has most weights, and experts."""
        stored = self.stored_dtype or self.dtype
        return self.dtype if self.stored_experts_alone else stored, stored

    @property
    def rotated_size(self) -> int:
        """Channels of a head that carry positions."""
        return self.head_size if self.mla is None else self.mla.rope_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's FFN has experts."""
        moe = self.moe
        return moe is not None and layer >= moe.num_dense_layers and (layer + 1) % moe.layer_step == 0

    @property
    def num_dense_layers(self) -> int:
        """Layers whose FFNs have no experts."""
        return sum(not self.has_experts(layer) for layer in range(self.num_layers))

    def has_window(self, layer: int) -> bool:
        """Whether a layer attends to a window alone."""
        return self.sliding_window is not None and layer not in self.full_layers

    @property
    def num_windowed_layers(self) -> int:
        return sum(map(self.has_window, range(self.num_layers)))

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.linear is not None and layer not in self.full_layers

    @property
    def num_linear_layers(self) -> int:
        return sum(map(self.is_linear, range(self.num_layers)))

    @property
    def mean_window(self) -> float:
        """What a row of a layer with a window sees on average, far into a prompt, in tokens."""
        assert self.sliding_window is not None
        return (self.sliding_window + 1) / 2 if self.chunked_attention else self.sliding_window

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
        if self.mla is None:
            return (CacheEntry("kv", self.head_size, self.head_size),)
        return (CacheEntry("latent", self.mla.cached_size, self.mla.kv_lora_rank, shared_values=True),)

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

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        planned: bool = False,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> "ModelSpec":
        """Read config.json (and the end-of-sequence ids of generation_config.json, if there is one).

        Args:
            planned: accept families that can be planned but not run.
            rope_scaling: settings that replace the config's own rope settings, all but theta.
        """
        architecture, families = config.get("model_type"), FAMILIES | (PLANNED_FAMILIES if planned else {})
        family = families.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            raise UserError(
                f"the model's architecture is {shown(architecture)}: longhelix runs {', '.join(FAMILIES)}"
                + (f", and plans for {', '.join(PLANNED_FAMILIES)}" if planned else ""),
                "unknown_architecture",
            )
        vision = VisionSpec.from_hf_config(config) if family.vision else None
        if family.vision or family.wrapped:
            config = decoder_config(config)
        config = completed(config, family)
        activation = config["hidden_act"]
        if not isinstance(activation, str) or activation not in ("silu", "swish"):
            raise UserError(f"hidden_act is {shown(activation)}: longhelix runs 'silu' (SwiGLU)", "invalid_model")
        hidden_size, num_query_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        max_positions = count(config, "max_position_embeddings")
        mla = MLA.from_hf_config(config) if family.mla else None
        if mla is None:
            head_size = count_or_none(config, "head_dim") or hidden_size // num_query_heads
            num_kv_heads = count_or_none(config, "num_key_value_heads") or num_query_heads
            rotated_size = head_size
        else:
            head_size, num_kv_heads, rotated_size = mla.nope_size + mla.rope_size, 1, mla.rope_size
        num_layers = count(config, "num_hidden_layers")
        window = sliding_window(config, family, num_layers)
        rope = rope_mapping(config)
        if family.vision:
            rope = {"mrope_section": DEFAULT_SECTIONS, "mrope_interleaved": True, **rope}
        if family.partly_rotated:
            rope.pop("partial_rotary_factor", None)  # which channels turn changes no cost
        if rope_scaling is not None:
            rope = replaced(rope, rope_scaling)
        bias = family.attention_bias and switch(config, "attention_bias")
        # Only qwen2_moe's config can say that there is none.
        always_biased = family.qkv_bias and switch(config, "qkv_bias", True)
        generated_eos = (generation_config or {}).get("eos_token_id")
        return cls(
            architecture=str(architecture),
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            ffn_size=count(config, "intermediate_size_mlp" if family.chunked else "intermediate_size"),
            vocab_size=count(config, "vocab_size"),
            max_positions=max_positions,
            rms_norm_eps=positive(config, "rms_norm_eps"),
            rope=RopeSpec.from_config(rope, rotated_size, max_positions),
            dtype=dtype_name(config),
            stored_dtype=stored_dtype(config),
            stored_experts_alone=family.moe and stores_experts_alone(config),
            tied_embeddings=switch(config, "tie_word_embeddings"),
            qkv_bias=bias or always_biased,
            attention_output_bias=bias and family.output_bias,
            ffn_bias=family.mlp_bias and switch(config, "mlp_bias"),
            qk_norm=family.qk_norm or (family.qk_norm_asked and switch(config, "use_qk_norm")),
            sliding_window=window,
            eos_token_ids=token_ids(config.get("eos_token_id") if generated_eos is None else generated_eos),
            mla=mla,
            moe=MoE.from_hf_config(config) if family.moe else None,
            vision=vision,
            full_layers=full_layers(config, family, num_layers) if window is not None or family.linear else (),
            chunked_attention=window is not None and family.chunked,
            indexer=Indexer.from_hf_config(config) if family.indexed else None,
            linear=LinearAttention.from_hf_config(config) if family.linear else None,
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        rope_divisors: Sequence[float] = (),
        *,
        tied: bool,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> "ModelSpec":
        """Read the metadata of a GGUF file of the llama architecture.

        Args:
            rope_divisors: its rope_freqs tensor, if it has one.
            tied: it has no output tensor of its own.
            rope_scaling: settings that replace the file's own rope settings, all but theta.
        """

        def present(key: str) -> str:
            if metadata.get(key) is None:
                raise UserError(f"the GGUF file has no metadata key {key!r}", "invalid_model")
            return key

        def number(key: str, default: int | None = None) -> int:
            name = f"llama.{key}"
            return count(metadata, present(name) if default is None else name, default)

        hidden_size, num_query_heads = number("embedding_length"), number("attention.head_count")
        head_size = number("attention.key_length", hidden_size // num_query_heads)
        max_positions = number("context_length")
        rope = _gguf_rope(metadata, rope_divisors, rope_scaling)
        if number("rope.dimension_count", head_size) != head_size:
            raise UserError("the GGUF file rotates only a part of each head: longhelix rotates whole heads")
        resolved = RopeSpec.from_config(rope, head_size, max_positions)
        if rope_divisors and rope_scaling is None:
            resolved = replace(
                resolved, divisors=frequency_divisors({"rope_freqs": list(rope_divisors)}, "rope_freqs", head_size)
            )
        causal = metadata.get("llama.attention.causal", True)
        if causal is not True:
            raise UserError(
                f"llama.attention.causal in the GGUF file is {shown(causal)}: longhelix runs only models that attend "
                "to earlier tokens, so choose such a model",
                "unsupported_model",
            )
        tokens = metadata.get("tokenizer.ggml.tokens")
        return cls(
            architecture="llama",
            num_layers=number("block_count"),
            hidden_size=hidden_size,
            num_query_heads=num_query_heads,
            num_kv_heads=number("attention.head_count_kv", num_query_heads),
            head_size=head_size,
            ffn_size=number("feed_forward_length"),
            vocab_size=number("vocab_size", len(tokens) if isinstance(tokens, (list, tuple)) else None),
            max_positions=max_positions,
            rms_norm_eps=positive(metadata, present("llama.attention.layer_norm_rms_epsilon"), 1e-5),
            rope=resolved,
            dtype="bfloat16",
            tied_embeddings=tied,
            sliding_window=count_or_none(metadata, "llama.attention.sliding_window"),
            eos_token_ids=token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        )


def _gguf_rope(
    metadata: Mapping[str, Any], divisors: Sequence[float], rope_scaling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The rope settings of a GGUF file, with Hugging Face's names."""
    theta = metadata.get("llama.rope.freq_base")
    rope: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if rope_scaling is not None:
        return replaced(rope, rope_scaling)
    scaling = {
        key.removeprefix("llama.rope.scaling."): setting
        for key, setting in metadata.items()
        if key.startswith("llama.rope.scaling.") and key != "llama.rope.scaling.finetuned"
    }
    if metadata.get("llama.rope.scale_linear") is not None:  # the name of old files
        scaling.setdefault("factor", metadata["llama.rope.scale_linear"])
    kind = scaling.pop("type", "linear" if "factor" in scaling else "none")
    if not isinstance(kind, str) or kind != "none":
        rope |= {"rope_type": kind, "factor": scaling.pop("factor", 1.0)}
        if "original_context_length" in scaling:
            rope["original_max_position_embeddings"] = scaling.pop("original_context_length")
        scaling |= {"rope_freqs": divisors} if divisors else {}
    if scaling:
        raise UserError(
            f"the GGUF file combines rope scaling {shown(kind)} with {shown(next(iter(scaling)))}, which longhelix "
            "does not know: use the model's Hugging Face folder",
            "unknown_rope",
        )
    return rope
