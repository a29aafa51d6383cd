"""Checkpoints in GGUF files, including quantised ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from longhelix.compute.models.checkpoint import TensorInfo, invalid_checkpoint
from longhelix.compute.models.gguf_blocks import decode
from longhelix.compute.models.gguf_file import GgufModel, GgufTensor, unreadable
from longhelix.errors import UserError
from longhelix.spec.family import Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, read_head_size
from longhelix.spec.gguf_metadata import gguf_architectures, gguf_family, read_gguf
from longhelix.spec.gguf_names import GgufPart, model_parts
from longhelix.spec.gguf_quantisation import gguf_quantisation
from longhelix.spec.model import ModelSpec
from longhelix.values import shown

if TYPE_CHECKING:
    import torch

_GGUF_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F16: "float16",
}
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, eq=False)
class StoredRows:
    """A tensor of the model that is rows of a stored tensor.

    Attributes:
        shape: Its shape in the model.
        kind: The type of its blocks.
        data: The bytes of its rows [R, bytes of a row], mapped. A vector is one row, or rows of one number if its type
            has no blocks.
        head_size: Rows of heads of this size are stored as (head, pair, half), for interleaved rotation. The model has
            them as (head, half, pair). 0: rows are stored in the model's order.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray
    head_size: int = 0

    def blocks(self, rows: slice) -> np.ndarray:
        """Return the bytes of rows in the model's order: a view of the file, or a copy if it has another order."""
        C = self.head_size
        if not C:
            return self.data[rows]
        row = np.arange(rows.start, rows.stop)
        half, pair = np.divmod(row % C, C // 2)
        return self.data[row - row % C + 2 * pair + half]

    @property
    def block_size(self) -> int:
        """How many numbers a block has."""
        return GGML_QUANT_SIZES[self.kind][0]

    def read_blocks(self, rows: slice, blocks: slice) -> torch.Tensor:
        """Return the bytes of some blocks of some rows in the model's order, (rows, blocks, bytes of a block)."""
        import torch

        block_bytes = GGML_QUANT_SIZES[self.kind][1]
        with warnings.catch_warnings():  # the mapped file cannot be written to, and is not
            warnings.simplefilter("ignore", UserWarning)
            blocks_OX = torch.from_numpy(self.blocks(rows)[:, blocks.start * block_bytes : blocks.stop * block_bytes])
        return blocks_OX.unflatten(1, (-1, block_bytes))

    def read(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        if len(slices) == 2:
            rows, columns = slices
        else:
            rows, columns = (slices[0], slice(0, 1)) if block == 1 else (slice(0, 1), slices[0])
        first_block, end_block = columns.start // block, -(-columns.stop // block)
        covering = self.blocks(rows)[:, first_block * block_bytes : end_block * block_bytes]
        values = _decode(covering, self.kind)[
            :, columns.start - first_block * block : columns.stop - first_block * block
        ]
        return values if len(slices) == 2 else values.flatten()


@dataclass(frozen=True, eq=False)
class LatentUp:
    """The up-projection of latents, which is stored as two tensors. The model has each head's rows of both together.

    Attributes:
        keys: The first rows of each head, stored as their columns [H, latent, K].
        values: The other rows of each head, stored as rows [H, V, latent].
    """

    keys: GgufTensor
    values: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model."""
        num_heads, latent, keys = self.keys.shape
        return num_heads * (keys + self.values.shape[1]), latent

    @property
    def kind(self) -> GGMLQuantizationType:
        """The type of the blocks of keys."""
        return self.keys.kind

    def read(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        import torch

        rows, columns = slices
        unit = self.shape[0] // self.keys.shape[0]
        heads = slice(rows.start // unit, -(-rows.stop // unit))
        keys = _decode(self.keys.data[heads], self.keys.kind).transpose(1, 2)
        values = _decode(self.values.data[heads], self.values.kind)
        both = torch.cat([keys, values], dim=1).flatten(0, 1)
        first = heads.start * unit
        return both[rows.start - first : rows.stop - first, columns]


class GgufCheckpoint:
    """A GGUF file, or all parts of a split one.

    Raises UserError if a file is damaged or missing, has another architecture, or has a tensor or a quantisation that
    cannot be read.

    Attributes:
        path: The file that was given.
        metadata: Values by key, from the first file.
        rope_factors: The C/2 divisors of the rotary frequencies, for rotated heads of size C. None: there are none.
        stored: Where the files have each tensor of the model, by its name in a Hugging Face checkpoint.
        tensors: See `Checkpoint`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        model = GgufModel.open(path)
        self._files, self.metadata = model.files, model.metadata
        metadata = GgufMetadata(model.metadata)
        form, family = _family(path, metadata)
        head_size = _head_size(path, metadata) if form.interleaved else 0
        self.rope_factors = _rope_factors(path, model, head_size)
        self.stored: Mapping[str, StoredRows | LatentUp] = _stored(path, model, form, family, head_size)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, stored.shape, _GGUF_DTYPES.get(stored.kind, stored.kind.name))
            for name, stored in self.stored.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        """See `Checkpoint.files`."""
        return self._files

    def spec(self, rope_scaling: Mapping[str, Any] | None = None) -> ModelSpec:
        """Return the model's spec. Raises UserError.

        rope_scaling: settings that replace the file's own rope settings, all but theta.
        """
        spec = read_gguf(self.metadata, self.rope_factors or (), tensors=self.stored, rope_scaling=rope_scaling)
        return spec.quantised_by(gguf_quantisation(self._kinds()))

    def _kinds(self) -> dict[str, str]:
        """Return the kinds of the matrices by module, but not of those that are stored as two tensors."""
        return {
            name.removesuffix(".weight"): stored.kind.name
            for name, stored in self.stored.items()
            if name.endswith(".weight") and len(stored.shape) == 2 and isinstance(stored, StoredRows)
        }

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        return self.stored[name].read(slices)


def _family(path: Path, metadata: GgufMetadata) -> tuple[GgufForm, Family]:
    if metadata.architecture not in gguf_architectures():
        given = shown(metadata.values.get("general.architecture"))
        known = ", ".join(f'"{name}"' for name in gguf_architectures())
        raise invalid_checkpoint(f"{path} is of architecture {given}: give a GGUF file of one of {known}.")
    _, form, family = gguf_family(metadata)
    return form, family


def _stored(
    path: Path, model: GgufModel, form: GgufForm, family: Family, head_size: int
) -> dict[str, StoredRows | LatentUp]:
    """Return where the tensors of the model are, by their names in a Hugging Face checkpoint."""
    found: dict[str, StoredRows | LatentUp] = {}
    halves: dict[str, dict[str, GgufTensor]] = {}
    for tensor in model.tensors.values():
        _check_readable(path, tensor)
        if tensor.name == _ROPE_DIVISORS:
            continue
        parts = model_parts(tensor.name, form, family)
        if not parts:
            raise invalid_checkpoint(
                f"{path} holds {shown(tensor.name)}, which a {form.architecture} model does not have: give a file "
                "that llama.cpp's converter has written."
            )
        for part in parts:
            if part.half is not None:
                halves.setdefault(part.name, {})[part.half] = tensor
            else:
                found |= _parts_of(path, tensor, part, head_size)
    # Some files have the whole projection as well.
    return found | {name: _latent_up(path, pair) for name, pair in halves.items() if name not in found}


def _parts_of(path: Path, tensor: GgufTensor, part: GgufPart, head_size: int) -> Iterator[tuple[str, StoredRows]]:
    """Yield tensors of the model that are parts of a stored tensor, by name."""
    if not part.is_of_expert:
        yield part.name, _rows(path, tensor, part, head_size)
        return
    if len(tensor.shape) != 3 or tensor.shape[1] % part.places:
        raise invalid_checkpoint(
            f"{path} holds {shown(tensor.name)} of shape {list(tensor.shape)}, which is not that of the experts of a "
            "layer: convert the model again."
        )
    num_rows = tensor.shape[1] // part.places
    rows = slice(part.place * num_rows, (part.place + 1) * num_rows)
    for expert in range(tensor.shape[0]):
        shape = num_rows, tensor.shape[2]
        yield part.name.format(expert), StoredRows(shape, tensor.kind, tensor.data[expert, rows])


def _rows(path: Path, tensor: GgufTensor, part: GgufPart, head_size: int) -> StoredRows:
    """Return a whole stored tensor as a tensor of the model."""
    data, shape = tensor.data, tensor.shape
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    if part.is_interleaved and len(shape) == 1 and block > 1:  # blocks cannot be put into another order
        raise unreadable(path, tensor.name, f"a vector of {tensor.kind.name}")
    if part.is_row and len(shape) == 1:
        shape = 1, *shape
    elif len(shape) == 1 and block == 1:
        data = data.reshape(-1, block_bytes)
    data = data.reshape(-1, data.shape[-1])
    is_interleaved = part.is_interleaved and head_size > 0 and len(data) % head_size == 0
    return StoredRows(shape, tensor.kind, data, head_size if is_interleaved else 0)


def _latent_up(path: Path, halves: Mapping[str, GgufTensor]) -> LatentUp:
    shapes = {name: tensor.shape for name, tensor in halves.items()}
    if len(halves) == 2 and all(len(shape) == 3 for shape in shapes.values()):
        (num_heads, latent, _), values = shapes["k_b"], shapes["v_b"]
        if (num_heads, latent) == (values[0], values[2]):
            return LatentUp(halves["k_b"], halves["v_b"])
    names = " and ".join(f"{shown(tensor.name)} of shape {list(tensor.shape)}" for tensor in halves.values())
    raise invalid_checkpoint(
        f"{path} holds {names}, which are not the two parts of one projection: convert the model again."
    )


def _rope_factors(path: Path, model: GgufModel, head_size: int) -> tuple[float, ...] | None:
    tensor = model.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return None
    _check_readable(path, tensor)
    if head_size and tensor.shape != (head_size // 2,):
        raise invalid_checkpoint(
            f"{path} holds rope_freqs of shape {list(tensor.shape)}, not half the head size {head_size}: convert the "
            "model again."
        )
    return tuple(dequantize(tensor.data, tensor.kind).ravel().tolist())


def _head_size(path: Path, metadata: GgufMetadata) -> int:
    try:
        size = read_head_size(metadata)
    except UserError:
        size = 0
    if size % 2 or not size:
        raise invalid_checkpoint(
            f"{path} has no even head size: set {metadata.key('attention.key_length')}, or "
            f"{metadata.key('embedding_length')} and {metadata.key('attention.head_count')}."
        )
    return size


def _check_readable(path: Path, tensor: GgufTensor) -> None:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor.kind][1], np.uint8), tensor.kind)
    except NotImplementedError:
        raise unreadable(path, tensor.name, tensor.kind.name) from None


def _decode(stored: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """Decode bytes of whole blocks [..., blocks * block_bytes] to values [..., blocks * block]."""
    import torch

    block, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // block_bytes * block)
    values = torch.empty(shape, dtype=getattr(torch, _GGUF_DTYPES.get(kind, "float32")))
    if kind in _GGUF_DTYPES:
        values.view(torch.uint8).numpy()[...] = stored
        return values
    if not values.numel():  # a rank without a share
        return values
    decode(stored.reshape(-1, stored.shape[-1]), kind, values.view(-1, shape[-1]))
    return values
