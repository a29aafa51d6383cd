"""Loading: each parameter is sliced while it is read, so a rank never holds the whole model."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longhelix.models.checkpoint import Checkpoint
from longhelix.models.parameter import Parameter


def load(
    checkpoint: Checkpoint,
    parameters: Sequence[Parameter],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int], None],
) -> dict[str, Tensor]:
    """The parameters by name, in `dtype` on `device`. `progress` is called with the elements of each one once it is
    loaded."""
    weights = {}
    for parameter in parameters:
        pieces = [
            checkpoint.read(source.name, tuple(slice(items.start, items.stop) for items in source.slices))
            for source in parameter.sources
        ]
        if not parameter.exact:
            pieces = [piece.to(dtype) for piece in pieces]
        # A lone slice may still be a view of the mapped file, whose pages would stay with this rank.
        weights[parameter.name] = (torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()).to(device)
        progress(parameter.num_elements)
    return weights
