"""A fingerprint of a model: its configuration, and samples of the files that hold its weights."""

import hashlib

import msgspec

from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.errors import UserError
from longhelix.spec import LayerSpec, ModelSpec, RopeSpec

# Of each file, evenly spread: whoever trains a model on changes nearly all of its numbers.
_SAMPLES, _SAMPLE_BYTES = 256, 4096


def fingerprint(spec: ModelSpec, checkpoint: Checkpoint) -> str:
    """The same for copies of a model wherever they lie, another one for another model: SHA-256 over its configuration
    and, of each file of weights, its size and some thousands of bytes. Rope settings do not count, because an option
    replaces them. Raises UserError if a file cannot be read."""
    without_rope = spec.with_layers(_without_rope)
    sha = hashlib.sha256(msgspec.json.encode(without_rope))
    for path in checkpoint.files:
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                sha.update(size.to_bytes(8, "little"))
                for sample in range(_SAMPLES):
                    file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                    sha.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", "invalid_checkpoint") from error
    return sha.hexdigest()


def _without_rope(layer: LayerSpec) -> LayerSpec:
    sections = () if layer.attention is None else layer.attention.rope.sections
    return layer.with_attention(rope=RopeSpec(sections=sections))
