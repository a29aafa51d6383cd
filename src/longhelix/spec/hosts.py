"""Which host runs each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.errors import UserError

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, by the host's node rank. Every rank runs on one host, and every host runs some ranks."""

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        every = sorted(rank for ranks in self.ranks for rank in ranks)
        if not every or every != list(range(len(every))) or not all(self.ranks):
            raise UserError(
                f"the rank mapping {self} does not place each of ranks 0 to {max(every, default=0)} on one host, and "
                "at least one rank on each host: correct --rank-mapping",
                "invalid_layout",
            )
        if any(list(ranks) != sorted(ranks) for ranks in self.ranks) or 0 not in self.ranks[0]:
            raise UserError(
                f"the rank mapping {self} has ranks out of order, or rank 0 is not on the first host: list the ranks "
                "of each host in ascending order, with rank 0 on the first",
                "invalid_layout",
            )

    @classmethod
    def in_order(cls, counts: Sequence[int]) -> Hosts:
        """Place consecutive ranks on each host. TPA and then KVP groups stay inside a host, and stages go across."""
        starts = [sum(counts[:node]) for node in range(len(counts))]
        return cls(tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)))

    @classmethod
    def parse(cls, text: str) -> Hosts:
        """Parse a mapping such as `0-3,8;4-7,9`: ranges of ranks, with a semicolon between hosts. Raises UserError."""
        hosts = []
        for host in text.split(";"):
            ranks: list[int] = []
            for part in host.split(","):
                match = _RANGE.fullmatch(part.strip())
                if match is None or int(match[2] or match[1]) < int(match[1]):
                    raise UserError(
                        f"the rank mapping {text!r} contains {part.strip()!r}, which is no range of ranks: write it "
                        "like 0-3;4-7, with a semicolon between hosts",
                        "invalid_layout",
                    )
                ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
            hosts.append(tuple(ranks))
        return cls(tuple(hosts))

    def __str__(self) -> str:
        return ";".join(",".join(map(str, ranks)) for ranks in self.ranks)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.ranks))

    def node_of(self, rank: int) -> int:
        """Return the node rank of the host that runs a rank."""
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)

    def local_rank(self, rank: int) -> int:
        """Return the position of a rank among the ranks of its host, which is also the number of its GPU."""
        return self.ranks[self.node_of(rank)].index(rank)

    def parts(self, group: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a group on each host that runs some of them, in the order of hosts."""
        parts = (tuple(rank for rank in group if rank in ranks) for ranks in self.ranks)
        return tuple(part for part in parts if part)
