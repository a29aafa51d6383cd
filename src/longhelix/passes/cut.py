"""Choose which values of a region to gather, so that the ranks gather as few bytes as possible."""

from collections.abc import Iterable

import networkx as nx
from torch.fx import Node

from longhelix.passes.region import Region
from longhelix.passes.tokens import row_bytes


def cheapest_cut(region: Region, demanded: Iterable[Node]) -> set[Node]:
    """Return the nodes to gather so that every rank can compute the `demanded` nodes for all tokens.

    The result is a minimum cut of the region between its sources and the demanded nodes, weighted by bytes per token.
    If there are several minimum cuts, the result is the cut nearest to the demanded nodes. Each rank computes the
    nodes between the cut and the demanded nodes for all tokens, from the gathered values.

    Raises:
        networkx.NetworkXUnbounded: No cut has a known size.
    """
    network = nx.DiGraph()
    network.add_nodes_from(("begin", "end"))
    for node, tokens in region.tokens.items():
        size = row_bytes(node, tokens)
        # A minimum cut never contains an edge without a capacity.
        network.add_edge((node, "in"), (node, "out"), **({} if size is None else {"capacity": size}))
        for user in region.downstream(node):
            network.add_edge((node, "out"), (user, "in"))
    for node in region.sources:
        network.add_edge("begin", (node, "in"))
    for node in demanded:
        network.add_edge((node, "out"), "end")
    _, (before, after) = nx.minimum_cut(network, "begin", "end")
    return {node for node in region.tokens if (node, "in") in before and (node, "out") in after}
