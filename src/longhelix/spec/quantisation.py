"""Reads the format of a checkpoint's weights from the quantisation settings of its config."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from longhelix.spec.formats import FORMATS
from longhelix.values import refused, shown

_SETTINGS = ("quantization_config", "compression_config")  # the latter of older compressed-tensors checkpoints
_INTEGERS = {4: "int4", 8: "int8"}
# Lists of modules that stay in the model's dtype.
_PLAIN_MODULES = ("exclude", "exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")
# All attention, by a pattern: "*.self_attn", "model.layers.*.self_attn*", "re:.*self_attn.*".
_ALL_ATTENTION = re.compile(r"(re:)?[\w.]*\*[\w.]*self_attn(\.?\*)?")
_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "INT4_AWQ": "int4",
    "INT8_SQ": "int8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "W4A16_AWQ": "int4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_AWQ": "int4",
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config's quantisation settings. Empty if the checkpoint is not quantised. Raises UserError."""
    for key in _SETTINGS:
        settings = config.get(key)
        if not isinstance(settings, Mapping | None):
            raise refused(f"{key} in the model's settings", settings, "settings by name, or null", "invalid_model")
        if settings:
            return settings
    return {}


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the format of most of a quantised checkpoint's weights. Empty if it is not quantised.

    A format without a name in longhelix keeps the name of its method. No table of formats has this name, so asking for
    its size raises an error.
    """
    settings = quantisation(config)
    if not settings:
        return ""
    method_name = settings.get("quant_method")
    method = method_name if isinstance(method_name, str) else ""
    if not method:
        method = "compressed-tensors" if "config_groups" in settings else "modelopt" if "quant_algo" in settings else ""
    reader = _READERS.get(method)
    format_name = None if reader is None else reader(settings)
    if format_name in FORMATS:
        return str(format_name)
    return f"{method or shown(method_name)} ({format_name})" if format_name else method or shown(method_name)


def stores_experts_alone(config: Mapping[str, Any]) -> bool:
    """Return whether only the experts are quantised, because attention stays in the model's dtype."""
    settings = quantisation(config)
    lists = [settings.get(key) for key in _PLAIN_MODULES]
    names = [name for plain in lists if isinstance(plain, (list, tuple)) for name in plain if isinstance(name, str)]
    return any(_ALL_ATTENTION.fullmatch(name.replace(".*", "*")) for name in names)


def _integers(*keys: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a reader for methods whose settings contain the number of bits of integers."""

    def read(settings: Mapping[str, Any]) -> str:
        bits = next((settings[key] for key in keys if type(settings.get(key)) is int), None)
        return "" if bits is None else _INTEGERS.get(bits, f"{bits} bits")

    return read


def _bitsandbytes(settings: Mapping[str, Any]) -> str:
    four = any(settings.get(key) is True for key in ("load_in_4bit", "_load_in_4bit"))
    eight = any(settings.get(key) is True for key in ("load_in_8bit", "_load_in_8bit"))
    return "int4" if four else "int8" if eight else ""


def _compressed_tensors(settings: Mapping[str, Any]) -> str:
    """Return the format of all groups. If they differ, only the number of formats."""
    groups = settings.get("config_groups")
    formats = {_group(group) for group in groups.values()} if isinstance(groups, Mapping) else set()
    return formats.pop() if len(formats) == 1 else f"{len(formats)} formats" if formats else ""


def _group(group: Any) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return ""
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind == "float" and bits == 4:
        return {16: "nvfp4", 32: "mxfp4"}.get(size, "") if isinstance(size := weights.get("group_size"), int) else ""
    if kind == "float" and bits == 8:
        return "fp8"
    return _INTEGERS.get(bits, f"{bits} bits") if kind == "int" and type(bits) is int else ""


def _modelopt(settings: Mapping[str, Any]) -> str:
    algorithm = settings.get("quant_algo")
    if not isinstance(algorithm, str):
        return _compressed_tensors(settings)
    return _ALGORITHMS.get(algorithm.upper(), algorithm)


def _quark(settings: Mapping[str, Any]) -> str:
    common = settings.get("global_quant_config")
    weight = common.get("weight") if isinstance(common, Mapping) else None
    if isinstance(weight, (list, tuple)) and len(weight) == 1:
        weight = weight[0]
    if not isinstance(weight, Mapping):
        return ""
    name, size = weight.get("dtype"), weight.get("group_size")
    if name == "fp4":
        return "mxfp4" if size == 32 else ""
    known = {"fp8_e4m3": "fp8", "int8": "int8", "uint8": "int8", "int4": "int4", "uint4": "int4"}
    return known.get(name, name) if isinstance(name, str) else ""


def _torchao(settings: Mapping[str, Any]) -> str:
    """Read a name such as int4_weight_only, or settings of a class with such a name."""
    kind = settings.get("quant_type")
    if isinstance(kind, Mapping):
        default = kind.get("default")
        kind = default.get("_type") if isinstance(default, Mapping) else default
    name = kind.lower() if isinstance(kind, str) else ""
    # What comes first are the weights: Float8DynamicActivationInt4Weight has them last.
    if "int4weight" in name or name.startswith(("int4", "uint4")):
        return "int4"
    if name.startswith("int8"):
        return "int8"
    return "fp8" if name.startswith("float8") else name


def _quanto(settings: Mapping[str, Any]) -> str:
    weights = settings.get("weights")
    return {"float8": "fp8"}.get(weights, weights) if isinstance(weights, str) else ""


def _hqq(settings: Mapping[str, Any]) -> str:
    inner = settings.get("quant_config")
    weights = inner.get("weight_quant_params") if isinstance(inner, Mapping) else None
    return _integers("nbits")(weights if isinstance(weights, Mapping) else settings)


def _fp_quant(settings: Mapping[str, Any]) -> str:
    name = settings.get("forward_dtype")
    return name if isinstance(name, str) else ""


def _always(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _: name


_READERS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "auto-round": _integers("bits"),
    "awq": _integers("bits", "w_bit"),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "eetq": _always("int8"),
    "experts_int8": _always("int8"),
    "fbgemm_fp8": _always("fp8"),
    "fp8": _always("fp8"),
    "fp_quant": _fp_quant,
    "gptq": _integers("bits"),
    "hqq": _hqq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _always("mxfp4"),
    "nvfp4": _always("nvfp4"),
    "quanto": _quanto,
    "quark": _quark,
    "torchao": _torchao,
}
