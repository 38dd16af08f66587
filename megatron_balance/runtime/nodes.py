"""Ranks that share a node: torchrun numbers the ranks of a node one after another, and sets LOCAL_WORLD_SIZE."""

from __future__ import annotations

import os
from collections.abc import Sequence


def local_world_size() -> int | None:
    """Ranks of this process's node; None where no launcher has said."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


def nodes_of(ranks: Sequence[int], *, ranks_per_node: int | None) -> list[int]:
    """The node of each rank, from 0.

    Args:
        ranks: `[num_ranks]` world ranks.
        ranks_per_node: the same on every node; None where it is not known: then no two ranks count as neighbours.
    """
    return [rank // (ranks_per_node or 1) for rank in ranks]


def members_per_node(ranks: Sequence[int], *, ranks_per_node: int | None) -> int | None:
    """Members of a group on each of its nodes; None where it has one node, one member on each, or unequal numbers.

    Args:
        ranks: `[num_members]` world ranks.
        ranks_per_node: as for `nodes_of`.

    Example:
        >>> members_per_node([0, 2, 4, 6, 8, 10], ranks_per_node=4)
        2
    """
    nodes = nodes_of(ranks, ranks_per_node=ranks_per_node)
    count = nodes.count(nodes[0])
    even = all((nodes[i] == nodes[i - 1]) == (i % count != 0) for i in range(1, len(nodes)))
    return count if even and 1 < count < len(nodes) and len(nodes) % count == 0 else None


def blocks_span_nodes(size: int, *, world_size: int, ranks_per_node: int | None) -> bool:
    """True if some block of consecutive ranks, of which the world is made, has ranks on two nodes.

    Args:
        size: ranks of a block.
        world_size: of the run.
        ranks_per_node: as for `nodes_of`.

    Example:
        >>> blocks_span_nodes(4, world_size=16, ranks_per_node=6)
        True
    """
    nodes = nodes_of(range(world_size), ranks_per_node=ranks_per_node)
    return any(nodes[start] != nodes[min(start + size, world_size) - 1] for start in range(0, world_size, size))
