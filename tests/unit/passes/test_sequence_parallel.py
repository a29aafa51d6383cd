"""The pass over graphs of many kinds: what it finds, what it makes of them, and that numbers stay."""

import pytest
import torch
from lockstep import Lockstep, group_of
from modules import H, Mixer, Norm, summed
from torch import nn

pytestmark = pytest.mark.unit


class Chain(nn.Module):
    """Embeddings summed over the ranks, layers, a last norm."""

    def __init__(self, rank, size, layers=3):
        super().__init__()
        self.embed = Mixer(rank, size, 1)
        self.norms = nn.ModuleList(Norm(10 + index) for index in range(layers))
        self.mixers = nn.ModuleList(Mixer(rank, size, 20 + 2 * index) for index in range(layers))
        self.last = Norm(30)

    def forward(self, x):
        residual = summed(self.embed(x))
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            residual = residual + summed(mixer(norm(residual)))
        return self.last(residual)


def rows(tokens, *shape):
    return torch.randn(tokens, *(shape or (H,)), generator=torch.Generator().manual_seed(tokens))


def near(one, other):
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_chain(size, dynamic):
    with group_of(size):
        ranks = Lockstep([Chain(rank, size) for rank in range(size)], dynamic, min_tokens=1)
        for tokens in sorted({1, size - 1, size, size + 1, 13, 1000, 1001}):
            outcome = ranks(rows(tokens))
            for one, other in zip(outcome.changed.returned, outcome.plain.returned, strict=True):
                near(one[0], other[0])
            assert outcome.report["patterns"]["MiddleAllReduceRMSNorm"] == 2
