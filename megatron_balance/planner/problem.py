"""The planning problem as integers: what each sample costs, what a micro-batch holds, who waits for whom.

Objectives, in the words of the time they stand for:

    step        ranks meet once, at the gradient reduction: the largest sum over slots of a rank
    microbatch  ranks meet in every micro-batch (experts spread over ranks, FSDP, ZeRO-3): the sum over
                slots of the costliest rank, for the slowest group of ranks that meet
    pipeline    one-forward-one-backward over `pp_size` stages: the largest makespan of a rank

With expert-parallel groups over several ranks and pipeline stages both, `microbatch` and `pipeline` mean the same:
in each slot a stage waits for its expert-parallel group, so the time is the largest makespan of a group's
costliest micro-batches.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.topology import Limits, Topology

OBJECTIVES = ("auto", "step", "microbatch", "pipeline")


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """Chooses the objective that fits the topology where it is `auto`.

    Raises:
        BalanceError: there is no such objective.
    """
    if objective not in OBJECTIVES:
        raise BalanceError(f"objective is {objective!r}: it must be one of {', '.join(OBJECTIVES)}.")
    if objective != "auto":
        return objective
    if topology.ep_span > 1 or topology.fully_sharded:
        return "microbatch"
    return "pipeline" if topology.pp_size > 1 else "step"


def meeting_ranks(topology: Topology) -> int:
    """Neighbouring ranks that meet in every micro-batch, if any do: an expert-parallel group, else all."""
    span = topology.ep_span
    return topology.dp_size if topology.fully_sharded or span == 1 else span


def is_makespan(objective: str, *, topology: Topology) -> bool:
    """Whether an objective's value is a pipeline's makespan: under `pipeline`, and where expert-parallel groups meet
    in a pipeline. Any other value is the work of all stages together.
    """
    expert_pipeline = topology.ep_span > 1 and topology.pp_size > 1
    return objective == "pipeline" or (objective == "microbatch" and expert_pipeline)


@dataclass(frozen=True)
class Problem:
    """One global batch to plan.

    Attributes:
        costs: `[num_samples]` int64, what a sample costs its own rank.
        shared_costs: `[num_samples]` int64, what it costs its expert-parallel group together.
        weights: `[num_samples]` int64, room it takes in a micro-batch: padded tokens, or 1 where samples
            are counted. An over-long sample weighs `capacity + 1`: it runs alone.
        capacity: room of a micro-batch, tokens or samples.
        counts_samples: `capacity` is a number of samples.
        per_microbatch: cost of a micro-batch whatever it holds, in the units of `costs`.
        cost_shift: costs are in units of `2**cost_shift` of the cost model's.
        topology: the ranks.
        objective: `step`, `microbatch` or `pipeline`.
    """

    costs: NDArray[np.int64]
    _: KW_ONLY
    shared_costs: NDArray[np.int64]
    weights: NDArray[np.int64]
    capacity: int
    counts_samples: bool
    per_microbatch: int
    cost_shift: int
    topology: Topology
    objective: str

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return self.costs.size

    @property
    def sync_span(self) -> int:
        """Neighbouring data-parallel ranks that wait for one another in every micro-batch."""
        if self.objective == "microbatch":
            return meeting_ranks(self.topology)
        # Under `pipeline` groups meet where they share work; `auto` chooses `microbatch` for all of them.
        return self.topology.ep_span if self.objective == "pipeline" and self.shared_costs.any() else 1

    @property
    def in_pipeline(self) -> bool:
        """Whether time is a makespan: under `pipeline`, and where expert-parallel groups meet in a pipeline."""
        return is_makespan(self.objective, topology=self.topology)

    def cost_grid(self, slot_of: NDArray[np.int64], *, num_microbatches: int) -> NDArray[np.int64]:
        """Cost of every micro-batch.

        A micro-batch costs its samples, plus `per_microbatch` (an empty one as well: its masked dummy runs),
        plus its rank's even share, rounded up, of what the expert-parallel group computes in that slot.

        Args:
            slot_of: `[num_samples]` `rank * num_microbatches + slot` of each sample.
            num_microbatches: slots of a rank.

        Returns:
            `[dp_size, num_microbatches]` int64.
        """
        dp_size, span = self.topology.dp_size, self.topology.ep_span
        grid = np.full(dp_size * num_microbatches, self.per_microbatch, dtype=np.int64)
        np.add.at(grid, slot_of, self.costs)
        grid = grid.reshape(dp_size, num_microbatches)
        if span > 1:
            shared = np.zeros(dp_size * num_microbatches, dtype=np.int64)
            np.add.at(shared, slot_of, self.shared_costs)
            of_groups = shared.reshape(dp_size // span, span, num_microbatches).sum(axis=1)
            grid += np.repeat(-(-of_groups // span), span, axis=0)
        return grid

    def predicted_cost(self, grid: NDArray[np.int64]) -> int:
        """The objective's value for a cost grid `[dp_size, num_microbatches]`, in its units.

        In each slot every rank waits for the costliest of those it meets. In a pipeline each stage waits so
        (its expert-parallel group holds the same stage of other ranks), hence the group runs the pipeline of
        its costliest micro-batches.
        """
        of_groups = grid.reshape(-1, self.sync_span, grid.shape[1]).max(axis=1)
        if self.in_pipeline:
            makespans = pipeline_makespans(of_groups, pp_size=self.topology.pp_size, vpp_size=self.topology.vpp_size)
            return int(makespans.max())
        return int(of_groups.sum(axis=1).max())


def build_problem(
    padded_lengths: NDArray[np.int64],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str,
    num_segments: NDArray[np.int64] | None = None,
) -> Problem:
    """Turns lengths, a cost model, ranks and limits into integers.

    Args:
        padded_lengths: `[num_samples]` int64, tokens; with `num_segments`, of every segment.
        cost_model: what a sample costs.
        topology: the ranks.
        limits: what a micro-batch holds.
        objective: `step`, `microbatch` or `pipeline`.
        num_segments: `[num_samples]` int64 segments of each sample, whose tokens and cost are sums over them.

    Raises:
        BalanceError: expert-parallel groups do not divide the data-parallel ranks, or `per_microbatch`
            is too large for int64.
    """
    span = topology.ep_span
    if topology.dp_size % span:
        raise BalanceError(
            f"ep_size is {topology.ep_size}: expert-parallel groups of {span} data-parallel ranks "
            f"do not divide dp_size {topology.dp_size}."
        )
    scaled = cost_model.sample_costs(padded_lengths)
    costs = sum_segments(scaled.costs, num_segments=num_segments)
    shared_costs = sum_segments(scaled.expert_costs, num_segments=num_segments)
    tokens = sum_segments(padded_lengths, num_segments=num_segments)
    capacity = limits.max_tokens_per_microbatch(topology)
    counts_samples = capacity is None
    if capacity is None:
        assert limits.micro_batch_size is not None
        capacity, weights = limits.micro_batch_size, np.ones_like(tokens)
    else:
        weights = np.minimum(tokens, capacity + 1)
    if span == 1:
        # An expert group inside one rank's tensor-parallel group shares nothing with other ranks.
        costs, shared_costs = costs + shared_costs, np.zeros_like(shared_costs)
    per_microbatch = cost_model.per_microbatch
    if per_microbatch:
        per_microbatch = max(per_microbatch >> scaled.shift, 1)
    return Problem(
        costs,
        shared_costs=shared_costs,
        weights=weights,
        capacity=capacity,
        counts_samples=counts_samples,
        per_microbatch=per_microbatch,
        cost_shift=scaled.shift,
        topology=topology,
        objective=objective,
    )


def check_total(problem: Problem, *, num_microbatches: int) -> None:
    """Raises where the costs of `dp_size * num_microbatches` micro-batches leave int64."""
    num_slots = problem.topology.dp_size * num_microbatches
    total = int(problem.costs.sum()) + int(problem.shared_costs.sum()) + num_slots * (problem.per_microbatch + 1)
    if total >= MAX_TOTAL_COST:
        raise BalanceError(
            f"CostModel.per_microbatch is {problem.per_microbatch}: with {num_slots} micro-batches the costs "
            f"sum to {total}, which must stay below 2**62. Divide all coefficients by the same number."
        )


def restrict(problem: Problem, samples: NDArray[np.int64], *, topology: Topology) -> Problem:
    """The problem of some of the samples on other ranks. `samples`: `[num_kept]` ids."""
    return replace(
        problem,
        costs=problem.costs[samples],
        shared_costs=problem.shared_costs[samples],
        weights=problem.weights[samples],
        topology=topology,
    )
