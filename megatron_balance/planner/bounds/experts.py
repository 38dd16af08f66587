"""Lower bound where each group of ranks meets by itself and shares expert work.

A large sample makes a slot of its group at least as long as itself, and the other ranks of the group wait unless
they hold samples as well. Those cost the group their shared work. So a group that ends by time V has little shared work
left beside its large sample. With little shared work it holds little own cost, and some of its time is lost.

With e ranks in a group, b the falling own costs, V the time of the slowest group:

    1. a group whose highest slot is at least b holds shared work of at most e*(V - b)
    2. the most own cost for that shared work is a fractional knapsack, O(e*(V - b))
    3. among the j costliest samples at most q fit into one group, so the i-th of the groups that hold them is
       forced to b[(i-1)*q], counted from 0
    4. those groups lose e*sum(b) - O(e*sum(V - b)), and all groups together have dp_size*V

The least V for which own and shared costs and this loss fit into dp_size*V is found by halving.
"""

from __future__ import annotations

import numpy as np

from megatron_balance.planner.kinds import Kinds
from megatron_balance.planner.problem import Problem

MAX_LARGE = 64
"""Most large samples that are considered."""

PRECISION = 14
"""The bound is within one part in `2**PRECISION` of the exact one, below it."""


class _Knapsack:
    """The most own cost for an amount of shared work."""

    def __init__(self, kinds: Kinds) -> None:
        shared = kinds.shared_costs
        densities = np.where(shared > 0, kinds.costs / np.maximum(shared, 1), np.inf)
        order = np.argsort(-densities, kind="stable")
        self._own, self._shared, counts = kinds.costs[order], shared[order], kinds.counts[order]
        self._own_sums = np.concatenate([[0], np.cumsum(self._own * counts)])
        self._shared_sums = np.cumsum(self._shared * counts)

    def most(self, shared: int) -> int:
        """Own cost, rounded up."""
        index = int(np.searchsorted(self._shared_sums, shared, side="right"))
        held = int(self._own_sums[index])
        if index < self._own.size:
            free = shared - (int(self._shared_sums[index - 1]) if index else 0)
            held += -(-free * int(self._own[index]) // int(self._shared[index]))
            # Densities are rounded, so that neighbours may stand in the wrong order by one part in 2**52.
            held += (held >> 48) + 1
        return min(held, int(self._own_sums[-1]))


def expert_bound(problem: Problem, *, at_least: int) -> int:
    """Lower bound on the slowest group's time without `per_microbatch`, at least `at_least`."""
    dp_size, span = problem.topology.dp_size, problem.sync_group_size
    if span != problem.topology.ep_span or span in (1, dp_size) or not problem.shared_costs.any():
        return at_least
    total = int(problem.costs.sum()) + int(problem.shared_costs.sum())
    kinds = problem.kinds
    kind_of = np.repeat(np.arange(kinds.counts.size)[:MAX_LARGE], kinds.counts[:MAX_LARGE])[:MAX_LARGE]
    large = [cost for cost in kinds.costs[kind_of].tolist() if cost * dp_size > total // 4]
    shared = kinds.shared_costs[kind_of[: len(large)]].tolist()
    knapsack = _Knapsack(kinds)

    def fits(time: int) -> bool:
        return all(
            total + _loss(large[:count], sorted(shared[:count]), time=time, span=span, knapsack=knapsack)
            <= dp_size * time
            for count in range(1, len(large) + 1)
        )

    low, high = at_least, at_least
    while not fits(high):
        low, high = high + 1, 2 * high + 1
    while high - low > low >> PRECISION:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _loss(large: list[int], rising_shared: list[int], *, time: int, span: int, knapsack: _Knapsack) -> int:
    """Time that the groups of the costliest samples lose, times their ranks; too much where none of them fits."""
    together, shared = 0, 0
    for work in rising_shared:
        shared += work
        # The cheapest of the costliest samples: any other as many make the slot no lower.
        if span * large[-together - 1] + shared > span * time:
            break
        together += 1
    if not together:
        return knapsack.most(0) + span * time * (len(large) + 1)
    forced = large[::together]
    return max(0, span * sum(forced) - knapsack.most(span * sum(time - height for height in forced)))
