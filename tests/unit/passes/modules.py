"""Models for the passes: every rank has a shard, and the code calls functional collectives."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

H, INNER = 16, 12  # INNER: divisible by 2, 3 and 4 ranks

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def weight(outputs, inputs, seed):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) / inputs**0.5


def rows(tokens, *shape, seed=0):
    return torch.randn(tokens, *(shape or (H,)), generator=torch.Generator().manual_seed(tokens + seed))


def summed(x, size):
    """Sum over the ranks. With one rank, the value is already the sum."""
    return x if size == 1 else functional.all_reduce(x, "sum", dist.group.WORLD)


def gathered(x, size):
    return x if size == 1 else functional.all_gather_tensor(x, 0, dist.group.WORLD)


class Norm(nn.Module):
    """RMSNorm as in transformers, optionally with a bias."""

    def __init__(self, seed, eps=1e-6, bias=False):
        super().__init__()
        self.weight = nn.Parameter(weight(1, H, seed)[0] + 1)
        self.bias = nn.Parameter(weight(1, H, seed + 100)[0]) if bias else None
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = self.weight * wide.to(x.dtype)
        return normed if self.bias is None else normed + self.bias


def quantised(x, how):
    """Quantise as "static int8" (one scale per tensor) or "dynamic fp8" (one per row); return numbers and scale."""
    kind, dtype = how.split()
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[dtype]
    if kind == "static":
        scale = torch.tensor(4.0 / LARGEST[dtype])
    elif kind == "dynamic":
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / LARGEST[dtype]
    else:
        scale = x.abs().amax().clamp_min(1e-9) / LARGEST[dtype]
    scaled = x / scale
    if dtype is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


class Mixer(nn.Module):
    """Stand-in for attention or an FFN: each rank has some inner channels, and so a part of the sum. how: format in
    which its input is quantised."""

    def __init__(self, rank, size, seed, how=None):
        super().__init__()
        self.up = nn.Parameter(weight(INNER, H, seed).chunk(size)[rank].clone())
        self.down = nn.Parameter(weight(H, INNER, seed + 1).chunk(size, 1)[rank].clone())
        self.how = how

    def forward(self, x):
        if self.how is not None:
            narrow, scale = quantised(x, self.how)
            x = narrow.float() * scale
        return torch.tanh(x @ self.up.T) @ self.down.T


class Chain(nn.Module):
    """Layers with a residual, between a first sum over the ranks and a last norm. given: the residual is the input,
    which is the same on all ranks, instead of a sum. how: format of the values quantised after norms, by layer."""

    def __init__(self, rank, size, layers=3, how=None, given=False, eps=(1e-6,), norm=Norm):
        super().__init__()
        self.size, self.given = size, given
        how = how if isinstance(how, (list, tuple)) else [how] * layers
        self.embed = Mixer(rank, size, 1)
        self.norms = nn.ModuleList(norm(10 + index, eps[index % len(eps)]) for index in range(layers))
        self.mixers = nn.ModuleList(Mixer(rank, size, 20 + 2 * index, how[index]) for index in range(layers))
        self.last = norm(30)

    def forward(self, x, *deepstack):
        residual = x if self.given else summed(self.embed(x), self.size)
        for index, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            mixed = summed(mixer(norm(residual)), self.size)
            if index < len(deepstack):
                mixed = mixed + deepstack[index]
            residual = residual + mixed
        return self.last(residual)


class Experts(nn.Module):
    """Layers with experts on token shards: each rank runs its own tokens, and gathers the others' results."""

    def __init__(self, rank, size, layers=3, how=None):
        super().__init__()
        self.rank, self.size = rank, size
        self.norms = nn.ModuleList(Norm(10 + index) for index in range(layers))
        self.mixers = nn.ModuleList(Mixer(rank, size, 20 + 2 * index, how) for index in range(layers))
        self.experts = nn.ParameterList(nn.Parameter(weight(H, H, 50 + index)) for index in range(layers))
        self.middle = nn.ModuleList(Norm(60 + index) for index in range(layers))
        self.last = Norm(30)

    def forward(self, x, *deepstack):
        residual, count = x, x.shape[0]
        for index, expert in enumerate(self.experts):
            residual = residual + summed(self.mixers[index](self.norms[index](residual)), self.size)
            own = self.own(self.middle[index](residual))
            mixed = gathered(torch.tanh(own @ expert.T), self.size)[:count]
            if index < len(deepstack):
                mixed = mixed + deepstack[index]
            residual = residual + mixed
        return self.last(residual)

    def own(self, x):
        """Return this rank's rows, padded with zeros."""
        if self.size == 1:
            return x
        share = (x.shape[0] + self.size - 1) // self.size
        padded = nn.functional.pad(x, (0, 0, 0, share * self.size - x.shape[0]))
        return padded[self.rank * share : (self.rank + 1) * share]


class PostNorms(nn.Module):
    """Four norms per layer, as in gemma2. Two of them normalise a sum before it is added."""

    def __init__(self, rank, size):
        super().__init__()
        self.size = size
        self.norms = nn.ModuleList(Norm(10 + index) for index in range(4))
        self.mixers = nn.ModuleList(Mixer(rank, size, 20 + 2 * index) for index in range(2))

    def forward(self, x):
        for index, mixer in enumerate(self.mixers):
            x = x + self.norms[2 * index + 1](summed(mixer(self.norms[2 * index](x)), self.size))
        return x


class Shared(nn.Module):
    """One sum that two branches normalise, each for its own product."""

    def __init__(self, rank, size):
        super().__init__()
        self.size = size
        self.norms = nn.ModuleList([Norm(10), Norm(11), Norm(12)])
        self.mixers = nn.ModuleList(Mixer(rank, size, 20 + 2 * index) for index in range(3))

    def forward(self, x):
        total = summed(self.mixers[0](x), self.size)
        attended = self.mixers[1](self.norms[0](total))
        return self.norms[2](total + summed(attended + self.mixers[2](self.norms[1](total)), self.size))


class LayerNorms(Chain):
    def __init__(self, rank, size):
        super().__init__(rank, size, norm=lambda seed, eps=1e-6: nn.LayerNorm(H, eps))


class Biased(Chain):
    """A norm with a bias, so that rows of padding are not zero, quantised with one scale for all tokens."""

    def __init__(self, rank, size, how=None):
        super().__init__(rank, size, how=how, norm=lambda seed, eps=1e-6: Norm(seed, eps, bias=True))


class Scaled(Chain):
    """The residual is scaled by a constant."""

    def forward(self, x):
        residual = summed(self.embed(x), self.size)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            residual = 0.5 * residual + summed(mixer(norm(residual)), self.size) * 0.3
        return self.last(residual)


class Returned(Chain):
    """The residuals are returned as well, and one is kept in a buffer."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.register_buffer("kept", torch.zeros(13, H))

    def forward(self, x):
        residuals = [summed(self.embed(x), self.size)]
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            residuals.append(residuals[-1] + summed(mixer(norm(residuals[-1])), self.size))
        self.kept.copy_(residuals[1])
        return self.last(residuals[-1]), residuals[-1]
