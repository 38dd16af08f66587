"""Packs the samples of every node into micro-batches, with slots from the root down.

All leaves of a node have the same ancestors, so they reach its micro-batches in the same slot and at the same time: no
rank waits inside a group. Two rules need dummies:

    even counts   every leaf has as many slots as the fullest
    last slot     otherwise a micro-batch is the last of all its leaves or of none, since in its last one a rank
                  reduces gradients while the others still exchange keys and values
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.tree import Nodes


def pack_nodes(samples: SizedSamples, nodes: Nodes, *, even: bool, multiple: int) -> Groups:
    """Micro-batches of every node, first fit by falling tokens.

    Args:
        samples: the global batch.
        nodes: the node of every sample.
        even: every leaf has the same number of slots, a multiple of `multiple`.
        multiple: divides the number of slots if `even`.
    """
    num_leaves = samples.num_leaves
    group_of = np.zeros(samples.num_samples, dtype=np.int64)
    levels: list[NDArray[np.int64]] = []
    firsts: list[NDArray[np.int64]] = []
    slots: list[NDArray[np.int64]] = []
    num_slots = np.zeros(num_leaves, dtype=np.int64)
    ends: list[tuple[int, NDArray[np.int64]]] = []
    num_groups = 0
    for level in range(samples.num_levels - 1, -1, -1):
        ids = np.flatnonzero(nodes.levels == level)
        if not ids.size:
            continue
        num_nodes = num_leaves >> level
        node_of = nodes.indices[ids]
        pack_of = _first_fit(
            samples.tokens[level, ids], node_of=node_of, num_nodes=num_nodes, capacity=samples.capacity
        )
        counts = np.zeros(num_nodes, dtype=np.int64)
        np.maximum.at(counts, node_of, pack_of + 1)
        first_of = np.cumsum(counts) - counts
        group_of[ids] = num_groups + first_of[node_of] + pack_of
        of_groups = np.repeat(np.arange(num_nodes), counts)
        num_groups += of_groups.size
        before = num_slots[: num_nodes << level : 1 << level]
        levels.append(np.full(of_groups.size, level, dtype=np.int64))
        firsts.append(of_groups << level)
        slots.append(before[of_groups] + np.arange(of_groups.size) - first_of[of_groups])
        num_slots[: num_nodes << level] += np.repeat(counts, 1 << level)
        ends.append((level, num_slots.copy()))
    none = [np.zeros(0, dtype=np.int64)]
    num_slots = np.maximum(num_slots, 1)
    if even:
        num_slots[:] = -(-int(num_slots.max()) // multiple) * multiple
    else:
        for level, end in ends:
            num_slots = _end_together(num_slots, level=level, end=end)
    return Groups(
        group_of=group_of,
        levels=np.concatenate(levels or none),
        first_leaves=np.concatenate(firsts or none),
        slots=np.concatenate(slots or none),
        num_slots=num_slots,
    )


def _end_together(num_slots: NDArray[np.int64], *, level: int, end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Adds a dummy to leaves that end with a node's last micro-batch while other leaves of the node have more.

    Args:
        num_slots: `[num_leaves]`, of all levels.
        level: of the nodes.
        end: `[num_leaves]` slots up to this level.
    """
    reach = num_slots.size >> level << level
    fullest = np.repeat(num_slots[:reach].reshape(-1, 1 << level).max(axis=1), 1 << level)
    short = (num_slots[:reach] == end[:reach]) & (fullest > end[:reach])
    return np.concatenate([num_slots[:reach] + short, num_slots[reach:]])


def _first_fit(
    tokens: NDArray[np.int64], *, node_of: NDArray[np.int64], num_nodes: int, capacity: int
) -> NDArray[np.int64]:
    """First-fit decreasing in every node at once, `[num_items]` pack of each item from 0.

    Args:
        tokens: `[num_items]`; an item above `capacity` runs alone.
        node_of: `[num_items]`.
        num_nodes: nodes.
        capacity: tokens of a pack.
    """
    held = np.clip(tokens, 1, capacity)
    order = np.lexsort((np.arange(tokens.size), -held, node_of))
    nodes = node_of[order]
    # The position of every item in its node: round r packs the r-th item of every node.
    starts = np.searchsorted(nodes, nodes)
    position = np.arange(nodes.size) - starts
    room = np.zeros(num_nodes, dtype=np.int64)
    np.add.at(room, node_of, held)
    # Two packs together hold more than `capacity`, or first fit would not have opened the second.
    width = 2 * (int(room.max()) // capacity) + 1
    rooms = np.full((num_nodes, width), capacity, dtype=np.int64)
    pack_of = np.zeros(tokens.size, dtype=np.int64)
    by_position = np.argsort(position, kind="stable")
    bounds = np.cumsum(np.bincount(position))
    for first, last in zip([0, *bounds.tolist()], bounds.tolist(), strict=False):
        items = order[by_position[first:last]]
        of_items = node_of[items]
        pack = (rooms[of_items] >= held[items, None]).argmax(axis=1)
        rooms[of_items, pack] -= held[items]
        pack_of[items] = pack
    return pack_of
