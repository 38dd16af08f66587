"""Assigns every sample to a node of the tree of ranks, minimizing the fullest leaf: the objective `step`.

The load of a leaf is the sum over all its ancestors. For a target time:

    1. a sample's level is the smallest size with room for it at which its cost on each rank is at most the target
    2. levels from the root down, in a level costliest first: a sample goes to the node whose fullest leaf is least
    3. if it would exceed the target there, it goes to the smallest larger size at which some node has room

Bisection between the lower bound and the first feasible target finds the least one; with few samples, larger groups
are tried as well.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner.dynamic_cp.samples import SizedSamples

_TOLERANCE = 2048
"""The search for a target ends within one part in this many of the lower bound."""

_SHARES = (1, 2, 4, 8)
"""Divisors of the target to try as the limit of a sample's cost on each rank: larger groups exchange more, but even
out few samples better."""

_MAX_PLACED = 65536
"""Most placements of samples during the search; a first feasible target is always found."""


@dataclass(frozen=True)
class Nodes:
    """The node of every sample: leaves `[index << level, (index + 1) << level)`.

    Attributes:
        levels: `[num_samples]` int64.
        indices: `[num_samples]` int64.
        time: cost of the fullest leaf.
    """

    levels: NDArray[np.int64]
    _: KW_ONLY
    indices: NDArray[np.int64]
    time: int


def place_on_tree(samples: SizedSamples, *, floor: int) -> Nodes:
    """Gives every sample a node.

    Args:
        samples: the global batch.
        floor: a lower bound on the time, where the search for a target starts.
    """
    # Fixed costs of micro-batches are spread over tokens, since most micro-batches are full.
    whole, part = divmod(samples.per_microbatch, samples.capacity)
    shares = whole * samples.tokens + part * samples.tokens // samples.capacity
    samples = replace(samples, costs=samples.costs + shares)
    best: Nodes | None = None
    low, step, num_placed = floor, floor // (4 * _TOLERANCE), 0
    while best is None:
        best = _place_within(samples, target=low + step, share=1)
        num_placed += samples.num_samples
        if best is None:
            low += step
            step = 2 * step + 1
    for share in _SHARES:
        if share > 1:
            low = floor
        while num_placed < _MAX_PLACED and best.time - low > floor // _TOLERANCE:
            middle = (low + best.time) // 2
            placed = _place_within(samples, target=middle, share=share)
            num_placed += samples.num_samples
            if placed is None:
                low = middle
            else:
                best = placed
    return best


def _place_within(samples: SizedSamples, *, target: int, share: int) -> Nodes | None:
    """Places every sample, or returns None if one would exceed the target. `share`: see `_SHARES`."""
    levels = samples.levels_within(target // share)
    wanted = levels.copy()
    indices = np.zeros(samples.num_samples, dtype=np.int64)
    loads = np.zeros(samples.num_leaves, dtype=np.int64)
    for level in range(samples.num_levels - 1, -1, -1):
        ids = np.flatnonzero(wanted == level)
        if not ids.size:
            continue
        costs = samples.costs[level, ids]
        ids = ids[np.argsort(-costs, kind="stable")]
        num_nodes = samples.num_leaves >> level
        of_nodes = loads[: num_nodes << level].reshape(num_nodes, -1)
        before = of_nodes.max(axis=1)
        node_loads: list[int] = before.tolist()
        bits = num_nodes.bit_length()
        mask = (1 << bits) - 1
        heap = [(load << bits) | node for node, load in enumerate(node_loads)]
        heapify(heap)
        for sample, cost in zip(ids.tolist(), samples.costs[level, ids].tolist(), strict=True):
            key = heap[0]
            # A larger group may have filled the node since its key was made.
            while key >> bits != node_loads[key & mask]:
                heapreplace(heap, (node_loads[key & mask] << bits) | (key & mask))
                key = heap[0]
            node = key & mask
            if node_loads[node] + cost <= target:
                node_loads[node] += cost
                indices[sample] = node
                heapreplace(heap, key + (cost << bits))
                continue
            larger = _larger_node(samples, sample, level=level, node_loads=node_loads, target=target)
            if larger is None:
                return None
            to_level, node = larger
            levels[sample], indices[sample] = to_level, node
            width = to_level - level
            for child in range(node << width, (node + 1) << width):
                node_loads[child] += int(samples.costs[to_level, sample])
        of_nodes += (np.array(node_loads) - before)[:, None]
    return Nodes(levels, indices=indices, time=int(loads.max()))


def _larger_node(
    samples: SizedSamples, sample: int, *, level: int, node_loads: list[int], target: int
) -> tuple[int, int] | None:
    """Level and index of the least full node of the smallest larger size that takes the sample within the target."""
    loads = np.array(node_loads)
    for larger in range(level + 1, samples.num_levels):
        width = larger - level
        num_nodes = samples.num_leaves >> larger
        fullest = loads[: num_nodes << width].reshape(num_nodes, -1).max(axis=1)
        node = int(fullest.argmin())
        if int(fullest[node]) + int(samples.costs[larger, sample]) <= target:
            return larger, node
    return None
