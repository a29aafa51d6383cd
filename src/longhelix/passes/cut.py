"""Where the values of a region are gathered: the fewest bytes, and as late as they allow."""

from collections.abc import Iterable

import networkx as nx
from torch.fx import Node

from longhelix.passes.region import Region
from longhelix.passes.tokens import row_bytes


def cheapest_cut(region: Region, demanded: Iterable[Node]) -> set[Node]:
    """The nodes to gather such that all `demanded` ones can be had in full: a minimum cut of the region between its
    sources and them, by bytes of a token; of several, the one nearest to the demanded nodes.

    What lies between the cut and the demanded nodes is computed for all tokens, from what is gathered.
    """
    network = nx.DiGraph()
    network.add_nodes_from(("begin", "end"))
    for node, tokens in region.tokens.items():
        size = row_bytes(node, tokens)
        # Without a capacity an edge is never cut.
        network.add_edge((node, "in"), (node, "out"), **({} if size is None else {"capacity": size}))
        for user in region.downstream(node):
            network.add_edge((node, "out"), (user, "in"))
    for node in region.sources:
        network.add_edge("begin", (node, "in"))
    for node in demanded:
        network.add_edge((node, "out"), "end")
    _, (before, after) = nx.minimum_cut(network, "begin", "end")
    return {node for node in region.tokens if (node, "in") in before and (node, "out") in after}
