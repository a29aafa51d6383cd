"""What next tokens are chosen by: the largest of a row's logits, in order, and the sum of the weights of all of them.

CPUs run a native kernel, everything else the reference. Tokens are chosen outside of graphs, so there is no fake.
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
    """Of S rows the K largest logits after the penalty, largest first, of equal ones that of the lowest id.

    values_SK: float32; -inf where a row has fewer. ids_SK: int64; -1 there, and perhaps for logits of -inf. sums_S:
    float64, over all logits of the row, of exp((logit - largest) / temperature); 0 for temperature 0, and where the
    largest is -inf. If a row has a NaN, its first value is one.
    """

    values_SK: Tensor
    ids_SK: Tensor
    sums_S: Tensor

    @classmethod
    def new(cls, rows: int, count: int, device: torch.device) -> "Candidates":
        """Undefined ones, one after the other in the same memory."""
        memory_X = torch.empty(cls.size(rows, count), dtype=torch.int64, device=device)
        ids_X, sums_X, values_X = memory_X.tensor_split([rows * count, rows * (count + 1)])
        values_SK = values_X.view(torch.float32)[: rows * count].view(rows, count)
        return cls(values_SK, ids_X.view(rows, count), sums_X.view(torch.float64))

    @staticmethod
    def size(rows: int, count: int) -> int:
        """The memory, in numbers of 64 bits."""
        return rows * (count + 1) + -(-rows * count // 2)

    def memory(self) -> Tensor:
        """All of the memory of `new`, int64."""
        rows, count = self.ids_SK.shape
        return self.ids_SK.as_strided((self.size(rows, count),), (1,))


class Weighing:
    """How S rows are weighed, for any number of steps.

    seen: by row which logits are penalised, words_W (int32, on the CPU), a bit for each; None: no logit is.
    penalties_S: of repetition (arXiv 1909.05858, section 4.1). temperatures_S: of 0, only the largest are wanted. Both
    float32, on the CPU.
    """

    def __init__(self, seen: Sequence[Tensor | None], penalties_S: Tensor, temperatures_S: Tensor) -> None:
        self.seen, self.penalties_S, self.temperatures_S = seen, penalties_S, temperatures_S
        # What native kernels read.
        addresses = [0 if words_W is None else words_W.data_ptr() for words_W in seen]
        self.addresses_S = torch.tensor(addresses, dtype=torch.int64)
        self.inverse_S = torch.where(temperatures_S == 0, 0.0, 1 / temperatures_S)


def candidates(logits_Sv: Tensor, weighing: Weighing, count: int, into: Candidates | None = None) -> Candidates:
    """The `count` candidates of each row of logits_Sv (float32, its rows contiguous), a part of the vocabulary or
    all. `into`: where they are written, if not to new memory."""
    if into is None:
        into = Candidates.new(len(logits_Sv), count, logits_Sv.device)
    if _is_native(logits_Sv):
        _native(logits_Sv, weighing, into)
    else:
        for own, found in zip(into, reference(logits_Sv, weighing, count), strict=True):
            own.copy_(found)
    return into


def reference(logits_Sv: Tensor, weighing: Weighing, count: int) -> Candidates:
    """In pieces, because it takes several times the memory of the logits that it is shown."""
    seen, penalties_S, temperatures_S = weighing.seen, weighing.penalties_S, weighing.temperatures_S
    rows = max(1, _PIECE // max(1, logits_Sv.shape[1]))
    starts = range(0, max(1, len(logits_Sv)), rows)
    pieces = [slice(start, start + rows) for start in starts]
    found = [_of_piece(logits_Sv[p], seen[p], penalties_S[p], temperatures_S[p], count) for p in pieces]
    return Candidates(*map(torch.cat, zip(*found, strict=True)))


def _of_piece(logits_Sv, seen, penalties_S, temperatures_S, count) -> Candidates:
    logits_Sv = _penalised(logits_Sv, seen, penalties_S)
    rows, size = logits_Sv.shape
    padding = 0, max(count - size, 0)
    # One number in which larger logits come first, then lower ids: topk takes any of equal ones.
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
    """The repetition penalty, in place; arguments as above."""
    if not _is_native(logits_Sv):
        logits_Sv.copy_(_penalised(logits_Sv, weighing.seen, weighing.penalties_S))
        return
    of_rows = weighing.addresses_S.data_ptr(), weighing.penalties_S.data_ptr()
    native.module.penalise(logits_Sv.data_ptr(), logits_Sv.stride(0), *logits_Sv.shape, *of_rows)


def take_largest(memories: Sequence[Tensor], first_ids: Sequence[int], tokens_S: Tensor) -> None:
    """Of each row the token with the largest logit, of equal ones that of the lowest id, or UNDECIDED if that logit is
    not finite.

    memories: on the CPU, of one candidate for each row, in the order of the parts of the vocabulary; first_ids: where
    these begin. tokens_S: int64, on the CPU, where the tokens are written.
    """
    if native.module is not None:
        addresses = [memory_X.data_ptr() for memory_X in memories]
        native.module.take_largest(addresses, first_ids, len(tokens_S), tokens_S.data_ptr())
        return
    ids_NS, _, values_NS = zip(*(memory_X.split(len(tokens_S)) for memory_X in memories), strict=True)
    values_SN = torch.stack([values_X.view(torch.float32)[: len(tokens_S)] for values_X in values_NS], dim=1)
    ids_SN = torch.stack([ids_S + first for ids_S, first in zip(ids_NS, first_ids, strict=True)], dim=1)
    best_S1 = torch.from_numpy(values_SN.numpy().argmax(axis=1))[:, None]  # of a NaN, if there is one, or the first
    ids_S1 = ids_SN.gather(1, best_S1).masked_fill(~values_SN.gather(1, best_S1).isfinite(), UNDECIDED)
    tokens_S.copy_(ids_S1[:, 0])


def _is_native(logits_Sv: Tensor) -> bool:
    return native.module is not None and logits_Sv.device.type == "cpu" and len(logits_Sv) > 0


def _penalised(logits_Sv: Tensor, seen: Sequence[Tensor | None], penalties_S: Tensor) -> Tensor:
    given = [words_W for words_W in seen if words_W is not None]
    if not given:
        return logits_Sv
    nothing_W = torch.zeros_like(given[0])
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
