"""What waits for what among the nodes of a graph, in their order."""

from collections.abc import Sequence

from jaxkern.runtime.graph.conflicts import ConflictTracker, Region
from jaxkern.runtime.graph.node import Node


def levels(nodes: Sequence[Node]) -> tuple[tuple[int, ...], ...]:
    """What `Graph.levels` documents."""
    groups: list[list[int]] = []
    done: dict[int, int] = {}  # the group after which a node's result is there
    floor = 0
    for node, waits in zip(nodes, waits_for(nodes), strict=True):
        last = max((done[id] for id in waits), default=-1)
        level = max(last + (not node.is_view), floor)
        if node.barrier:
            level = floor = len(groups)
            floor += 1
        while len(groups) <= level:
            groups.append([])
        groups[level].append(node.id)
        done[node.id] = max(last, floor - 1) if node.is_view else level
    return tuple(map(tuple, groups))


def waits_for(nodes: Sequence[Node]) -> tuple[frozenset[int], ...]:
    """For each node the ids of those before it that it conflicts with."""
    maker: dict[int, int] = {}
    reads: dict[str, list[tuple[Region, int]]] = {}
    writes: dict[str, list[tuple[Region, int]]] = {}
    found = []
    for node in nodes:
        waits = {maker[v] for v in node.inputs if v in maker}
        for regions, table in (
            (node.reads, writes),
            (node.writes, reads),
            (node.writes, writes),
        ):
            for region in regions:
                for other, id in table.get(region.buffer, ()):
                    if region.overlaps(other):
                        waits.add(id)
        for regions, table in ((node.reads, reads), (node.writes, writes)):
            for region in regions:
                table.setdefault(region.buffer, []).append((region, node.id))
        maker.update(dict.fromkeys(node.outputs, node.id))
        found.append(frozenset(waits))
    return tuple(found)


def barriers(nodes: Sequence[Node]) -> tuple[int, ...]:
    """What `Graph.barriers` documents."""
    found, group = [], ConflictTracker()
    issued = after_barrier = False
    for node in nodes:
        if node.is_view:
            continue
        wait = group.barrier_between(node.reads, node.writes)
        if issued and (wait or after_barrier or node.barrier):
            found.append(node.id)
        after_barrier, issued = node.barrier is not None, True
    return tuple(found)
