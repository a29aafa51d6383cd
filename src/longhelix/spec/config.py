"""Values of a model's configuration, read one by one; whatever would have to be guessed is refused."""

import math
from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.formats import DTYPES
from longhelix.values import real, refused, shown, whole

MOST_LAYERS = 4096  # a spec lists them one by one, and no model has nearly as many
_MOST = 2**31 - 1  # token ids and lengths travel in 32 bits, and no model's sizes are near it


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero. Only an absent key means the default, and there may be none."""
    value = config.get(key, default)
    return real(f"{key} in the model's settings", value, lambda number: 0 < number < math.inf, "a number above 0")


def count(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
    """An integer from `least` to `most`. Only an absent key means the default, and there may be none."""
    name = f"{key} in the model's settings"
    return whole(name, config.get(key, default), least, most, code="invalid_model")


def count_or_none(config: Mapping[str, Any], key: str) -> int | None:
    """An integer above zero; absent and null mean None."""
    return None if config.get(key) is None else count(config, key)


def switch(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false; absent means the default, null false."""
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{key} in the model's settings", value, "true or false", "invalid_model")
    return bool(value)


def equals(given: object, kind: type, wanted: list[Any]) -> bool:
    """Whether a value from outside, which may be anything, is a list of these items."""
    return isinstance(given, list) and all(type(item) is kind for item in given) and given == wanted


def dtype_name(config: Mapping[str, Any]) -> str:
    dtypes = (config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None)
    dtype = next(dtypes, "float32")
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
    if name not in DTYPES:
        raise UserError(f"the model's dtype is {shown(dtype)}: longhelix runs {', '.join(DTYPES)}", "invalid_model")
    return name


def token_ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them, or None for none; -1 is none as well."""
    given = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    name = "a token id of eos_token_id in the model's settings"
    ids = [whole(name, token_id, -1, _MOST, " (-1 for none)", "invalid_model") for token_id in given]
    return tuple(token_id for token_id in ids if token_id >= 0)


def rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the two forms in use: `rope_scaling` with a separate `rope_theta`, and `rope_parameters`.

    As in transformers, `rope_scaling` wins over `rope_parameters`, and its entries win over separate fields.
    """
    forms = [_mapping(config, key) for key in ("rope_scaling", "rope_parameters")]
    rope = forms[0] or forms[1]
    rope.setdefault("rope_theta", config.get("rope_theta"))
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if "original_max_position_embeddings" in config:  # goes before the one in the mapping, as in transformers
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def replaced(rope: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return `scaling` as the rope settings of a model.

    Theta, the axes of images and the rotated share of a head stay if `scaling` does not set them.
    """
    kept = ("rope_theta", "mrope_section", "mrope_interleaved", "partial_rotary_factor")
    return {**{key: rope[key] for key in kept if key in rope}, **scaling}


def _mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise refused(f"{key} in the model's settings", value, "settings by name, or null", "invalid_model")
    return dict(value or {})
