"""Saves the KV of long prompts to disk as contexts. Any layout can load a context that another layout saved."""

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import add
from pathlib import Path

from longhelix.compute.cache.context_folder import ContextFolder, tokens_checksum
from longhelix.compute.cache.rank_file import RankFile
from longhelix.compute.cache.saved_context import Origin, SavedContext, SavedFile, file_name
from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.fingerprint import fingerprint, rope_fingerprint
from longhelix.compute.models.rope import all_frequencies
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.saved_layers import SavedLayers, saved_layers
from longhelix.engine.core import TokenCore
from longhelix.engine.prompt import token_ids
from longhelix.engine.workers.transport import LoadBlocks, SaveBlocks
from longhelix.errors import UserError
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import MOST_PRIORITY, SamplingParams, ServiceLevel

_PART_BYTES = 2**27  # bytes that a rank writes or reads between two steps
LOWEST_PRIORITY = ServiceLevel(priority=-MOST_PRIORITY)


@dataclass(frozen=True)
class NewContext:
    """A context to save."""

    name: str
    token_ids: "array[int]"  # int32
    cache_salt: str
    replace: bool  # True to overwrite a context of the same name

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the request that computes the context: the context's tokens and one sampled token."""
        return len(self.token_ids) + 1


@dataclass(frozen=True)
class LoadedContext:
    """A saved context that is now in the prefix cache."""

    saved: SavedContext
    token_ids: "array[int]"  # int32
    loaded_blocks: int  # KV blocks that were read from disk; the other blocks were already cached


@dataclass(frozen=True)
class ReadContext:
    """Manifest and token ids of a saved context, read from disk. `LLM.read_context` returns it."""

    saved: SavedContext
    token_ids: "array[int]"  # int32
    cache_salt: str  # requests that use the context must have the same salt
    hashes: Sequence[bytes]  # hashes of its blocks with this salt, see `PrefixCache.hashes`


