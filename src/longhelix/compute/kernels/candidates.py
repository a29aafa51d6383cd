"""Candidates for next tokens: the largest logits of each row, in order, and the sum of all weights of the row.

CPUs run a native kernel, other devices the reference. Tokens are chosen outside of graphs, so there is no fake.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.kernels.draw import UNDECIDED

_ID_BITS = 32
_PIECE = 2**21  # logits


class Candidates(NamedTuple):
    """The K largest logits of S rows after the penalty, largest first. Of equal logits, the lowest id comes first.

    Attributes:
        values_SK: The logits, then -inf if a row has fewer. The first is NaN if the row has a NaN. float32.
        ids_SK: Token ids. -1 if a row has fewer, and possibly for logits of -inf. int64.
        sums_S: Sum of exp((logit - largest) / temperature) over all logits of the row. 0 if the temperature is 0, or if
            the largest logit is -inf. float64.
    """

    values_SK: Tensor
    ids_SK: Tensor
    sums_S: Tensor

    @classmethod
    def new(cls, rows: int, count: int, device: torch.device) -> "Candidates":
        """Allocate candidates in one contiguous memory. Contents are undefined."""
        memory_X = torch.empty(cls.size(rows, count), dtype=torch.int64, device=device)
        ids_X, sums_X, values_X = memory_X.tensor_split([rows * count, rows * (count + 1)])
        values_SK = values_X.view(torch.float32)[: rows * count].view(rows, count)
        return cls(values_SK, ids_X.view(rows, count), sums_X.view(torch.float64))

    @staticmethod
    def size(rows: int, count: int) -> int:
        """Return the size of the memory in 64-bit numbers."""
        return rows * (count + 1) + -(-rows * count // 2)

    def memory(self) -> Tensor:
        """Return the whole memory allocated by `new`. int64."""
        rows, count = self.ids_SK.shape
        return self.ids_SK.as_strided((self.size(rows, count),), (1,))


class Weighing:
    """Penalties and temperatures of S rows, for any number of steps.

    Args:
        seen: A bit for each penalised logit, words_W (int32, on the CPU), for each row. None: no logit is penalised.
        penalties_S: Repetition penalties (arXiv 1909.05858, section 4.1). float32, on the CPU.
        temperatures_S: Temperatures. 0: only the largest logits matter. float32, on the CPU.
    """

    def __init__(self, seen: Sequence[Tensor | None], penalties_S: Tensor, temperatures_S: Tensor) -> None:
        self.seen, self.penalties_S, self.temperatures_S = seen, penalties_S, temperatures_S
        # Read by native kernels.
        addresses = [0 if words_W is None else words_W.data_ptr() for words_W in seen]
        self.addresses_S = torch.tensor(addresses, dtype=torch.int64)
        self.inverse_S = torch.where(temperatures_S == 0, 0.0, 1 / temperatures_S)


def candidates(logits_Sv: Tensor, weighing: Weighing, count: int, into: Candidates | None = None) -> Candidates:
    """Return the `count` candidates of each row of logits_Sv (float32, contiguous rows).

    The columns are the vocabulary or a part of it. into: Memory for the result. None: allocate it.
    """
    if into is None:
        into = Candidates.new(len(logits_Sv), count, logits_Sv.device)
    if _is_native(logits_Sv):
        _native(logits_Sv, weighing, into)
    else:
        for target, values in zip(into, reference(logits_Sv, weighing, count), strict=True):
            target.copy_(values)
    return into


def reference(logits_Sv: Tensor, weighing: Weighing, count: int) -> Candidates:
    """Compute candidates with torch. In pieces, because it needs several times the memory of its logits."""
    seen, penalties_S, temperatures_S = weighing.seen, weighing.penalties_S, weighing.temperatures_S
    rows = max(1, _PIECE // max(1, logits_Sv.shape[1]))
    starts = range(0, max(1, len(logits_Sv)), rows)
    pieces = [slice(start, start + rows) for start in starts]
    results = [_of_piece(logits_Sv[p], seen[p], penalties_S[p], temperatures_S[p], count) for p in pieces]
    return Candidates(*map(torch.cat, zip(*results, strict=True)))


def _of_piece(logits_Sv, seen, penalties_S, temperatures_S, count) -> Candidates:
    logits_Sv = _penalised(logits_Sv, seen, penalties_S)
    rows, size = logits_Sv.shape
    padding = 0, max(count - size, 0)
    # Keys with larger logits first, then lower ids, because topk takes any of equal values.
    bits_Sv = (logits_Sv + 0.0).view(torch.int32)
    ordered_Sv = (bits_Sv ^ ((bits_Sv >> 31) & 0x7FFFFFFF)).long()
    ids_v = torch.arange(size, device=logits_Sv.device)
    keys_SK = ((ordered_Sv << _ID_BITS) + ((1 << _ID_BITS) - 1 - ids_v)).topk(min(count, size), dim=1).values
    ids_SK = torch.nn.functional.pad((1 << _ID_BITS) - 1 - (keys_SK & ((1 << _ID_BITS) - 1)), padding, value=-1)
    values_SK = logits_Sv.gather(1, ids_SK[:, :size])
    values_SK = torch.nn.functional.pad(values_SK, padding, value=-torch.inf)
    temperatures_S = temperatures_S.to(logits_Sv.device)
    sums_S = logits_Sv.new_zeros(rows, dtype=torch.float64)
    if size:
        values_SK[logits_Sv.isnan().any(dim=1), 0] = torch.nan
        largest_S = logits_Sv.amax(dim=1)
        scaled_Sv = (logits_Sv - largest_S[:, None]).double() / temperatures_S[:, None]
        sums_S = torch.where((temperatures_S == 0) | (largest_S == -torch.inf), 0.0, scaled_Sv.exp().sum(dim=1))
    return Candidates(values_SK, ids_SK, sums_S)


def penalise(logits_Sv: Tensor, weighing: Weighing) -> None:
    """Apply the repetition penalty in place."""
    if not _is_native(logits_Sv):
        logits_Sv.copy_(_penalised(logits_Sv, weighing.seen, weighing.penalties_S))
        return
    of_rows = weighing.addresses_S.data_ptr(), weighing.penalties_S.data_ptr()
    native.module.penalise(logits_Sv.data_ptr(), logits_Sv.stride(0), *logits_Sv.shape, *of_rows)


def take_largest(memories: Sequence[Tensor], first_ids: Sequence[int], tokens_S: Tensor) -> None:
    """Choose the token with the largest logit of each row, or UNDECIDED if that logit is not finite.

    Of equal logits, the lowest id wins.

    Args:
        memories: `Candidates.memory` of one candidate per row, for each part of the vocabulary, in order. On the CPU.
        first_ids: First token id of each part.
        tokens_S: Receives the tokens. int64, on the CPU.
    """
    if native.module is not None:
        addresses = [memory_X.data_ptr() for memory_X in memories]
        native.module.take_largest(addresses, first_ids, len(tokens_S), tokens_S.data_ptr())
        return
    ids_NS, _, values_NS = zip(*(memory_X.split(len(tokens_S)) for memory_X in memories), strict=True)
    values_SN = torch.stack([values_X.view(torch.float32)[: len(tokens_S)] for values_X in values_NS], dim=1)
    ids_SN = torch.stack([ids_S + first for ids_S, first in zip(ids_NS, first_ids, strict=True)], dim=1)
    best_S1 = torch.from_numpy(values_SN.numpy().argmax(axis=1))[:, None]  # the first NaN or maximum
    ids_S1 = ids_SN.gather(1, best_S1).masked_fill(~values_SN.gather(1, best_S1).isfinite(), UNDECIDED)
    tokens_S.copy_(ids_S1[:, 0])


def _is_native(logits_Sv: Tensor) -> bool:
    return native.module is not None and logits_Sv.device.type == "cpu" and len(logits_Sv) > 0


def _penalised(logits_Sv: Tensor, seen: Sequence[Tensor | None], penalties_S: Tensor) -> Tensor:
    masks = [words_W for words_W in seen if words_W is not None]
    if not masks:
        return logits_Sv
    nothing_W = torch.zeros_like(masks[0])
    words_SW = torch.stack([nothing_W if words_W is None else words_W for words_W in seen]).to(logits_Sv.device)
    places_v = torch.arange(logits_Sv.shape[1], device=logits_Sv.device)
    seen_Sv = (words_SW[:, places_v // 32] >> (places_v % 32)) & 1 == 1
    penalties_S1 = penalties_S.to(logits_Sv.device)[:, None]
    less_Sv = torch.where(logits_Sv > 0, logits_Sv / penalties_S1, logits_Sv * penalties_S1)
    return torch.where(seen_Sv, less_Sv, logits_Sv)


def _native(logits_Sv: Tensor, weighing: Weighing, into: Candidates) -> None:
    rows, size = logits_Sv.shape
    native.module.candidates(
        logits_Sv.data_ptr(),
        logits_Sv.stride(0),
        rows,
        size,
        weighing.addresses_S.data_ptr(),
        weighing.penalties_S.data_ptr(),
        weighing.inverse_S.data_ptr(),
        into.ids_SK.shape[1],
        *(tensor.data_ptr() for tensor in into),
    )
