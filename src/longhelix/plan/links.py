"""Which groups of ranks communicate, over which links, and what that costs in a decode step."""

from dataclasses import dataclass

from longhelix.perf.layouts import Layouts
from longhelix.perf.step import decode_items
from longhelix.plan.candidate import as_layouts
from longhelix.plan.choice import Choice
from longhelix.plan.question import Question
from longhelix.plan.service import ServiceLoad
from longhelix.plan.space import OVERLAPPED
from longhelix.spec import HardwareSpec
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import split

# The cost items that each group causes, by name.
_ITEMS = {
    "KVP": ("exchange", "candidates"),
    "attention": ("all-reduce after attention",),
    "FFN": ("gather before FFN", "all-reduce after FFN", "embedding", "sampling"),
    "stages": ("stage to stage",),
}


@dataclass(frozen=True)
class GroupLinks:
    """One kind of group of ranks."""

    name: str
    ranks: tuple[int, ...]  # the first group of this kind
    hosts: int  # number of hosts that a group spans
    domains: int  # number of scale-up domains that a group spans
    link: str  # the slowest link that its messages cross
    sent_bytes: float  # bytes that one rank sends in a decode step
    seconds: float  # time in a decode step, as far as it is not overlapped
    share: float  # fraction of the decode step


def hosts_of(system: HardwareSpec, ranks: int) -> Hosts:
    """Place ranks on the servers of a system: consecutive ranks on each, as the engine does by default."""
    servers = -(-ranks // system.network.node_ranks)
    return Hosts.in_order([len(held) for held in split(ranks, servers)])


def group_links(question: Question, choice: Choice) -> list[GroupLinks]:
    """Return the groups of one replica that have more than one rank, in the order in which a layer uses them."""
    setting, system = question.setting, question.setting.system
    layouts = as_layouts(choice.layout, hop_b=choice.strategy in OVERLAPPED)
    load = ServiceLoad(setting, question.context, question.demand)
    items = decode_items(setting, layouts, float(choice.batch), load.kv_tokens)
    total_s = sum(float(item.seconds[0]) for item in items)
    hosts = hosts_of(system, int(layouts.world_size[0]))
    found = []
    for name, ranks in _groups(layouts).items():
        caused = [item for item in items if item.name in _ITEMS[name]]
        seconds = sum(float(item.seconds[0]) for item in caused)
        domains = len({rank // system.network.scale_up.ranks for rank in ranks})
        found.append(
            GroupLinks(
                name=name,
                ranks=ranks,
                hosts=len(hosts.parts(ranks)),
                domains=domains,
                link="scale-out" if domains > 1 else "scale-up",
                sent_bytes=sum(float(item.net_bytes[0]) for item in caused),
                seconds=seconds,
                share=seconds / total_s,
            )
        )
    return [each for each in found if len(each.ranks) > 1]


def _groups(layouts: Layouts) -> dict[str, tuple[int, ...]]:
    """Return the first group of each kind."""

    def group(size: float, stride: float) -> tuple[int, ...]:
        return tuple(range(0, int(size) * int(stride), int(stride)))

    return {
        "KVP": group(layouts.kvp[0], layouts.tpa[0]),
        "attention": group(layouts.output_ranks[0], 1),
        "FFN": group(layouts.ffn_ranks[0], 1),
        "stages": group(layouts.pp[0], layouts.num_ranks[0]),
    }
