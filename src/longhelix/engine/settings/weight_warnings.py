"""Warnings about packed weights that take more memory or time than their format makes users expect."""

import warnings

from longhelix.compute.machine.devices import has_native_kernels
from longhelix.compute.models.parameters import mixed_weight, slow_weight
from longhelix.errors import UserError
from longhelix.spec import ModelSpec
from longhelix.spec.layout import Layout


def warn_of_weights(spec: ModelSpec, layout: Layout, device: str, weight_dtype: str) -> None:
    """Warn if packed weights take more memory or time than their format makes users expect."""
    mixed = mixed_weight(spec)
    if mixed is not None:
        names = " and ".join(source.module for source in mixed.sources)
        if mixed.in_experts and mixed.storage is None:
            reason = "experts with act-order. Their rows would need an order for each expert"
        elif mixed.in_experts:
            reason = "and the other weights of these experts in different formats. Experts need one"
        else:
            reason = "in different formats. longhelix multiplies them together"
        warnings.warn(
            f"the checkpoint stores {names} {reason}, so weights such as these become {mixed.format(weight_dtype)} in "
            "memory: use another checkpoint to save memory",
            stacklevel=4,
        )
    quantisation = spec.checkpoint.quantisation
    if quantisation is not None and quantisation.gguf and quantisation.plain.names:
        warnings.warn(
            "the GGUF file has experts of one layer in different formats, such as "
            f"{min(quantisation.plain.names)}, so all experts of such layers become "
            f"{weight_dtype} in memory: use a file with K-quants alone",
            stacklevel=4,
        )
    slow = slow_weight(spec, layout, weight_dtype) if device == "cpu" and has_native_kernels() else None
    if slow is not None:
        rank, parameter = slow
        inputs = parameter.sources[0].slices[1]
        if parameter.rounds_inputs or parameter.format(weight_dtype) == "w8a8":
            raise UserError(
                "activation_dtype int8 needs weights with a multiple of 16 inputs on each rank, but rank "
                f"{rank} has {len(inputs)} of {parameter.sources[0].module}: choose another layout, or leave "
                "activation_dtype out"
            )
        warnings.warn(
            f"rank {rank} has the inputs {inputs.start} to {inputs.stop - 1} of {parameter.sources[0].module}, but the "
            "native CPU kernels read packed weights only in sixteens of inputs. Products with this weight run many "
            "times slower: choose a layout that splits it elsewhere, if there is one",
            stacklevel=4,
        )
