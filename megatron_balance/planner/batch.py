"""A planning problem in integers: the costs and the room of its samples, at one context-parallel size or at every size.

`make_batch` makes the `Batch` of `level_packing.py`. With dynamic context parallelism a micro-batch stands on a node of
a binary tree, or forest, of the `dp_size * cp_size` DP×CP ranks; the `2**level` ranks of a node share its samples. The
cost of a sample of L tokens on each of c = 2**level ranks is, rounded up,

    linear*L / c  +  max(attention(L) / c, cp_exchange * L * (c - 1) / c)

with L padded for that size: a larger size means less computation and more exchange on each rank.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, STAGE_BITS, StageCosts
from megatron_balance.errors import BalanceError
from megatron_balance.planner import bound
from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.objective import Waiting, makespans, waiting
from megatron_balance.planner.problem import INT_MAX, Ints, Problem, sum_segments, sums


@dataclass(frozen=True, eq=False)
class SizedBatch:
    """A global batch of which each sample is shared by 1, 2, 4 … DP×CP ranks, here just ranks."""

    costs: Ints  # [num_levels, num_samples] on each of the 2**level ranks that share a sample
    _: KW_ONLY
    expert_cost: Ints  # [num_levels, num_samples] cost over all of them that expert-parallel groups share
    tokens: Ints  # [num_levels, num_samples] padded, on each of them
    cap: int  # tokens that a rank holds in one micro-batch
    per_microbatch: int  # fixed cost of a micro-batch on each of its ranks
    dp_cp_size: int  # ranks that micro-batches are spread over
    ep_dp_size: int  # neighbouring ranks that share the work of experts
    waiting: Waiting  # which ranks wait for one another, beside those that share a micro-batch
    equal_counts: bool  # all ranks have the same number of slots, a multiple of `multiple`
    multiple: int
    shift: int  # costs are in units of 2**shift of the cost model's
    kinds: tuple[SizedBatch, ...] = ()  # the samples as if all chunks of a pipeline were of each kind

    @property
    def num_levels(self) -> int:
        """Sizes to choose from: 1, 2, 4 … `2**(num_levels - 1)` ranks."""
        return self.costs.shape[0]

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return self.costs.shape[1]

    @cached_property
    def min_levels(self) -> Ints:
        """The smallest size with room for a sample alone, `[num_samples]`; the largest size for over-long ones."""
        return np.minimum((self.tokens > self.cap).sum(axis=0), self.num_levels - 1)

    @cached_property
    def oversized(self) -> Ints:
        """Ids of the samples longer than the ranks of the largest size hold: each runs alone."""
        return np.flatnonzero(self.tokens[-1] > self.cap)

    @cached_property
    def cheapest(self) -> Ints:
        """The size with room at which a sample costs its ranks least, `[num_samples]`."""
        has_room = np.arange(self.num_levels)[:, None] >= self.min_levels
        return np.where(has_room, self.costs, INT_MAX).argmin(axis=0)

    def at(self, table: Ints, levels: Ints) -> Ints:
        """`[num_samples]` of `costs` or `tokens`, where each sample has a level of its own."""
        return table[levels, np.arange(self.num_samples)]

    def with_local_experts(self) -> SizedBatch:
        """The batch with the work of experts done by the ranks of their tokens, where groups of ranks share it."""
        per_rank = -(-self.expert_cost // (1 << np.arange(self.num_levels)[:, None]))
        return replace(self, costs=self.costs + per_rank, expert_cost=np.zeros_like(self.expert_cost))

    def levels_within(self, limit: int) -> Ints:
        """The smallest size with room whose ranks pay at most `limit`, `[num_samples]`; else the cheapest."""
        levels = self.min_levels.copy()
        high = np.flatnonzero(self.at(self.costs, levels) > limit)
        fits = (np.arange(self.num_levels)[:, None] >= levels[high]) & (self.costs[:, high] <= limit)
        levels[high] = np.where(fits.any(axis=0), fits.argmax(axis=0), self.cheapest[high])
        return levels

    @cached_property
    def min_slots(self) -> int:
        """Lower bound on the micro-batches of the busiest rank, from tokens; at least one."""
        return max(1, -(-self.min_room // (self.cap * self.dp_cp_size)))

    @cached_property
    def min_room(self) -> int:
        """Tokens of all samples at their smallest size, over all ranks; an over-long one fills its ranks."""
        tokens = np.minimum(self.at(self.tokens, self.min_levels), self.cap)
        return int((tokens << self.min_levels).sum())

    def cost_grid(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """Cost of every rank's micro-batches, `[dp_cp_size, num_microbatches]`; 0 where a rank has no such slot."""
        levels = (1 << np.arange(self.num_levels)).searchsorted(cp_sizes.reshape(-1)[microbatch_of])
        first = first_ranks(cp_sizes)

        def by_rank(table: Ints) -> Ints:
            costs = sums(self.at(table, levels), microbatch_of, cp_sizes.size).reshape(cp_sizes.shape)
            return costs[first, np.arange(first.shape[1])]

        grid = by_rank(self.costs) + self.per_microbatch
        if self.expert_cost.any():
            work = -(-by_rank(self.expert_cost) // np.maximum(cp_sizes, 1))
            starts = np.arange(0, self.dp_cp_size, self.ep_dp_size)
            members = np.diff(starts, append=self.dp_cp_size)
            grid += (-(-np.add.reduceat(work, starts) // members[:, None])).repeat(members, axis=0)
        grid[cp_sizes == 0] = 0
        return grid

    def kind_grids(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """`cost_grid` for each kind of chunk, `[num_kinds, dp_cp_size, num_microbatches]`."""
        return np.stack([kind.cost_grid(microbatch_of, cp_sizes) for kind in self.kinds or (self,)])

    def time(self, microbatch_of: Ints, cp_sizes: Ints) -> int:
        """Predicted time of a plan: of the slowest rank, or of all if they wait in every slot.

        In a pipeline without that, a stage runs its micro-batches in slot order, each once all its ranks are free.
        """
        costs, first = self.kind_grids(microbatch_of, cp_sizes), first_ranks(cp_sizes)
        if self.waiting.in_slots:
            return int(self.waiting.times(costs.max(axis=1)[None])[0])

        def peers(times: Ints, slots: Ints) -> Ints:
            together, columns = np.zeros_like(times), np.arange(slots.size)
            np.maximum.at(together, (first[:, slots], columns), times)
            return together[first[:, slots], columns]

        return int(makespans(costs.swapaxes(0, 1), self.waiting.pipeline, peers=peers).max())

    def lower_bound(self) -> int:
        """A time that no plan can beat."""
        return self.waiting.at_least(self.min_work(), empty=self.per_microbatch)

    def single_sample_floor(self) -> float:
        """The largest sample, at its cheapest size, over an even share of the least work; at least 1.0."""
        largest = int(self.at(self.costs, self.cheapest).max(initial=0))
        total = int((self.at(self.costs, self.min_levels) << self.min_levels).sum())
        return max(1.0, largest * self.dp_cp_size / max(total, 1))

    def min_work(self) -> int:
        """Work of the most loaded rank at least."""
        return bound.min_work_of_sizes(self)

    @property
    def even_expert_cost(self) -> int:
        """Work of experts on each rank at least where all share it."""
        return -(-int(self.expert_cost[0].sum()) // self.dp_cp_size)


def first_ranks(cp_sizes: Ints) -> Ints:
    """The first rank of every rank's micro-batches, a multiple of their size, `[dp_cp_size, num_microbatches]`."""
    ranks = np.arange(len(cp_sizes))[:, None]
    return ranks - ranks % np.maximum(cp_sizes, 1)


def make_batch(problem: Problem) -> Batch:
    """Lengths, cost model, ranks and limits in integers, at one context-parallel size.

    Images take no room in a micro-batch beside the tokens that they become.
    """
    topology, cost_model, limits, images = problem.topology, problem.cost_model, problem.limits, problem.images
    ep_dp_size = topology.ep_dp_size
    if topology.dp_size % ep_dp_size:
        raise BalanceError(
            f"ep_size is {topology.ep_size}: expert-parallel groups of {ep_dp_size} data-parallel ranks "
            f"do not divide dp_size {topology.dp_size}."
        )
    padded, (peers, stages) = topology.padded_seq_len(problem.segments), _waiting_and_stages(problem)
    scaled = replace(cost_model, stages=stages).sample_costs(
        padded,
        image_patches=None if images is None else images.sums,
        copies=max(peers.sync_size, peers.pipeline.num_stages * peers.pipeline.num_chunks),
    )
    tokens = sum_segments(padded, num_segments=problem.num_segments)
    local, expert_cost = (
        np.stack([sum_segments(kind, num_segments=problem.num_segments) for kind in kinds])
        for kinds in (scaled.costs, scaled.expert_costs)
    )
    if ep_dp_size == 1:
        # An expert group inside one rank's tensor-parallel group shares nothing with other ranks.
        local, expert_cost = local + expert_cost, np.zeros_like(expert_cost)
    has_phases = images is not None and peers.in_slots and peers.sync_size > 1 and not peers.is_makespan
    if images is not None and not has_phases:
        local = local + scaled.image_costs
    cap = limits.max_tokens_per_microbatch(topology)
    if cap is not None:
        cap = min(cap, max(int(tokens.sum()), 1))  # as good as none, and within int64
    chunks = [kind for stage in peers.pipeline.kinds for kind in stage] or [0]

    def mean(kinds: Ints) -> Ints:
        return kinds[chunks].sum(axis=0) // len(chunks)

    batch = Batch(
        np.stack([scaled.image_costs[0], local[0]]) if has_phases else mean(local)[None],
        expert_cost=mean(expert_cost),
        weights=np.ones_like(tokens) if cap is None else np.minimum(tokens, cap + 1),
        cap=cap or limits.micro_batch_size or 1,
        num_ranks=topology.dp_size,
        waiting=peers,
        ep_dp_size=ep_dp_size,
        per_microbatch=int(mean(scaled.per_microbatch)),
        multiple=topology.microbatch_multiple,
        shift=scaled.shift,
    )
    if stages is None:
        return batch
    rows = zip(local, expert_cost, scaled.per_microbatch.tolist(), strict=True)
    kinds = (
        replace(batch, costs=costs[None], expert_cost=expert, per_microbatch=fixed) for costs, expert, fixed in rows
    )
    return replace(batch, kinds=tuple(kinds))


def make_sized_batch(problem: Problem) -> SizedBatch:
    """Padded tokens and cost of every sample at every size, in integers."""
    topology, cost_model, limits = problem.topology, problem.cost_model, problem.limits
    if limits.micro_batch_size is not None or limits.max_tokens_per_gpu is None:
        raise BalanceError(
            f"Limits.micro_batch_size is {limits.micro_batch_size} with Topology.dynamic_cp: sizes follow from a token "
            "cap, so set max_tokens_per_gpu alone."
        )
    (peers, stages), sizes = _waiting_and_stages(problem), topology.dynamic_cp_sizes
    unique, inverse, counts = np.unique(problem.segments, return_inverse=True, return_counts=True)
    padded = [topology.with_cp_size(size).padded_seq_len(unique) for size in sizes]
    models = replace(cost_model, stages=stages).by_kind()
    if topology.ep_dp_size == 1:
        models = [replace(kind, linear=kind.linear + kind.expert_linear, expert_linear=0) for kind in models]
    tables = [
        (
            [kind.summed_over_cp(size).local_cost(tokens) for tokens, size in zip(padded, sizes, strict=True)],
            [tokens.astype(object) * kind.expert_linear for tokens in padded],
            kind.per_microbatch,
        )
        for kind in models
    ]
    # Upper bound: padding and communication grow with the size, and each sample may be a micro-batch by itself.
    upper = max(
        int((local[-1] + expert[-1]).astype(object) @ counts.astype(object))
        + fixed * (problem.lengths.size + 1) * topology.dp_cp_size
        for local, expert, fixed in tables
    )
    upper *= max(peers.sync_size, peers.pipeline.num_stages * peers.pipeline.num_chunks)
    shift = max(0, upper.bit_length() - (MAX_TOTAL_COST.bit_length() - 3))

    def sample_costs(costs: NDArray[Any], size: int) -> Ints:
        """Costs on each of `size` ranks. Rounded up once, so that a larger size never costs less in all."""
        per_rank = (-(-costs // (size << shift))).astype(np.int64)
        return sum_segments(per_rank[inverse], num_segments=problem.num_segments)

    samples = [sum_segments(tokens[inverse], num_segments=problem.num_segments) for tokens in padded]
    tokens = np.stack([-(-tokens // size) for tokens, size in zip(samples, sizes, strict=True)])
    kinds = [
        SizedBatch(
            np.stack([sample_costs(costs, size) for costs, size in zip(local, sizes, strict=True)]),
            expert_cost=np.stack([sample_costs(costs, 1) for costs in expert]),
            tokens=tokens,
            cap=min(limits.max_tokens_per_gpu, max(int(tokens[0].sum()), 1)),  # as good as none, and within int64
            per_microbatch=max(fixed >> shift, 1) if fixed else 0,
            dp_cp_size=topology.dp_cp_size,
            ep_dp_size=topology.ep_dp_size,
            waiting=peers,
            equal_counts=topology.has_equal_counts or problem.objective != "step",
            multiple=topology.microbatch_multiple,
            shift=shift - (STAGE_BITS if stages else 0),
        )
        for local, expert, fixed in tables
    ]
    if stages is None:
        return kinds[0]
    chunks = [kinds[kind] for stage in stages.kinds for kind in stage]
    return replace(
        kinds[0],
        costs=sum(kind.costs for kind in chunks) // len(chunks),
        expert_cost=sum(kind.expert_cost for kind in chunks) // len(chunks),
        per_microbatch=sum(kind.per_microbatch for kind in chunks) // len(chunks),
        kinds=tuple(kinds),
    )


def _waiting_and_stages(problem: Problem) -> tuple[Waiting, StageCosts | None]:
    """Who waits, and the costs of stages where the time is a makespan and they differ."""
    topology, peers = problem.topology, waiting(problem.objective, topology=problem.topology)
    stages = problem.cost_model.stages if peers.is_makespan else None
    if stages is not None:
        shape = len(stages.kinds), len(stages.kinds[0])
        if shape != (topology.pp_size, topology.vpp_size):
            raise BalanceError(
                f"CostModel.stages has {shape[0]} stages of {shape[1]} chunks: Topology.pp_size is {topology.pp_size} "
                f"and vpp_size {topology.vpp_size}. Make it for this topology, or leave it out."
            )
        peers = replace(peers, pipeline=replace(peers.pipeline, kinds=stages.kinds))
    return peers, stages


def batch_of(problem: Problem) -> Batch | SizedBatch:
    """A global batch in integers, at one size or at all of its topology."""
    return make_sized_batch(problem) if problem.topology.dynamic_cp else make_batch(problem)
