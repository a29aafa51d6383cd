"""Check the options of `SequenceParallel`."""

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
    """Raise ValueError if `SequenceParallel` does not accept an option's value."""
    if type(min_tokens) is not int or min_tokens < 1:
        raise ValueError(f"min_tokens must be an integer of 1 or more, not {min_tokens!r}")
    if quantize is not None:
        check_quantize(quantize)
    if scales is not None and quantize is None:
        raise ValueError("scales have no effect without quantize: set quantize as well")
    if scales is not None and not isinstance(scales, Calibration):
        _check_scales(scales, quantize)
    if tokens is not None and not _is_range(tokens):
        raise ValueError(
            "tokens must be the smallest and the largest number of tokens, such as (1000, 8000), or (1000, None) "
            f"without a limit, not {tokens!r}"
        )
    if in_rank_order is not None and not isinstance(in_rank_order, bool):
        raise ValueError(f"in_rank_order must be True, False or None, not {in_rank_order!r}")
    if not isinstance(own_chunks, bool):
        raise ValueError(f"own_chunks must be True or False, not {own_chunks!r}")
    if token_wise is not None and not _names_operands(token_wise):
        raise ValueError(
            "token_wise must map ops to names of their operands, such as {torch.ops.mine.scale.default: ['x']}, not "
            f"{token_wise!r}"
        )
    if not isinstance(norms, Sequence) or not all(isinstance(op, OpOverload) for op in norms):
        raise ValueError(f"norms must be a list of ops, such as [torch.ops.mine.norm.default], not {norms!r}")


def _check_scales(scales: object, quantize: str) -> None:
    """Raise ValueError unless `scales` maps places to static scales of the narrow type `quantize`."""
    if not isinstance(scales, Mapping):
        raise ValueError(
            f"scales must be a Calibration, or the dict that its scales() returns, not {type(scales).__name__}"
        )
    for place, scale in scales.items():
        if not isinstance(place, str) or not place.startswith(f"{quantize}/"):
            raise ValueError(
                f"scales has the key {place!r}, which is not for {quantize}: pass calibration.scales({quantize!r})"
            )
        if not isinstance(scale, float) or not 0 < scale < math.inf:
            raise ValueError(f"the scale of {place} is {scale!r}: it must be a finite float above 0")


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
