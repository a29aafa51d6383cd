"""Saved contexts of an engine: the KV of long prompts, kept on disk and taken up again by any layout."""

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from longhelix.cache.context_folder import ContextFolder, tokens_checksum
from longhelix.cache.rank_file import RankFile
from longhelix.cache.saved_context import Origin, SavedContext, SavedFile, file_name
from longhelix.engine.core import TokenCore
from longhelix.errors import UserError
from longhelix.kv.blocks import Block
from longhelix.models.checkpoint import Checkpoint
from longhelix.models.fingerprint import fingerprint
from longhelix.models.rope import inverse_frequencies
from longhelix.request import Request
from longhelix.runner.config import EngineConfig
from longhelix.workers.transport import LoadBlocks, SaveBlocks

# That a rank writes or reads at a time.
_PART_BYTES = 2**27


@dataclass(frozen=True)
class LoadedContext:
    """A saved context whose KV the ranks have. token_ids: int32."""

    saved: SavedContext
    token_ids: "array[int]"


class Contexts:
    """The saved contexts in a folder, as one engine may use them. Raises UserError for what cannot be."""

    def __init__(self, core: TokenCore, model: str, checkpoint: Checkpoint, folder: ContextFolder) -> None:
        """`model`: what users call the checkpoint."""
        self._core, self._model, self._checkpoint, self._folder = core, model, checkpoint, folder
        self._fingerprint = ""  # once it was asked for
        self._loaded: dict[str, LoadedContext] = {}

    def check_new(self, name: str, num_tokens: int, replace: bool) -> None:
        """Refuse what could not be saved, before anything is computed."""
        self._folder.check_free(name, replace)
        block_tokens = self._core.config.scheduler.block_tokens
        if num_tokens < block_tokens:
            raise UserError(
                f"the context has {num_tokens} tokens, which do not fill one KV block of {block_tokens}: there is "
                "nothing to save, give it with each prompt"
            )

    def save(self, name: str, request: Request, replace: bool) -> SavedContext:
        """Keep the KV of a running request's prompt, all of which is computed."""
        origin = self._origin(request.capacity_tokens)
        blocks = self._core.scheduler.blocks_of(request.id, len(request.prompt_token_ids) // origin.block_tokens)
        with self._folder.new(name, replace) as folder:
            files = self._save(blocks, folder)
            context = SavedContext(
                name=name,
                origin=origin,
                model=self._model,
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                num_tokens=len(request.prompt_token_ids),
                capacity_tokens=request.capacity_tokens,
                tokens_checksum=tokens_checksum(request.prompt_token_ids),
                files=files,
            )
            self._folder.finish(folder, context, request.prompt_token_ids, replace)
        return context

    def _save(self, blocks: tuple[Block, ...], folder: Path) -> tuple[SavedFile, ...]:
        """Have the ranks write KV blocks to files of a folder."""
        config = self._core.config
        kvp = range(config.layout.kvp)
        totals, before = Counter(block.owner for block in blocks), Counter[int]()
        for first, part in _parts(blocks, config):
            counts = tuple(before[rank] for rank in kvp), tuple(totals[rank] for rank in kvp)
            self._core.carry(SaveBlocks(str(folder), first, part, *counts))
            before.update(block.owner for block in part)
        return tuple(
            _described(folder, rank, config)
            for rank in range(config.layout.world_size)
            if config.layout.keeps_kv_first(config.heads, rank) and totals[config.layout.kvp_rank(rank)]
        )

    def load(self, name: str) -> LoadedContext:
        """Have the ranks take up a context, unless they have it."""
        saved = self._folder.manifest(name)
        if name in self._loaded and self._loaded[name].saved == saved:
            return self._loaded[name]
        self.unload(name)
        saved.check(self._origin(saved.capacity_tokens))
        token_ids = self._folder.token_ids(saved)
        blocks = self._core.hold(token_ids, saved.num_blocks)
        try:
            for first, part in _parts(blocks, self._core.config):
                self._core.carry(LoadBlocks(str(self._folder.at(name)), saved.files, first, part))
        except UserError:
            self._core.scheduler.release(blocks)
            raise
        self._core.prefixes.hold(name, token_ids, blocks)
        self._loaded[name] = LoadedContext(saved, token_ids)
        return self._loaded[name]

    def check_request(self, loaded: LoadedContext, capacity_tokens: int) -> None:
        """Refuse a request of that capacity whose keys are rotated by other angles than the context's."""
        loaded.saved.check(self._origin(capacity_tokens))

    def unload(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._core.scheduler.release(self._core.prefixes.drop(name))

    def _origin(self, capacity_tokens: int) -> Origin:
        """What the KV of requests of this engine depends on."""
        config = self._core.config
        if not self._fingerprint:
            self._fingerprint = fingerprint(config.spec, self._checkpoint)
        frequencies = inverse_frequencies(config.spec.rope, config.spec.rotated_size, capacity_tokens)
        return Origin(
            model=self._fingerprint,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            kv_dtype=config.kv_dtype,
            attention_dtype=config.attention_dtype,
            block_tokens=config.scheduler.block_tokens,
            frequencies=hashlib.sha256(struct.pack(f"<{len(frequencies)}d", *frequencies)).hexdigest(),
        )


def _described(folder: Path, rank: int, config: EngineConfig) -> SavedFile:
    """What a rank has written."""
    layers, heads = config.layout.layers(config.spec.num_layers, rank), config.layout.kv_heads(config.heads, rank)
    file = RankFile(folder / file_name(rank))
    bounds = (layers.start, layers.stop), (heads.start, heads.stop)
    return SavedFile(file_name(rank), *bounds, file.num_bytes, file.checksum)


def _parts(blocks: tuple[Block, ...], config: EngineConfig) -> Iterator[tuple[int, tuple[Block, ...]]]:
    """KV blocks, some after others, each with the index of its first one."""
    block_bytes = config.kv_bytes_per_token(0) * config.scheduler.block_tokens
    count = max(_PART_BYTES // max(block_bytes, 1), 1) * config.layout.kvp
    return ((first, blocks[first : first + count]) for first in range(0, len(blocks), count))
