"""Measures collectives between hosts.

The hosts are those that run the command, or two network namespaces of this machine, joined by links of given rates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import torch
import torch.distributed as dist

from longhelix.compute.kernels import native
from longhelix.compute.parallel import across_hosts
from longhelix.compute.runner.rank import meet
from longhelix.measure.collectives import COLLECTIVES, DTYPE, bursts
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.hosts import meet as meet_hosts
from longhelix.measure.link import RankLink, join, link_label
from longhelix.measure.timing import interleave
from longhelix.measure.world import Row, collect
from longhelix.perf.fit import MeasuredCollective, fit_link
from longhelix.spec import HardwareSpec
from longhelix.spec.hosts import Hosts

SIZES_BYTES = (2048, 8192, 32768, 131072, 524288)  # message sizes, from that of one decoding request to that of many
_BULK_BYTES, _LEAST_BULK_BYTES, _BULK_S = 2**25, 2**20, 0.25  # messages so large that their latency does not matter
_BULK_REPEATS = 5
_ROUNDS = 6


class HostLinkJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures collectives of all ranks at each rate of the link."""

    hosts: Hosts
    rates_mbit: tuple[float | None, ...]  # rates of a link between network namespaces; a single None for real hosts

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(1)
        link = HostsLink.join(self.hosts, rank, directory, self.rates_mbit)
        across_hosts.register()
        group = dist.new_group(backend=across_hosts.NAME, pg_options=list(self.hosts.ranks))
        for rate_mbit in self.rates_mbit:
            link.limit(rate_mbit)
            group.barrier()
            for name in COLLECTIVES:
                for num_bytes in (_even(group, num_bytes) for num_bytes in SIZES_BYTES):
                    call = _call(group, name, num_bytes)
                    (timing,) = bursts({name: call}, group.barrier, _ROUNDS).values()
                    yield {"rate_mbit": rate_mbit, "collective": name, "bytes": num_bytes, **timing.row("seconds")}
            yield {"rate_mbit": rate_mbit, "collective": None, **self._bulk(group, rate_mbit)}

    def _bulk(self, group: dist.ProcessGroup, rate_mbit: float | None) -> Row:
        """Measure a large all-gather, in which all hosts send at the same time. On slow links, it is smaller."""
        bulk_bytes = _BULK_BYTES
        if rate_mbit is not None:
            bulk_bytes = min(max(int(_BULK_S * rate_mbit * 1e6 / 8), _LEAST_BULK_BYTES), _BULK_BYTES)
        before = group.network_bytes
        call = _call(group, "all-gather", _even(group, bulk_bytes))
        call().wait()
        sent_bytes = group.network_bytes - before
        (timing,) = interleave({"": lambda: call().wait()}, _BULK_REPEATS, warm_up=0).values()
        return {"bytes_per_s": sent_bytes / timing.median_s, **timing.row("seconds")}


@dataclass(frozen=True)
class HostsLink:
    """The link between the hosts, for one rank."""

    end: RankLink | None  # the end that this rank limits, if it limits one

    @classmethod
    def join(cls, hosts: Hosts, rank: int, directory: Path, rates_mbit: Sequence[float | None]) -> Self:
        """Meet the ranks of all hosts. If there are rates, the hosts are network namespaces, which this call makes."""
        if rates_mbit[0] is None:
            meet_hosts(hosts.world_size, rank, directory)
            return cls(None)
        end = join(rank, directory, hosts)
        meet(hosts.world_size, rank, directory, interface=end.device)
        return cls(end if hosts.local_rank(rank) == 0 else None)

    def limit(self, rate_mbit: float | None) -> None:
        """Set the rate of the link."""
        if self.end is not None and rate_mbit is not None:
            self.end.limit(rate_mbit)


def _even(group: dist.ProcessGroup, num_bytes: int) -> int:
    """Round down to as many numbers for each rank."""
    return num_bytes - num_bytes % (DTYPE.itemsize * group.size())


def _call(group: dist.ProcessGroup, name: str, num_bytes: int) -> Callable[[], dist.Work]:
    whole = torch.zeros(num_bytes // DTYPE.itemsize, dtype=DTYPE)
    return COLLECTIVES[name](group, whole, torch.zeros(len(whole) // group.size(), dtype=DTYPE))


def name_of(rate_mbit: float | None) -> str:
    """Name of a link between hosts in tables."""
    return "network" if rate_mbit is None else link_label(rate_mbit)


def measure(
    system: HardwareSpec,
    hosts: Hosts,
    rates_mbit: Sequence[float | None],
    on_point: Callable[[Row], None],
    measuring: MeasuringHosts | None = None,
) -> tuple[list[Row], list[HardwareSpec]]:
    """Measure the link between hosts at each rate.

    Args:
        system: the machine of a host, or the machine that runs both.
        hosts: the ranks of the hosts, as many on each.
        rates_mbit: rates of a link between network namespaces, or a single None for real hosts.
        on_point: called with each row of the first rank.
        measuring: the real hosts.

    Returns:
        A row per rate, and the system with the constants that are fitted to the collectives at this rate.
    """
    job = HostLinkJob(hosts, tuple(rates_mbit))
    found = [row for row, *_ in collect(job, hosts.world_size, on_point, hosts=measuring)]
    system = system.replaced({"scale_up.ranks": len(hosts.ranks[0])}, "ranks of one host")
    rows, systems = [], []
    for rate_mbit in rates_mbit:
        *calls, bulk = (row for row in found if row["rate_mbit"] == rate_mbit)
        measured = [
            MeasuredCollective(row["collective"], hosts.world_size, row["bytes"], row["seconds"]) for row in calls
        ]
        fitted = fit_link(system, measured)
        systems.append(fitted)
        link = fitted.network.scale_out
        rows.append(
            bulk
            | {
                "link": name_of(rate_mbit),
                "latency_s": link.latency_s,
                "fitted_bytes_per_s": link.bytes_per_s,
            }
        )
    return rows, systems
