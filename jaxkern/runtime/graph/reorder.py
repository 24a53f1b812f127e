"""Greedy list scheduling of a graph's nodes, so that a device waits less often."""

from collections.abc import Callable, Sequence

from jaxkern.runtime.graph.conflicts import ConflictTracker
from jaxkern.runtime.graph.node import Node


def reordered(nodes: Sequence[Node], lookahead: int) -> tuple[Node, ...]:
    """The nodes in an order that respects every conflict; see `Graph.reorder`."""
    pending = list(nodes)
    made_later = {v for node in nodes for v in node.outputs}
    group = ConflictTracker()
    order: list[Node] = []

    def issue(node: Node) -> None:
        order.append(node)
        made_later.difference_update(node.outputs)
        group.record(node.reads, node.writes)

    while pending:
        node = pending.pop(0)
        if node.barrier or group.conflicts(node.reads, node.writes):
            if not node.barrier:
                fill(group, node, pending, lookahead, made_later, issue)
            group.reset()
        issue(node)
        if node.barrier:
            group.reset()
    return tuple(order)


def fill(
    group: ConflictTracker,
    waiting: Node,
    pending: list[Node],
    lookahead: int,
    made_later: set[int],
    issue: Callable[[Node], None],
) -> None:
    """Issues from `pending` what can join the group that `waiting` waits for."""
    passed = ConflictTracker()
    passed.record(waiting.reads, waiting.writes)
    for node in pending[:lookahead]:
        if node.barrier:
            return
        if (
            (node.kind.reorderable or node.is_view)
            and made_later.isdisjoint(node.inputs)
            and not group.conflicts(node.reads, node.writes)
            and not passed.conflicts(node.reads, node.writes)
        ):
            pending.remove(node)
            issue(node)
        else:
            passed.record(node.reads, node.writes)
