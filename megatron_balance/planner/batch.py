"""One global batch in integers: what each sample costs, the room it takes, and which ranks wait for one another.

All that the planner knows of a run is in `Batch`: no lengths, no model, no names. The time of any plan follows from it,
and a bound that no plan beats. Each part of the bound is sound on integers, never above the best plan:

mean        the work of all, spread evenly over all ranks
largest     one sample, with its part of shared work, runs whole on one rank
pigeonhole  among the k*D + 1 costliest samples some of D ranks holds k + 1
forced      at most k samples heavier than cap/(k+1) share a micro-batch, so that the i highest rows of e ranks hold
            at most k*i*e of them, and the next row is at least as high as the costliest left over. What the i
            highest rows cannot hold is spread evenly over all rows.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron_balance.cost.model import MAX_TOTAL_COST
from megatron_balance.errors import BalanceError
from megatron_balance.planner.inputs import Ints, Problem, sum_segments
from megatron_balance.planner.times import Waiting, waiting

MOST_SHARING = 4
"""Forced heights look at samples of which at most this many share a micro-batch."""


@dataclass(frozen=True)
class Plan:
    """The micro-batches of a batch."""

    microbatch_of: Ints  # [num_samples] rank * num_microbatches + slot; of several leaves the first
    cp_sizes: Ints  # [num_ranks, num_microbatches] leaves that share each, as DataSchedule.cp_size_grid; 1 at one size


@dataclass(frozen=True, eq=False)
class Batch:
    """A global batch at one context-parallel size.

    Costs have one part, or, where ranks meet between the two, vision encoder and language model. An over-long sample
    weighs `cap + 1`: it runs alone.
    """

    costs: Ints  # [num_parts, num_samples] on a sample's own rank
    _: KW_ONLY
    shared: Ints  # [num_samples] cost that the expert-parallel group of its rank shares
    weights: Ints  # [num_samples] room in a micro-batch: padded tokens, or 1 where samples are counted
    cap: int  # room of a micro-batch
    num_ranks: int  # data-parallel ones
    waiting: Waiting  # which of them wait for one another
    expert_span: int = 1  # neighbouring ranks that share the work of experts
    launch: int = 0  # fixed cost of a micro-batch, an empty one included
    multiple: int = 1  # the number of micro-batches is a multiple of this
    shift: int = 0  # costs are in units of 2**shift of the cost model's

    @property
    def num_samples(self) -> int:
        """Samples of the global batch."""
        return self.weights.size

    @property
    def span(self) -> int:
        """Ranks of a group: those that wait for one another in every micro-batch."""
        return self.waiting.span

    @property
    def num_groups(self) -> int:
        """Groups of ranks that meet."""
        return self.num_ranks // self.span

    @cached_property
    def own(self) -> Ints:
        """`[num_samples]` cost on its own rank; at least 1, so that samples that cost nothing are spread as well."""
        return np.maximum(self.costs.sum(axis=0), 1)

    @cached_property
    def oversized(self) -> Ints:
        """Ids of the samples longer than the cap."""
        return np.flatnonzero(self.weights > self.cap)

    def take(self, ids: Ints) -> Batch:
        """Some of the samples, in the order of `ids`."""
        return replace(self, costs=self.costs[:, ids], shared=self.shared[ids], weights=self.weights[ids])

    def with_sample_cap(self, most: int) -> Batch:
        """A batch whose bins hold at most so many samples as well.

        Where each weighs at least the `most`-th part of the cap, no more than `most` fit. It is stricter than both caps
        where a bin mixes heavy samples with light ones; bounds are those of the batch without.
        """
        return replace(self, weights=np.maximum(self.weights * most, self.cap), cap=self.cap * most)

    def heights(self, bin_of: Ints, rows: int) -> Ints:
        """Cost of every bin without `launch`, with its even share of the work of its expert-parallel group, rounded up.

        For `(group * rows + row) * span + column` of each sample `[num_parts, num_groups, rows, span]`.
        """
        num_bins, cells = self.num_ranks * rows, (self.num_groups, rows, self.span)
        heights = np.stack([sums(part, bin_of, num_bins).reshape(cells) for part in self.costs])
        if self.expert_span > 1:
            work = sums(self.shared, bin_of, num_bins).reshape(cells).swapaxes(0, 1).reshape(rows, -1, self.expert_span)
            share = -(-work.sum(axis=2) // self.expert_span).repeat(self.expert_span, axis=1)
            heights[-1] += share.reshape(rows, self.num_groups, self.span).swapaxes(0, 1)
        return heights

    def row_times(self, bin_of: Ints, rows: int) -> Ints:
        """`[num_groups, rows]`: a row lasts as long as its highest bin, of each part."""
        return self.heights(bin_of, rows).max(axis=3).sum(axis=0) + self.launch

    def cost_grid(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """Cost of every micro-batch, `[num_ranks, num_microbatches]`. Of `cp_sizes` only the shape matters."""
        return self._parts(microbatch_of, cp_sizes.shape[1]).sum(axis=0) + self.launch

    def time(self, microbatch_of: Ints, cp_sizes: Ints) -> int:
        """Predicted time of the step, in the units of the costs; arguments as for `cost_grid`."""
        num_microbatches = cp_sizes.shape[1]
        of_groups = self._parts(microbatch_of, num_microbatches).reshape(
            len(self.costs), -1, self.span, num_microbatches
        )
        return int(self.waiting.times(of_groups.max(axis=2).sum(axis=0) + self.launch).max())

    def _parts(self, microbatch_of: Ints, num_microbatches: int) -> Ints:
        """`[num_parts, num_ranks, num_microbatches]`."""
        alone = replace(self, waiting=replace(self.waiting, span=1))
        return alone.heights(microbatch_of, num_microbatches)[..., 0]

    @cached_property
    def least_rows(self) -> int:
        """Micro-batches that every rank needs at least, a multiple of `multiple`.

        They hold all weight, and at most k samples heavier than cap/(k+1) each.
        """
        inside = self.weights[self.weights <= self.cap]
        heavy = [-(-int(((most + 1) * inside > self.cap).sum()) // most) for most in range(1, MOST_SHARING + 1)]
        bins = self.oversized.size + max(-(-int(inside.sum()) // self.cap), *heavy)
        return max(-(-bins // (self.num_ranks * self.multiple)), 1) * self.multiple

    @cached_property
    def least_work(self) -> int:
        """Work of the slowest group at least, over all stages together and without `launch`."""
        own, shared = self.costs.sum(axis=0), int(self.shared.sum())
        work = max(-(-(int(own.sum()) + shared) // self.num_ranks), self._largest)
        if self.span == 1:
            return max(work, _pigeonhole(own, num_parts=self.num_ranks))
        # Ranks that wait for the costliest sample may compute shared work of a smaller group meanwhile.
        beside = shared if self.span == self.expert_span else 0
        return max(work, -(-(_with_forced_rows(self, own) + beside) // self.num_ranks))

    def least_time(self, rows: int) -> int:
        """A time that no plan with this many micro-batches or more can beat."""
        work = self.least_work + rows * self.launch
        return self.waiting.at_least(work, launch=self.launch, longest=self._largest + self.launch)

    def lower_bound(self) -> int:
        """A time that no plan which may move samples can beat."""
        return self.least_time(self.least_rows)

    @property
    def _largest(self) -> int:
        return int((self.costs.sum(axis=0) + -(-self.shared // self.expert_span)).max(initial=0))

    def single_sample_floor(self) -> float:
        """The largest sample over a rank's even share, at least 1.0: no plan brings the slowest rank below it."""
        own = self.costs.sum(axis=0)
        return max(1.0, int(own.max(initial=0)) * self.num_ranks / max(int(own.sum()), 1))

    def check_total(self, *, num_microbatches: int) -> None:
        """Raises BalanceError if the costs of all micro-batches exceed int64."""
        num_slots = self.num_ranks * num_microbatches
        total = int(self.costs.sum()) + int(self.shared.sum()) + num_slots * (self.launch + 1)
        if total >= MAX_TOTAL_COST:
            raise BalanceError(
                f"CostModel.per_microbatch is {self.launch}: with {num_slots} micro-batches the costs sum to {total}, "
                "which must stay below 2**62. Divide all coefficients by the same number."
            )


