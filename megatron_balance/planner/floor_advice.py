"""Advises where one sample costs more than a rank's even share, which no plan can mend.

At a fixed number of GPUs, context parallelism of c over d data-parallel ranks keeps `d * c` constant. The
largest sample of cost m is shared by c GPUs, the total cost C by all, so that the step lasts at least
`m * d / C` times its even share: twice the context parallelism halves the floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.topology import Topology

TOLERATED_PERCENT = 101
"""Floors up to this percentage of the even share are ignored."""


@dataclass(frozen=True)
class FloorAdvice:
    """The single-sample floor and what lifts it.

    Attributes:
        floor: cost of the largest sample over a rank's even share, at least 1.0.
        dp_size: data-parallel ranks now.
        cp_size: the least context parallelism, a power of two, at which the floor is gone on the same GPUs;
            the present one where the floor is ignored, None where none divides the ranks.
        fitting_tokens: longest length to shorten samples to at the present context parallelism, so that the
            floor is gone; None where no length does it, since there are too few samples.
        num_longer: samples above `fitting_tokens`.
        message: the above in one line.
    """

    floor: float
    dp_size: int
    cp_size: int | None
    fitting_tokens: int | None
    num_longer: int
    message: str


def floor_advice(lengths: NDArray[np.int64], *, cost_model: CostModel, topology: Topology) -> FloorAdvice:
    """Computes the floor that a global batch's largest sample sets, and what would lift it.

    Args:
        lengths: `[num_samples]` int64 original tokens.
        cost_model: cost of a sample.
        topology: the ranks now; `dp_size * cp_size` stays when context parallelism is raised.

    Example:
        >>> advice = floor_advice(np.array([4, 1, 1, 2]), cost_model=CostModel.tokens(), topology=Topology(4))
        >>> advice.message
        'floor 2.00x at DP4: raise --context-parallel-size to 2 or shorten samples above 1 tokens (2 of them)'
    """
    largest, total = _largest_and_total(lengths, cost_model=cost_model, topology=topology)
    floor = max(1.0, largest * topology.dp_size / total) if total else 1.0
    fitting: int | None = int(lengths.max(initial=0))
    cp_size: int | None = topology.cp_size
    if not _tolerated(largest, total, dp_size=topology.dp_size):
        cp_size = _least_cp_size(lengths, cost_model=cost_model, topology=topology)
        fitting = _fitting_tokens(lengths, cost_model=cost_model, topology=topology)
    num_longer = 0 if fitting is None else int((lengths > fitting).sum())
    return FloorAdvice(
        floor=floor,
        dp_size=topology.dp_size,
        cp_size=cp_size,
        fitting_tokens=fitting,
        num_longer=num_longer,
        message=_message(floor, cp_size=cp_size, fitting=fitting, num_longer=num_longer, topology=topology),
    )


def _message(floor: float, *, cp_size: int | None, fitting: int | None, num_longer: int, topology: Topology) -> str:
    start = f"floor {floor:.2f}x at DP{topology.dp_size}"
    if cp_size == topology.cp_size:
        return f"{start}: no single sample holds up the step"
    ways: list[str] = []
    if cp_size is not None:
        ways.append(f"raise --context-parallel-size to {cp_size}")
    if fitting is not None:
        ways.append(f"shorten samples above {fitting} tokens ({num_longer} of them)")
    return f"{start}: {' or '.join(ways) or 'train on more samples a step, or on fewer ranks'}"


def _largest_and_total(lengths: NDArray[np.int64], *, cost_model: CostModel, topology: Topology) -> tuple[int, int]:
    """Cost of the costliest sample and of all; expert work that ranks share weighs on no single one."""
    scaled = cost_model.sample_costs(topology.padded_seq_len(lengths))
    costs = scaled.costs if topology.ep_span > 1 else scaled.costs + scaled.expert_costs
    return int(costs.max(initial=0)), int(costs.sum())


def _tolerated(largest: int, total: int, *, dp_size: int) -> bool:
    return 100 * largest * dp_size <= TOLERATED_PERCENT * total


def _least_cp_size(lengths: NDArray[np.int64], *, cost_model: CostModel, topology: Topology) -> int | None:
    num_ranks = topology.dp_size * topology.cp_size
    cp_size = 1
    while cp_size <= num_ranks:
        if cp_size > topology.cp_size and num_ranks % cp_size == 0:
            other = replace(topology, dp_size=num_ranks // cp_size, cp_size=cp_size)
            largest, total = _largest_and_total(lengths, cost_model=cost_model, topology=other)
            if _tolerated(largest, total, dp_size=other.dp_size):
                return cp_size
        cp_size *= 2
    return None


def _fitting_tokens(lengths: NDArray[np.int64], *, cost_model: CostModel, topology: Topology) -> int | None:
    """By bisection: cutting at a shorter length never makes the largest sample a larger part of the total."""
    low, high = 0, int(lengths.max(initial=0))
    while high - low > 1:
        middle = (low + high) // 2
        cut = np.minimum(lengths, middle)
        largest, total = _largest_and_total(cut, cost_model=cost_model, topology=topology)
        if _tolerated(largest, total, dp_size=topology.dp_size):
            low = middle
        else:
            high = middle
    return low or None
