"""The time of a pipeline over micro-batches of different cost, and a good order for them.

One-forward-one-backward (D. Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", 2021): stage s of p runs p-1-s forwards, then one forward and one backward in
turn, then the backwards that are left. A micro-batch of cost c spends c/p on each stage, one third of it
forward and two thirds backward.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Meeting = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
"""Maps times `[num_ranks, n]` at which ranks are ready for slots `[n]` to those at which their peers are ready too."""


def pipeline_makespans(
    grid: NDArray[np.int64], *, pp_size: int, vpp_size: int = 1, meet: Meeting | None = None
) -> NDArray[np.int64]:
    """Time from the first forward to the last backward, for every rank.

    In the wavefront below, stage s runs the forward of micro-batch j at tick 2j + s and the backward of
    micro-batch i at tick 2i + 2p - 1 - s. That is the order of the schedule above on every stage, and what
    a stage waits for always ended on its neighbour at the tick before. So one number a stage is enough:
    when it is free.

    Interleaving (`vpp_size` chunks a stage) is an approximation: the bubble, makespan minus work of a stage,
    is divided by `vpp_size`, as it is for equal micro-batches. A micro-batch still passes all the layers, so
    its whole cost stays a floor.

    Args:
        grid: `[dp_size, num_microbatches]` costs in slot order, non-negative.
        pp_size: stages.
        vpp_size: model chunks a stage.
        meet: ranks that wait for one another before each pass of a slot, where pipelines are not independent.

    Returns:
        `[dp_size]` int64, in the units of `grid`, rounded up.
    """
    num_ranks, num_microbatches = grid.shape
    if pp_size == 1:
        return grid.sum(axis=1)
    # Times are whole in units of 1/(3p) of a cost; costs too large for that lose their last bits, upwards.
    worst = 3 * pp_size * int(grid.sum(axis=1).max())
    shift = max(0, worst.bit_length() - 62)
    costs = -(-grid // (1 << shift))

    free = np.zeros((num_ranks, pp_size), dtype=np.int64)
    stages = np.arange(pp_size)
    for tick in range(2 * (num_microbatches + pp_size - 1)):
        forward = tick - stages
        backward = forward - 2 * pp_size + 1 + 2 * stages
        forwards = stages[(forward % 2 == 0) & (forward >= 0) & (forward < 2 * num_microbatches)]
        backwards = stages[(backward % 2 == 0) & (backward >= 0) & (backward < 2 * num_microbatches)]
        # The first stage waits for no forward, the last for no backward: they are their own neighbours.
        after_forward = np.maximum(free[:, forwards], free[:, np.maximum(forwards - 1, 0)])
        after_backward = np.maximum(free[:, backwards], free[:, np.minimum(backwards + 1, pp_size - 1)])
        if meet is not None:
            after_forward = meet(after_forward, forward[forwards] // 2)
            after_backward = meet(after_backward, backward[backwards] // 2)
        free[:, forwards] = after_forward + costs[:, forward[forwards] // 2]
        free[:, backwards] = after_backward + 2 * costs[:, backward[backwards] // 2]

    work = 3 * costs.sum(axis=1)
    makespans = work + -(-(free.max(axis=1) - work) // vpp_size)
    makespans = -(-makespans // (3 * pp_size)) << shift
    return np.maximum(makespans, grid.max(axis=1))


def mountain_order(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slot order for a pipeline: small micro-batches at both ends, the largest in the middle.

    The other stages wait for the first forwards and the last backwards, so these should be small.

    Args:
        costs: `[dp_size, num_microbatches]`.

    Returns:
        `[dp_size, num_microbatches]` index of the micro-batch that each slot takes.
    """
    ascending = np.argsort(costs, axis=1, kind="stable")
    return np.concatenate([ascending[:, ::2], ascending[:, 1::2][:, ::-1]], axis=1)