def sums(values: Ints, index: Ints, size: int) -> Ints:
    """`[size]` sums of the values of each index."""
    out = np.zeros(size, dtype=np.int64)
    np.add.at(out, index, values)
    return out


def _pigeonhole(costs: Ints, *, num_parts: int) -> int:
    """Max over k of the k+1 smallest of the k*num_parts + 1 costliest."""
    falling = np.sort(costs)[::-1]
    totals = np.concatenate([[0], np.cumsum(falling)])
    ends = np.arange(num_parts + 1, costs.size + 1, num_parts)
    held = np.arange(2, ends.size + 2)
    return int((totals[ends] - totals[ends - held]).max(initial=0))


def _with_forced_rows(batch: Batch, own: Ints) -> int:
    """Own cost of all samples plus what ranks idle beside rows that large samples force to be high."""
    total, span, cap = int(own.sum()), batch.span, batch.cap
    order = np.argsort(-own, kind="stable")
    costs, weights = own[order], batch.weights[order].clip(max=cap)
    forced = costs[:1]
    for most in range(1, MOST_SHARING + 1):
        heights = costs[(most + 1) * weights > cap][:: most * span]
        short, long = sorted((forced, heights), key=len)
        forced = np.concatenate([np.maximum(short, long[: short.size]), long[short.size :]])
    rooms = span * cap * np.arange(forced.size + 1)
    held = _most_cost(costs, weights, rooms)
    return max(
        span * height + total - most_held
        for height, most_held in zip(accumulate(forced.tolist(), initial=0), held, strict=True)
    )


