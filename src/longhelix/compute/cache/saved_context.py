"""The manifest of a saved context: its prompt, everything that its KV depends on, and its files."""

import msgspec

from longhelix.errors import UserError

VERSION = 4  # of the manifest and of the files
READ_VERSIONS = 2, 3, 4  # in version 2, files have all layers
_KEYS_SINCE = {"int4": 4}  # the version since which keys of a KV dtype are stored as they are now


def file_name(rank: int, number: int = 0) -> str:
    """Return the name of a rank's file. number: which of its files."""
    return f"rank-{rank}-{number}.safetensors" if number else f"rank-{rank}.safetensors"


class SavedFile(msgspec.Struct, frozen=True):
    """A file that one rank has written, with some of the model's layers and KV heads.

    Attributes:
        layers: First layer, and the layer after the last one.
        heads: First KV head, and the head after the last one.
        checksum: SHA-256 of the file's index, which has checksums of everything else.
        group: The file has only the layers of this KV group (`ModelSpec.group_of`), and for layers with a window only
            the last KV blocks. None: the layers may be in any KV group.
        only_layers: Of these, the file has only the layers with these indices, which keep KV of equal sizes. None: the
            file has all of them.
    """

    name: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    num_bytes: int
    checksum: str
    group: int | None = None
    only_layers: tuple[int, ...] | None = None


class Origin(msgspec.Struct, frozen=True):
    """Everything but the tokens that the KV of a prompt depends on."""

    model: str  # a fingerprint of its configuration, except for rope settings, and of its weights
    rope: str  # a checksum of its rope settings
    dtype: str  # number format of activations
    weight_dtype: str  # number format of weights that the checkpoint does not pack
    kv_dtype: str  # number format of the KV cache
    activation_dtype: str | None  # to which products round their inputs. None: they do not
    attention_dtype: str | None  # to which attention rounds its inputs. None: it does not
    block_tokens: int  # tokens of a KV block
    frequencies: str  # a checksum of the rotation frequencies of keys, which dynamic and longrope choose by capacity


class SavedContext(msgspec.Struct, frozen=True):
    """The manifest of a context. `files` have the KV of the tokens that fill complete KV blocks.

    Attributes:
        model: The name by which the model was opened.
        saved_at: UTC.
        num_tokens: Number of tokens of the prompt.
        capacity_tokens: Capacity of the request that computed the context.
        tokens_checksum: SHA-256 of the token ids as int32.
    """

    name: str
    origin: Origin
    model: str
    saved_at: str
    num_tokens: int
    capacity_tokens: int
    tokens_checksum: str
    files: tuple[SavedFile, ...]

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.origin.block_tokens

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def check(self, origin: Origin) -> None:
        """Raise UserError unless requests of `origin` have the same KV, if they have the same frequencies."""
        if origin.model != self.origin.model:
            raise _mismatch(
                f"context {self.name!r} was saved with another model ({self.model}): use that model, or save the "
                "context again"
            )
        if origin.rope != self.origin.rope:
            raise _mismatch(
                f"context {self.name!r} was saved with other RoPE settings: set --rope-scaling to its value at that "
                "time, or save the context again"
            )
        for name in ("dtype", "weight_dtype", "kv_dtype", "activation_dtype", "attention_dtype", "block_tokens"):
            saved, current = getattr(self.origin, name), getattr(origin, name)
            if saved != current:
                change = f"leave {name} out" if saved is None else f"set {name} to {saved}"
                raise _mismatch(
                    f"context {self.name!r} was saved with {name} {saved}, but {name} is now {current}: {change}, or "
                    "save the context again"
                )


def check_version(version: int, context: SavedContext) -> None:
    """Raise UserError if KV was stored differently when the context was saved in this version of the format."""
    if version < _KEYS_SINCE.get(context.origin.kv_dtype, 0):
        raise UserError(
            f"context {context.name!r} was saved by an earlier version of longhelix, which stored KV in "
            f"{context.origin.kv_dtype} differently: save it again",
            "invalid_context",
        )


def _mismatch(message: str) -> UserError:
    return UserError(message, "context_mismatch")
