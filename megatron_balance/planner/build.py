"""Checks the arguments of a global batch, and makes its plan by the search that they ask for.

    1. arguments are checked, lengths padded for context and sequence parallelism
    2. the objective is chosen from the topology, unless it is given
    3. lengths and cost model become integers (`batch.py`)
    4. samples are planned: `level_packing.py`; with pipeline stages `pipeline_packing.py`, with dynamic context
       parallelism `dynamic_packing.py`, on fixed ranks `home_ranks.py`
    5. the plan is frozen with its costs and its lower bound (`schedule.py`)

An empty global batch is legal: every rank gets `microbatch_multiple` masked dummies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError, check_integer
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner.batch import ForestBatch, SizedBatch, batch_of
from megatron_balance.planner.dynamic_packing import plan_sizes
from megatron_balance.planner.forest import Forest
from megatron_balance.planner.home_ranks import plan_on_ranks
from megatron_balance.planner.level_packing import Batch, Plan, plan_slots
from megatron_balance.planner.partition import partition_items, plan_karmarkar_karp, plan_padded
from megatron_balance.planner.piece_packing import plan_pieces
from megatron_balance.planner.pipeline_packing import plan_pipeline
from megatron_balance.planner.problem import (
    Ints,
    Problem,
    as_integers,
    check_kind,
    groups_that_split,
    number_groups,
    sums,
)
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology

ALGORITHMS = ("level_packing", "karmarkar_karp")
"""Names that `--balance-algorithm` and `build_data_schedule` take, besides `auto`."""


def balance(
    lengths: Sequence[int] | NDArray[Any],
    *,
    num_ranks: int,
    max_tokens: int,
    model: ModelShape | CostModel | str | None = None,
    objective: str = "step",
    max_samples: int | None = None,
    num_microbatches: int | None = None,
    num_segments: Sequence[int] | None = None,
    allow_empty: bool = True,
    padded: bool = False,
) -> list[list[list[int]]]:
    """Gives samples to data-parallel ranks and micro-batches of at most `max_tokens`, so that all ranks end together.

    Args:
        lengths: `[num_samples]` tokens of each sample.
        num_ranks: data-parallel ranks.
        max_tokens: tokens that a micro-batch holds at most; a longer sample runs alone.
        model: whose FLOPs are balanced, or its name (`ModelShape.presets`), or a cost model; None to balance tokens.
        objective: `step` where ranks wait for one another once a step, `microbatch` where they do in every micro-batch
            (experts spread over ranks, FSDP).
        max_samples: samples that a micro-batch holds at most.
        num_microbatches: micro-batches of each rank, where the host fixes it (gradient accumulation).
        num_segments: `[num_samples]` segments of each sample, where `lengths` are theirs; not with `padded`.
        allow_empty: False refuses a plan with an empty micro-batch: there is one only where samples are too few.
        padded: the host pads a micro-batch to its longest sample: it holds, and costs, its samples times that.

    Returns:
        `[num_ranks][num_microbatches]` lists of sample indices; every rank has as many micro-batches.

    Raises:
        BalanceError: an argument is wrong; names it.

    Examples:
        >>> balance([7, 5, 4, 4], num_ranks=2, max_tokens=8)
        [[[0], [3]], [[1], [2]]]
    """
    num_ranks, max_tokens = check_integer("num_ranks", num_ranks), check_integer("max_tokens", max_tokens)
    max_samples = None if max_samples is None else check_integer("max_samples", max_samples)
    num_microbatches = None if num_microbatches is None else check_integer("num_microbatches", num_microbatches)
    check_kind("padded", padded, bool)
    check_kind("allow_empty", allow_empty, bool)
    if isinstance(model, str):
        model = ModelShape.preset(model)
    if model is not None and not isinstance(model, (ModelShape, CostModel)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BalanceError(f"model is {model!r}: it must be a ModelShape, its name, a CostModel or None.")
    if objective not in ("step", "microbatch"):
        raise BalanceError(f"objective is {objective!r}: it must be step or microbatch.")
    cost_model = CostModel.from_shape(model) if isinstance(model, ModelShape) else model or CostModel.tokens()
    limits = Limits(max_tokens, micro_batch_size=max_samples)
    tokens = as_integers(lengths, name="lengths")
    arguments: dict[str, Any] = {"cost_model": cost_model, "topology": Topology(num_ranks), "limits": limits}
    if padded:
        batch = batch_of(Problem.of(tokens, objective=objective, **arguments))
        assert isinstance(batch, Batch)
        ranks = plan_padded(batch, max_tokens=max_tokens, max_samples=max_samples, num_slots=num_microbatches)
    else:
        arguments |= {"objective": objective, "num_microbatches": num_microbatches, "num_segments": num_segments}
        plan = build_data_schedule(tokens, **arguments)
        ranks = [[list(slot) for slot in slots] for slots in plan.ranks]
    if not allow_empty and not all(slot for slots in ranks for slot in slots):
        raise BalanceError(
            f"allow_empty is False: there are too few samples for {len(ranks[0])} micro-batches on each of {num_ranks} "
            "ranks. Give more, or raise max_tokens."
        )
    return ranks


def build_data_schedule(
    lengths: Sequence[int] | NDArray[Any],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str = "auto",
    algorithm: str = "auto",
    num_microbatches: int | None = None,
    num_segments: Sequence[int] | NDArray[Any] | None = None,
    image_patches: Sequence[Sequence[int]] | Ints | None = None,
    groups: Sequence[Hashable] | NDArray[Any] | None = None,
    home_ranks: Sequence[int] | NDArray[Any] | None = None,
    forest: Forest | None = None,
    together: Sequence[Hashable] | NDArray[Any] | None = None,
    move_samples: bool = True,
) -> DataSchedule:
    """Plans one global batch.

    Args:
        lengths: `[num_samples]` original tokens of each sample; 0 is legal. With `num_segments` it is
            `[sum(num_segments)]`, the segments of the first sample, then those of the second, and so on.
        cost_model: cost of a sample by padded length.
        topology: the ranks.
        limits: tokens, samples or both that a micro-batch holds.
        objective: `auto` (from the topology), `step`, `microbatch` or `pipeline`.
        algorithm: `auto` (which is `level_packing`), or `karmarkar_karp`: largest differencing of samples over ranks,
            then over the micro-batches of each; the cap holds all the same.
        num_microbatches: of each rank, where the host fixes it (gradient accumulation); None for the number that is
            best.
        num_segments: `[num_samples]` segments of each sample, each padded by itself; 0 is legal.
        image_patches: `[num_samples]` for each sample the patches of each of its images, which a vision encoder runs
            on the sample's rank before the language model runs its tokens, or their sums; None for no images.
        groups: `[num_samples]` id of the group of each sample, any number or string: a group stays on one rank.
        home_ranks: `[num_samples]` data-parallel rank that loaded each sample, which `move_samples=False` needs.
        forest: what samples share: a micro-batch computes the shared tokens of its samples once, for hosts that can.
        together: `[num_samples]` id of what a sample belongs to, any number or string: samples of one id run in one
            micro-batch, as the pairs of a preference or reward model must.
        move_samples: False keeps every sample on its home rank.

    Returns:
        DataSchedule: the same on every rank and platform.

    Raises:
        BalanceError: an argument is wrong, or does not go with another; names it and the remedy.

    Examples:
        >>> schedule = build_data_schedule(
        ...     [7, 5, 4, 4], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(16)
        ... )
        >>> schedule.ranks
        (((0, 3),), ((1, 2),))
    """
    problem = Problem.of(
        lengths,
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=objective,
        num_segments=num_segments,
        image_patches=image_patches,
        home_ranks=home_ranks,
        forest=forest,
    )
    check_kind("move_samples", move_samples, bool)
    if num_microbatches is not None:
        num_microbatches = check_integer("num_microbatches", num_microbatches)
    if algorithm not in ("auto", *ALGORITHMS):
        raise BalanceError(f"algorithm is {algorithm!r}: it must be one of auto, {', '.join(ALGORITHMS)}.")
    algorithm = "level_packing" if algorithm == "auto" else algorithm
    _refuse_together(
        {
            "together": together is not None,
            "forest": forest is not None,
            "Topology.dynamic_cp": topology.dynamic_cp,
            f"Topology.cp_size={topology.cp_size}": topology.cp_size > 1,
            f"Limits.micro_batch_size={limits.micro_batch_size}": limits.micro_batch_size is not None,
            f"algorithm={algorithm!r}": algorithm != "level_packing",
            f"num_microbatches={num_microbatches}": num_microbatches is not None,
            "move_samples=False": not move_samples,
            "groups": groups is not None,
            "image_patches": image_patches is not None,
            "num_segments": num_segments is not None,
        }
    )
    num_samples = problem.lengths.size
    group_of = None if groups is None else number_groups(groups, count=num_samples)
    homes = problem.home_ranks
    if not move_samples:
        if homes is None:
            raise BalanceError("move_samples is False: home_ranks must say which rank loaded each sample.")
        if group_of is not None and groups_that_split(group_of, ranks=homes).size:
            raise BalanceError(
                "move_samples is False, but groups were loaded by more than one rank: let samples move, or leave "
                "groups out."
            )
    # A set that runs together is planned as if it were a sample of several segments.
    set_of = None if together is None else number_groups(together, name="together", count=num_samples)
    planned = problem if set_of is None else problem.of_sets(set_of)
    batch = batch_of(planned)
    if set_of is not None and not isinstance(batch, ForestBatch):
        _check_sets(batch.oversized, set_of, problem=planned)
    if isinstance(batch, SizedBatch):
        plan = plan_sizes(batch)
    elif isinstance(batch, ForestBatch):
        plan = plan_pieces(batch, num_slots=num_microbatches)
    else:
        plan = _plan_at_one_size(
            batch,
            algorithm=algorithm,
            limits=limits,
            groups=group_of,
            home_ranks=None if move_samples else homes,
            num_slots=num_microbatches,
        )
    microbatch_of, cp_sizes = plan.microbatch_of, plan.cp_sizes
    if not isinstance(batch, SizedBatch):
        cp_sizes = cp_sizes * topology.cp_size
        alone = batch.alone if isinstance(batch, ForestBatch) else batch
        number = cp_sizes.shape[1]
        if num_microbatches not in (None, number) or number % topology.microbatch_multiple:
            raise BalanceError(
                f"num_microbatches is {num_microbatches}: these samples fit in {number} on each rank, and the "
                f"number must be a multiple of {topology.microbatch_multiple}. Give such a number, or raise {limits}."
            )
        fixed = cp_sizes.size * (alone.per_microbatch + alone.gather + 1)
        if int(alone.costs.sum() + alone.expert_cost.sum()) + fixed >= MAX_TOTAL_COST:
            raise BalanceError(
                f"CostModel.per_microbatch is {cost_model.per_microbatch} and gather {cost_model.gather}: with "
                f"{cp_sizes.size} micro-batches costs exceed 2**62. Divide all coefficients by the same number."
            )
    if set_of is not None:
        microbatch_of, batch = microbatch_of[set_of], None
    return DataSchedule.from_assignment(
        problem, microbatch_of, cp_sizes, batch=batch, move_samples=move_samples, groups=group_of
    )


_EXCLUDED = {
    "together": "forest Limits.micro_batch_size move_samples groups image_patches num_segments",
    # A forest's micro-batch is one sequence, not cut over ranks.
    "forest": "Topology.dynamic_cp Topology.cp_size Limits.micro_batch_size algorithm move_samples groups "
    "image_patches num_segments",
    # These bind samples, or work on them, to one rank.
    "Topology.dynamic_cp": "algorithm num_microbatches move_samples groups image_patches",
}
"""What does not go with an argument."""


def _refuse_together(is_set: dict[str, bool]) -> None:
    """A BalanceError names two arguments of these texts that are set and do not go together."""
    for name, others in _EXCLUDED.items():
        for text in is_set:
            if is_set[name] and is_set[text] and text.partition("=")[0] in others.split():
                raise BalanceError(f"{text} does not go with {name}: leave one of them out.")


def _check_sets(oversized: Ints, set_of: Ints, *, problem: Problem) -> None:
    """A set that is longer than the cap has one sample."""
    for index in oversized.tolist():
        if (size := int((set_of == index).sum())) > 1:
            raise BalanceError(
                f"the {size} samples that belong together with sample {int(np.argmax(set_of == index))} have "
                f"{problem.lengths[index]} tokens: raise {problem.limits}, or leave together out."
            )


def _plan_at_one_size(
    batch: Batch,
    *,
    algorithm: str,
    limits: Limits,
    groups: Ints | None,
    home_ranks: Ints | None,
    num_slots: int | None,
) -> Plan:
    """The plan at one size: on fixed ranks where samples or groups are bound to them."""
    counts_samples, max_samples = limits.max_tokens_per_gpu is None, limits.micro_batch_size
    if home_ranks is None and groups is not None:
        costs = sums(batch.local_cost + batch.expert_cost, groups, int(groups.max(initial=-1)) + 1)
        home_ranks = partition_items(costs, num_parts=batch.num_ranks, equal_count=counts_samples)[groups]

    def plan_within(caps: Batch) -> Plan:
        if home_ranks is not None:
            return plan_on_ranks(caps, home_ranks, num_slots=num_slots)
        if algorithm == "karmarkar_karp":
            return plan_karmarkar_karp(caps, equal_count=counts_samples, num_slots=num_slots)
        return (plan_pipeline if caps.waiting.is_makespan else plan_slots)(caps, num_slots=num_slots)

    plan = plan_within(batch)
    if counts_samples or max_samples is None or int(np.bincount(plan.microbatch_of, minlength=1).max()) <= max_samples:
        return plan
    return plan_within(batch.with_sample_cap(max_samples))
