"""The frequencies of rotary position embedding. compute/kernels/angles.py makes angles of them."""

import math

from longhelix.spec import ModelSpec, RopeSpec


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
    theta = rope.theta
    if rope.kind == "dynamic" and length > rope.original_max_positions:
        stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
        theta *= stretch ** (head_size / (head_size - 2))
    plain = [theta ** (-channel / head_size) for channel in range(0, head_size, 2)]
    if rope.divisors:
        return [frequency / divisor for frequency, divisor in zip(plain, rope.divisors, strict=True)]
    if rope.kind == "linear":
        return [frequency / rope.factor for frequency in plain]
    if rope.kind == "longrope":
        divisors = rope.long_factor if length > rope.original_max_positions else rope.short_factor
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
    if rope.kind == "llama3":
        return [_blend(frequency, rope.factor, _llama3_kept(rope, frequency)) for frequency in plain]
    if rope.kind == "yarn":
        return [
            _blend(frequency, rope.factor, kept)
            for frequency, kept in zip(plain, _yarn_kept(rope, head_size), strict=True)
        ]
    return plain


def _blend(frequency: float, factor: float, kept: float) -> float:
    """Interpolate between the frequency (kept = 1) and the frequency divided by `factor` (kept = 0)."""
    return kept * frequency + (1 - kept) * frequency / factor


def _llama3_kept(rope: RopeSpec, frequency: float) -> float:
    turns = rope.original_max_positions * frequency / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return min(max(kept, 0.0), 1.0)


def _yarn_kept(rope: RopeSpec, head_size: int) -> list[float]:
    """Return 1 for channels that turn more than beta_fast times in the trained context, 0 below beta_slow."""

    def channel(turns: float) -> float:
        return head_size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    return [1 - min(max((pair - low) / width, 0.0), 1.0) for pair in range(head_size // 2)]
