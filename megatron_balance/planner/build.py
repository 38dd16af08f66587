"""Builds a schedule from lengths: the rank and the micro-batch of every sample.

    1. lengths are validated and padded for context and sequence parallelism
    2. the cost model turns them into integer costs
    3. the objective is chosen from the topology, unless it is given
    4. groups that must share a rank are given to ranks (`grouping.py`)
    5. samples are placed (`packing/place.py`)
    6. interchangeable ranks and slots are exchanged so that fewer tokens move (`locality/`)
    7. the plan is frozen with its cost grid and its lower bound

`DataSchedule.check` asserts the invariants of the plan (`schedule.py`). An empty global batch is
legal: every rank gets `microbatch_multiple` masked dummies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.planner.grouping import KEEP_GROUPS, assign_groups, groups_that_split
from megatron_balance.planner.images import Images
from megatron_balance.planner.inputs import as_home_ranks, as_integers, as_num_segments, number_groups, sum_segments
from megatron_balance.planner.locality.relabel import Homes, keep_local
from megatron_balance.planner.objectives import OBJECTIVES, resolve_objective
from megatron_balance.planner.packing.place import place
from megatron_balance.planner.partition import ALGORITHMS
from megatron_balance.planner.problem import CHEAPEST_LEVEL, build_problem
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology


def build_data_schedule(
    lengths: Sequence[int] | NDArray[Any],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str = "auto",
    algorithm: str = "auto",
    num_segments: Sequence[int] | NDArray[Any] | None = None,
    image_patches: Sequence[Sequence[int]] | Images | None = None,
    groups: Sequence[Hashable] | NDArray[Any] | None = None,
    keep_groups: str = "rank",
    home_ranks: Sequence[int] | NDArray[Any] | None = None,
    move_samples: bool = True,
    relabel: bool = True,
    ranks_per_node: int | None = None,
    level: int = 0,
) -> DataSchedule:
    """Plans one global batch.

    Args:
        lengths: `[num_samples]` original tokens of each sample; 0 is legal. With `num_segments` it is
            `[sum(num_segments)]`, the segments of the first sample, then those of the second, and so on.
        cost_model: cost of a sample by padded length.
        topology: the ranks.
        limits: tokens or samples that a micro-batch holds.
        objective: `auto` (from the topology), `step`, `microbatch` or `pipeline`.
        algorithm: `auto` (level packing), or a name in `partition.ALGORITHMS`. By name samples go to ranks
            by cost, then into micro-batches rank by rank; the cap holds all the same.
        num_segments: `[num_samples]` segments of each sample, each padded by itself; 0 is legal.
        image_patches: `[num_samples]` for each sample the patches of each of its images, which a vision encoder runs
            on the sample's rank before the language model runs its tokens, or their sums; None for no images.
        groups: `[num_samples]` id of the group of each sample, any number or string.
        keep_groups: `rank` keeps each group on one rank; `step` asks for nothing, since a global batch is
            one optimiser step.
        home_ranks: `[num_samples]` rank that loaded each sample.
        move_samples: False keeps every sample on its home rank.
        relabel: exchange interchangeable ranks and slots so that fewer tokens leave their home rank; costs stay equal.
        ranks_per_node: data-parallel ranks of one node; samples that move stay on their node where possible.
        level: 0, or a cheaper plan of the same invariants: 1 refines nothing and brings no
            samples home, 2 plans copies of smaller parts as well. Plans with dynamic sizes have one level.

    Returns:
        DataSchedule: the same on every rank and platform.

    Raises:
        BalanceError: a length is negative or no integer, a name is unknown, home ranks are missing or wrong,
            segments do not match lengths, or a group that must share a rank may not move there.

    Example:
        >>> schedule = build_data_schedule(
        ...     [7, 5, 4, 4], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(16)
        ... )
        >>> schedule.ranks
        (((0, 3),), ((1, 2),))
    """
    objective = resolve_objective(objective, topology=topology)
    algorithm = "level_packing" if algorithm == "auto" else algorithm
    if algorithm not in ALGORITHMS:
        raise BalanceError(f"algorithm is {algorithm!r}: it must be one of auto, {', '.join(ALGORITHMS)}.")
    if ranks_per_node is not None and (isinstance(ranks_per_node, bool) or ranks_per_node < 1):
        raise BalanceError(f"ranks_per_node is {ranks_per_node!r}: it must be an integer of at least 1.")

    of_segments = as_integers(lengths, name="lengths")
    padded_segments = topology.padded_seq_len(of_segments)
    counts = None if num_segments is None else as_num_segments(num_segments, num_lengths=of_segments.size)
    original = sum_segments(of_segments, num_segments=counts)

    if home_ranks is None and not move_samples:
        raise BalanceError("move_samples is False: home_ranks must say which rank loaded each sample.")
    homes = None
    if home_ranks is not None:
        homes = as_home_ranks(home_ranks, num_samples=original.size, dp_size=topology.dp_size)
    kept = _kept_groups(groups, keep_groups=keep_groups, num_samples=original.size)
    if kept is not None and not move_samples:
        assert homes is not None
        split = groups_that_split(kept, ranks=homes)
        if split.size:
            raise BalanceError(
                f"move_samples is False, but {split.size} groups were loaded by more than one rank: let samples "
                "move, or set keep_groups to 'step'."
            )

    images = None if image_patches is None else Images.of(image_patches, num_samples=original.size)
    if topology.dynamic_cp:
        _refuse_with_dynamic_cp(
            algorithm=algorithm,
            move_samples=move_samples,
            keeps_groups=kept is not None,
            has_images=images is not None,
        )
        return _plan_sizes(
            of_segments,
            cost_model=cost_model,
            topology=topology,
            limits=limits,
            objective=objective,
            num_segments=counts,
            home_ranks=homes,
        )
    if not 0 <= level <= CHEAPEST_LEVEL:
        raise BalanceError(f"level is {level!r}: it must be an integer from 0 to {CHEAPEST_LEVEL}.")
    problem = build_problem(
        padded_segments,
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=OBJECTIVES[objective],
        num_segments=counts,
        images=images,
        level=level,
    )
    bound_to = homes if not move_samples else None
    if kept is not None and move_samples:
        bound_to = assign_groups(problem, groups=kept)
    placement = place(problem, algorithm=algorithm, home_ranks=bound_to)

    slot_of, grid, num_microbatches = placement.slot_of, placement.cost_grid, placement.num_microbatches
    moved: int | None = None
    if homes is not None:
        at_home = Homes(homes, tokens=original, ranks_per_node=ranks_per_node)
        moved = at_home.moved_tokens(slot_of // num_microbatches)
        if move_samples and relabel and not level:
            slot_of = keep_local(
                problem, slot_of, num_microbatches=num_microbatches, homes=at_home, whole_ranks=kept is not None
            )
            grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    return DataSchedule(
        slot_of=slot_of,
        num_microbatches=num_microbatches,
        cost_grid=grid,
        cost_shift=problem.cost_shift,
        predicted_cost=placement.predicted_cost,
        lower_bound=placement.lower_bound,
        objective=objective,
        algorithm=algorithm,
        lengths=original,
        padded_lengths=sum_segments(padded_segments, num_segments=counts),
        num_segments=counts,
        segment_lengths=None if counts is None else of_segments,
        images=images,
        oversized=tuple(np.flatnonzero(problem.weights > problem.capacity).tolist()),
        home_ranks=homes,
        move_samples=move_samples,
        moved_tokens_before_relabel=moved,
        ranks_per_node=ranks_per_node,
        groups=kept,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    )


def _plan_sizes(
    lengths: NDArray[np.int64],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str,
    num_segments: NDArray[np.int64] | None,
    home_ranks: NDArray[np.int64] | None,
) -> DynamicCpSchedule:
    """Plans one global batch with context-parallel sizes of their own; home ranks change nothing."""
    samples, shift = size_samples(
        lengths, cost_model=cost_model, topology=topology, limits=limits, num_segments=num_segments
    )
    chosen = OBJECTIVES[objective]
    floor = chosen.groups_floor(samples, topology=topology)
    return DynamicCpSchedule.of_groups(
        chosen.place_groups(samples, topology=topology, floor=floor),
        lengths=lengths,
        num_segments=num_segments,
        home_ranks=home_ranks,
        samples=samples,
        cost_shift=shift,
        objective=objective,
        algorithm="level_packing",
        lower_bound=chosen.timing(topology).at_least(floor, launch=samples.per_microbatch),
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    )


def _refuse_with_dynamic_cp(*, algorithm: str, move_samples: bool, keeps_groups: bool, has_images: bool) -> None:
    """Raises where an option binds samples, or work on them, to one rank: others share them by context parallelism."""
    for is_set, name, remedy in (
        (algorithm != "level_packing", f"algorithm {algorithm!r}", "leave it at auto"),
        (not move_samples, "move_samples=False", "let samples move"),
        (keeps_groups, "keep_groups='rank'", "set it to 'step'"),
        (has_images, "image_patches", "leave them out"),
    ):
        if is_set:
            raise BalanceError(f"{name} does not go with Topology.dynamic_cp: {remedy}, or plan at one size.")


def _kept_groups(
    groups: Sequence[Hashable] | NDArray[Any] | None, *, keep_groups: str, num_samples: int
) -> NDArray[np.int64] | None:
    """Groups that must share a rank, numbered from 0, `[num_samples]`; None where there are none."""
    if keep_groups not in KEEP_GROUPS:
        raise BalanceError(f"keep_groups is {keep_groups!r}: it must be one of {', '.join(KEEP_GROUPS)}.")
    if groups is None:
        return None
    numbers = number_groups(groups)
    if numbers.size != num_samples:
        raise BalanceError(f"groups has {numbers.size} ids: it must have one for each of {num_samples} samples.")
    return numbers if keep_groups == "rank" else None
