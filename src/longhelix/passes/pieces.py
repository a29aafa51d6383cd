"""Collectives that send large messages in pieces, for gloo.

Within a collective, gloo uses the two directions of a link one after the other. If several pieces start together, they
use both directions at the same time. Each collective is a single op of the graph. If starting and waiting were two ops,
the compiler would move the wait directly after the start.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import ir, lowering
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group

_PIECE_BYTES, _MOST_PIECES = 256 * 1024, 16
# torch 2.13 renames this function, and prints a warning for the old name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_library = torch.library.Library("longhelix_passes", "FRAGMENT")
# Blocking versions of ops in `_c10d_functional`. all_to_all sends the same number of rows to each rank.
_library.define("all_gather(Tensor x_LX, int ranks, str group) -> Tensor")
_library.define("all_to_all(Tensor x_TX, int ranks, str group) -> Tensor")


def _all_gather(x_LX: Tensor, ranks: int, group: str) -> Tensor:
    ranks_of, whole_nLX = _resolve_process_group(group), x_LX.new_empty((ranks, *x_LX.shape))
    pieces = _pieces(x_LX)
    if len(pieces) == 1:
        _gather(whole_nLX.flatten(0, 1), x_LX, ranks_of)
        return whole_nLX.flatten(0, 1)
    started = []
    for rows in pieces:
        piece_nlX = x_LX.new_empty((ranks, *x_LX[rows].shape))
        work = _gather(piece_nlX.flatten(0, 1), x_LX[rows], ranks_of, async_op=True)
        started.append((work, piece_nlX))
    for rows, (work, piece_nlX) in zip(pieces, started, strict=True):
        work.wait()
        whole_nLX[:, rows] = piece_nlX
    return whole_nLX.flatten(0, 1)


def _all_to_all(x_TX: Tensor, ranks: int, group: str) -> Tensor:
    x_TX = x_TX.contiguous()
    ranks_of, given_nLX = _resolve_process_group(group), x_TX.unflatten(0, (ranks, -1))
    received_nLX = torch.empty_like(given_nLX)
    pieces = _pieces(given_nLX[0])
    if len(pieces) == 1:
        dist.all_to_all_single(received_nLX.flatten(0, 1), x_TX, group=ranks_of)
        return received_nLX.flatten(0, 1)
    started = []
    for rows in pieces:
        given_nlX = given_nLX[:, rows].contiguous()
        piece_nlX = torch.empty_like(given_nlX)
        work = dist.all_to_all_single(piece_nlX, given_nlX, group=ranks_of, async_op=True)
        started.append((work, piece_nlX, given_nlX))
    for rows, (work, piece_nlX, _) in zip(pieces, started, strict=True):
        work.wait()
        received_nLX[:, rows] = piece_nlX
    return received_nLX.flatten(0, 1)


def _pieces(x_LX: Tensor) -> list[slice]:
    """Split the rows that one rank sends to another rank into pieces that are sent at the same time."""
    count = max(min(x_LX.nbytes // _PIECE_BYTES, len(x_LX), _MOST_PIECES), 1)
    ends = [len(x_LX) * piece // count for piece in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
_library.impl("all_to_all", _all_to_all, "CompositeExplicitAutograd")
torch.library.register_fake(
    "longhelix_passes::all_gather",
    lambda x_LX, ranks, group: x_LX.new_empty((ranks * x_LX.shape[0], *x_LX.shape[1:])),
    lib=_library,
)
torch.library.register_fake(
    "longhelix_passes::all_to_all", lambda x_TX, ranks, group: x_TX.new_empty(x_TX.shape), lib=_library
)

ALL_GATHER = torch.ops.longhelix_passes.all_gather.default
ALL_TO_ALL = torch.ops.longhelix_passes.all_to_all.default


def _lower_as_collective(op: OpOverload) -> None:
    """Make the compiler treat an op as a collective, so that all ranks run the collectives in the same order.

    The compiler may reorder other ops by their memory use, which differs between ranks.
    """
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(
        lambda *operands: ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(op, *operands))
    )


_lower_as_collective(ALL_GATHER)
_lower_as_collective(ALL_TO_ALL)
