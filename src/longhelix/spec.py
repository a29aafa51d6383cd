"""What a model is: its shapes and numbers, read from a checkpoint's configuration.

This is the only reader of Hugging Face config names and of GGUF metadata names. Pure: mappings in, frozen
specs out; anything that longhelix would have to guess is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longhelix.errors import UserError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = (*DTYPES, "int8", "int4")
KV_DTYPES = (*DTYPES, "fp8", "int8", "int4")
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}


def weight_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a product's weights; narrow ones have a float16 scale and offset for every 32."""
    return num_elements * (_BITS[dtype] if dtype in DTYPES else _BITS[dtype] + 1) // 8


_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
}  # fmt: skip
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: how its frequencies follow from theta.

    `attention_factor` multiplies cos and sin. `divisors`, where present, divide the frequencies one by one
    (C/2 numbers; GGUF files carry llama3 scaling in this form). Fields of other kinds keep their defaults.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, rope: Mapping[str, Any], head_size: int, max_positions: int) -> "RopeSpec":
        """Resolve a `rope_parameters` (or `rope_scaling` plus theta) mapping; all defaults are filled here."""
        unknown = sorted(set(rope) - _ROPE_KEYS)
        if unknown:
            raise UserError(f"unknown rope setting {unknown[0]!r}: known ones are {', '.join(sorted(_ROPE_KEYS))}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise UserError(f"rope type {kind!r} is not known: use one of {', '.join(ROPE_KINDS)}", "unknown_rope")
        missing = [key for key in _ROPE_NEEDS[kind] if rope.get(key) is None]
        if missing:
            raise UserError(f"rope type {kind!r} needs {missing[0]!r}: set it in the rope settings")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UserError("partial_rotary_factor other than 1 is not supported: longhelix rotates whole heads")
        original = int(_positive(rope, "original_max_position_embeddings", max_positions))
        factor = _positive(rope, "factor", max_positions / original)
        low, high = _positive(rope, "low_freq_factor", 1.0), _positive(rope, "high_freq_factor", 1.0)
        if kind == "llama3" and low >= high:
            raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high} in the rope settings")
        return cls(
            kind=kind,
            theta=_positive(rope, "rope_theta", 10_000.0),
            factor=factor,
            original_max_positions=max_positions if kind == "dynamic" else original,
            attention_factor=_attention_factor(kind, rope, factor, original),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=_positive(rope, "beta_fast", 32.0),
            beta_slow=_positive(rope, "beta_slow", 1.0),
            truncate=bool(rope.get("truncate", True)),
            short_factor=_divisors(rope, "short_factor", head_size) if kind == "longrope" else (),
            long_factor=_divisors(rope, "long_factor", head_size) if kind == "longrope" else (),
        )


def _positive(rope: Mapping[str, Any], key: str, default: float) -> float:
    """A number above zero; absent and null mean the default."""
    value = rope.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{key} is {value!r} in the model's settings: set it to a number above 0")
    return float(value)


def _divisors(rope: Mapping[str, Any], key: str, head_size: int) -> tuple[float, ...]:
    values = tuple(rope[key]) if isinstance(rope[key], (list, tuple)) else ()
    if len(values) != head_size // 2 or not all(isinstance(value, (int, float)) and value > 0 for value in values):
        raise UserError(f"{key} must be a list of {head_size // 2} numbers above 0, half the head size {head_size}")
    return tuple(float(value) for value in values)