class Contexts:
    """Saves contexts to a folder, and loads contexts of any engine from it.

    Contexts are saved from the prefix cache and loaded into the prefix cache, where requests find them by their tokens.
    If a loaded context is evicted before a request uses it, the request computes the context's KV.
    """

    def __init__(self, core: TokenCore, model: str, checkpoint: Checkpoint, folder: ContextFolder) -> None:
        """Args:
        core: the engine.
        model: the user's name for the checkpoint, which is stored in each manifest.
        checkpoint: the model's weights. Their fingerprint identifies the model of a context.
        folder: the folder of saved contexts.
        """
        self._core, self._model, self._checkpoint, self._folder = core, model, checkpoint, folder
        self._config = core.config
        self._fingerprint = ""  # computed when it is first needed

    def use(self, core: TokenCore) -> None:
        """Switch to another engine of the same configuration."""
        self._core = core

    def new(self, name: str, prompt: Sequence[int], cache_salt: str, replace: bool) -> NewContext:
        """Return a context to save. Raises UserError, before the context is computed, if it cannot be saved."""
        self._check_cache()
        self._folder.check_free(name, replace)
        ids = token_ids(prompt, self._config.spec.vocabulary.size, self._config.scheduler.max_model_len)
        block_tokens = self._config.scheduler.block_tokens
        if len(ids) < block_tokens:
            raise UserError(
                f"the context has {len(ids)} tokens, but a KV block has {block_tokens} and only full blocks are saved: "
                "give these tokens with each prompt"
            )
        return NewContext(name, ids, cache_salt, replace)

    def writing(self, new: NewContext) -> Generator[None, None, SavedContext | None]:
        """Write the KV of a prompt that was just computed, one part per iteration.

        The engine may run steps between two parts. If the generator is closed early, the partial files are removed.

        Returns:
            The saved context, or None if some of the KV was evicted before writing began.
        """
        prompt = new.token_ids, new.capacity_tokens, new.cache_salt
        held = self._core.pin_prefix(*prompt, self._core.hashes(*prompt))
        if held is None:
            return None
        with self._core.releasing(held):
            if not held.is_cached:
                return None
            with self._folder.new(new.name, new.replace) as folder:
                yield from self._write(held.sent, folder)
                context = SavedContext(
                    name=new.name,
                    origin=self._origin(new.capacity_tokens - 1),
                    model=self._model,
                    saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                    num_tokens=len(new.token_ids),
                    capacity_tokens=new.capacity_tokens,
                    tokens_checksum=tokens_checksum(new.token_ids),
                    files=self._written(held.sent, folder),
                )
                self._folder.finish(folder, context, new.token_ids, new.replace)
        return context

    def load(self, name: str, cache_salt: str = "") -> LoadedContext:
        """Load a context into the prefix cache. Blocks that are already in the cache are not read again.

        Raises:
            UserError: the context is damaged, or the KV cache has no room for it now.
        """
        context = self.read(name, cache_salt)
        saved = context.saved
        loaded_blocks = self._load_missing(context)
        if loaded_blocks is None:
            raise UserError(
                f"context {name!r} of {saved.num_tokens} tokens does not fit into the free part of the KV cache: "
                "increase --kv-cache-tokens, or wait until other requests have ended",
                "kv_cache_exceeded",
            )
        return LoadedContext(saved, context.token_ids, loaded_blocks)

    def before(
        self, context: ReadContext, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple["array[int]", Sequence[bytes]]:
        """Return the token ids of a context followed by the prompt's token ids, and the block hashes that are known.

        The ranks load the context if the KV cache has room for it now and if its keys were rotated with the request's
        RoPE frequencies. Otherwise the request computes the context when it runs.
        """
        most = self._config.scheduler.max_model_len
        given = context.token_ids + token_ids(prompt, self._config.spec.vocabulary.size, most)
        if self._origin(len(given) + sampling.most_sampled - 1).frequencies != context.saved.origin.frequencies:
            return given, ()
        self._load_missing(context)
        return given, context.hashes

    def read(self, name: str, cache_salt: str) -> ReadContext:
        """Read a context's manifest and token ids, and check that this engine can use the context.

        Any thread may call this method.
        """
        self._check_cache()
        saved = self._folder.manifest(name)
        saved.check(self._origin(saved.capacity_tokens - 1))
        ids = self._folder.token_ids(saved)
        return ReadContext(saved, ids, cache_salt, self._core.hashes(ids, saved.capacity_tokens, cache_salt))

    def _load_missing(self, context: ReadContext) -> int | None:
        """Load the KV blocks that are not cached. Returns their number, or None if the cache has no room for them."""
        if self._core.has_cached(context.hashes):
            return 0
        saved = context.saved
        if self._folder.manifest(saved.name) != saved:
            raise UserError(
                f"context {saved.name!r} was replaced while a request was waiting for it: send the request again",
                "context_mismatch",
            )
        held = self._core.pin_prefix(context.token_ids, saved.capacity_tokens, context.cache_salt, context.hashes)
        if held is None:
            return None
        with self._core.releasing(held):
            for first, part in _parts(held.missing, self._config):
                self._core.carry(LoadBlocks(str(self._folder.at(saved.name)), saved.files, first, part))
            self._core.publish(held)
        return len(held.blocks) - held.num_cached

    def _check_cache(self) -> None:
        scheduler = self._config.scheduler
        if not scheduler.cache.prefix_cache:
            raise UserError("saved contexts need the prefix cache, but prefix_cache is False: set it to True")

    def _write(self, blocks: tuple[Block, ...], folder: Path) -> Iterator[None]:
        """Have the ranks write KV blocks to files in a folder, part by part."""
        config = self._config
        totals, before = self._counts(blocks), self._counts(())
        for first, part in _parts(blocks, config):
            self._core.carry(SaveBlocks(str(folder), first, blocks=part, before=before, totals=totals))
            both = zip(before, self._counts(part), strict=True)
            before = tuple(tuple(map(add, *of_group)) for of_group in both)
            yield

    def _written(self, blocks: tuple[Block, ...], folder: Path) -> tuple[SavedFile, ...]:
        """Describe the files that hold these blocks."""
        config, totals = self._config, self._counts(blocks)
        return tuple(
            _described(folder, rank, number, saved, config)
            for rank in range(config.layout.world_size)
            for number, saved in enumerate(saved_layers(config))
            if totals[saved.group][config.layout.kvp_rank(rank)]
            and set(saved.layers) & set(config.layout.layers(config.spec.num_layers, rank))
            and config.layout.keeps_kv_first(saved.heads, rank)
        )

    def _counts(self, blocks: tuple[Block, ...]) -> tuple[tuple[int, ...], ...]:
        """Count the blocks that have not expired, by KV group and KVP rank."""
        groups, kvp = 1 + len(self._config.scheduler.cache.windows), self._config.layout.kvp
        found = [Counter(block.owner for block in blocks[group::groups] if block.id >= 0) for group in range(groups)]
        return tuple(tuple(count[rank] for rank in range(kvp)) for count in found)

    def _origin(self, num_rows: int) -> Origin:
        """Return everything that the KV of a request depends on.

        num_rows: the maximum number of tokens of the request that have keys. Some kinds of RoPE depend on this number.
        """
        config = self._config
        if not self._fingerprint:
            self._fingerprint = fingerprint(config.spec, self._checkpoint)
        frequencies = [each for of_rotation in all_frequencies(config.spec, num_rows) for each in of_rotation]
        return Origin(
            model=self._fingerprint,
            rope=rope_fingerprint(config.spec),
            dtype=config.formats.dtype,
            weight_dtype=config.weight_formats,
            kv_dtype=config.formats.kv_dtype,
            activation_dtype=config.formats.activation_dtype,
            attention_dtype=config.formats.attention_dtype,
            block_tokens=config.scheduler.block_tokens,
            frequencies=hashlib.sha256(struct.pack(f"<{len(frequencies)}d", *frequencies)).hexdigest(),
        )


def _described(folder: Path, rank: int, number: int, saved: SavedLayers, config: EngineConfig) -> SavedFile:
    """Describe a file that a rank has written. number: which of its files."""
    layers = config.layout.layers(config.spec.num_layers, rank)
    heads = config.layout.kv_heads(saved.heads, rank)
    file = RankFile(folder / file_name(rank, number))
    return SavedFile(
        name=file_name(rank, number),
        layers=(layers.start, layers.stop),
        heads=(heads.start, heads.stop),
        num_bytes=file.num_bytes,
        checksum=file.checksum,
        group=saved.group if config.scheduler.cache.windows else None,
        only_layers=None if saved.are_all else saved.layers,
    )


def _parts(blocks: tuple[Block, ...], config: EngineConfig) -> Iterator[tuple[int, tuple[Block, ...]]]:
    """Split KV blocks into parts, without those at the start that have expired in all KV groups. Each part comes with
    the index of its first block."""
    groups = 1 + len(config.scheduler.cache.windows)
    start = next((at for at, block in enumerate(blocks) if block.id >= 0), len(blocks)) // groups
    block_bytes = config.kv_bytes_per_token(0) * config.scheduler.block_tokens
    count = max(_PART_BYTES // max(block_bytes, 1), 1) * config.layout.kvp
    for first in range(start, len(blocks) // groups, count):
        yield first, blocks[first * groups : (first + count) * groups]
