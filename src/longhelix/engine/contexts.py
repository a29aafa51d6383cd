"""Saved contexts of an engine: the KV of long prompts, kept on disk and taken up again by any layout."""

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from longhelix.compute.cache.context_folder import ContextFolder, tokens_checksum
from longhelix.compute.cache.rank_file import RankFile
from longhelix.compute.cache.saved_context import Origin, SavedContext, SavedFile, file_name
from longhelix.compute.models.checkpoint import Checkpoint
from longhelix.compute.models.fingerprint import fingerprint
from longhelix.compute.models.rope import inverse_frequencies
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.core import TokenCore
from longhelix.engine.prompt import token_ids
from longhelix.engine.workers.transport import LoadBlocks, SaveBlocks
from longhelix.errors import UserError
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import MOST_PRIORITY, SamplingParams, ServiceLevel

# That a rank writes or reads at a time.
_PART_BYTES = 2**27
LOWEST = ServiceLevel(priority=-MOST_PRIORITY)


@dataclass(frozen=True)
class NewContext:
    """One that is to be saved. token_ids: int32. replace: also in place of the context that has its name."""

    name: str
    token_ids: "array[int]"
    cache_salt: str
    replace: bool

    @property
    def capacity_tokens(self) -> int:
        """Of the request that computes it."""
        return len(self.token_ids) + 1


@dataclass(frozen=True)
class LoadedContext:
    """A saved context whose KV the ranks have. token_ids: int32. loaded_blocks: KV blocks that were read just now, and
    not there already."""

    saved: SavedContext
    token_ids: "array[int]"
    loaded_blocks: int


@dataclass(frozen=True)
class ReadContext:
    """A saved context whose manifest and token ids have been read from disk. `LLM.read_context` returns it.

    token_ids: int32.
    cache_salt: requests that use the context need the same one.
    hashes: those of its blocks under this salt, see `PrefixCache.hashes`.
    """

    saved: SavedContext
    token_ids: "array[int]"
    cache_salt: str
    hashes: Sequence[bytes]


