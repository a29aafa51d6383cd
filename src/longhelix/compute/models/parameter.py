"""One parameter: its checkpoint tensors, their global shapes, and this rank's slices of them. No torch."""

from dataclasses import dataclass
from math import prod

from longhelix.spec import FORMATS, number_format
from longhelix.spec.packed_share import PackedShare, packed_share
from longhelix.spec.quantisation import Storage
from longhelix.spec.weights import WeightDtype, packed_storage


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, and the part of it that a rank keeps."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[range, ...]  # one range per dim
    row_unit: int = 1  # rows that are read together, such as those of a head
    storage: Storage | None = None  # how the checkpoint packs it, None if it does not

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.name.removesuffix(".weight")

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(len(items) for items in self.slices)


@dataclass(frozen=True)
class Parameter:
    """A tensor of this rank: its sources, concatenated along dim 0."""

    name: str  # in the model
    sources: tuple[Source, ...]
    exact: bool = False  # loaded in the dtype of the checkpoint
    stored: WeightDtype = WeightDtype.ACTIVATION  # dtype in memory
    plus_one: bool = False  # the sources have the weight minus one
    in_experts: bool = False  # belongs to routed or shared experts

    @property
    def local_shape(self) -> tuple[int, ...]:
        rows = sum(source.local_shape[0] for source in self.sources)
        return (rows, *self.sources[0].local_shape[1:])

    @property
    def num_elements(self) -> int:
        return sum(prod(map(len, source.slices)) for source in self.sources)

    @property
    def storage(self) -> Storage | None:
        """How a product's weight is kept. None: as numbers of the model's dtype."""
        if self.stored is not WeightDtype.PRODUCT:
            return None
        return packed_storage((source.storage for source in self.sources), self.in_experts)

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs, and multiply them with packed codes."""
        return self.storage is not None and self.storage.rounds_inputs

    def format(self, weight_dtype: str) -> str:
        """Return the number format of a product's weight. weight_dtype: see `share`."""
        share = self.share(weight_dtype)
        if share is not None:
            return share.format
        return weight_dtype if self.storage is None else self.storage.kept

    def share(self, weight_dtype: str) -> PackedShare | None:
        """Return how the rank's inputs stay packed.

        None: it becomes or stays numbers, as products with `weight_dtype` need numbers, or the checkpoint has them, or
        sources differ, or no product reads it.

        Args:
            weight_dtype: Number format of the weights of products that the checkpoint does not pack.
        """
        if self.stored is not WeightDtype.PRODUCT:
            return None
        storage = self.storage
        if FORMATS[weight_dtype].codes is None if storage is None else storage.is_number:
            return None
        format, ordered = (weight_dtype, False) if storage is None else (storage.kept, storage.ordered)
        return packed_share(format, ordered, self.sources[0].shape[1], self.sources[0].slices[1])

    def product_shape(self, weight_dtype: str) -> tuple[int, int]:
        """Return the shape in memory of a product's weight, with padded inputs. weight_dtype: see `share`."""
        share = self.share(weight_dtype)
        rows, columns = self.local_shape
        return rows, columns if share is None else share.depth

    def stored_bytes(self, dtype: str, weight_dtype: str) -> int:
        """Return the bytes that it takes in memory.

        Args:
            dtype: Number format of activations.
            weight_dtype: Number format of the weights of products that the checkpoint does not pack.
        """
        share = self.share(weight_dtype)
        if share is not None:
            return self.local_shape[0] * share.row_bytes + share.order_bytes
        names = {
            WeightDtype.ACTIVATION: dtype,
            WeightDtype.PRODUCT: self.format(weight_dtype),
            WeightDtype.FLOAT32: "float32",
        }
        return int(self.num_elements * number_format(names[self.stored]).weight_bytes)

    def lead(self, weight_dtype: str) -> int:
        """Return how many inputs of the first scale block belong to another rank. weight_dtype: see `format`."""
        share = self.share(weight_dtype)
        return 0 if share is None else share.lead
