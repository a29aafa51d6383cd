"""A rank's share of the inputs of a packed weight."""

from dataclasses import dataclass

from longhelix.spec.formats import FORMATS

_ORDERED_BLOCK = 32  # inputs of a scale block, where ranks share ordered inputs
_INDEX_BYTES = 4
_PANEL_INPUTS = 16


@dataclass(frozen=True)
class PackedShare:
    """How a rank keeps its inputs of a packed weight.

    Attributes:
        format: The number format.
        depth: Number of inputs, with the padding of ordered ones.
        lead: How many inputs of the first scale block belong to another rank.
        ordered: The inputs lie in the order of their scale blocks, and each place has the index of its input.
    """

    format: str
    depth: int
    lead: int = 0
    ordered: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of the weights of one output."""
        return FORMATS[self.format].weight_row_bytes(self.depth, self.lead)

    @property
    def fits_panels(self) -> bool:
        """Whether the native CPU kernels read it, in panels of sixteen inputs."""
        return self.depth % _PANEL_INPUTS == 0 and self.lead % _PANEL_INPUTS == 0

    @property
    def order_bytes(self) -> int:
        """Bytes of the indices of inputs."""
        return _INDEX_BYTES * self.depth if self.ordered else 0


def packed_share(format: str, ordered: bool, size: int, inputs: range) -> PackedShare:
    """Return how a rank keeps some inputs of a weight.

    If inputs are ordered, a rank may have any inputs of a scale block. It pads its inputs of each scale block to blocks
    of 32. The returned depth has room for the worst order, because only sizes are known here.

    Args:
        format: The number format of the whole weight.
        ordered: See `longhelix.spec.quantised_modules.Storage`.
        size: Number of all inputs.
        inputs: Those of the rank.
    """
    numbers = FORMATS[format].weight_scales.numbers
    if not ordered or not inputs or numbers is None:
        return PackedShare(format, len(inputs), FORMATS[format].weight_scales.lead(inputs.start) if inputs else 0)
    if len(inputs) == size:
        return PackedShare(format, size, ordered=True)
    groups, last = divmod(size, numbers)
    all_blocks = groups * (numbers // _ORDERED_BLOCK) - -last // _ORDERED_BLOCK
    parts = min(groups + (last > 0), len(inputs))
    blocks = min((len(inputs) + (_ORDERED_BLOCK - 1) * parts) // _ORDERED_BLOCK, all_blocks)
    return PackedShare(_in_blocks(format), blocks * _ORDERED_BLOCK, ordered=True)


def _in_blocks(format: str) -> str:
    """Return the format that differs from this one only in its scale blocks, which have 32 inputs."""
    same = (name for name, other in FORMATS.items() if other.codes == FORMATS[format].codes)
    return next(name for name in same if FORMATS[name].weight_scales.numbers == _ORDERED_BLOCK)
