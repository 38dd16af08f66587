"""A planning problem in integers: the costs and the room of its samples, at one context-parallel size or at every size.

At one size it is the `Batch` of `level_packing.py`; in a forest a sample costs what it adds to its micro-batch. With
dynamic context parallelism a micro-batch stands on a node of a binary tree, or several, of the `dp_size * cp_size`
DP×CP ranks; the `2**level` ranks of a node share its samples. The cost of a sample of L tokens on each of c = 2**level
ranks is, rounded up,

    linear*L / c  +  max(attention(L) / c, cp_exchange * L * (c - 1) / c)

with L padded for that size: a larger size means less computation and more exchange on each rank.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_balance.cost.model import STAGE_BITS, SampleCosts, StageCosts
from megatron_balance.errors import BalanceError
from megatron_balance.planner import bound
from megatron_balance.planner.forest import Forest
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
    gather: int  # its least cost there, that included
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

    def take(self, ids: Ints) -> SizedBatch:
        """The samples of these ids, in their order."""
        costs, expert_cost, tokens = self.costs[:, ids], self.expert_cost[:, ids], self.tokens[:, ids]
        return replace(self, costs=costs, expert_cost=expert_cost, tokens=tokens)

    def at_size(self, level: int) -> Batch:
        """The samples where `2**level` ranks share every micro-batch, and are one rank."""
        size = 1 << level
        return Batch(
            self.costs[level][None],
            expert_cost=-(-self.expert_cost[level] // size),
            weights=np.minimum(self.tokens[level], self.cap + 1),
            cap=self.cap,
            num_ranks=self.dp_cp_size // size,
            waiting=replace(self.waiting, sync_size=max(self.waiting.sync_size // size, 1)),
            ep_dp_size=max(self.ep_dp_size // size, 1),
            per_microbatch=self.per_microbatch,
            gather=self.gather,
            multiple=self.multiple if self.equal_counts else 1,
            kinds=tuple(kind.at_size(level) for kind in self.kinds),
        )

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
        grid = np.maximum(grid, self.gather)
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
        work = max(self.min_work(), self.min_slots * self.gather)
        return self.waiting.at_least(work, empty=self.per_microbatch)

    def min_work(self) -> int:
        """Work of the most loaded rank at least."""
        return bound.min_work_of_sizes(self)


@dataclass(frozen=True, eq=False)
class ForestBatch:
    """A global batch at one size whose micro-batches compute once what their samples share."""

    forest: Forest
    ends: Batch  # the path to the end of each node as if it were a sample, and one of no tokens behind them

    @cached_property
    def alone(self) -> Batch:
        """The samples, each by itself."""
        return self.ends.take(self.forest.node_of)

    @property
    def waiting(self) -> Waiting:
        """Which ranks wait for one another."""
        return self.ends.waiting

    @property
    def shift(self) -> int:
        """Costs are in units of 2**shift of the cost model's."""
        return self.ends.shift

    def computed(self, microbatch_of: Ints) -> Batch:
        """The samples with the cost and the tokens that each adds to those before it in its micro-batch."""
        return _difference(self.alone, self.ends.take(self.forest.starts(microbatch_of)))

    @cached_property
    def nodes(self) -> Batch:
        """What each node adds to its parent's path."""
        return _difference(self.ends, self.ends.take(np.append(self.forest.parent, -1)))

    def time(self, microbatch_of: Ints, cp_sizes: Ints) -> int:
        """Predicted time of the step; as `Batch.time`."""
        return self.computed(microbatch_of).time(microbatch_of, cp_sizes)

    def cost_grid(self, microbatch_of: Ints, cp_sizes: Ints) -> Ints:
        """Cost of every micro-batch; as `Batch.cost_grid`."""
        return self.computed(microbatch_of).cost_grid(microbatch_of, cp_sizes)

    def lower_bound(self) -> int:
        """A time that no plan can beat, however it cuts trees."""
        return bound.min_time_of_forest(self)


def _difference(batch: Batch, starts: Batch) -> Batch:
    """What each entry of a batch adds to its start."""
    return replace(
        batch,
        costs=batch.costs - starts.costs,
        expert_cost=batch.expert_cost - starts.expert_cost,
        weights=batch.weights - starts.weights,
        kinds=tuple(map(_difference, batch.kinds, starts.kinds)),
    )


def first_ranks(cp_sizes: Ints) -> Ints:
    """The first rank of every rank's micro-batches, a multiple of their size, `[dp_cp_size, num_microbatches]`."""
    ranks = np.arange(len(cp_sizes))[:, None]
    return ranks - ranks % np.maximum(cp_sizes, 1)


