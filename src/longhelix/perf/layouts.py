"""Layouts as arrays with one entry per layout, and the shares of the fullest rank of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhelix.scheduler.work import Work
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.weights import Split

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Stages(NamedTuple):
    """Pipeline stages of n layouts, and how many layers they have.

    Attributes:
        pp: Stages of each layout.
        most_layers: Layers of the largest stage. 0: stages are even.
        last_layers: Layers of the last stage. 0: stages are even.
    """

    pp: Array
    most_layers: Array
    last_layers: Array

    @classmethod
    def even(cls, pp: Array) -> "Stages":
        """Return stages with equal numbers of layers. The first stages have one more if layers do not divide evenly."""
        return cls(pp, np.zeros_like(pp), np.zeros_like(pp))


@dataclass(frozen=True)
class Layouts:
    """Degrees of parallelism of n layouts.

    All arrays have the shape (n,), or (n, 1) if a second dim has other choices, such as batches.

    Attributes:
        dp: Groups of KVP x TPA ranks with their own requests, which share the FFN. If kvp is 1, this is data-parallel
            attention.
        kvp: Ranks that share a request's KV.
        tpa: Ranks that share attention's heads.
        tpf: Ranks that share the columns of each FFN or expert.
        ep: Groups of ranks that share the experts.
        ffn_replicas: Copies of the FFN and of the vocabulary.
        stages: Pipeline stages, and how many layers they have.
        hop_b: Whether the exchange overlaps attention.
    """

    dp: Array
    kvp: Array
    tpa: Array
    tpf: Array
    ep: Array
    ffn_replicas: Array
    stages: Stages
    hop_b: Mask

    @classmethod
    def of(cls, layouts: Sequence[Layout], *, dp: int = 1, local: bool = False, hop_b: bool = True) -> "Layouts":
        """Convert layouts.

        dp: number of groups of the KVP ranks. local: every KVP rank is a group.
        """

        def degrees(name: str) -> Array:
            return np.array([getattr(layout, name) for layout in layouts], dtype=np.float64)

        kvp, tpa, tpf, ep, pp, ffn_replicas = map(degrees, ("kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas"))
        groups = kvp if local else np.full(len(layouts), float(dp))
        layers = [layout.stage_layers or (0,) for layout in layouts]
        most, last = (np.array(list(map(chosen, layers)), dtype=np.float64) for chosen in (max, itemgetter(-1)))
        overlapping = np.full(len(layouts), hop_b)
        return cls(
            dp=groups,
            kvp=kvp / groups,
            tpa=tpa,
            tpf=tpf,
            ep=ep,
            ffn_replicas=ffn_replicas,
            stages=Stages(pp, most, last),
            hop_b=overlapping,
        )

    def __len__(self) -> int:
        return len(self.kvp)

    def take(self, index: NDArray[np.intp] | Mask | slice) -> "Layouts":
        """Return the entries that `index` selects."""
        return self._with_each(lambda array: array[index])

    def as_column(self) -> "Layouts":
        """Return the layouts with the shape (n, 1) instead of (n,)."""
        return self._with_each(lambda array: array[:, None])

    def _with_each(self, change: Callable[[Array], Array]) -> "Layouts":
        """Return the layouts with each of their arrays changed."""
        own = (field.name for field in fields(self) if field.name != "stages")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in own}
        return Layouts(stages=Stages(*map(change, self.stages)), **changed)

    @property
    def pp(self) -> Array:
        """Pipeline stages."""
        return self.stages.pp

    @property
    def zeros(self) -> Array:
        return np.zeros_like(self.kvp)

    @property
    def ones(self) -> Array:
        return np.ones_like(self.kvp)

    @property
    def group_ranks(self) -> Array:
        """The ranks that share a request."""
        return self.kvp * self.tpa

    @property
    def num_ranks(self) -> Array:
        """N: the ranks of one pipeline stage."""
        return self.dp * self.group_ranks

    @property
    def ffn_ranks(self) -> Array:
        """The ranks of one copy of the FFN, and of the vocabulary."""
        return self.tpf * self.ep

    @property
    def world_size(self) -> Array:
        return self.num_ranks * self.pp

    @property
    def exchanges(self) -> Mask:
        """Whether several ranks hold shards of one request's KV."""
        return self.kvp > 1

    @property
    def grouped(self) -> Mask:
        """Whether groups of ranks have their own requests."""
        return self.dp > 1

    @property
    def output_ranks(self) -> Array:
        """The ranks that share Wo: all that share a request, or only its heads if the FFN has copies."""
        return np.where(self.ffn_replicas > 1, self.tpa, self.group_ranks)

    def sharers(self, split: Split) -> Array:
        """Return the ranks that share a dim with this split. Heads of attention are not divided by ranks alone."""
        match split:
            case Split.LINEAR_HEADS:
                return self.output_ranks
            case Split.FFN_COLUMNS | Split.VOCABULARY:
                return self.ffn_ranks
            case Split.SHARED_COLUMNS:
                return np.where(self.grouped, 1.0, self.ffn_ranks)
            case Split.EXPERT_COLUMNS:
                return self.tpf
            case Split.EXPERTS:
                return self.ep
        raise ValueError(split)

    def stage_layers(self, num_layers: int) -> Array:
        """Layers of the fullest stage (`Layout.layers`)."""
        return np.maximum(self.stages.most_layers, np.ceil(num_layers / self.pp))

    def last_stage_layers(self, num_layers: int) -> Array:
        """Layers of the last stage; even shares put the larger ones first (`Layout.layers`)."""
        return np.where(self.stages.last_layers > 0, self.stages.last_layers, np.floor(num_layers / self.pp))

    def kv_heads(self, heads: HeadShape) -> Array:
        """KV heads of the fullest rank (`Layout.kv_heads`)."""
        return np.maximum(1.0, np.ceil(heads.num_kv_heads / self.tpa))

    def query_heads(self, heads: HeadShape) -> Array:
        """Query heads of the fullest rank (`Layout.query_heads`)."""
        sharers = np.maximum(1.0, self.tpa // heads.num_kv_heads)
        return self.kv_heads(heads) * np.ceil(heads.group_size / sharers)

    def merged_query_heads(self, heads: HeadShape) -> Array:
        """Query heads of the fullest rank in the output projection (`Layout.output_heads`)."""
        num_heads = self.query_heads(heads)
        return np.where(self.ffn_replicas > 1, num_heads, np.ceil(num_heads / self.kvp))

    def decode(self, batch: float | Array, context: float | Array) -> Work:
        """Return the work of a token of each of `batch` requests with `context` tokens, spread evenly over groups."""
        return Work.decode(batch, context)._replace(decode_kv_tokens=self.dp * np.ceil(batch / self.dp) * context)

    def chunk(self, rows: float | Array, prefix: float | Array) -> Work:
        """Return the work of `rows` tokens of a prompt after `prefix` others, all in one group."""
        work = Work.chunk(rows, prefix)
        return work._replace(chunk_kv_tokens=self.dp * work.chunk_kv_tokens, chunk_pairs=self.dp * work.chunk_pairs)

    def of_rank(self, work: Work, request_rows: int = 1) -> Work:
        """Return the fullest rank's part of the attention.

        Every group has the same number of requests, each with `request_rows` decode rows, and every rank of the group
        has a share of their KV.
        """
        decodes, share = work.decode_rows + self.zeros, 1 / (self.dp * self.kvp)
        requests = np.ceil(decodes / (request_rows * self.dp))
        return work._replace(
            decode_rows=np.where(self.grouped, request_rows * requests, decodes),
            decode_kv_tokens=work.decode_kv_tokens * share,
            chunk_kv_tokens=work.chunk_kv_tokens * share,
            chunk_pairs=work.chunk_pairs * share,
        )
