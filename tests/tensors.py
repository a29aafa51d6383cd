"""A checkpoint in memory."""

import torch

from longhelix.compute.models.parameter import Parameter, Source
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.spec.layout import Layout

CPU = torch.device("cpu")


class Tensors:
    """A model's tensors, by name."""

    def __init__(self, tensors):
        self._tensors = tensors

    @classmethod
    def of(cls, spec, tensors=None, seed=0):
        """Those of a model. What `tensors` lacks is random, float32: the same for every rank."""
        generator = torch.Generator().manual_seed(seed)
        drawn = {
            source.name: torch.randn(source.shape, generator=generator) / 8 + (len(source.shape) == 1)  # norms about 1
            for parameter in declare(spec, Layout(), 0)
            for source in parameter.sources
        }
        return cls(drawn | (tensors or {}))

    def __getitem__(self, name):
        return self._tensors[name]

    def read(self, name, slices):
        return self._tensors[name][slices]


def weights_of(tensors, weight_dtype, dtype=torch.float32, device=CPU):
    """A parameter for each tensor, whole."""
    parameters = [
        Parameter(name, (Source(name, tuple(tensor.shape), tuple(map(range, tensor.shape))),))
        for name, tensor in tensors.items()
    ]
    return Weights(Tensors(tensors), parameters, dtype, weight_dtype, device)
