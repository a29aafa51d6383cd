"""Values of a model's configuration, read one by one; whatever would have to be guessed is refused."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.family import Family
from longhelix.spec.formats import DTYPES
from longhelix.values import real, refused, shown, whole

_MOST = 2**31 - 1  # token ids and lengths travel in 32 bits, and no model's sizes are near it


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above zero. Only an absent key means the default, and there may be none."""
    value = config.get(key, default)
    return real(f"{key} in the model's settings", value, lambda number: 0 < number < math.inf, "a number above 0")


def count(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of `least` or more. Only an absent key means the default, and there may be none."""
    name = f"{key} in the model's settings"
    return whole(name, config.get(key, default), least, _MOST, code="invalid_model")


def count_or_none(config: Mapping[str, Any], key: str) -> int | None:
    """An integer above zero; absent and null mean None."""
    return None if config.get(key) is None else count(config, key)


def switch(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false; absent means the default, null false."""
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise refused(f"{key} in the model's settings", value, "true or false", "invalid_model")
    return bool(value)


def dtype_name(config: Mapping[str, Any]) -> str:
    found = (config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None)
    dtype = next(found, "float32")
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
    """`scaling` in place of a model's rope settings. Theta and the axes of images stay unless it has its own."""
    kept = ("rope_theta", "mrope_section", "mrope_interleaved")
    return {**{key: rope[key] for key in kept if key in rope}, **scaling}


def _mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise refused(f"{key} in the model's settings", value, "settings by name, or null", "invalid_model")
    return dict(value or {})


def sliding_window(config: Mapping[str, Any], family: Family, num_layers: int) -> int | None:
    """The span in tokens of layers with a window; None where there are none."""
    kinds = _layer_types(config, family, num_layers) if family.layered else None
    if not family.slides:
        return None
    used = family.slides_unasked or switch(config, "use_sliding_window")
    window = count_or_none(config, "attention_chunk_size" if family.chunked else "sliding_window") if used else None
    if window is None and not family.slides_unasked and kinds is not None and "sliding_attention" in kinds:
        raise UserError(
            "config.json has layers with sliding_attention in layer_types, but no window: set use_sliding_window to "
            "true and sliding_window to its size in tokens, or leave layer_types out",
            "invalid_model",
        )
    return window if any(windowed_layers(config, family, num_layers)) else None


def windowed_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has the family's window, or linear attention, rather than attention to everything."""
    kinds = _layer_types(config, family, num_layers) if family.layered else None
    if kinds is not None:
        return tuple(kind != "full_attention" for kind in kinds)
    # Llama 4: layers without rotary positions attend to everything.
    rotated = _flags(config, "no_rope_layers", num_layers) if family.chunked else ()
    if rotated:
        return tuple(flag == 1 for flag in rotated[:num_layers])
    layers = range(num_layers)
    if "max_window_layers" in family.defaults:
        bound = count(config, "max_window_layers", least=0)
        if family.alternates:
            return tuple(layer % 2 == 0 and layer < bound for layer in layers)
        return tuple(layer >= bound for layer in layers)
    if family.full_period is None:
        return (True,) * num_layers
    period = family.full_period if isinstance(family.full_period, int) else count(config, family.full_period)
    return tuple((layer + 1) % period != 0 for layer in layers)


def full_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """The layers that attend to everything, ascending, of a model with a window or with linear attention."""
    return tuple(layer for layer, has in enumerate(windowed_layers(config, family, num_layers)) if not has)


def _layer_types(config: Mapping[str, Any], family: Family, num_layers: int) -> Sequence[str] | None:
    """What each layer attends to; None where nothing is said of it."""
    given = config.get("layer_types")
    if given is None:
        return None
    other = "linear_attention" if family.linear else "chunked_attention" if family.chunked else "sliding_attention"
    names = {"full_attention": "full_attention", "attention": "full_attention", other: other}
    known = isinstance(given, (list, tuple)) and all(isinstance(kind, str) and kind in names for kind in given)
    if not known or len(given) != num_layers:
        allowed = f"a list of {num_layers} names, one for each layer: full_attention or {other}"
        raise refused("layer_types in the model's settings", given, allowed, "invalid_model")
    return [names[kind] for kind in given]


def _flags(config: Mapping[str, Any], key: str, least: int) -> Sequence[int]:
    """A list of `least` or more numbers that are 0 or 1; null and an empty list mean none."""
    flags = config.get(key)
    if flags is None:
        return ()
    if (
        not isinstance(flags, (list, tuple))
        or not all(type(flag) is int and flag in (0, 1) for flag in flags)
        or 0 < len(flags) < least
    ):
        allowed = f"a list of {least} or more numbers, one for each layer: 0 or 1"
        raise refused(f"{key} in the model's settings", flags, allowed, "invalid_model")
    return flags