def _attention_factor(kind: str, rope: Mapping[str, Any], factor: float, original: int) -> float:
    """Yarn: 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22); longrope: sqrt(1 + ln factor / ln original)."""
    if rope.get("attention_factor") is not None and kind in ("yarn", "longrope"):
        return _positive(rope, "attention_factor", 1.0)
    if factor <= 1 or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(_positive(rope, "mscale", 1.0)) / mscale(_positive(rope, "mscale_all_dim", 1.0))
    return mscale(1.0)


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only transformer with GQA attention and dense SwiGLU FFNs.

    `eos_token_ids` end a sequence; `sliding_window`, where set, is the attention span in tokens beyond which
    full attention would no longer be what the model computes.
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
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_query_heads", "num_kv_heads", "head_size", "ffn_size",
                     "vocab_size", "max_positions"):  # fmt: skip
            if getattr(self, name) < 1:
                raise UserError(f"the model's {name} is {getattr(self, name)}: it must be 1 or more", "invalid_model")
        if self.num_query_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_query_heads} query heads do not divide into groups over {self.num_kv_heads} KV heads: "
                "correct num_attention_heads or num_key_value_heads in the model's config",
                "invalid_model",
            )
        if self.head_size % 2:
            raise UserError(f"head size {self.head_size} is odd: rotary embedding needs an even one", "invalid_model")

    def kv_bytes_per_token(self, kv_dtype: str, num_kv_heads: int) -> int:
        """Bytes of K and V of one token over all layers, for `num_kv_heads` of the KV heads.

        Narrow numbers have a 16-bit scale for each token's key and value of a head.
        """
        scale_bytes = 0 if kv_dtype in DTYPES else 2
        return 2 * self.num_layers * num_kv_heads * (self.head_size * _BITS[kv_dtype] // 8 + scale_bytes)

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> "ModelSpec":
        """Read config.json (and the end-of-sequence ids of generation_config.json, if there is one)."""
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"the model's architecture is {architecture!r}: longhelix runs {', '.join(ARCHITECTURES)}",
                "unknown_architecture",
            )
        if config.get("quantization_config"):
            raise UserError("the checkpoint is quantised: use one in float32, bfloat16 or float16", "invalid_model")
        if config.get("hidden_act", "silu") != "silu":
            raise UserError(f"hidden_act is {config['hidden_act']!r}: longhelix runs 'silu' (SwiGLU)", "invalid_model")
        hidden_size, num_query_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        head_size = _count(config, "head_dim", 128 if architecture == "qwen3" else hidden_size // num_query_heads)
        max_positions = _count(config, "max_position_embeddings")
        bias = bool(config.get("attention_bias", False)) and architecture in ("llama", "qwen3")
        return cls(
            architecture=architecture,
            num_layers=_count(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_query_heads=num_query_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_query_heads if architecture == "llama" else None),
            head_size=head_size,
            ffn_size=_count(config, "intermediate_size"),
            vocab_size=_count(config, "vocab_size"),
            max_positions=max_positions,
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            rope=RopeSpec.from_config(_rope_mapping(config), head_size, max_positions),
            dtype=_dtype(config.get("dtype", config.get("torch_dtype"))),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or architecture == "qwen2",
            attention_output_bias=bias,
            ffn_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(config),
            eos_token_ids=_token_ids((generation_config or {}).get("eos_token_id", config.get("eos_token_id"))),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], rope_divisors: Sequence[float] = (), *, tied: bool) -> "ModelSpec":
        """Read the metadata of a GGUF file of the llama architecture.

        `rope_divisors` is its rope_freqs tensor, if it has one; `tied`: it has no output tensor of its own.
        """

        def value(key: str, default: Any = None) -> Any:
            found = metadata.get(f"llama.{key}", default)
            if found is None:
                raise UserError(f"the GGUF file has no metadata key 'llama.{key}'", "invalid_model")
            return found

        hidden_size, num_query_heads = int(value("embedding_length")), int(value("attention.head_count"))
        head_size = int(value("attention.key_length", hidden_size // num_query_heads))
        max_positions = int(value("context_length"))
        rope: dict[str, Any] = {"rope_theta": value("rope.freq_base", 10_000.0)}
        scaling = {
            key.removeprefix("llama.rope.scaling."): setting
            for key, setting in metadata.items()
            if key.startswith("llama.rope.scaling.") and key != "llama.rope.scaling.finetuned"
        }
        kind = scaling.pop("type", "none")
        if kind != "none":
            rope |= {"rope_type": kind, "factor": scaling.pop("factor", 1.0)}
            rope["original_max_position_embeddings"] = scaling.pop("original_context_length", None)
            if scaling or rope_divisors:
                extra = next(iter(scaling), "rope_freqs")
                raise UserError(
                    f"the GGUF file combines rope scaling {kind!r} with {extra!r}, which longhelix does not know: "
                    "use the model's Hugging Face folder",
                    "unknown_rope",
                )
        if value("rope.dimension_count", head_size) != head_size:
            raise UserError("the GGUF file rotates only a part of each head: longhelix rotates whole heads")
        resolved = RopeSpec.from_config(rope, head_size, max_positions)
        if rope_divisors:
            resolved = replace(
                resolved, divisors=_divisors({"rope_freqs": list(rope_divisors)}, "rope_freqs", head_size)
            )
        vocabulary: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
        return cls(
            architecture="llama",
            num_layers=int(value("block_count")),
            hidden_size=hidden_size,
            num_query_heads=num_query_heads,
            num_kv_heads=int(value("attention.head_count_kv", num_query_heads)),
            head_size=head_size,
            ffn_size=int(value("feed_forward_length")),
            vocab_size=int(value("vocab_size", len(vocabulary))),
            max_positions=max_positions,
            rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
            rope=resolved,
            dtype="bfloat16",
            tied_embeddings=tied,
            sliding_window=metadata.get("llama.attention.sliding_window"),
            eos_token_ids=_token_ids(metadata.get("tokenizer.ggml.eos_token_id")),
        )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json has {key} = {value!r}: it must be a whole number of 1 or more", "invalid_model")
    return value


def _dtype(name: Any) -> str:
    dtype = str(name or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"config.json has dtype {dtype!r}: longhelix runs {', '.join(DTYPES)}", "invalid_model")
    return dtype


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise UserError(f"eos_token_id is {value!r}: it must be a token id or a list of them", "invalid_model")
    return ids


def _rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping from the two forms in use: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """The narrowest layer's span in tokens; where the key is absent, 4096 as in transformers."""
    has_window = config["model_type"] == "mistral" or (
        config["model_type"] in ("qwen2", "qwen3") and config.get("use_sliding_window", False)
    )
    layer_types = config.get("layer_types")
    if not has_window or (layer_types is not None and "sliding_attention" not in layer_types):
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)
