"""Attention that keeps something of every token: what a row sees, and how heads are made."""

import msgspec

from longhelix.spec.cache_entry import CacheEntry
from longhelix.spec.layout import HeadShape
from longhelix.spec.mla import MLA
from longhelix.spec.norms import HeadNorms
from longhelix.spec.rope import RopeSpec, Rotation
from longhelix.spec.sparse import Indexer


class Visibility(msgspec.Struct, frozen=True):
    """The tokens that a row sees: those before it and itself, within at most one limit.

    Attributes:
        window_tokens: A row sees the last tokens, its own included. None: there is no window.
        chunk_tokens: A row sees the tokens of its own chunk. None: there are no chunks.
        indexer: Chooses the tokens. None: a row sees all tokens within the limit.
    """

    window_tokens: int | None = None
    chunk_tokens: int | None = None
    indexer: Indexer | None = None

    @property
    def limit_tokens(self) -> int | None:
        """The most tokens that a row sees. None if there is no limit."""
        return self.chunk_tokens if self.window_tokens is None else self.window_tokens

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` sees. An indexer chooses from there on."""
        if self.window_tokens is not None:
            return max(position + 1 - self.window_tokens, 0)
        if self.chunk_tokens is not None:
            return position // self.chunk_tokens * self.chunk_tokens
        return 0

    @property
    def mean_tokens(self) -> float:
        """The tokens that a row sees on average, far into a prompt. For layers with a limit."""
        if self.window_tokens is not None:
            return self.window_tokens
        assert self.chunk_tokens is not None
        return (self.chunk_tokens + 1) / 2


EVERYTHING = Visibility()


class Projections(msgspec.Struct, frozen=True):
    """What the projections of attention have in addition to their weights.

    Attributes:
        qkv_bias: Queries, keys and values have biases.
        output_bias: The output projection has a bias.
        output_gate: Query heads have as many channels again, which weigh their outputs.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False


class Scores(msgspec.Struct, frozen=True):
    """How scores follow from queries and keys, and what their softmax sees.

    Attributes:
        scale: Products of queries and keys are scaled by it. None: by 1 / sqrt(head_size).
        cap: Scores s become cap * tanh(s / cap). None: they stay as they are.
        temperature_tuning: Queries are scaled by a number that grows with their position.
        sinks: Each query head has a number that its softmax counts as one more score.
    """

    scale: float | None = None
    cap: float | None = None
    temperature_tuning: bool = False
    sinks: bool = False


class GroupedQueryAttention(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Grouped-query attention: each KV head serves as many query heads.

    Attributes:
        heads: Query heads and KV heads.
        head_size: Channels of a head.
        rotated_size: Channels of a head that carry positions. 0: the layer has no positions.
        rope: How they turn.
        visibility: The tokens that a row sees.
        projections: Biases and gates of the projections.
        norms: Norms of heads.
        scores: How scores follow from queries and keys.
    """

    heads: HeadShape
    head_size: int
    rotated_size: int
    rope: RopeSpec
    visibility: Visibility = EVERYTHING
    projections: Projections = Projections()
    norms: HeadNorms = HeadNorms()
    scores: Scores = Scores()

    @property
    def scale(self) -> float:
        """What products of queries and keys are scaled by."""
        return self.head_size**-0.5 if self.scores.scale is None else self.scores.scale

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.rope, self.rotated_size)

    @property
    def output_size(self) -> int:
        """Channels of a head's output, as the output projection takes it."""
        return self.head_size

    @property
    def cache_entry(self) -> CacheEntry:
        """What the layer keeps of a token, for each KV head: its key and its value."""
        return CacheEntry("kv", self.head_size, self.head_size)


class MultiHeadLatentAttention(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Multi-head latent attention: all query heads share one KV head, the latent.

    Attributes:
        heads: Query heads, and one KV head.
        latents: Sizes in channels.
        rope: How the rotated channels turn.
        visibility: The tokens that a row sees.
        qkv_bias: The down-projections have biases.
        output_bias: The output projection has a bias.
    """

    heads: HeadShape
    latents: MLA
    rope: RopeSpec
    visibility: Visibility = EVERYTHING
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def head_size(self) -> int:
        """Channels of a query, rotated ones included."""
        return self.latents.nope_size + self.latents.rope_size

    @property
    def rotated_size(self) -> int:
        """Channels of a head that carry positions."""
        return self.latents.rope_size

    @property
    def rotation(self) -> Rotation:
        return Rotation(self.rope, self.rotated_size)

    @property
    def output_size(self) -> int:
        """Channels of a head's output, as the output projection takes it."""
        return self.latents.value_size

    @property
    def cache_entry(self) -> CacheEntry:
        """What the layer keeps of a token: the latent and the rotated key. The values are a part of the latent."""
        return CacheEntry("latent", self.latents.cached_size, self.latents.kv_lora_rank, shared_values=True)
