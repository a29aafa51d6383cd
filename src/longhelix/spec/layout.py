"""Layouts: how heads, columns, experts and vocabulary are divided among ranks.

One pipeline stage has N = KVP * TPA = TPF * EP * R ranks (Helix, arXiv 2507.07120, section 2). Only
this module divides anything among ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.errors import UserError
from longhelix.values import items, whole

_MOST_RANKS = 2**20


def split(total: int, pieces: int) -> tuple[range, ...]:
    """Cut `total` consecutive items into `pieces` ranges whose sizes differ by one at most, larger ones first."""
    return tuple(piece_of(total, pieces, index) for index in range(pieces))


def piece_of(total: int, pieces: int, index: int) -> range:
    """Return one of `split`'s ranges without computing the others."""
    small, larger = divmod(total, pieces)
    return range(index * small + min(index, larger), (index + 1) * small + min(index + 1, larger))


def widest_ep(num_ranks: int, num_experts: int) -> int:
    """Return the largest EP that divides both the ranks and the experts."""
    return max(ep for ep in range(1, num_ranks + 1) if num_ranks % ep == 0 and num_experts % ep == 0)


def _piece(of: range, pieces: int, index: int) -> range:
    piece = piece_of(len(of), pieces, index)
    return range(of.start + piece.start, of.start + piece.stop)


