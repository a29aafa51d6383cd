"""Checks that the kernels can run a model with an engine's options."""

import warnings

from longhelix.compute.machine.devices import has_native_kernels
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec import ModelSpec
from longhelix.spec.attention import GroupedQueryAttention


def check_kernels(spec: ModelSpec, options: EngineOptions, device: str, replay: bool) -> None:
    """Raise UserError if the kernels cannot run the model with these options. Warn if native kernels are missing.

    Args:
        spec: the model.
        options: the user's options.
        device: "cpu" or "cuda".
        replay: whether layers run from tapes or CUDA graphs.
    """
    if options.batch_invariant and spec.has_latents:
        raise UserError(
            "batch_invariant does not work for models with latent attention, which use torch's matrix products: leave "
            "batch_invariant out"
        )
    if options.attention == "flashinfer":
        _check_flashinfer(spec, options, device, replay)
    if options.activation_dtype == "int8" and not has_native_kernels():
        raise UserError(
            "activation_dtype int8 needs the native CPU kernels, which this install does not have: leave "
            "activation_dtype out"
        )
    if device == "cpu" and not has_native_kernels():
        warnings.warn(
            "the native CPU kernels are missing because there was no C++ compiler when longhelix was installed, so the "
            "engine runs many times slower: install GCC 12 or later and then longhelix again, or install a wheel",
            stacklevel=4,
        )


def _check_flashinfer(spec: ModelSpec, options: EngineOptions, device: str, replay: bool) -> None:
    if device == "cpu" or not replay:
        raise UserError(
            "attention flashinfer runs only inside CUDA graphs: run on GPUs without execution eager and without trace, "
            "or leave attention out"
        )
    if spec.has_latents:
        raise UserError("attention flashinfer does not support latent attention: leave the option out")
    if any(isinstance(each, GroupedQueryAttention) and each.scores.cap is not None for each in spec.attentions):
        raise UserError("attention flashinfer does not support scores with a cap: leave the option out")
    if spec.views:
        raise UserError(
            "attention flashinfer does not support layers whose rows see only some tokens: leave the option out"
        )
    if len(spec.attentions) > 1:
        raise UserError("attention flashinfer does not support layers with different attention: leave the option out")
    if options.hop_b not in (None, 1):
        raise UserError(
            f"hop_b is {options.hop_b}, but attention flashinfer cannot split a batch into parts: leave one of them out"
        )
