"""Checkpoints in GGUF files, including quantised ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from longhelix.compute.models.checkpoint import TensorInfo, invalid_checkpoint
from longhelix.compute.models.gguf_blocks import decode
from longhelix.compute.models.gguf_file import GgufFile, GgufTensor, unreadable
from longhelix.values import shown

if TYPE_CHECKING:
    import torch

_GGUF_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F16: "float16",
}

_GGUF_MODEL_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GGUF_LAYER_MODULES = {
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


class GgufCheckpoint:
    """A GGUF file of the llama architecture.

    `metadata` holds every field of the file. `rope_factors` are the C/2 divisors of the rotary
    frequencies (C is the head size), None where the file has none.
    Raises UserError where the file is damaged, split, of another architecture, or holds a tensor or
    a quantisation that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = _read_gguf(path)
        self.metadata: Mapping[str, Any] = file.metadata
        self._head_size = _gguf_head_size(path, self.metadata)
        self.rope_factors: tuple[float, ...] | None = None
        self._stored: dict[str, GgufTensor] = {}
        for tensor in file.tensors.values():
            _check_readable(path, tensor)
            if tensor.name == "rope_freqs.weight":
                if tensor.shape != (self._head_size // 2,):
                    raise invalid_checkpoint(
                        f"{path} holds rope_freqs of shape {list(tensor.shape)}, not half the head size "
                        f"{self._head_size}: convert the model again."
                    )
                self.rope_factors = tuple(dequantize(tensor.data, tensor.kind).ravel().tolist())
            else:
                self._stored[_hugging_face_name(path, tensor.name)] = tensor
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, _GGUF_DTYPES.get(tensor.kind, tensor.kind.name))
            for name, tensor in self._stored.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        """See `Checkpoint.files`."""
        return (self.path,)

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`; rows of q_proj and k_proj are cut at whole heads."""
        block = self.block_size(name)
        *lead, last = slices
        blocks = slice(last.start // block, -(-last.stop // block))
        values = _decode(self._bytes(name, (*lead, blocks)), self._stored[name].kind)
        values = values[..., last.start - blocks.start * block : last.stop - blocks.start * block]
        return self._in_halves(values, slices[0]) if _GGUF_PERMUTED.search(name) else values

    def block_size(self, name: str) -> int:
        """Return how many numbers a block of a tensor has."""
        return GGML_QUANT_SIZES[self._stored[name].kind][0]

    def read_blocks(self, name: str, rows: slice, blocks: slice) -> torch.Tensor:
        """Return the bytes of some blocks of some rows, (rows, blocks, bytes of a block). Rows: see `read`."""
        import torch

        raw = self._bytes(name, (rows, blocks))
        block_bytes = GGML_QUANT_SIZES[self._stored[name].kind][1]
        with warnings.catch_warnings():  # the mapped file cannot be written to, and is not
            warnings.simplefilter("ignore", UserWarning)
            blocks_OX = torch.from_numpy(raw)
        blocks_OX = self._in_halves(blocks_OX, rows) if _GGUF_PERMUTED.search(name) else blocks_OX
        return blocks_OX.unflatten(1, (-1, block_bytes))

    def _bytes(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """Return part of a tensor's bytes. The last slice is of blocks."""
        stored = self._stored[name]
        block_bytes, (*lead, last) = GGML_QUANT_SIZES[stored.kind][1], slices
        return stored.data[(*lead, slice(last.start * block_bytes, last.stop * block_bytes))]

    def _in_halves(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        """Reorder rows (head, i, half) of GGUF, for interleaved rotation, to (head, half, i) of Hugging Face."""
        C = self._head_size
        assert rows.start % C == 0 == rows.stop % C, f"rows {rows} do not hold whole heads of {C}"
        heads = values.unflatten(0, (len(values) // C, C // 2, 2))
        return heads.transpose(1, 2).reshape(values.shape)


def _read_gguf(path: Path) -> GgufFile:
    file = GgufFile(path)
    # 0: what has been merged. The later files of a split have no architecture.
    if file.metadata.get("split.count") not in (None, 0, 1):
        raise invalid_checkpoint(
            f"{path} is one part of a split model, which is not supported: merge all parts with `llama-gguf-split "
            "--merge`, and give the merged file."
        )
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise invalid_checkpoint(f'{path} is of architecture {shown(architecture)}: give a GGUF file of "llama".')
    return file


def _gguf_head_size(path: Path, metadata: Mapping[str, Any]) -> int:
    try:
        size = metadata.get("llama.attention.key_length") or (
            metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
        )
    except (KeyError, TypeError, ZeroDivisionError):
        size = None
    if not isinstance(size, int) or size <= 0 or size % 2:
        raise invalid_checkpoint(
            f"{path} has no even head size: set llama.attention.key_length, or llama.embedding_length and "
            "llama.attention.head_count."
        )
    return size


def _check_readable(path: Path, tensor: GgufTensor) -> None:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor.kind][1], np.uint8), tensor.kind)
    except NotImplementedError:
        raise unreadable(path, tensor.name, tensor.kind.name) from None


def _hugging_face_name(path: Path, name: str) -> str:
    match = re.fullmatch(r"(?:blk\.([0-9]+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, module, kind = match.groups()
        if layer is None and module in _GGUF_MODEL_MODULES:
            return f"{_GGUF_MODEL_MODULES[module]}.{kind}"
        if layer is not None and module in _GGUF_LAYER_MODULES:
            return f"model.layers.{layer}.{_GGUF_LAYER_MODULES[module]}.{kind}"
    raise invalid_checkpoint(
        f"{path} holds {shown(name)}, which does not belong to a dense llama model: give a dense llama model."
    )


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
