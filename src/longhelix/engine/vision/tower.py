"""Runs transformers' vision tower with the weights of the model's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from longhelix.compute.models.checkpoint import invalid_checkpoint
from longhelix.compute.models.vision_language_checkpoint import VisionLanguageCheckpoint
from longhelix.engine.vision.patches import SETTINGS, Patches, missing_extra
from longhelix.spec import ModelSpec
from longhelix.values import shown

if TYPE_CHECKING:
    from torch import nn


class Tower:
    """Turns patches into the states that the decoder uses for an image's tokens. It runs on the cores of this process.

    The tower is loaded at its first use. It keeps the states of the most recent images, because each request of a
    conversation contains the conversation's earlier images again.

    Args:
        checkpoint: the model's checkpoint.
        spec: the spec of the whole model.
        dtype: name of the dtype of activations.
        most_bytes: largest number of bytes of states to keep.
    """

    def __init__(self, checkpoint: VisionLanguageCheckpoint, spec: ModelSpec, dtype: str, most_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._spec, self._dtype, self._most_bytes = spec, dtype, most_bytes
        self._kept: dict[bytes, bytes] = {}
        self._turn = Lock()

    def states(self, patches: Patches) -> bytes:
        """Return an image's states in the form of `TakeImageRows`. Only one thread at a time runs the tower."""
        with self._turn:
            states = self._kept.pop(patches.digest, None)
            if states is None:
                states = self._run(patches)
            self._kept[patches.digest] = states  # the dict is ordered by last use
            while sum(map(len, self._kept.values())) > self._most_bytes:
                del self._kept[next(iter(self._kept))]
            return states

    def _run(self, patches: Patches) -> bytes:
        import torch

        assert self._spec.vision is not None
        config, merge, patches_PX = self._model.config, self._model.spatial_merge_size, patches.cut()
        patch_numbers = config.in_channels * config.temporal_patch_size * config.patch_size**2
        if patches_PX.shape != (patches.num_tokens * merge**2, patch_numbers):
            raise invalid_checkpoint(
                f"{SETTINGS} makes patches that do not fit the model's vision_config: check that both belong together"
            )
        with torch.inference_mode():
            found = self._model(
                torch.from_numpy(patches_PX).to(self._model.dtype),
                grid_thw=torch.tensor([[1, patches.rows * merge, patches.columns * merge]]),
                return_dict=True,
            )
        given = [found.pooler_output, *found.deepstack_features]
        wanted = [(patches.num_tokens, self._spec.hidden_size)] * (1 + self._spec.vision.num_deepstack)
        if [tuple(states_XH.shape) for states_XH in given] != wanted:
            raise invalid_checkpoint(
                "the vision tower's states have a different shape from the decoder's input: check that the model's "
                "config and weights belong together"
            )
        return torch.stack(given).view(torch.uint8).numpy().tobytes()

    @cached_property
    def _model(self) -> nn.Module:
        try:
            import torch
            from transformers.initialization import no_init_weights
            from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
            from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
        except ImportError as error:
            raise missing_extra() from error
        weights = {name: self._checkpoint.read_tower(name) for name in self._checkpoint.tower_tensors}
        try:
            config = Qwen3VLVisionConfig(**_settings(self._checkpoint.config))
            with no_init_weights():
                model = Qwen3VLVisionModel(config)
            differ = sorted(model.state_dict().keys() ^ weights.keys())
            if not differ:
                model.load_state_dict(weights, assign=True)
        except Exception as error:  # transformers may raise any exception
            raise invalid_checkpoint(
                f"the vision tower cannot be created from the model's config and weights ({shown(str(error))}): check "
                "that they belong together"
            ) from error
        if differ:
            raise invalid_checkpoint(
                f"the vision tower's config and weights differ in {len(differ)} tensors, such as {differ[0]!r}: check "
                "that they belong together"
            )
        return model.to(getattr(torch, self._dtype)).eval()


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config["vision_config"].items() if key not in ("model_type", "dtype")}
