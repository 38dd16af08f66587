"""The planning problem in integers: costs and weights of samples, the cap of a micro-batch, and the objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.dynamic_cp.bound import least_time
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.images import Images
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.planner.kinds import Kinds
from megatron_balance.planner.timing import Makespan, Sum, Timing
from megatron_balance.topology import Limits, Topology

SMALLER_PARTS = CHEAPEST_LEVEL = 2
"""The level from which on parts are smaller (`packing/copies.py`), and the last one. From the first on nothing is
refined, no algorithm by name is tried, and samples are not brought home (`locality/`)."""


class Objective(ABC):
    """The measure of a plan: where ranks wait for one another, and the predicted time of a step.

    Instances hold no state. `planner.objectives.OBJECTIVES` lists them by name.
    """

    name: ClassVar[str]
    """Its name in flags and files."""

    trials: ClassVar[tuple[str, ...]] = ()
    """Additional partition algorithms to try on small batches."""

    @abstractmethod
    def suits(self, topology: Topology) -> bool:
        """True if `auto` may choose this objective for the topology."""

    def waits_in_slots(self) -> bool:
        """True if ranks wait in every micro-batch even without shared work: reports draw slots aligned."""
        return False

    def sync_group_size(self, topology: Topology, *, shares_work: bool = True) -> int:
        """Neighbouring ranks that wait for one another in every micro-batch; 1 where ranks meet once a step.

        Args:
            topology: the ranks.
            shares_work: expert-parallel ranks share work, which makes them meet.
        """
        return 1

    def is_makespan(self, topology: Topology) -> bool:
        """True if the time is a pipeline's makespan, False if it is the work of all stages together."""
        return False

    def meets_between_parts(self, topology: Topology) -> bool:
        """True if ranks meet between vision encoder and language model of each micro-batch."""
        return self.waits_in_slots() and self.sync_group_size(topology) > 1 and not self.is_makespan(topology)

    def timing(self, topology: Topology) -> Timing:
        """The time of a step as a function of the micro-batches of a group of ranks that meet.

        In a pipeline each stage waits for the ranks that meet there, so the time of a group is the makespan of its
        costliest micro-batches.
        """
        return Makespan(topology.pp_size, topology.vpp_size) if self.is_makespan(topology) else Sum()

    @abstractmethod
    def least_work(self, problem: Problem) -> int:
        """Lower bound on the work of the slowest group in any plan that may move samples.

        Over all stages together, without `per_microbatch`.
        """

    def has_even_slots(self, topology: Topology) -> bool:
        """True if dynamic context parallelism needs the same number of slots on all leaves."""
        return topology.has_even_slots or self.waits_in_slots() or self.is_makespan(topology)

    def groups_floor(self, samples: SizedSamples, *, topology: Topology) -> int:
        """Lower bound on the work of the fullest leaf."""
        return least_time(samples, even=self.has_even_slots(topology))

    def place_groups(self, samples: SizedSamples, *, topology: Topology, floor: int) -> Groups:
        """Plans micro-batches with dynamic context-parallel sizes.

        Args:
            samples: the global batch.
            topology: the ranks.
            floor: `groups_floor`.

        Raises:
            BalanceError: the objective supports one size only.
        """
        raise BalanceError(
            f"objective is {self.name!r}: with Topology.dynamic_cp it must be one that plans groups of ranks, as step, "
            "microbatch and pipeline do."
        )

    def groups_time(self, samples: SizedSamples, groups: Groups, *, topology: Topology) -> int:
        """Predicted time of a plan with dynamic sizes: of the slowest leaf, or of all if they wait in every slot."""
        costs = groups.cost_grid(samples)
        of_groups = costs.max(axis=0, keepdims=True) if self.waits_in_slots() else costs
        return self.timing(topology).time(of_groups)


