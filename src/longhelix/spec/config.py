"""Values of a model's configuration, read one by one; whatever would have to be guessed is refused."""

import math
from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.dtypes import DTYPES
from longhelix.values import real


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number above zero; absent and null mean the default."""
    value = config.get(key)
    if value is None:
        return default
    return real(f"{key} in the model's settings", value, lambda number: 0 < number < math.inf, "a number above 0")


def count(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of `least` or more; absent and null mean the default, without which they are refused."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(
            f"config.json has {key} = {value!r}: it must be a whole number of {least} or more", "invalid_model"
        )
    return value


def dtype_name(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype", config.get("torch_dtype")) or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"config.json has dtype {dtype!r}: longhelix runs {', '.join(DTYPES)}", "invalid_model")
    return dtype


def token_ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them, or None for none."""
    ids = tuple(value) if isinstance(value, (list, tuple)) else () if value is None else (value,)
    if not all(isinstance(token_id, int) for token_id in ids):
        raise UserError(f"eos_token_id is {value!r}: it must be a token id or a list of them", "invalid_model")
    return ids


def rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping from the two forms in use: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The narrowest layer's span in tokens; where mistral's or qwen's key is absent, 4096 as in transformers."""
    architecture = config["model_type"]
    has_window = architecture in ("mistral", "mixtral") or (
        architecture in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe") and config.get("use_sliding_window", False)
    )
    layer_types = config.get("layer_types")
    if not has_window or (layer_types is not None and "sliding_attention" not in layer_types):
        return None
    window = config.get("sliding_window", None if architecture == "mixtral" else 4096)
    return None if window is None else int(window)