class Contexts:
    """The saved contexts in a folder, as one engine may use them. Raises UserError for what cannot be.

    Their KV is among what the prefix cache has: it is saved from there and loaded to there, where a request finds it by
    its tokens. If others need the room before that, the request computes it.
    """

    def __init__(self, core: TokenCore, model: str, checkpoint: Checkpoint, folder: ContextFolder) -> None:
        """`model`: what users call the checkpoint."""
        self._core, self._model, self._checkpoint, self._folder = core, model, checkpoint, folder
        self._config = core.config
        self._fingerprint = ""  # once it was asked for

    def use(self, core: TokenCore) -> None:
        """Another engine of the same configuration, from now on."""
        self._core = core

    def new(self, name: str, prompt: Sequence[int], cache_salt: str, replace: bool) -> NewContext:
        """A prompt to be saved. Refuses what could not be, before anything is computed."""
        self._check_cache()
        self._folder.check_free(name, replace)
        ids = token_ids(prompt, self._config.spec.vocab_size, self._config.scheduler.max_model_len)
        block_tokens = self._config.scheduler.block_tokens
        if len(ids) < block_tokens:
            raise UserError(
                f"the context has {len(ids)} tokens, which do not fill one KV block of {block_tokens}: nothing is "
                "there to save, give it with each prompt"
            )
        return NewContext(name, ids, cache_salt, replace)

    def writing(self, new: NewContext) -> Generator[None, None, SavedContext | None]:
        """Keep the KV of a prompt that was just computed, a part each time that it is asked: steps may run between two
        of them. Returns None if some of the KV is gone already. Where it is closed early, nothing stays on the disk."""
        prompt = new.token_ids, new.capacity_tokens, new.cache_salt
        held = self._core.hold(*prompt, self._core.hashes(*prompt))
        if held is None:
            return None
        with self._core.releasing(held):
            if held.num_cached < len(held.blocks):
                return None
            with self._folder.new(new.name, new.replace) as folder:
                yield from self._write(held.blocks, folder)
                context = SavedContext(
                    name=new.name,
                    origin=self._origin(new.capacity_tokens - 1),
                    model=self._model,
                    saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                    num_tokens=len(new.token_ids),
                    capacity_tokens=new.capacity_tokens,
                    tokens_checksum=tokens_checksum(new.token_ids),
                    files=self._written(held.blocks, folder),
                )
                self._folder.finish(folder, context, new.token_ids, new.replace)
        return context

    def load(self, name: str, cache_salt: str = "") -> LoadedContext:
        """Have the ranks take up what they do not have of a context."""
        context = self.read(name, cache_salt)
        saved = context.saved
        loaded_blocks = self._take_up(context)
        if loaded_blocks is None:
            raise UserError(
                f"context {name!r} of {saved.num_tokens} tokens does not fit into what is free of the KV cache: set "
                "--kv-cache-tokens to more, or wait until other requests have ended",
                "kv_cache_exceeded",
            )
        return LoadedContext(saved, context.token_ids, loaded_blocks)

    def before(
        self, context: ReadContext, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple["array[int]", Sequence[bytes]]:
        """Return the token ids of a context followed by a prompt, and the block hashes that are known already.

        The ranks take the context up if there is room for it now and its keys are rotated by the request's angles. If
        not, the request computes it when its turn comes.
        """
        most = self._config.scheduler.max_model_len
        given = context.token_ids + token_ids(prompt, self._config.spec.vocab_size, most)
        if self._origin(len(given) + sampling.most_sampled - 1).frequencies != context.saved.origin.frequencies:
            return given, ()
        self._take_up(context)
        return given, context.hashes

    def read(self, name: str, cache_salt: str) -> ReadContext:
        """Read a context's manifest and token ids, and check that this engine can use it. Any thread may call it."""
        self._check_cache()
        saved = self._folder.manifest(name)
        saved.check(self._origin(saved.capacity_tokens - 1))
        ids = self._folder.token_ids(saved)
        return ReadContext(saved, ids, cache_salt, self._core.hashes(ids, saved.capacity_tokens, cache_salt))

    def _take_up(self, context: ReadContext) -> int | None:
        """Have the ranks read the KV blocks that they do not have. Returns how many; None: there is no room now."""
        if self._core.has_cached(context.hashes):
            return 0
        saved = context.saved
        if self._folder.manifest(saved.name) != saved:
            raise UserError(
                f"context {saved.name!r} was replaced while a request for it was on its way: ask again",
                "context_mismatch",
            )
        held = self._core.hold(context.token_ids, saved.capacity_tokens, context.cache_salt, context.hashes)
        if held is None:
            return None
        with self._core.releasing(held):
            for first, part in _parts(held.blocks, held.num_cached, self._config):
                self._core.carry(LoadBlocks(str(self._folder.at(saved.name)), saved.files, first, part))
            self._core.publish(held)
        return len(held.blocks) - held.num_cached

    def _check_cache(self) -> None:
        if not self._config.scheduler.prefix_cache:
            raise UserError("saved contexts are taken up through the prefix cache: set prefix_cache to True")

    def _write(self, blocks: tuple[Block, ...], folder: Path) -> Iterator[None]:
        """Have the ranks write KV blocks to files of a folder, part by part."""
        config = self._config
        totals, before = _counts(blocks), Counter[int]()
        for first, part in _parts(blocks, 0, config):
            counts = (tuple(count[rank] for rank in range(config.layout.kvp)) for count in (before, totals))
            self._core.carry(SaveBlocks(str(folder), first, part, *counts))
            before += _counts(part)
            yield

    def _written(self, blocks: tuple[Block, ...], folder: Path) -> tuple[SavedFile, ...]:
        """The files of these blocks."""
        config, totals = self._config, _counts(blocks)
        return tuple(
            _described(folder, rank, config)
            for rank in range(config.layout.world_size)
            if config.layout.keeps_kv_first(config.heads, rank) and totals[config.layout.kvp_rank(rank)]
        )

    def _origin(self, num_rows: int) -> Origin:
        """What the KV of requests of this engine depends on. num_rows: the most tokens of a request that have keys."""
        config = self._config
        if not self._fingerprint:
            self._fingerprint = fingerprint(config.spec, self._checkpoint)
        frequencies = inverse_frequencies(config.spec.rope, config.spec.rotated_size, num_rows)
        return Origin(
            model=self._fingerprint,
            rope=hashlib.sha256(msgspec.json.encode(config.spec.rope)).hexdigest(),
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            kv_dtype=config.kv_dtype,
            activation_dtype=config.activation_dtype,
            attention_dtype=config.attention_dtype,
            block_tokens=config.scheduler.block_tokens,
            frequencies=hashlib.sha256(struct.pack(f"<{len(frequencies)}d", *frequencies)).hexdigest(),
        )


def _counts(blocks: tuple[Block, ...]) -> Counter[int]:
    """How many each KVP rank has."""
    return Counter(block.owner for block in blocks)


def _described(folder: Path, rank: int, config: EngineConfig) -> SavedFile:
    """What a rank has written."""
    layers, heads = config.layout.layers(config.spec.num_layers, rank), config.layout.kv_heads(config.heads, rank)
    file = RankFile(folder / file_name(rank))
    bounds = (layers.start, layers.stop), (heads.start, heads.stop)
    return SavedFile(file_name(rank), *bounds, file.num_bytes, file.checksum)


def _parts(blocks: tuple[Block, ...], start: int, config: EngineConfig) -> Iterator[tuple[int, tuple[Block, ...]]]:
    """KV blocks from `start` on, some after others, each with the index of its first one."""
    block_bytes = config.kv_bytes_per_token(0) * config.scheduler.block_tokens
    count = max(_PART_BYTES // max(block_bytes, 1), 1) * config.layout.kvp
    return ((first, blocks[first : first + count]) for first in range(start, len(blocks), count))