@dataclass(frozen=True)
class Problem:
    """One global batch to plan.

    Attributes:
        costs: `[num_samples]` int64 cost of a sample on its own rank, its images included.
        shared_costs: `[num_samples]` int64 cost that its expert-parallel group computes together.
        weights: `[num_samples]` int64 weight in a micro-batch: padded tokens, or 1 if samples are counted. An
            over-long sample weighs `capacity + 1`: it runs alone.
        capacity: cap of a micro-batch, tokens or samples.
        counts_samples: `capacity` is a number of samples.
        per_microbatch: fixed cost of a micro-batch, in the units of `costs`.
        cost_shift: costs are in units of `2**cost_shift` of the cost model's.
        topology: the ranks.
        objective: measure of plans.
        level: 0 for all the effort that the size allows, up to `CHEAPEST_LEVEL` for less.
        image_costs: `[num_samples]` int64 part of `costs` in the vision encoder, where ranks meet between encoder and
            language model; None where they do not.
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
    objective: Objective
    level: int = 0
    image_costs: NDArray[np.int64] | None = None

    @property
    def num_samples(self) -> int:
        """Samples in the global batch."""
        return self.costs.size

    @cached_property
    def kinds(self) -> Kinds:
        """The kinds of the samples."""
        return Kinds.of(self.costs, shared_costs=self.shared_costs, weights=self.weights, image_costs=self.image_costs)

    @property
    def sync_group_size(self) -> int:
        """Neighbouring data-parallel ranks that wait for one another in every micro-batch."""
        return self.objective.sync_group_size(self.topology, shares_work=bool(self.shared_costs.any()))

    @property
    def timing(self) -> Timing:
        """`Objective.timing` on these ranks."""
        return self.objective.timing(self.topology)

    def cost_grid(self, slot_of: NDArray[np.int64], *, num_microbatches: int) -> NDArray[np.int64]:
        """Cost of every micro-batch.

        The cost is that of its samples, plus `per_microbatch` (for an empty one too, as its masked dummy runs), plus
        the rank's even share, rounded up, of the work that the expert-parallel group shares in that slot.

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

    def image_grid(self, slot_of: NDArray[np.int64], *, num_microbatches: int) -> NDArray[np.int64] | None:
        """The vision encoder's part of `cost_grid`; None where ranks do not meet after it."""
        if self.image_costs is None:
            return None
        grid = np.zeros(self.topology.dp_size * num_microbatches, dtype=np.int64)
        np.add.at(grid, slot_of, self.image_costs)
        return grid.reshape(self.topology.dp_size, num_microbatches)

    def predicted_cost(self, grid: NDArray[np.int64], *, image_grid: NDArray[np.int64] | None = None) -> int:
        """The objective's time for a cost grid `[dp_size, num_microbatches]`, in its units.

        Args:
            grid: as `cost_grid` makes it.
            image_grid: as `image_grid` makes it. Ranks then meet twice in a slot, after each part.
        """
        parts = [grid] if image_grid is None else [image_grid, grid - image_grid]
        of_groups = [part.reshape(-1, self.sync_group_size, grid.shape[1]).max(axis=1) for part in parts]
        return self.timing.time(np.concatenate(of_groups, axis=1))


def build_problem(
    padded_lengths: NDArray[np.int64],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: Objective,
    num_segments: NDArray[np.int64] | None = None,
    images: Images | None = None,
    level: int = 0,
) -> Problem:
    """Turns lengths, a cost model, ranks and limits into integers.

    Args:
        padded_lengths: `[num_samples]` int64, tokens; with `num_segments`, of every segment.
        cost_model: cost of a sample.
        topology: the ranks.
        limits: token or sample cap of a micro-batch.
        objective: measure of plans.
        num_segments: `[num_samples]` int64 segments of each sample, whose tokens and cost are sums over them.
        images: those of the samples, whose costs are added to theirs; None for none. They take no room in a
            micro-batch beside the tokens that they become.
        level: as in Problem.

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
    scaled = cost_model.sample_costs(padded_lengths, image_patches=None if images is None else images.sums)
    costs = sum_segments(scaled.costs, num_segments=num_segments)
    if images is not None:
        costs = costs + scaled.image_costs
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
    meets_after_images = images is not None and objective.meets_between_parts(topology)
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
        level=level,
        image_costs=scaled.image_costs if meets_after_images else None,
    )


def check_total(problem: Problem, *, num_microbatches: int) -> None:
    """Raises if the costs of `dp_size * num_microbatches` micro-batches exceed int64."""
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
        image_costs=None if problem.image_costs is None else problem.image_costs[samples],
        topology=topology,
    )