def _most_cost(costs: Ints, weights: Ints, rooms: Ints) -> list[int]:
    """The most cost that each of some rooms can hold, samples cut freely: a fractional knapsack, rounded up."""
    # Cost for each unit of weight, with as many bits behind the point as int64 has left.
    bits = max(61 - int(costs.max(initial=0)).bit_length(), 0)
    density = np.where(weights > 0, (costs << bits) // np.maximum(weights, 1), np.iinfo(np.int64).max)
    order = np.argsort(-density, kind="stable")
    costs, weights = costs[order], weights[order]
    cost_before, weight_before = ([0, *np.cumsum(values).tolist()] for values in (costs, weights))
    cut: list[int] = np.searchsorted(np.cumsum(weights), rooms, side="right").tolist()
    # Samples whose densities differ behind these bits may stand in the wrong order.
    slack = (weight_before[-1] >> bits) + 1
    held: list[int] = []
    for room, index in zip(rooms.tolist(), cut, strict=True):
        cost = cost_before[index]
        if index < costs.size:
            cost += -(-(room - weight_before[index]) * int(costs[index]) // int(weights[index])) + slack
        held.append(min(cost, cost_before[-1]))
    return held


def make_batch(problem: Problem) -> Batch:
    """Lengths, cost model, ranks and limits in integers, at one context-parallel size.

    Images take no room in a micro-batch beside the tokens that they become.
    """
    topology, cost_model, limits, images = problem.topology, problem.cost_model, problem.limits, problem.images
    expert_span = topology.ep_dp_size
    if topology.dp_size % expert_span:
        raise BalanceError(
            f"ep_size is {topology.ep_size}: expert-parallel groups of {expert_span} data-parallel ranks "
            f"do not divide dp_size {topology.dp_size}."
        )
    padded = topology.padded_seq_len(problem.segments)
    scaled = replace(cost_model, stages=None).sample_costs(
        padded, image_patches=None if images is None else images.sums
    )
    columns = (scaled.costs[0], scaled.expert_costs[0], padded)
    own, shared, tokens = (sum_segments(column, num_segments=problem.num_segments) for column in columns)
    if expert_span == 1:
        # An expert group inside one rank's tensor-parallel group shares nothing with other ranks.
        own, shared = own + shared, np.zeros_like(shared)
    costs = own[None]
    where = waiting(problem.objective, topology=topology)
    if images is not None:
        meets_between = where.in_slots and where.span > 1 and not where.is_makespan
        costs = np.stack([scaled.image_costs[0], own]) if meets_between else own + scaled.image_costs
    cap = limits.max_tokens_per_microbatch(topology)
    if cap is not None:
        cap = min(cap, max(int(tokens.sum()), 1))  # as good as none, and within int64
    return Batch(
        costs,
        shared=shared,
        weights=np.ones_like(tokens) if cap is None else np.minimum(tokens, cap + 1),
        cap=cap or limits.micro_batch_size or 1,
        num_ranks=topology.dp_size,
        waiting=where,
        expert_span=expert_span,
        launch=int(scaled.per_microbatch[0]),
        multiple=topology.microbatch_multiple,
        shift=scaled.shift,
    )
