"""Values of a model's configuration, read one by one; whatever would have to be guessed is refused."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.family import Family
from longhelix.spec.formats import DTYPES
from longhelix.values import real, refused, shown, whole

_MOST = 2**31 - 1  # token ids and lengths travel in 32 bits, and no model's sizes are near it


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number above zero; absent and null mean the default."""
    value = config.get(key)
    if value is None:
        return default
    return real(f"{key} in the model's settings", value, lambda number: 0 < number < math.inf, "a number above 0")


def count(config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number of `least` or more; absent and null mean the default, without which they are refused."""
    value = config.get(key)
    name = f"{key} in the model's settings"
    return whole(name, default if value is None else value, least, _MOST, code="invalid_model")


def count_or_none(config: Mapping[str, Any], key: str) -> int | None:
    """A whole number above zero; absent and null mean None."""
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


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The format of most of a quantised checkpoint's weights; empty where it is not quantised, or in a way that has no
    name here."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return ""
    method, algorithm = quantised.get("quant_method"), quantised.get("quant_algo")
    if algorithm in ("NVFP4", "FP8"):
        return str(algorithm).lower()
    if method in ("gptq", "awq"):
        bits = quantised.get("bits")
        return {4: "int4", 8: "int8"}.get(bits, "") if isinstance(bits, int) else ""
    return str(method) if method in ("fp8", "mxfp4") else ""


def stores_experts_alone(config: Mapping[str, Any]) -> bool:
    """Whether that format is of the experts: all other weights are in the model's dtype, those of attention among the
    modules that are not converted."""
    quantised = config.get("quantization_config")
    plain = quantised.get("modules_to_not_convert") if isinstance(quantised, Mapping) else None
    names = plain if isinstance(plain, (list, tuple)) else ()
    return any(isinstance(name, str) and name.endswith("*.self_attn") for name in names)


def token_ids(value: Any) -> tuple[int, ...]:
    """One token id, a list of them, or None for none; -1 is none as well."""
    given = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    name = "a token id of eos_token_id in the model's settings"
    ids = [whole(name, token_id, -1, _MOST, " (-1 is none)", "invalid_model") for token_id in given]
    return tuple(token_id for token_id in ids if token_id >= 0)


def rope_mapping(config: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping from the two forms in use: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    forms = [_mapping(config, key) for key in ("rope_parameters", "rope_scaling")]
    rope = forms[0] or forms[1]
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if config.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return rope


def _mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise refused(f"{key} in the model's settings", value, "settings by name, or null", "invalid_model")
    return dict(value or {})


def sliding_window(config: Mapping[str, Any], family: Family) -> int | None:
    """The narrowest layer's span in tokens; None where all attend to everything."""
    has_window = family.slides and (family.slides_unasked or switch(config, "use_sliding_window"))
    if not has_window or not _slides(_layer_types(config), family):
        return None
    key = "attention_chunk_size" if family.chunked else "sliding_window"
    return count_or_none(config, key) if key in config else family.window


def _slides(kinds: Sequence[str] | None, family: Family) -> bool:
    """Whether any layer does; where nothing is said of layers, all do, or those of the family's pattern."""
    return kinds is None or _windowed_kind(family) in kinds


def full_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    """Of a model with a window, or with linear attention, the layers that attend to everything, ascending. Those that a
    list leaves out do."""
    kinds = _layer_types(config)
    # Llama 4: layers without rotary positions attend to everything.
    rotated = _flags(config, "no_rope_layers") if family.chunked else ()
    if kinds is not None:
        windowed = [kind == _windowed_kind(family) for kind in kinds]
    elif rotated:
        windowed = [flag == 1 for flag in rotated]
    elif family.full_first is not None:
        first = count(config, "max_window_layers", family.full_first, least=0)
        windowed = [layer >= first for layer in range(num_layers)]
    elif family.full_period is not None:
        period = count(config, "full_attention_interval", family.full_period)
        windowed = [(layer + 1) % period != 0 for layer in range(num_layers)]
    else:
        return ()
    return tuple(layer for layer in range(num_layers) if not (layer < len(windowed) and windowed[layer]))


def _windowed_kind(family: Family) -> str:
    if family.linear:
        return "linear_attention"
    return "chunked_attention" if family.chunked else "sliding_attention"


def _layer_types(config: Mapping[str, Any]) -> Sequence[str] | None:
    """What each layer attends to; None where nothing is said of it."""
    layer_types = config.get("layer_types")
    if layer_types is None:
        return None
    if not (isinstance(layer_types, (list, tuple)) and all(isinstance(kind, str) for kind in layer_types)):
        raise refused("layer_types in the model's settings", layer_types, "a list of names", "invalid_model")
    return layer_types


def _flags(config: Mapping[str, Any], key: str) -> Sequence[int]:
    """A list of 0 and 1; absent and null mean none."""
    flags = config.get(key)
    if flags is None:
        return ()
    if not (isinstance(flags, (list, tuple)) and all(type(flag) is int and flag in (0, 1) for flag in flags)):
        raise refused(f"{key} in the model's settings", flags, "a list of 0 and 1", "invalid_model")
    return flags