def batch_of(problem: Problem) -> Batch | SizedBatch | ForestBatch:
    """A global batch in integers: at one size, at all sizes of its topology, or in a forest.

    Images take no room in a micro-batch beside the tokens that they become.
    """
    if problem.forest is not None:
        paths = np.append(problem.forest.ends, 0)
        ends = batch_of(replace(problem, lengths=paths, forest=None, home_ranks=None))
        assert isinstance(ends, Batch), "Problem.of takes no dynamic sizes with a forest"
        return ForestBatch(problem.forest, ends)
    topology, limits, images = problem.topology, problem.limits, problem.images
    ep_dp_size, sizes = topology.ep_dp_size, np.array(topology.dynamic_cp_sizes)
    if topology.dynamic_cp and (limits.micro_batch_size is not None or limits.max_tokens_per_gpu is None):
        raise BalanceError(
            f"Limits.micro_batch_size is {limits.micro_batch_size} with Topology.dynamic_cp: sizes follow from a token "
            "cap, so set max_tokens_per_gpu alone."
        )
    if not topology.dynamic_cp and topology.dp_size % ep_dp_size:
        raise BalanceError(
            f"ep_size is {topology.ep_size}: expert-parallel groups of {ep_dp_size} data-parallel ranks "
            f"do not divide dp_size {topology.dp_size}."
        )
    peers, stages = _waiting_and_stages(problem)
    pipeline, model = peers.pipeline, replace(problem.cost_model, stages=stages)
    copies = max(peers.sync_size, pipeline.num_stages * pipeline.num_chunks)
    if topology.dynamic_cp:
        copies *= -(-topology.dp_cp_size // int(sizes[-1]))  # each sample may be a micro-batch of all ranks
    padded, scaled, shift = list[Ints](), list[SampleCosts](), -STAGE_BITS
    # Padding and exchange grow with the size, so that the largest has the largest costs.
    for size in sizes[::-1].tolist():
        tokens = topology.with_cp_size(size).padded_seq_len(problem.segments)
        costs = model.sample_costs(
            tokens,
            cp_size=size if topology.dynamic_cp else 1,
            shift=shift,
            image_patches=images,
            copies=copies,
        )
        padded, scaled, shift = [tokens, *padded], [costs, *scaled], costs.shift

    def table(rows: list[Ints], axis: int = 0) -> Ints:
        return sum_segments(np.stack(rows, axis=axis), num_segments=problem.num_segments)

    # [num_kinds, num_sizes, num_samples]
    local, expert = table([costs.costs for costs in scaled], 1), table([costs.expert_costs for costs in scaled], 1)
    fixed, tokens = np.stack([scaled[0].per_microbatch, scaled[0].gather], axis=1), table(padded)
    if ep_dp_size == 1:
        # An expert group inside one rank's tensor-parallel group shares nothing with other ranks.
        local, expert = local - (-expert // (sizes[:, None] if topology.dynamic_cp else 1)), np.zeros_like(expert)
    if images is not None:
        image_costs = scaled[0].image_costs[:, None]
        has_phases = peers.in_slots and peers.sync_size > 1 and not peers.is_makespan
        local = np.concatenate([image_costs, local], axis=1) if has_phases else local + image_costs

    # A larger cap is as good as none, and not in int64.
    cap, largest = limits.max_tokens_per_microbatch(topology), max(int(tokens[0].sum()), 1)

    def batch(local: Ints, expert: Ints, fixed: Ints) -> Batch | SizedBatch:
        fields: dict[str, Any] = {"per_microbatch": int(fixed[0]), "gather": int(fixed[1]), "ep_dp_size": ep_dp_size}
        fields |= {"waiting": peers, "multiple": topology.microbatch_multiple, "shift": shift}
        if topology.dynamic_cp:
            return SizedBatch(
                local,
                expert_cost=expert,
                tokens=-(-tokens // sizes[:, None]),
                cap=min(limits.max_tokens_per_gpu or 0, largest),
                dp_cp_size=topology.dp_cp_size,
                equal_counts=topology.has_equal_counts or problem.objective != "step",
                **fields,
            )
        return Batch(
            local,
            expert_cost=expert[0],
            weights=np.ones_like(tokens[0]) if cap is None else np.minimum(tokens[0], min(cap, largest) + 1),
            cap=(limits.micro_batch_size or 1) if cap is None else min(cap, largest),
            num_ranks=topology.dp_size,
            **fields,
        )

    chunks = [kind for stage in pipeline.kinds for kind in stage] or [0]
    mean = batch(*(kinds[chunks].sum(axis=0) // len(chunks) for kinds in (local, expert, fixed)))
    return mean if stages is None else replace(mean, kinds=tuple(map(batch, local, expert, fixed)))


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
