"""From lengths to a schedule: which rank computes which sample in which micro-batch.

    1. lengths are validated and padded for context and sequence parallelism
    2. the cost model turns them into integer costs
    3. the objective is chosen from the topology, unless it is given
    4. groups that must share a rank are given to ranks (`grouping.py`)
    5. samples are placed (`placement.py`)
    6. what is interchangeable is exchanged so that fewer tokens move (`locality.py`)
    7. the plan is frozen with its cost grid and its lower bound

`DataSchedule.check` asserts the invariants that are listed in `invariants.py`. An empty global batch is
legal: every rank gets `microbatch_multiple` masked dummies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.grouping import KEEP_GROUPS, assign_groups, groups_that_split
from megatron_balance.planner.inputs import as_home_ranks, as_integers, as_num_segments, number_groups, sum_segments
from megatron_balance.planner.invariants import check_invariants
from megatron_balance.planner.locality import Homes, keep_local
from megatron_balance.planner.partition import ALGORITHMS
from megatron_balance.planner.placement import place
from megatron_balance.planner.problem import Problem, build_problem, resolve_objective
from megatron_balance.planner.topology import Limits, Topology

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank, for every slot: sample ids, which are positions in the global batch."""


@dataclass(frozen=True, eq=False)
class DataSchedule:
    """The plan of one global batch. Two plans are the same where their `digest()` is.

    Attributes:
        slot_of: `[num_samples]` int64 `rank * num_microbatches + slot` of each sample.
        num_microbatches: slots of every rank.
        cost_grid: `[dp_size, num_microbatches]` int64: the costs of a micro-batch's samples, plus
            `per_microbatch` for every slot, plus an even share of its expert-parallel group's work.
        cost_shift: costs here are in units of `2**cost_shift` of the cost model's.
        predicted_cost: the objective's value. `step`: the largest row sum; `microbatch`: the sum over slots
            of the costliest rank that meets there, of the slowest group; `pipeline`: the largest makespan.
        lower_bound: what no plan that moves samples at will can beat, same units.
        objective: `step`, `microbatch` or `pipeline`.
        algorithm: name of the algorithm that made the plan.
        lengths: `[num_samples]` int64 original tokens.
        padded_lengths: `[num_samples]` int64 padded tokens.
        num_segments: `[num_samples]` int64 segments of each sample, or None where each is one.
        segment_lengths: `[sum(num_segments)]` int64 original tokens, or None likewise.
        oversized: ids of the samples longer than the cap; each runs alone.
        home_ranks: `[num_samples]` rank that loaded each sample, or None where it is not known.
        move_samples: whether samples may leave their home rank.
        moved_tokens_unlabelled: original tokens off their home rank before ranks were exchanged, or None.
        ranks_per_node: data-parallel ranks of one node, or None where nodes do not matter.
        groups: `[num_samples]` group of each sample, from 0, where groups are kept on a rank; else None.
        topology: the ranks.
        limits: what a micro-batch holds.
        cost_model: what a sample costs.
    """

    slot_of: NDArray[np.int64]
    num_microbatches: int
    cost_grid: NDArray[np.int64]
    cost_shift: int
    predicted_cost: int
    lower_bound: int
    objective: str
    algorithm: str
    lengths: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    num_segments: NDArray[np.int64] | None
    segment_lengths: NDArray[np.int64] | None
    oversized: tuple[int, ...]
    home_ranks: NDArray[np.int64] | None
    move_samples: bool
    moved_tokens_unlabelled: int | None
    ranks_per_node: int | None
    groups: NDArray[np.int64] | None
    topology: Topology
    limits: Limits
    cost_model: CostModel

    @cached_property
    def ranks(self) -> Ranks:
        """`ranks[dp_rank][slot]` are the sample ids of that micro-batch, ascending; made when first asked for."""
        ids, ends = self.sample_ids().tolist(), np.cumsum(self.slot_counts()).tolist()
        slots = [tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        return tuple(
            tuple(slots[first : first + self.num_microbatches]) for first in range(0, len(slots), self.num_microbatches)
        )

    def destinations(self) -> NDArray[np.int64]:
        """The rank that runs each sample, `[num_samples]`."""
        return self.slot_of // self.num_microbatches

    def slot_counts(self) -> NDArray[np.int64]:
        """Samples in each micro-batch, `[dp_size * num_microbatches]`, rank by rank."""
        return np.bincount(self.slot_of, minlength=self.topology.dp_size * self.num_microbatches)

    def slot_tokens(self) -> NDArray[np.int64]:
        """Padded tokens of each micro-batch, before it is filled up, `[dp_size * num_microbatches]`, rank by rank."""
        tokens = np.zeros(self.topology.dp_size * self.num_microbatches, dtype=np.int64)
        np.add.at(tokens, self.slot_of, self.padded_lengths)
        return tokens

    def sample_ids(self) -> NDArray[np.int64]:
        """All sample ids, rank by rank and slot by slot, `[num_samples]`."""
        # A stable sort leaves the ids of a slot ascending.
        return np.argsort(self.slot_of, kind="stable")

    def check(self) -> DataSchedule:
        """Asserts the invariants of `invariants.py`.

        Returns:
            The schedule itself.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        check_invariants(self)
        return self

    def digest(self) -> int:
        """A number of 63 bits that is the same on every platform for the same plan: compare it across ranks."""
        header = [self.topology.dp_size, self.num_microbatches, self.lengths.size]
        header += [int(value) for value in vars(self.topology).values()]
        parts = [np.array(header, dtype=np.int64), self.slot_counts(), self.sample_ids()]
        canonical = b"".join(part.astype("<i8").tobytes() for part in parts)
        return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") >> 1

    def problem(self) -> Problem:
        """The planning problem that the schedule answers."""
        padded = self.padded_lengths
        if self.segment_lengths is not None:
            padded = self.topology.padded_seq_len(self.segment_lengths)
        return build_problem(
            padded,
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=self.objective,
            num_segments=self.num_segments,
        )


def build_data_schedule(
    lengths: Sequence[int] | NDArray[Any],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str = "auto",
    algorithm: str = "auto",
    num_segments: Sequence[int] | NDArray[Any] | None = None,
    groups: Sequence[Hashable] | NDArray[Any] | None = None,
    keep_groups: str = "rank",
    home_ranks: Sequence[int] | NDArray[Any] | None = None,
    move_samples: bool = True,
    relabel: bool = True,
    ranks_per_node: int | None = None,
) -> DataSchedule:
    """Plans one global batch.

    Args:
        lengths: `[num_samples]` original tokens of each sample; 0 is legal. With `num_segments` it is
            `[sum(num_segments)]`, the segments of the first sample, then those of the second, and so on.
        cost_model: what a sample of a padded length costs.
        topology: the ranks.
        limits: tokens or samples that a micro-batch holds.
        objective: `auto` (from the topology), `step`, `microbatch` or `pipeline`.
        algorithm: `auto` (level packing), or a name in `partition.ALGORITHMS`. By name samples go to ranks
            by cost, then into micro-batches rank by rank; the cap holds all the same.
        num_segments: `[num_samples]` segments of each sample, each padded by itself; 0 is legal.
        groups: `[num_samples]` id of the group of each sample, any number or string.
        keep_groups: `rank` keeps each group on one rank; `step` asks for nothing, since a global batch is
            one optimiser step.
        home_ranks: `[num_samples]` rank that loaded each sample.
        move_samples: False keeps every sample on its home rank.
        relabel: exchange what is interchangeable so that fewer tokens leave their home rank; costs stay.
        ranks_per_node: data-parallel ranks of one node: what must move stays on its node where it can.

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

    problem = build_problem(
        padded_segments,
        cost_model=cost_model,
        topology=topology,
        limits=limits,
        objective=objective,
        num_segments=counts,
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
        if move_samples and relabel:
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
        oversized=tuple(np.flatnonzero(problem.weights > problem.capacity).tolist()),
        home_ranks=homes,
        move_samples=move_samples,
        moved_tokens_unlabelled=moved,
        ranks_per_node=ranks_per_node,
        groups=kept,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    )


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
