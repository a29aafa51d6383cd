"""What a pass may be told."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from longhelix.passes.scales import Calibration, check_quantize


def check_options(
    min_tokens: Any,
    quantize: Any,
    scales: Any,
    tokens: Any,
    in_rank_order: Any,
    own_chunks: Any,
    token_wise: Any,
    norms: Any,
) -> None:
    """Raise ValueError for what `SequenceParallel` does not take."""
    if type(min_tokens) is not int or min_tokens < 1:
        raise ValueError(f"min_tokens is the fewest tokens of a graph, 1 or more, not {min_tokens!r}")
    if quantize is not None:
        check_quantize(quantize)
    if scales is not None and quantize is None:
        raise ValueError("scales are of what travels quantised: set quantize as well")
    if scales is not None and not isinstance(scales, Calibration):
        _check_scales(scales, quantize)
    if tokens is not None and not _is_range(tokens):
        raise ValueError(
            f"tokens is the least and the most tokens of graphs, as (1000, None) where there is no most, not {tokens!r}"
        )
    if in_rank_order is not None and not isinstance(in_rank_order, bool):
        raise ValueError(f"in_rank_order is True, False or None, not {in_rank_order!r}")
    if not isinstance(own_chunks, bool):
        raise ValueError(f"own_chunks is True or False, not {own_chunks!r}")
    if token_wise is not None and not _names_operands(token_wise):
        raise ValueError(
            "token_wise has ops and names of their operands, as {torch.ops.mine.scale.default: ['x']}, not "
            f"{token_wise!r}"
        )
    if not isinstance(norms, Sequence) or not all(isinstance(op, OpOverload) for op in norms):
        raise ValueError(f"norms is a list of ops, as [torch.ops.mine.norm.default], not {norms!r}")


def _check_scales(scales: object, quantize: str) -> None:
    """Raise ValueError unless these are static scales of that narrow type, by place."""
    if not isinstance(scales, Mapping):
        raise ValueError(f"scales are what a Calibration gives, or that itself, not {type(scales).__name__}")
    for place, scale in scales.items():
        if not isinstance(place, str) or not place.startswith(f"{quantize}/"):
            raise ValueError(
                f"scales has {place!r}, which is no place of {quantize}: give calibration.scales({quantize!r})"
            )
        if not isinstance(scale, float) or not 0 < scale < math.inf:
            raise ValueError(f"the scale of {place} is {scale!r}: scales are floats above 0, and finite")


def _is_range(tokens: object) -> bool:
    if not isinstance(tokens, tuple) or len(tokens) != 2:
        return False
    least, most = tokens
    return type(least) is int and least >= 1 and (most is None or (type(most) is int and most >= least))


def _names_operands(token_wise: object) -> bool:
    if not isinstance(token_wise, Mapping):
        return False
    return all(
        isinstance(op, OpOverload)
        and isinstance(names, Sequence)
        and not isinstance(names, str)
        and {argument.name for argument in op._schema.arguments}.issuperset(names)
        for op, names in token_wise.items()
    )
