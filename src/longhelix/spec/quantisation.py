"""Reads which modules of a checkpoint are quantised, and how, from the quantisation settings of its config."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.quantisation_methods import METHODS, unread
from longhelix.spec.quantised_modules import Quantisation, Storage
from longhelix.values import refused, shown

__all__ = ["Quantisation", "Storage", "read_quantisation"]

_SETTINGS = ("quantization_config", "compression_config")  # the latter of older compressed-tensors checkpoints
# Keys of settings that do not name their method.
_MARKS = {"config_groups": "compressed-tensors", "quant_algo": "modelopt", "quantization": "modelopt"}


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Return which modules are quantised, and how. None: the checkpoint is not quantised.

    Raises UserError: longhelix does not read the method, or does not know what a value of the settings means.
    """
    settings = _settings(config)
    if not settings:
        return None
    method = settings.get("quant_method")
    if method is None:
        method = next((name for key, name in _MARKS.items() if settings.get(key) is not None), None)
    if not isinstance(method, str) or method not in METHODS:
        raise unread(f"quant_method {shown(method)}")
    return METHODS[method](settings, _has_float16(config))


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _SETTINGS:
        settings = config.get(key)
        if not isinstance(settings, Mapping | None):
            raise refused(f"{key} in the model's settings", settings, "settings by name, or null", "invalid_model")
        if settings:
            return settings
    return {}


def _has_float16(config: Mapping[str, Any]) -> bool:
    """Return whether the model's dtype is float16."""
    dtypes = (config.get(key) for key in ("dtype", "torch_dtype"))
    return any(isinstance(dtype, str) and dtype.removeprefix("torch.") == "float16" for dtype in dtypes)
