"""Models of which every rank has a shard, with functional collectives: what the passes are for."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

H = 16


def weight(outputs, inputs, seed):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) / inputs**0.5


def summed(x):
    return functional.all_reduce(x, "sum", dist.group.WORLD)


class Norm(nn.Module):
    """RMSNorm as transformers has it."""

    def __init__(self, seed, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(weight(1, H, seed)[0] + 1)
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Columns(nn.Module):
    """A product of which every rank has some outputs."""

    def __init__(self, rank, size, outputs, seed):
        super().__init__()
        self.weight = nn.Parameter(weight(outputs * size, H, seed).chunk(size)[rank].clone())

    def forward(self, x):
        return x @ self.weight.T


class Rows(nn.Module):
    """A product of which every rank has some inputs: a part of the sum."""

    def __init__(self, rank, size, inputs, seed):
        super().__init__()
        self.weight = nn.Parameter(weight(H, inputs * size, seed).chunk(size, 1)[rank].clone())

    def forward(self, x):
        return x @ self.weight.T


class Mixer(nn.Module):
    """What stands for attention or FFN: a part of its sum on every rank."""

    def __init__(self, rank, size, seed):
        super().__init__()
        self.up, self.down = Columns(rank, size, 6, seed), Rows(rank, size, 6, seed + 1)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))
