"""Rotary position embedding (RoPE) as a model's configuration describes it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from longhelix.errors import UserError
from longhelix.spec.config import positive
from longhelix.values import flag, one_of, real, refused, shown, whole

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved",
    "attn_factor", "finetuned",
}  # fmt: skip
# No model's values are near these. Far beyond them, cos and sin overflow.
_LEAST, _MOST = 1e-3, 1e6
# Settings of yarn's first implementation, which neither transformers nor longhelix reads.
UNREAD_ROPE_KEYS = frozenset({"attn_factor"})
_MOST_POSITIONS = 2**53  # above, floats skip integers

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Llama3Bounds:
    """Bounds of the frequencies that llama3 scales, in turns within the original positions.

    Attributes:
        low_freq_factor: Frequencies with fewer turns are divided by the factor.
        high_freq_factor: Frequencies with more turns stay.
    """

    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0


@dataclass(frozen=True)
class YarnBounds:
    """Bounds of the frequencies that yarn interpolates, in turns within the original positions.

    Attributes:
        beta_fast: Frequencies with more turns stay.
        beta_slow: Frequencies with fewer turns are divided by the factor.
        truncate: The bounds are rounded outwards to whole frequency pairs.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeDivisors:
    """What longrope divides each frequency by (C/2 numbers each).

    Attributes:
        short_factor: For requests within the original positions.
        long_factor: For longer requests.
    """

    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are changed for contexts beyond the original positions.

    Fields that the kind does not use keep their defaults.

    Attributes:
        kind: One of ROPE_KINDS.
        factor: Scaling of the positions.
        original_max_positions: Positions before scaling.
        attention_factor: Multiplies cos and sin.
        latent_factor: Multiplies the scores of latent attention, whose keys are only partly rotated (mscale_all_dim of
            DeepSeek's models).
        llama3: The bounds of the kind llama3.
        yarn: The bounds of the kind yarn.
        longrope: The divisors of the kind longrope.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    latent_factor: float = 1.0
    llama3: Llama3Bounds = Llama3Bounds()
    yarn: YarnBounds = YarnBounds()
    longrope: LongRopeDivisors = LongRopeDivisors()


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding: how its frequencies follow from theta.

    Attributes:
        theta: Base of the frequencies.
        scaling: How the frequencies are changed for long contexts.
        divisors: Divide the frequencies one by one, if present (C/2 numbers). GGUF files have llama3 scaling in this
            form.
        sections: Number of frequency pairs that turn by each of three axes (`axes`), if present. Image tokens have a
            position for each axis: time, row and column. All other tokens have the same position on all three.
    """

    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling()
    divisors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis by which each frequency pair turns (interleaved M-RoPE, as in Qwen3-VL, arXiv 2511.21631).

        Rows and columns have every third pair, from the second and the third pair on, up to their numbers of pairs. All
        other pairs turn by time.
        """
        return tuple(
            axis if (axis := pair % 3) and pair < 3 * self.sections[axis] else 0 for pair in range(sum(self.sections))
        )

    @classmethod
    def from_config(cls, rope: Mapping[str, Any], head_size: int, max_positions: int) -> "RopeSpec":
        """Read a `rope_parameters` mapping (or `rope_scaling` plus theta), and fill in all defaults."""
        unknown = sorted(map(shown, set(rope) - _ROPE_KEYS))
        if unknown:
            raise UserError(f"unknown rope setting {unknown[0]}: known ones are {', '.join(sorted(_ROPE_KEYS))}")
        kind = one_of("rope type", rope.get("rope_type", rope.get("type", "default")), ROPE_KINDS, "unknown_rope")
        missing = [key for key in _ROPE_NEEDS[kind] if rope.get(key) is None]
        if missing:
            raise UserError(f"rope type {kind!r} needs {missing[0]!r}: set it in the rope settings")
        if positive(rope, "partial_rotary_factor", 1.0) != 1:
            raise UserError(
                "partial_rotary_factor is not supported for this model family, which rotates whole heads: leave it out"
            )
        original = whole(
            "original_max_position_embeddings in the model's settings",
            rope.get("original_max_position_embeddings", max_positions),
            least=2 if kind == "longrope" else 1,  # longrope divides by its logarithm
            most=_MOST_POSITIONS,
        )
        theta = positive(rope, "rope_theta", 10_000.0)
        if theta <= 1:
            raise refused("rope_theta in the model's settings", theta, "a number above 1")
        factor = _moderate(rope, "factor", max_positions / original)
        low, high = _moderate(rope, "low_freq_factor", 1.0), _moderate(rope, "high_freq_factor", 1.0)
        if kind == "llama3" and low >= high:
            raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high} in the rope settings")
        scaling = RopeScaling(
            kind=kind,
            factor=factor,
            original_max_positions=max_positions if kind == "dynamic" else original,
            attention_factor=_attention_factor(kind, rope, factor, original),
            latent_factor=_latent_factor(kind, rope, factor),
            llama3=Llama3Bounds(low_freq_factor=low, high_freq_factor=high),
            yarn=_yarn_bounds(rope),
            longrope=_longrope_divisors(rope, head_size) if kind == "longrope" else LongRopeDivisors(),
        )
        return cls(theta=theta, scaling=scaling, sections=_sections(rope, head_size))


