"""The checkpoint of a vision-language model: the tensors of its decoder, named like those of any decoder, and of its
vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint

if TYPE_CHECKING:
    import torch

_TOWER = "model.visual."


@dataclass(frozen=True)
class _Part:
    """The place of a matrix: a complete tensor, or the matrix of `expert` in a tensor of all experts, from a row on. It
    may be stored transposed."""

    name: str
    expert: int | None = None
    first_row: int = 0
    transposed: bool = False


class VisionLanguageCheckpoint:
    """Views of the tensors of a `SafetensorsCheckpoint`. `tensors` are the decoder's, with its usual names.
    `tower_tensors` are the vision tower's, with its own names."""

    def __init__(self, stored: SafetensorsCheckpoint) -> None:
        self._stored = stored
        self.path: Path = stored.path
        self.config: Mapping[str, object] = stored.config
        self.generation_config: Mapping[str, object] = stored.generation_config
        self._parts: dict[str, _Part] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for info in stored.tensors.values():
            if not info.name.startswith(_TOWER):
                for view, part in self._views(info):
                    self.tensors[view.name], self._parts[view.name] = view, part
        tower = (name for name in stored.tensors if name.startswith(_TOWER))
        self.tower_tensors = {name.removeprefix(_TOWER): stored.tensors[name] for name in tower}

    @property
    def files(self) -> tuple[Path, ...]:
        """See `Checkpoint.files`."""
        return self._stored.files

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """See `Checkpoint.read`."""
        part = self._parts[name]
        if part.expert is None:
            return self._stored.read(part.name, slices)
        expert, (rows, columns) = slice(part.expert, part.expert + 1), slices
        rows = slice(part.first_row + rows.start, part.first_row + rows.stop)
        if not part.transposed:
            return self._stored.read(part.name, (expert, rows, columns))[0]
        return self._stored.read(part.name, (expert, columns, rows))[0].T.contiguous()

    def holds_same(self, name: str, other: str) -> bool:
        """Return whether two complete tensors have the same bits."""
        return self._stored.holds_same(self._parts[name].name, self._parts[other].name)

    def read_tower(self, name: str) -> torch.Tensor:
        """Read a complete tensor of the vision tower."""
        shape = self.tower_tensors[name].shape
        return self._stored.read(_TOWER + name, tuple(slice(0, size) for size in shape))

    def _views(self, info: TensorInfo) -> Iterator[tuple[TensorInfo, _Part]]:
        """Return the decoder's tensors in a stored tensor: itself, or one or two matrices for each expert."""
        name = info.name
        of_layer, separator, kind = name.partition(".mlp.experts.")
        if not separator or len(info.shape) != 3:
            yield TensorInfo(name, info.shape, info.dtype), _Part(info.name)
            return
        hidden_size = self._decoder_config.get("hidden_size")
        # Published ones have inputs before outputs, those that transformers writes of new models outputs first.
        transposed = info.shape[1 if kind == "down_proj" else 2] != hidden_size
        outputs, inputs = reversed(info.shape[1:]) if transposed else info.shape[1:]
        matrices = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        shape = outputs // len(matrices), inputs
        for expert in range(info.shape[0]):
            for index, matrix in enumerate(matrices):
                view = TensorInfo(f"{of_layer}.mlp.experts.{expert}.{matrix}.weight", shape, info.dtype)
                yield view, _Part(info.name, expert, index * shape[0], transposed)

    @property
    def _decoder_config(self) -> Mapping[str, Any]:
        text_config = self.config.get("text_config")
        return text_config if isinstance(text_config, Mapping) else {}
