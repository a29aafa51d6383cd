"""Collectives over groups of ranks on two levels: the scale-up domain, and what joins domains.

Alpha-beta costs: a fixed cost, a latency for each round, bytes over bandwidth. A group is `size` ranks, `stride` apart;
ranks count TPA fastest, then KVP, then stages, so a domain holds consecutive ranks. In a domain the cheapest of the
known ways is taken; between domains rings, each rank with its own link.

Where ranks are processes that share their host, a domain is a host. Its ranks share one link, and one of each group
exchanges whole tensors with the other hosts in a ring, as compute/parallel/across_hosts.py does.
"""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array, Mask
from longhelix.spec import HardwareSpec


@dataclass(frozen=True)
class RankGroups:
    """For each layout, the groups of ranks that communicate: their size, and the stride between ranks."""

    size: Array
    stride: Array


@dataclass(frozen=True)
class Sent:
    """The cost of a collective for one rank. `fixed_s` is the part of `seconds` that does not depend on bytes."""

    seconds: Array
    net_bytes: Array
    fixed_s: Array

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.seconds + other.seconds, self.net_bytes + other.net_bytes, self.fixed_s + other.fixed_s)

    def where(self, mask: Mask, otherwise: "Sent") -> "Sent":
        """Return this cost where `mask` holds, and `otherwise` elsewhere."""
        return Sent(
            np.where(mask, self.seconds, otherwise.seconds),
            np.where(mask, self.net_bytes, otherwise.net_bytes),
            np.where(mask, self.fixed_s, otherwise.fixed_s),
        )

    def or_cheaper(self, other: "Sent") -> "Sent":
        """Return the faster of the two, entry by entry."""
        return other.where(other.seconds < self.seconds, self)


def all_reduce(system: HardwareSpec, groups: RankGroups, size_bytes: Array) -> Sent:
    """Return the cost of summing `size_bytes` of every rank on every rank.

    In the domain: one-shot (all send all), two-shot (reduce-scatter, all-gather), or adding up in the switch (a rank
    reads its share of the sum, for which the switch fetches everybody's, and multicasts it).
    """
    inside, outside = _levels(system, groups)
    one_shot = _inside(system, inside, 1.0, (inside - 1) * size_bytes)
    best = one_shot.or_cheaper(_inside(system, inside, 2.0, 2 * (inside - 1) / inside * size_bytes))
    if system.network.in_switch_reduction:
        in_switch = np.where(inside > 1, 1 + 1 / inside, 0.0) * size_bytes
        best = best.or_cheaper(_inside(system, inside, 2.0, in_switch))
    if system.shared:
        return best + _outside(system, outside, outside - 1, _groups(system, groups) * (outside - 1) * size_bytes)
    return best + _outside(system, outside, 2 * (outside - 1), 2 * (outside - 1) / outside * size_bytes / inside)


def all_gather(system: HardwareSpec, groups: RankGroups, size_bytes: Array) -> Sent:
    """Return the cost of an all-gather with a result of `size_bytes`. A reduce-scatter costs the same."""
    inside, outside = _levels(system, groups)
    across_bytes = (outside - 1) / outside * size_bytes
    across_bytes = across_bytes * _groups(system, groups) if system.shared else across_bytes / inside
    across = _outside(system, outside, outside - 1, across_bytes)
    return _inside(system, inside, 1.0, (inside - 1) / inside * size_bytes) + across


def all_to_all(system: HardwareSpec, groups: RankGroups, size_bytes: Array) -> Sent:
    """Return the cost if every rank sends another share of its `size_bytes` to each rank."""
    inside, outside = _levels(system, groups)
    senders = inside * _groups(system, groups) if system.shared else 1.0
    across = _outside(system, outside, 1.0, senders * (outside - 1) / outside * size_bytes)
    return _inside(system, inside, 1.0, (inside - 1) / groups.size * size_bytes) + across


def send(system: HardwareSpec, stride: Array, size_bytes: Array) -> Sent:
    """Return the cost of a message to the rank `stride` after the sender."""
    near, far = system.network.scale_up, system.network.scale_out
    inside = stride < near.ranks
    latency_s = np.where(inside, near.latency_s, far.latency_s)
    bytes_per_s = np.where(inside, near.bytes_per_s, far.bytes_per_s)
    if system.shared:  # the ranks of a host send at the same time
        bytes_per_s = bytes_per_s / np.where(inside, 1.0, np.minimum(stride, near.ranks))
    fixed_s = system.fixed.collective_s + latency_s
    return Sent(fixed_s + size_bytes / bytes_per_s, size_bytes + np.zeros_like(stride), fixed_s)


def _groups(system: HardwareSpec, groups: RankGroups) -> Array:
    """Return the number of groups that share the link of a host."""
    return np.minimum(groups.stride, system.network.scale_up.ranks)


def _levels(system: HardwareSpec, groups: RankGroups) -> tuple[Array, Array]:
    """Return the ranks of a group in one domain, and the number of domains that it spans."""
    inside = np.minimum(groups.size, np.maximum(1.0, system.network.scale_up.ranks // groups.stride))
    outside = np.ceil(groups.size / inside)
    return inside, outside


def _inside(system: HardwareSpec, ranks: Array, rounds: float, size_bytes: Array) -> Sent:
    link, several = system.network.scale_up, ranks > 1
    latency_s = link.latency_s * rounds * _waits(system, ranks)
    return _sent(several, system.fixed.collective_s + latency_s, size_bytes, link.bytes_per_s)


def _waits(system: HardwareSpec, ranks: Array) -> float | Array:
    """Return how many latencies a round takes: one. Processes of one machine wait for each peer, and multiply this by
    the number of turns that they take on its cores."""
    if not system.shared:
        return 1.0
    return (ranks - 1) * np.maximum(ranks / system.cores, 1.0)


def _outside(system: HardwareSpec, domains: Array, rounds: float | Array, size_bytes: Array) -> Sent:
    link = system.network.scale_out
    return _sent(domains > 1, system.fixed.collective_s + link.latency_s * rounds, size_bytes, link.bytes_per_s)


def _sent(happens: Mask, fixed_s: float | Array, size_bytes: Array, bytes_per_s: float) -> Sent:
    fixed_s = np.where(happens, fixed_s, 0.0)
    size_bytes = np.where(happens, size_bytes, 0.0)
    return Sent(fixed_s + size_bytes / bytes_per_s, size_bytes, fixed_s)
