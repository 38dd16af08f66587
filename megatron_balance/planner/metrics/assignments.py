"""Computes the figures of schedules, and of assignments of samples at one context-parallel size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.bounds.time import lower_bound, single_sample_floor
from megatron_balance.planner.dynamic_cp_schedule import DynamicCpSchedule
from megatron_balance.planner.images import Images
from megatron_balance.planner.inputs import as_home_ranks, as_integers, as_num_segments, sum_segments
from megatron_balance.planner.locality.relabel import Homes
from megatron_balance.planner.makespan import pipeline_makespans
from megatron_balance.planner.metrics.figures import ScheduleMetrics, slowest_over_mean
from megatron_balance.planner.metrics.groups import group_metrics
from megatron_balance.planner.objectives import OBJECTIVES, resolve_objective
from megatron_balance.planner.problem import build_problem
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology


def schedule_metrics(
    schedule: DataSchedule, *, cost_model: CostModel | None = None, objective: str | None = None
) -> ScheduleMetrics:
    """Figures of a schedule.

    Args:
        schedule: the plan.
        cost_model: judge by this one instead of the plan's own.
        objective: judge by this one instead of the plan's own; slots stay in their order.
    """
    lengths = schedule.lengths if schedule.segment_lengths is None else schedule.segment_lengths
    model, judged_by = cost_model or schedule.cost_model, objective or schedule.objective
    judged_by = resolve_objective(judged_by, topology=schedule.topology)
    if isinstance(schedule, DynamicCpSchedule):
        return group_metrics(
            schedule.cp_groups,
            of_segments=lengths,
            num_segments=schedule.num_segments,
            cost_model=model,
            topology=schedule.topology,
            limits=schedule.limits,
            objective=judged_by,
        )
    figures = _figures(
        schedule.slot_of,
        num_microbatches=schedule.num_microbatches,
        of_segments=lengths,
        num_segments=schedule.num_segments,
        images=schedule.images,
        cost_model=model,
        topology=schedule.topology,
        limits=schedule.limits,
        objective=judged_by,
        home_ranks=schedule.home_ranks,
        ranks_per_node=schedule.ranks_per_node,
    )
    return replace(figures, moved_tokens_before_relabel=schedule.moved_tokens_before_relabel)


def assignment_metrics(
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    lengths: Sequence[int] | NDArray[Any],
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str = "auto",
    num_segments: Sequence[int] | NDArray[Any] | None = None,
    image_patches: Sequence[Sequence[int]] | None = None,
    home_ranks: Sequence[int] | NDArray[Any] | None = None,
    ranks_per_node: int | None = None,
) -> ScheduleMetrics:
    """Figures of any assignment of all samples, a valid schedule or not.

    Args:
        ranks: `ranks[dp_rank][slot]` are sample ids. A rank with fewer slots than others idles through
            dummies at its end.
        lengths: `[num_samples]` original tokens, or of every segment, as for `build_data_schedule`.
        cost_model: cost of a sample.
        topology: the ranks.
        limits: of a micro-batch; violations are counted, and the lower bound uses them.
        objective: as for `build_data_schedule`.
        num_segments: `[num_samples]` segments of each sample.
        image_patches: `[num_samples]` for each sample the patches of each of its images.
        home_ranks: `[num_samples]` rank that loaded each sample.
        ranks_per_node: data-parallel ranks of one node.

    Raises:
        BalanceError: the ranks are not `dp_size`, or a sample is missing, doubled or unknown.
    """
    of_segments = as_integers(lengths, name="lengths")
    counts = None if num_segments is None else as_num_segments(num_segments, num_lengths=of_segments.size)
    num_samples = of_segments.size if counts is None else counts.size
    homes = None
    if home_ranks is not None:
        homes = as_home_ranks(home_ranks, num_samples=num_samples, dp_size=topology.dp_size)
    if len(ranks) != topology.dp_size:
        raise BalanceError(f"the assignment has {len(ranks)} ranks: it must have dp_size {topology.dp_size}.")
    num_microbatches = max(1, *(len(slots) for slots in ranks))
    return _figures(
        _slot_of(ranks, num_samples=num_samples, num_microbatches=num_microbatches),
        num_microbatches=num_microbatches,
        of_segments=of_segments,
        num_segments=counts,
        images=None if image_patches is None else Images.of(image_patches, num_samples=num_samples),
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=resolve_objective(objective, topology=topology),
        home_ranks=homes,
        ranks_per_node=ranks_per_node,
    )


def _figures(
    slot_of: NDArray[np.int64],
    *,
    num_microbatches: int,
    of_segments: NDArray[np.int64],
    num_segments: NDArray[np.int64] | None,
    images: Images | None,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str,
    home_ranks: NDArray[np.int64] | None,
    ranks_per_node: int | None,
) -> ScheduleMetrics:
    """The figures, once every sample has a slot. `of_segments`: original tokens, of samples or of segments."""
    if topology.dynamic_cp:
        raise BalanceError(
            "Topology.dynamic_cp is set: the figures of an assignment are those of one context-parallel size. Judge it "
            "at Topology.at_cp_size(cp_size), or a schedule by schedule_metrics."
        )
    padded_segments = topology.padded_seq_len(of_segments)
    original = sum_segments(of_segments, num_segments=num_segments)
    padded = sum_segments(padded_segments, num_segments=num_segments)
    num_slots = topology.dp_size * num_microbatches
    problem = build_problem(
        padded_segments,
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=OBJECTIVES[objective],
        num_segments=num_segments,
        images=images,
    )
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    image_grid = problem.image_grid(slot_of, num_microbatches=num_microbatches)
    predicted, bound = problem.predicted_cost(grid, image_grid=image_grid), lower_bound(problem)
    step_imbalance = slowest_over_mean(grid, objective="step", topology=topology)

    counts = np.bincount(slot_of, minlength=num_slots)
    tokens = np.zeros(num_slots, dtype=np.int64)
    np.add.at(tokens, slot_of, padded)
    cap = limits.max_tokens_per_microbatch(topology)
    over = counts > (limits.micro_batch_size or 0) if cap is None else (tokens > cap) & (counts > 1)
    peak = int(tokens.max())

    moved: int | None = None
    off_node: int | None = None
    if home_ranks is not None:
        homes = Homes(home_ranks, tokens=original, ranks_per_node=ranks_per_node)
        moved = homes.moved_tokens(slot_of // num_microbatches)
        off_node = None if ranks_per_node is None else homes.moved_off_node_tokens(slot_of // num_microbatches)
    return ScheduleMetrics(
        objective=objective,
        predicted_cost=predicted << problem.cost_shift,
        lower_bound=bound << problem.cost_shift,
        over_bound=predicted / bound if bound else 1.0,
        single_sample_floor=single_sample_floor(problem),
        step_imbalance=step_imbalance,
        microbatch_imbalance=slowest_over_mean(grid, objective="microbatch", topology=topology),
        pipeline_imbalance=step_imbalance if topology.pp_size == 1 else _pipeline_imbalance(grid, topology=topology),
        padding_fraction=int((padded - original).sum()) / max(int(padded.sum()), 1),
        peak_tokens=peak,
        cap_headroom=None if cap is None else 1 - peak / cap,
        num_over_cap=int(over.sum()),
        num_microbatches=num_microbatches,
        num_dummies=int((counts == 0).sum()),
        moved_tokens=moved,
        moved_off_node_tokens=off_node,
        moved_tokens_before_relabel=None,
        mean_cp_size=float(topology.cp_size),
        tokens_by_cp_size=((topology.cp_size, int(original.sum())),),
    )


def _pipeline_imbalance(grid: NDArray[np.int64], *, topology: Topology) -> float:
    """See ScheduleMetrics. `grid`: `[dp_size, num_microbatches]`."""
    pp_size, vpp_size = topology.pp_size, topology.vpp_size
    mean = np.full((1, grid.shape[1]), -(-int(grid.sum()) // grid.size))
    even = pipeline_makespans(mean, pp_size=pp_size, vpp_size=vpp_size)
    # Expert-parallel groups meet in every micro-batch, on every stage, and wait for the costliest.
    of_groups = grid.reshape(-1, topology.ep_span, grid.shape[1]).max(axis=1)
    longest = int(pipeline_makespans(of_groups, pp_size=pp_size, vpp_size=vpp_size).max())
    return longest / int(even[0]) if even[0] else 1.0


def _slot_of(ranks: Sequence[Sequence[Sequence[int]]], *, num_samples: int, num_microbatches: int) -> NDArray[np.int64]:
    """`[num_samples]` `rank * num_microbatches + slot` of an assignment, once it is known to be whole."""
    slot_of = np.full(num_samples, -1, dtype=np.int64)
    for rank, slots in enumerate(ranks):
        for slot, ids in enumerate(slots):
            for sample in ids:
                if not 0 <= sample < num_samples or slot_of[sample] >= 0:
                    raise BalanceError(
                        f"the assignment gives sample {sample} to rank {rank}: it must give each of "
                        f"{num_samples} samples once."
                    )
                slot_of[sample] = rank * num_microbatches + slot
    missing = np.flatnonzero(slot_of < 0)
    if missing.size:
        raise BalanceError(f"the assignment leaves out sample {missing[0]}: it must give each of {num_samples} once.")
    return slot_of