class Rotation(NamedTuple):
    """How a layer rotates its queries and keys.

    Attributes:
        rope: The frequencies.
        size: Number of channels of a head that are rotated, from the first channel on. 0: none.
    """

    rope: RopeSpec
    size: int


@dataclass(frozen=True)
class RopeSettings:
    """The RoPE settings of a model's configuration, by Hugging Face's names.

    Attributes:
        settings: Theta and the scaling, by name.
        max_positions: Positions that the model was trained for.
        divisors: Divide the frequencies one by one, if there are any.
    """

    settings: Mapping[str, Any]
    max_positions: int
    divisors: tuple[float, ...] = ()

    def of(self, head_size: int) -> RopeSpec:
        """Read the rotation of whole heads. Raises UserError."""
        rope = RopeSpec.from_config(self.settings, head_size, self.max_positions)
        if not self.divisors:
            return rope
        return replace(rope, divisors=frequency_divisors({"rope_freqs": self.divisors}, "rope_freqs", head_size))

    def of_part(self, head_size: int) -> tuple[int, RopeSpec]:
        """Read the rotation of heads that rotate only some channels: a share of `partial_rotary_factor`.

        Returns:
            The channels of a head that are rotated, and how.

        Raises:
            UserError: a setting is invalid.
        """
        share = positive(self.settings, "partial_rotary_factor", 1.0)
        rotated_size = int(head_size * share)
        if not 2 <= rotated_size <= head_size:
            name, allowed = "partial_rotary_factor in the model's settings", f"a number from {2 / head_size:g} to 1"
            raise refused(name, share, allowed, "invalid_model")
        settings = {name: value for name, value in self.settings.items() if name != "partial_rotary_factor"}
        return rotated_size, replace(self, settings=settings).of(rotated_size)


def _yarn_bounds(rope: Mapping[str, Any]) -> YarnBounds:
    truncate = rope.get("truncate", True)
    return YarnBounds(
        beta_fast=_moderate(rope, "beta_fast", 32.0),
        beta_slow=_moderate(rope, "beta_slow", 1.0),
        truncate=flag("truncate in the model's settings", False if truncate is None else truncate),
    )


def _longrope_divisors(rope: Mapping[str, Any], head_size: int) -> LongRopeDivisors:
    return LongRopeDivisors(
        short_factor=frequency_divisors(rope, "short_factor", head_size),
        long_factor=frequency_divisors(rope, "long_factor", head_size),
    )


def _sections(rope: Mapping[str, Any], head_size: int) -> tuple[int, ...]:
    if rope.get("mrope_section") is None:
        return ()
    if rope.get("mrope_interleaved") is not True:
        raise UserError("mrope_interleaved is not true: longhelix supports M-RoPE only with interleaved axes")
    given, allowed = rope["mrope_section"], f"three numbers that add up to {head_size // 2}, half the head size"
    sections = given if isinstance(given, (list, tuple)) else ()
    whole_numbers = all(type(number) is int and number >= 0 for number in sections)
    if len(sections) != 3 or not whole_numbers or sum(sections) != head_size // 2:
        raise refused("mrope_section in the model's settings", given, allowed)
    return tuple(sections)


def _moderate(rope: Mapping[str, Any], key: str, default: float) -> float:
    """Read a scaling factor. Absent and null mean the default."""
    value = rope.get(key)
    return real(
        f"{key} in the model's settings",
        default if value is None else value,
        lambda number: _LEAST <= number <= _MOST,
        f"a number from {_LEAST} to {_MOST:.0f}",
    )


def _yarn_weight(rope: Mapping[str, Any], key: str) -> float:
    """Read mscale or mscale_all_dim. Absent and null mean 0: no scaling."""
    value = rope.get(key)
    return real(
        f"{key} in the model's settings",
        0 if value is None else value,
        lambda number: number == 0 or _LEAST <= number <= _MOST,
        f"0 (none), or a number from {_LEAST} to {_MOST:.0f}",
    )


def frequency_divisors(rope: Mapping[str, Any], key: str, head_size: int) -> tuple[float, ...]:
    values = rope[key] if isinstance(rope[key], (list, tuple)) else ()
    allowed = f"{head_size // 2} numbers (half the head size {head_size}), each {_LEAST} or more"
    if len(values) != head_size // 2:
        raise refused(key, rope[key], f"a list of {allowed}")
    name, allowed = f"a number of {key}", f"a number of {_LEAST} or more"
    return tuple(real(name, value, lambda number: _LEAST <= number < math.inf, allowed) for value in values)


def _attention_factor(kind: str, rope: Mapping[str, Any], factor: float, original: int) -> float:
    """Yarn: 0.1 ln(factor) + 1 (arXiv 2309.00071, eq. 22); longrope: sqrt(1 + ln factor / ln original)."""
    if rope.get("attention_factor") is not None and kind in ("yarn", "longrope"):
        return _moderate(rope, "attention_factor", 1.0)
    if factor <= 1 or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    weight, weight_all = _yarn_weight(rope, "mscale"), _yarn_weight(rope, "mscale_all_dim")
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)


def _latent_factor(kind: str, rope: Mapping[str, Any], factor: float) -> float:
    """(0.1 mscale_all_dim ln(factor) + 1)^2 for long contexts, as DeepSeek's models define it."""
    if kind == "default" or factor <= 1:
        return 1.0
    return (0.1 * _yarn_weight(rope, "mscale_all_dim") * math.log(factor) + 1.0) ** 2
