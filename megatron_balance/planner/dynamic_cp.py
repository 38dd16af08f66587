"""Plans in which every micro-batch has a context-parallel size of its own.

The `dp_size * cp_size` ranks are the leaves of a binary tree, or a forest if their number is no power of two. A
micro-batch stands on a node, and the `2**level` leaves below it share its samples. The cost of a sample of L tokens on
each of c = 2**level ranks is, rounded up,

    linear*L / c  +  max(attention(L) / c, cp_exchange * L * (c - 1) / c)

with L padded for that size: a larger size means less computation and more exchange on each rank.

    1. A limit gives every sample its size: the smallest with room whose ranks pay at most the limit.
    2. `step`: samples go to nodes from the root down, costliest first to the node with the least full leaf, within a
       target that halving makes the least; one that does not fit takes the next larger size.
    3. `microbatch`, `pipeline`: all leaves meet in a row of micro-batches. The sizes in turn are poured into packs,
       beside giants first; then packs of like cost make rows, and leaves that are left widen the costliest.

`dynamic_plan.py` has these steps; this file the samples at every size, the time of a plan, and a bound on it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST
from megatron_balance.errors import BalanceError
from megatron_balance.planner.batch import sums
from megatron_balance.planner.inputs import NEVER, Ints, Problem, sum_segments
from megatron_balance.planner.pipeline import makespans
from megatron_balance.planner.times import Waiting, waiting


@dataclass(frozen=True, eq=False)
class SizedBatch:
    """A global batch, each sample shared by 1, 2, 4 … ranks."""

    costs: Ints  # [num_levels, num_samples] on each of the 2**level ranks that share a sample
    _: KW_ONLY
    shared: Ints  # [num_levels, num_samples] cost over all of them that expert-parallel groups share
    tokens: Ints  # [num_levels, num_samples] padded, on each of them
    cap: int  # tokens that a rank holds in one micro-batch
    launch: int  # fixed cost of a micro-batch on each of its ranks
    dp_cp_size: int  # ranks that micro-batches are spread over
    expert_span: int  # neighbouring leaves that share the work of experts
    waiting: Waiting  # which leaves wait for one another, beside those that share a micro-batch
    even: bool  # all leaves have the same number of slots, a multiple of `multiple`
    multiple: int
    shift: int  # costs are in units of 2**shift of the cost model's

    @property
    def num_levels(self) -> int:
        """Sizes to choose from: 1, 2, 4 … `2**(num_levels - 1)` ranks."""
        return self.costs.shape[0]

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return self.costs.shape[1]

    @cached_property
    def least_levels(self) -> Ints:
        """The smallest size with room for a sample alone, `[num_samples]`; the largest size for over-long ones."""
        return np.minimum((self.tokens > self.cap).sum(axis=0), self.num_levels - 1)

    @cached_property
    def oversized(self) -> Ints:
        """Ids of the samples longer than the ranks of the largest size hold: each runs alone."""
        return np.flatnonzero(self.tokens[-1] > self.cap)

    @cached_property
    def cheapest(self) -> Ints:
        """The size with room at which a sample costs its ranks least, `[num_samples]`."""
        has_room = np.arange(self.num_levels)[:, None] >= self.least_levels
        return np.where(has_room, self.costs, NEVER).argmin(axis=0)

    def at(self, table: Ints, levels: Ints) -> Ints:
        """`[num_samples]` of `costs` or `tokens`, where each sample has a level of its own."""
        return table[levels, np.arange(self.num_samples)]

    def with_experts_as_own(self) -> SizedBatch:
        """The batch with the work of experts done by the ranks of their tokens, where groups of leaves share it."""
        of_ranks = -(-self.shared // (1 << np.arange(self.num_levels)[:, None]))
        return replace(self, costs=self.costs + of_ranks, shared=np.zeros_like(self.shared))

    def levels_within(self, limit: int) -> Ints:
        """The smallest size with room whose ranks pay at most `limit`, `[num_samples]`; else the cheapest."""
        levels = self.least_levels.copy()
        high = np.flatnonzero(self.at(self.costs, levels) > limit)
        costs = self.costs[:, high]
        within = (np.arange(self.num_levels)[:, None] >= levels[high]) & (costs <= limit)
        levels[high] = np.where(within.any(axis=0), within.argmax(axis=0), self.cheapest[high])
        return levels

    @cached_property
    def least_rows(self) -> int:
        """Lower bound on the micro-batches of the busiest rank, from tokens; at least one."""
        return max(1, -(-self._room_needed() // (self.cap * self.dp_cp_size)))

    def cost_grid(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """Cost of every leaf's micro-batches, `[dp_cp_size, num_microbatches]`: dummies cost `launch`, no slot 0."""
        levels = (1 << np.arange(self.num_levels)).searchsorted(cp_sizes.reshape(-1)[microbatch_of])
        of_first = sums(self.at(self.costs, levels), microbatch_of, cp_sizes.size).reshape(cp_sizes.shape)
        first = first_ranks(cp_sizes)
        grid = of_first[first, np.arange(first.shape[1])] + self.launch
        if self.shared.any():
            work = sums(self.at(self.shared, levels), microbatch_of, cp_sizes.size).reshape(cp_sizes.shape)
            of_leaves = -(-work[first, np.arange(first.shape[1])] // np.maximum(cp_sizes, 1))
            starts = np.arange(0, self.dp_cp_size, self.expert_span)
            of_groups, members = np.add.reduceat(of_leaves, starts), np.diff(starts, append=self.dp_cp_size)
            grid += (-(-of_groups // members[:, None])).repeat(members, axis=0)
        grid[cp_sizes == 0] = 0
        return grid

    def time(self, microbatch_of: Ints, cp_sizes: Ints) -> int:
        """Predicted time of a plan: of the slowest leaf, or of all if they wait in every slot.

        In a pipeline without that, a stage runs its micro-batches in slot order, each once all its leaves are free.
        """
        costs, first = self.cost_grid(microbatch_of, cp_sizes), first_ranks(cp_sizes)
        if self.waiting.in_slots:
            return int(self.waiting.times(costs.max(axis=0, keepdims=True))[0])

        def peers(times: Ints, slots: Ints) -> Ints:
            together, columns = np.zeros_like(times), np.arange(slots.size)
            np.maximum.at(together, (first[:, slots], columns), times)
            return together[first[:, slots], columns]

        return int(makespans(costs[:, None], self.waiting.pipeline, peers=peers).max())

    def lower_bound(self) -> int:
        """A time that no plan can beat."""
        return self.waiting.at_least(self.least_work(), launch=self.launch)

    def single_sample_floor(self) -> float:
        """The largest sample, at its cheapest size, over an even share of the least work; at least 1.0."""
        largest = int(self.at(self.costs, self.cheapest).max(initial=0))
        total = int((self.at(self.costs, self.least_levels) << self.least_levels).sum())
        return max(1.0, largest * self.dp_cp_size / max(total, 1))

    def least_work(self) -> int:
        """Lower bound on the work of the fullest leaf.

        In a time T a sample runs at a size with room for its tokens at which its cost on each rank is at most T. Its
        total cost is least at the smallest such size, because every further rank adds communication. So T is possible
        only if these costs fit on the ranks, and for every size those of this size and larger ones fit on the ranks
        that micro-batches of this size cover. The least such T is found by halving. The work of experts comes on top
        where all leaves share it; where smaller groups do, it may fill what ranks idle.
        """
        if not self.num_samples:
            return self.launch
        least_slots = self.dp_cp_size
        if self.even:
            least_slots *= self.least_rows
        else:
            least_slots = max(least_slots, self._room_needed() // self.cap)
        cheapest = self.at(self.costs, self.least_levels)
        low, high = 0, int(self.costs[0].sum()) + int(cheapest.sum()) + self.launch * (least_slots + 1)
        high += int(self.shared[0].sum())
        while low < high:
            middle = (low + high) // 2
            if self._is_possible(middle, least_slots=least_slots):
                high = middle
            else:
                low = middle + 1
        return low + (self.even_shared if self.expert_span >= self.dp_cp_size else 0)

    @property
    def even_shared(self) -> int:
        """Work of experts over all leaves at least, on each of them."""
        return -(-int(self.shared[0].sum()) // self.dp_cp_size)

    def _is_possible(self, time: int, *, least_slots: int) -> bool:
        """False where no plan ends within `time`. `least_slots`: micro-batches, each counted once a rank."""
        levels = self.levels_within(time - self.launch)
        costs = self.at(self.costs, levels)
        if int(costs.max()) > time - self.launch:
            return False
        areas = sums(costs << levels, levels, self.num_levels)
        of_larger: list[int] = np.cumsum(areas[::-1])[::-1].tolist()
        beside = int(self.shared[0].sum()) if self.expert_span < self.dp_cp_size else 0
        if of_larger[0] + beside + self.launch * least_slots > time * self.dp_cp_size:
            return False
        return all(area <= time * (self.dp_cp_size >> level << level) for level, area in enumerate(of_larger))

    def _room_needed(self) -> int:
        """Tokens of all samples at their smallest size, over all ranks; an over-long one fills its ranks."""
        held = np.minimum(self.at(self.tokens, self.least_levels), self.cap)
        return int((held << self.least_levels).sum())


def first_ranks(cp_sizes: Ints) -> Ints:
    """The first leaf of every leaf's micro-batches, a multiple of their size, `[dp_cp_size, num_microbatches]`."""
    leaves = np.arange(len(cp_sizes))[:, None]
    return leaves - leaves % np.maximum(cp_sizes, 1)


def make_sized_batch(problem: Problem) -> SizedBatch:
    """Padded tokens and cost of every sample at every size, in integers."""
    topology, cost_model, limits = problem.topology, problem.cost_model, problem.limits
    if limits.micro_batch_size is not None or limits.max_tokens_per_gpu is None:
        raise BalanceError(
            f"Limits.micro_batch_size is {limits.micro_batch_size} with Topology.dynamic_cp: sizes follow from a token "
            "cap, so set max_tokens_per_gpu alone."
        )
    sizes, per_token = topology.dynamic_cp_sizes, cost_model.expert_linear
    if topology.ep_dp_size == 1:
        cost_model, per_token = replace(cost_model, linear=cost_model.linear + per_token, expert_linear=0), 0
    unique, inverse, counts = np.unique(problem.segments, return_inverse=True, return_counts=True)
    padded = [topology.with_cp_size(size).padded_seq_len(unique) for size in sizes]
    own = [cost_model.summed_over_cp(size).local_cost(of_size) for of_size, size in zip(padded, sizes, strict=True)]
    shared = [of_size.astype(object) * per_token for of_size in padded]
    # Upper bound: padding and communication grow with the size, and each sample may be a micro-batch by itself.
    most = sum(cost * count for cost, count in zip((own[-1] + shared[-1]).tolist(), counts.tolist(), strict=True))
    most += cost_model.per_microbatch * (problem.lengths.size + 1) * topology.dp_cp_size
    shift = max(0, most.bit_length() - (MAX_TOTAL_COST.bit_length() - 3))

    def of_samples(costs: NDArray[Any], size: int) -> Ints:
        """Costs on each of `size` ranks. Rounded up once, so that a larger size never costs less in all."""
        per_rank = (-(-costs // (size << shift))).astype(np.int64)
        return sum_segments(per_rank[inverse], num_segments=problem.num_segments)

    def tokens_of(tokens: Ints, size: int) -> Ints:
        return -(-sum_segments(tokens[inverse], num_segments=problem.num_segments) // size)

    tokens = np.stack([tokens_of(tokens, size) for tokens, size in zip(padded, sizes, strict=True)])
    return SizedBatch(
        np.stack([of_samples(costs, size) for costs, size in zip(own, sizes, strict=True)]),
        shared=np.stack([of_samples(costs, 1) for costs in shared]),
        tokens=tokens,
        cap=min(limits.max_tokens_per_gpu, max(int(tokens[0].sum()), 1)),  # as good as none, and within int64
        launch=max(cost_model.per_microbatch >> shift, 1) if cost_model.per_microbatch else 0,
        dp_cp_size=topology.dp_cp_size,
        expert_span=topology.ep_dp_size,
        waiting=waiting(problem.objective, topology=topology),
        even=topology.has_equal_counts or problem.objective != "step",
        multiple=topology.microbatch_multiple,
        shift=shift,
    )