@dataclass(frozen=True)
class HeadShape:
    """The heads of a model's attention: Q query heads in equal groups over K KV heads."""

    num_query_heads: int
    num_kv_heads: int

    @property
    def group_size(self) -> int:
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True, init=False)
class Layout:
    """A parallel layout of kvp * tpa * pp ranks.

    In each pipeline stage, kvp * tpa equals tpf * ep * ffn_replicas. Ranks are numbered by TPA first, then KVP, then
    pipeline stage. Shares may be uneven, and a rank may own no part of something.

    Attributes:
        kvp: Ranks that share a request's KV cache along the sequence.
        tpa: Ranks that share the attention heads.
        tpf: Ranks that share the columns of an FFN. Default: the ranks of a stage divided by ep * ffn_replicas.
        ep: Groups of ranks that share the experts.
        pp: Pipeline stages.
        ffn_replicas: Copies of the FFN and of the vocabulary. More than 1 is the tied layout.
        stage_layers: Number of layers of each stage. None gives the stages even shares.
    """

    kvp: int
    tpa: int
    tpf: int
    ep: int
    pp: int
    ffn_replicas: int
    stage_layers: tuple[int, ...] | None

    def __init__(
        self,
        kvp: int = 1,
        tpa: int = 1,
        tpf: int | None = None,
        ep: int = 1,
        pp: int = 1,
        ffn_replicas: int = 1,
        stage_layers: Sequence[int] | None = None,
    ) -> None:
        """Raises UserError if a number is below 1, or the products or the number of stages do not match."""
        kvp, tpa, ep, pp = _degree("kvp", kvp), _degree("tpa", tpa), _degree("ep", ep), _degree("pp", pp)
        ffn_replicas = _degree("ffn_replicas", ffn_replicas)
        num_ranks, copies = kvp * tpa, ep * ffn_replicas
        if num_ranks % copies:
            # Copies of the FFN divide the ranks first, then experts divide what each copy has.
            name, degree, among = (
                ("ep", ep, num_ranks // ffn_replicas)
                if num_ranks % ffn_replicas == 0
                else ("ffn_replicas", ffn_replicas, num_ranks)
            )
            raise UserError(
                f"kvp * tpa = {kvp} * {tpa} = {num_ranks} ranks are not divisible by {name} = {degree}: set {name} to "
                f"a divisor of {among}",
                "invalid_layout",
            )
        if tpf is None:
            tpf = num_ranks // copies
        tpf = _degree("tpf", tpf)
        if tpf * copies != num_ranks:
            raise UserError(
                f"kvp * tpa = {kvp} * {tpa} = {num_ranks} ranks, but tpf * ep = {tpf} * {copies} = {tpf * copies}: "
                f"both must give the same number; set tpf to {num_ranks // copies} or leave it out",
                "invalid_layout",
            )
        fields = {"kvp": kvp, "tpa": tpa, "tpf": tpf, "ep": ep, "pp": pp, "ffn_replicas": ffn_replicas}
        for name, degree in fields.items():
            object.__setattr__(self, name, degree)
        object.__setattr__(self, "stage_layers", None if stage_layers is None else _stages(stage_layers, pp))

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline stage (N)."""
        return self.kvp * self.tpa

    @property
    def ffn_ranks(self) -> int:
        """Ranks of one copy of the FFN. With one copy, N."""
        return self.tpf * self.ep

    @property
    def world_size(self) -> int:
        """Ranks of all pipeline stages."""
        return self.num_ranks * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.num_ranks

    def stage_rank(self, rank: int) -> int:
        return rank % self.num_ranks

    def kvp_rank(self, rank: int) -> int:
        return self.stage_rank(rank) // self.tpa

    def tpa_rank(self, rank: int) -> int:
        return self.stage_rank(rank) % self.tpa

    def tpf_rank(self, rank: int) -> int:
        return self.stage_rank(rank) % self.tpf

    def ep_rank(self, rank: int) -> int:
        return self.stage_rank(rank) // self.tpf % self.ep

    def stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage."""
        return tuple(tuple(range(s * self.num_ranks, (s + 1) * self.num_ranks)) for s in range(self.pp))

    def kvp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold the same heads of different tokens: the groups of the exchange, in KVP order."""
        return tuple(stage[tpa_rank :: self.tpa] for stage in self.stage_groups() for tpa_rank in range(self.tpa))

    def tpa_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold different heads of the same tokens."""
        return tuple(
            stage[kvp_rank * self.tpa : (kvp_rank + 1) * self.tpa]
            for stage in self.stage_groups()
            for kvp_rank in range(self.kvp)
        )

    def ffn_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share one copy of the FFN, and of the vocabulary."""
        return tuple(
            stage[start : start + self.ffn_ranks]
            for stage in self.stage_groups()
            for start in range(0, self.num_ranks, self.ffn_ranks)
        )

    def check(self, heads: HeadShape, num_layers: int) -> None:
        """Raise UserError if the layout has too many ranks for the model's heads or layers."""
        if self.tpa > heads.num_query_heads:
            raise UserError(
                f"tpa is {self.tpa}, but the model has {heads.num_query_heads} query heads: set tpa to "
                f"{heads.num_query_heads} or less, and increase kvp instead",
                "invalid_layout",
            )
        if self.stage_layers is None and self.pp > num_layers:
            raise UserError(
                f"pp is {self.pp}, but the model has {num_layers} layers: set pp to {num_layers} or less",
                "invalid_layout",
            )
        if self.stage_layers is not None and sum(self.stage_layers) != num_layers:
            raise UserError(
                f"stage_layers is {list(self.stage_layers)}, {sum(self.stage_layers)} layers in total, but the model "
                f"has {num_layers}: change the total by {num_layers - sum(self.stage_layers):+}, or leave "
                "stage_layers out",
                "invalid_layout",
            )

    def layers(self, num_layers: int, rank: int) -> range:
        """Return the layers of this rank's stage: an even share, or as `stage_layers` says."""
        stage = self.stage(rank)
        if self.stage_layers is None:
            return piece_of(num_layers, self.pp, stage)
        start = sum(self.stage_layers[:stage])
        return range(start, start + self.stage_layers[stage])

    def has_embedding(self, rank: int) -> bool:
        """Return whether this rank is in the stage with the embedding, the first one."""
        return self.stage(rank) == 0

    def has_head(self, rank: int) -> bool:
        """Return whether this rank is in the stage with the LM head, the last one."""
        return self.stage(rank) == self.pp - 1

    def duplicates_kv(self, heads: HeadShape) -> bool:
        """Return whether several ranks keep the same KV heads, because TPA > K. Plain TP has this cost."""
        return self.tpa > heads.num_kv_heads

    def kv_heads(self, heads: HeadShape, rank: int) -> range:
        """Return the KV heads that this rank keeps: its share, or, if TPA > K, one that several ranks keep."""
        tpa_rank = self.tpa_rank(rank)
        if not self.duplicates_kv(heads):
            return piece_of(heads.num_kv_heads, self.tpa, tpa_rank)
        kv_head = next(head for head, ranks in enumerate(split(self.tpa, heads.num_kv_heads)) if tpa_rank in ranks)
        return range(kv_head, kv_head + 1)

    def keeps_kv_first(self, heads: HeadShape, rank: int) -> bool:
        """Return whether this rank is the first of those that keep the same KV heads. False if it keeps none."""
        kv_heads = self.kv_heads(heads, rank)
        return len(kv_heads) > 0 and (self.tpa_rank(rank) == 0 or self.kv_heads(heads, rank - 1) != kv_heads)

    def query_heads(self, heads: HeadShape, rank: int) -> range:
        """Return the query heads of this rank's attention: those of its KV heads, or its share of a shared group.

        Splitting by KV head keeps one group size on a rank, and a rank reads as few KV heads as possible.
        """
        kv_heads = self.kv_heads(heads, rank)
        group = range(kv_heads.start * heads.group_size, kv_heads.stop * heads.group_size)
        if not self.duplicates_kv(heads):
            return group
        sharers = piece_of(self.tpa, heads.num_kv_heads, kv_heads.start)
        return _piece(group, len(sharers), self.tpa_rank(rank) - sharers.start)

    def merged_query_heads(self, heads: HeadShape, rank: int) -> range:
        """Return the query heads that this rank has completely after the exchange: its rows of Wo."""
        return _piece(self.query_heads(heads, rank), self.kvp, self.kvp_rank(rank))

    def output_heads(self, heads: HeadShape, rank: int) -> range:
        """Return the query heads of this rank's rows of Wo: merged ones, or with copies of the FFN, all of its own."""
        if self.ffn_replicas > 1:
            return self.query_heads(heads, rank)
        return self.merged_query_heads(heads, rank)

    def heads_among(self, heads: HeadShape, rank: int, instances: int) -> list[int]:
        """Return how many of this rank's query heads each KVP instance merges.

        instances: KVP instances that share a request, each with a copy of the FFN.
        """
        return list(map(len, split(len(self.query_heads(heads, rank)), instances)))

    def ffn_columns(self, ffn_size: int, rank: int) -> range:
        """Return this rank's columns of a dense FFN or of shared experts, split over all ranks of a copy of the FFN."""
        return piece_of(ffn_size, self.ffn_ranks, self.stage_rank(rank) % self.ffn_ranks)

    def expert_columns(self, expert_size: int, rank: int) -> range:
        """Return this rank's columns of each of its experts."""
        return piece_of(expert_size, self.tpf, self.tpf_rank(rank))

    def experts(self, num_experts: int, rank: int) -> range:
        """Return this rank's experts."""
        return piece_of(num_experts, self.ep, self.ep_rank(rank))

    def expert_group_leaders(self) -> list[int]:
        """Return the first rank of each group that shares experts, in the order of the experts.

        Only the first copy of the FFN in each stage is included.
        """
        return [stage[rank] for stage in self.stage_groups() for rank in range(0, self.ffn_ranks, self.tpf)]

    def vocabulary(self, vocab_size: int, rank: int) -> range:
        """Return this rank's rows of the embedding and the LM head. Each copy of the FFN has all rows."""
        return piece_of(vocab_size, self.ffn_ranks, self.stage_rank(rank) % self.ffn_ranks)


def _degree(name: str, degree: object) -> int:
    return whole(name, degree, 1, _MOST_RANKS, code="invalid_layout")


def _stages(layers: object, pp: int) -> tuple[int, ...]:
    counts = items("stage_layers", layers, _MOST_RANKS, "numbers of layers", code="invalid_layout")
    if len(counts) != pp:
        raise UserError(
            f"stage_layers has {len(counts)} stages, but pp is {pp}: give one number of layers per stage",
            "invalid_layout",
        )
    return tuple(_degree("a stage's number of layers", count) for count in counts)
