"""Checkpoints in folders: config.json and safetensors."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from longhelix.compute.models.checkpoint import TensorInfo, invalid_checkpoint
from longhelix.spec.presets import with_quantisation_file
from longhelix.spec.tensor_names import canonical
from longhelix.values import shown

if TYPE_CHECKING:
    import torch

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 2**26  # at a time
_SAFETENSORS_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors weights, in one file or in indexed shards.

    `config` and `generation_config` are the contents of the JSON files. The latter is {} if there is no such file.
    `tensors` are keyed by their `canonical` names. Raises UserError if a file is missing, unreadable, or in conflict
    with the index, or if two names mean the same tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, object] = with_quantisation_file(_read_json(path / "config.json"), path)
        generation_config = path / "generation_config.json"
        self.generation_config: Mapping[str, object] = (
            _read_json(generation_config) if generation_config.exists() else {}
        )
        self._weight_map = _read_weight_map(path)
        stored = _read_shards(path, self._weight_map)
        self._stored_names = _canonical_names(path, stored)
        if _EMBEDDING not in self._stored_names and self.config.get("tie_word_embeddings") is True:
            head = self._stored_names.get(_HEAD)  # which is the embedding as well
            self._stored_names |= {} if head is None else {_EMBEDDING: head}
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(stored[of_file], name=name) for name, of_file in self._stored_names.items()
        }
        self._shards: dict[str, _MappedShard] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """See `Checkpoint.files`."""
        return tuple(self.path / shard for shard in sorted(set(self._weight_map.values())))

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        stored = self._stored_names[name]
        return self._shard(stored).read(replace(self.tensors[name], name=stored), slices)

    def holds_same(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same bits."""
        first, second = self.tensors[name], self.tensors[other]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        left, right = (
            self._shard(stored).bytes_of(replace(info, name=stored))
            for info, stored in ((first, self._stored_names[name]), (second, self._stored_names[other]))
        )
        parts = (slice(start, start + _COMPARED_BYTES) for start in range(0, len(left), _COMPARED_BYTES))
        return all(np.array_equal(left[part], right[part]) for part in parts)

    def _shard(self, stored_name: str) -> _MappedShard:
        shard = self._weight_map[stored_name]
        if shard not in self._shards:
            self._shards[shard] = _MappedShard(self.path / shard)
        return self._shards[shard]


class _MappedShard:
    """A validated and mapped safetensors file. The format: https://github.com/huggingface/safetensors#format."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                # Copied where it is written to, which never happens: torch wants memory that can be.
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._first = 8 + int.from_bytes(self._mapped[:8], "little")
            self._entries = json.loads(self._mapped[8 : self._first])
        except (OSError, ValueError) as error:
            raise invalid_checkpoint(
                f"{path} was valid when it was opened, but cannot be read now ({error})."
            ) from error
        self._bytes = np.frombuffer(self._mapped, np.uint8)

    def read(self, tensor: TensorInfo, slices: tuple[slice, ...]) -> torch.Tensor:
        import torch

        start, stop = self._place(tensor)
        if slices and all(part.start < part.stop for part in slices):
            row_bytes, rows = (stop - start) // tensor.shape[0], slices[0]
            next_byte = start + rows.stop * row_bytes
            self._read_ahead(next_byte, min((rows.stop - rows.start) * row_bytes, stop - next_byte))
        stored = torch.from_numpy(self._bytes[start:stop]).view(getattr(torch, tensor.dtype))
        return stored.view(tensor.shape)[slices]

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        start, stop = self._place(tensor)
        return self._bytes[start:stop]

    def _place(self, tensor: TensorInfo) -> tuple[int, int]:
        """Return begin and end of the tensor's bytes. Raises UserError if the file has changed since validation."""
        entry = self._entries.get(tensor.name, {"dtype": None, "shape": None})
        dtype = _SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"])
        if (dtype, entry["shape"]) != (tensor.dtype, list(tensor.shape)):
            raise invalid_checkpoint(f"{self._path} was changed while it was opened: start again.")
        start, stop = (self._first + at for at in entry["data_offsets"])
        return start, stop

    def _read_ahead(self, start: int, num_bytes: int) -> None:
        """Let the system read the following bytes in the background, because they are usually read next."""
        if num_bytes:
            before = start % mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_WILLNEED, start - before, before + num_bytes)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise invalid_checkpoint(f"{path} is missing: give a complete Hugging Face model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise invalid_checkpoint(f"{path} cannot be read as JSON ({error}): download it again.") from error
    if not isinstance(value, dict):
        raise invalid_checkpoint(f"{path} must hold a JSON object, not a {type(value).__name__}: download it again.")
    return value


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return the name of the file in `folder` with each tensor."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.isfile(single):
        return dict.fromkeys(_read_header(single), single.name)
    if not index.exists():
        raise invalid_checkpoint(
            f"{folder} holds neither {single.name} nor {index.name}: give a folder with safetensors weights (pickled "
            "weights are not supported)."
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise invalid_checkpoint(f'{index} must map tensor names to files under "weight_map": download it again.')
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise invalid_checkpoint(f"{index} maps {name} to {shard!r}: give the name of a file in the same folder.")
    return weight_map


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard, some in sorted({shard: name for name, shard in weight_map.items()}.items()):
        if not os.path.isfile(folder / shard):
            raise invalid_checkpoint(
                f"{folder / shard} is missing, in which the index places {some}: download all shards of the model."
            )
        shard_tensors = _read_header(folder / shard)
        for name in shard_tensors:
            if weight_map.get(name) != shard:
                place = f"in {weight_map[name]}" if name in weight_map else "in no file"
                raise invalid_checkpoint(
                    f"{folder / shard} holds {name}, which the index places {place}: "
                    "download the index and the shards of one revision."
                )
        tensors |= shard_tensors
    for name, shard in weight_map.items():
        if name not in tensors:
            raise invalid_checkpoint(
                f"{folder / shard} does not hold {name}, which the index places there: "
                "download the index and the shards of one revision."
            )
    return tensors


def _canonical_names(folder: Path, stored: Iterable[str]) -> dict[str, str]:
    """Return the name in the files for each canonical name."""
    stored_names: dict[str, str] = {}
    for name in stored:
        other = stored_names.setdefault(canonical(name), name)
        if other != name:
            raise invalid_checkpoint(
                f"{folder} holds {shown(other)} and {shown(name)}, which are the same tensor of a model: leave out the "
                "files that do not belong to it"
            )
    return stored_names


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(path, framework="numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise invalid_checkpoint(f"{path} is not a valid safetensors file ({error}): download it again.") from error
    return {
        name: TensorInfo(name, tuple(view.get_shape()), _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype()))
        for name, view in views.items()
    }
