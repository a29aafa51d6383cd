"""What a model is: its shapes and numbers, read from a checkpoint's configuration.

This is the only reader of Hugging Face config names and of GGUF metadata names. Pure: mappings in, frozen
specs out; anything that longhelix would have to guess is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longhelix.errors import UserError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

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

    @property
    def depends_on_length(self) -> bool:
        """True where frequencies follow from a request's length, which is then frozen at admission."""
        return self.kind in ("dynamic", "longrope")

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
        original = int(rope.get("original_max_position_embeddings") or max_positions)
        factor = float(rope.get("factor") or max_positions / original)
        if factor <= 0 or original <= 0:
            raise UserError(f"rope factor {factor} and original positions {original} must be above zero")
        short, long = tuple(rope.get("short_factor") or ()), tuple(rope.get("long_factor") or ())
        for name, values in (("short_factor", short), ("long_factor", long)):
            if kind == "longrope" and len(values) != head_size // 2:
                raise UserError(f"{name} has {len(values)} entries, but head size {head_size} needs {head_size // 2}")
        return cls(
            kind=kind,
            theta=float(rope.get("rope_theta") or 10_000.0),
            factor=factor,
            original_max_positions=max_positions if kind == "dynamic" else original,
            attention_factor=_attention_factor(kind, rope, factor, original),
            low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
            high_freq_factor=float(rope.get("high_freq_factor") or 1.0),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            truncate=bool(rope.get("truncate", True)),
            short_factor=tuple(float(value) for value in short),
            long_factor=tuple(float(value) for value in long),
        )


def _attention_factor(kind: str, rope: Mapping[str, Any], factor: float, original: int) -> float:
    """Yarn: 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22); longrope: sqrt(1 + ln factor / ln original)."""
    if rope.get("attention_factor") is not None and kind in ("yarn", "longrope"):
        return float(rope["attention_factor"])
    if factor <= 1 or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
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
        """Bytes of K and V of one token over all layers, for `num_kv_heads` of the KV heads."""
        return 2 * self.num_layers * num_kv_heads * self.head_size * DTYPE_BYTES[kv_dtype]

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
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
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
        scaling = value("rope.scaling.type", "none")
        rope: dict[str, Any] = {"rope_theta": value("rope.freq_base", 10_000.0)}
        if scaling != "none":
            rope |= {"rope_type": scaling, "factor": value("rope.scaling.factor", 1.0)}
            rope["original_max_position_embeddings"] = metadata.get("llama.rope.scaling.original_context_length")
        if value("rope.dimension_count", head_size) != head_size:
            raise UserError("the GGUF file rotates only a part of each head: longhelix rotates whole heads")
        resolved = RopeSpec.from_config(rope, head_size, max_positions)
        if rope_divisors:
            resolved = RopeSpec(kind="default", theta=resolved.theta, divisors=tuple(map(float, rope_divisors)))
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
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


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
