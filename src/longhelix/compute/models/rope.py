"""The frequencies of rotary position embedding. compute/kernels/angles.py makes angles of them."""

import math

from longhelix.spec import ModelSpec, RopeSpec
from longhelix.spec.rope import RopeScaling


def all_frequencies(spec: ModelSpec, length: int) -> tuple[tuple[float, ...], ...]:
    """Return `inverse_frequencies` for each of the model's rotations."""
    return tuple(tuple(inverse_frequencies(rotation.rope, rotation.size, length)) for rotation in spec.rotations)


def inverse_frequencies(rope: RopeSpec, head_size: int, length: int) -> list[float]:
    """Return the angles per position step (float64), one for each pair of a head's `head_size` rotated channels.

    `length` is the maximum number of keys of the request, `Request.num_rows`. Dynamic and longrope use it to choose
    frequencies once, because cached keys are already rotated.
    Sources: RoPE arXiv 2104.09864; dynamic NTK, linear and yarn arXiv 2309.00071; longrope arXiv
    2402.13753; llama3: the model card's smoothing between two wavelengths.
    """
    if not head_size:
        return []
    theta, scaling = rope.theta, rope.scaling
    if scaling.kind == "dynamic" and length > scaling.original_max_positions:
        stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
        theta *= stretch ** (head_size / (head_size - 2))
    plain = [theta ** (-channel / head_size) for channel in range(0, head_size, 2)]
    if rope.divisors:
        return [frequency / divisor for frequency, divisor in zip(plain, rope.divisors, strict=True)]
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "longrope":
        is_long = length > scaling.original_max_positions
        divisors = scaling.longrope.long_factor if is_long else scaling.longrope.short_factor
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
    if scaling.kind == "llama3":
        return [_blend(frequency, scaling.factor, _llama3_kept(scaling, frequency)) for frequency in plain]
    if scaling.kind == "yarn":
        return [
            _blend(frequency, scaling.factor, kept)
            for frequency, kept in zip(plain, _yarn_kept(rope, head_size), strict=True)
        ]
    return plain


def _blend(frequency: float, factor: float, kept: float) -> float:
    """Interpolate between the frequency (kept = 1) and the frequency divided by `factor` (kept = 0)."""
    return kept * frequency + (1 - kept) * frequency / factor


def _llama3_kept(scaling: RopeScaling, frequency: float) -> float:
    turns, bounds = scaling.original_max_positions * frequency / (2 * math.pi), scaling.llama3
    kept = (turns - bounds.low_freq_factor) / (bounds.high_freq_factor - bounds.low_freq_factor)
    return min(max(kept, 0.0), 1.0)


def _yarn_kept(rope: RopeSpec, head_size: int) -> list[float]:
    """Return 1 for channels that turn more than beta_fast times in the trained context, 0 below beta_slow."""

    def channel(turns: float) -> float:
        whole_turns = rope.scaling.original_max_positions / (turns * 2 * math.pi)
        return head_size * math.log(whole_turns) / (2 * math.log(rope.theta))

    bounds = rope.scaling.yarn
    low, high = channel(bounds.beta_fast), channel(bounds.beta_slow)
    if bounds.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    return [1 - min(max((pair - low) / width, 0.0), 1.0) for pair in range(head_size // 2)]
