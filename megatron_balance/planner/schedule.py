"""From lengths to a schedule: which rank computes which sample in which micro-batch.

    1. lengths are validated and padded for context and sequence parallelism
    2. the cost model turns them into integer costs
    3. the objective is chosen from the topology, unless it is given
    4. samples are placed (`placement.py`)
    5. the plan is frozen with its cost grid and its lower bound

Invariants (`DataSchedule.check` asserts them, in this order):

    placed once     every sample is in exactly one micro-batch
    even slots      every rank has num_microbatches micro-batches, a multiple of microbatch_multiple
    cap             a micro-batch over the cap holds one single over-long sample
    no empty slot   an empty micro-batch, run as a masked dummy, exists only where there are fewer samples than
                    slots: over all ranks, or on that rank where samples may not move
    ascending       sample ids ascend in a micro-batch
    home            where samples may not move, every one is on its home rank
    honest costs    cost_grid and predicted_cost follow from the placement, and lower_bound is not above

An empty global batch is legal: every rank gets `microbatch_multiple` masked dummies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.planner.bounds import lower_bound
from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.partition import ALGORITHMS
from megatron_balance.planner.placement import place
from megatron_balance.planner.problem import Problem, build_problem, resolve_objective
from megatron_balance.planner.topology import Limits, Topology

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank, for every slot: sample ids, which are positions in `lengths`."""


@dataclass(frozen=True, eq=False)
class DataSchedule:
    """The plan of one global batch. Two plans are the same where their `digest()` is.

    Attributes:
        ranks: `ranks[dp_rank][slot]` are the sample ids of that micro-batch.
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
        oversized: ids of the samples longer than the cap; each runs alone.
        home_ranks: `[num_samples]` rank that loaded each sample, or None where it is not known.
        move_samples: whether samples may leave their home rank.
        topology: the ranks.
        limits: what a micro-batch holds.
        cost_model: what a sample costs.
    """

    ranks: Ranks
    num_microbatches: int
    cost_grid: NDArray[np.int64]
    cost_shift: int
    predicted_cost: int
    lower_bound: int
    objective: str
    algorithm: str
    lengths: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    oversized: tuple[int, ...]
    home_ranks: NDArray[np.int64] | None
    move_samples: bool
    topology: Topology
    limits: Limits
    cost_model: CostModel

    def slot_counts(self) -> NDArray[np.int64]:
        """Samples in each micro-batch, `[dp_size * num_microbatches]`, rank by rank."""
        return np.array([len(ids) for slots in self.ranks for ids in slots], dtype=np.int64)

    def sample_ids(self) -> NDArray[np.int64]:
        """All sample ids, rank by rank and slot by slot, `[num_samples]`."""
        slots = chain.from_iterable(self.ranks)
        return np.fromiter(chain.from_iterable(slots), dtype=np.int64)

    def check(self) -> DataSchedule:
        """Asserts the invariants of this module, also under `python -O`.

        Returns:
            The schedule itself.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        dp_size, num_samples = self.topology.dp_size, self.lengths.size
        ids, counts = self.sample_ids(), self.slot_counts()

        in_range = bool(((ids >= 0) & (ids < num_samples)).all())
        placed_once = in_range and bool((np.bincount(ids, minlength=num_samples) == 1).all())
        _require(placed_once, "placed once", "a sample is missing, doubled or unknown")

        even = len(self.ranks) == dp_size and all(len(slots) == self.num_microbatches for slots in self.ranks)
        _require(even, "even slots", f"not every rank has {self.num_microbatches} micro-batches")
        divisible = self.num_microbatches > 0 and self.num_microbatches % self.topology.microbatch_multiple == 0
        _require(divisible, "even slots", f"{self.num_microbatches} is no multiple of microbatch_multiple")

        cap = self.limits.max_tokens_per_microbatch(self.topology)
        ends = np.cumsum(counts)
        if cap is None:
            held, cap = counts, self.limits.micro_batch_size or 0
        else:
            sums = np.concatenate([[0], np.cumsum(self.padded_lengths[ids])])
            held = sums[ends] - sums[ends - counts]
        over = np.flatnonzero((held > cap) & (counts > 1))
        _require(not over.size, "cap", f"micro-batches {over[:4].tolist()} (rank by rank) hold more than {cap}")
        oversized = set(self.oversized)
        shared = [sample for slots in self.ranks for held in slots if len(held) > 1 for sample in held]
        _require(oversized.isdisjoint(shared), "cap", "an over-long sample does not run alone")

        if self.move_samples:
            full = num_samples < counts.size or bool((counts > 0).all())
        else:
            of_ranks = counts.reshape(dp_size, -1)
            full = bool(((of_ranks > 0).all(axis=1) | (of_ranks.sum(axis=1) < self.num_microbatches)).all())
        _require(full, "no empty slot", "a micro-batch is empty although there are enough samples")

        starts = np.zeros(num_samples + 1, dtype=np.bool_)
        starts[ends - counts] = True
        ascending = bool(((np.diff(ids) > 0) | starts[1:num_samples]).all())
        _require(ascending, "ascending", "ids in a micro-batch do not ascend")

        slot_of = np.empty(num_samples, dtype=np.int64)
        slot_of[ids] = np.repeat(np.arange(counts.size), counts)
        if not self.move_samples:
            at_home = self.home_ranks is not None and bool((slot_of // self.num_microbatches == self.home_ranks).all())
            _require(at_home, "home", "a sample left its home rank")

        problem = self._problem()
        grid = problem.cost_grid(slot_of, num_microbatches=self.num_microbatches)
        honest = bool((grid == self.cost_grid).all()) and problem.predicted_cost(grid) == self.predicted_cost
        _require(honest, "honest costs", "cost_grid or predicted_cost does not follow from the placement")
        _require(self.lower_bound <= self.predicted_cost, "honest costs", "lower_bound is above predicted_cost")
        return self

    def digest(self) -> int:
        """A number of 63 bits that is the same on every platform for the same plan: compare it across ranks."""
        header = [len(self.ranks), self.num_microbatches, self.lengths.size]
        header += [int(value) for value in vars(self.topology).values()]
        parts = [np.array(header, dtype=np.int64), self.slot_counts(), self.sample_ids()]
        canonical = b"".join(part.astype("<i8").tobytes() for part in parts)
        return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") >> 1

    def _problem(self) -> Problem:
        return build_problem(
            self.padded_lengths,
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=self.objective,
        )


def build_data_schedule(
    lengths: Sequence[int] | NDArray[Any],
    *,
    cost_model: CostModel,
    topology: Topology,
    limits: Limits,
    objective: str = "auto",
    algorithm: str = "auto",
    home_ranks: Sequence[int] | NDArray[Any] | None = None,
    move_samples: bool = True,
) -> DataSchedule:
    """Plans one global batch.

    Args:
        lengths: `[num_samples]` original tokens of each sample; 0 is legal.
        cost_model: what a sample of a padded length costs.
        topology: the ranks.
        limits: tokens or samples that a micro-batch holds.
        objective: `auto` (from the topology), `step`, `microbatch` or `pipeline`.
        algorithm: `auto` (level packing), or a name in `partition.ALGORITHMS`. By name samples go to ranks
            by cost, then into micro-batches rank by rank; the cap holds all the same.
        home_ranks: `[num_samples]` rank that loaded each sample.
        move_samples: False keeps every sample on its home rank.

    Returns:
        DataSchedule: the same on every rank and platform.

    Raises:
        BalanceError: a length is negative or no integer, a name is unknown, or home ranks are missing or wrong.

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
    original = as_integers(lengths, name="lengths")
    homes = None if home_ranks is None else as_integers(home_ranks, name="home_ranks")
    if homes is None and not move_samples:
        raise BalanceError("move_samples is False: home_ranks must say which rank loaded each sample.")
    if homes is not None and homes.shape != original.shape:
        raise BalanceError(
            f"home_ranks has {homes.size} entries: it must have one for each of {original.size} lengths."
        )
    if homes is not None and homes.size and int(homes.max()) >= topology.dp_size:
        index = int(homes.argmax())
        raise BalanceError(f"home_ranks[{index}] is {homes[index]}: it must be below dp_size {topology.dp_size}.")

    padded = topology.padded_seq_len(original)
    problem = build_problem(padded, cost_model=cost_model, topology=topology, limits=limits, objective=objective)
    placement = place(problem, algorithm=algorithm, home_ranks=None if move_samples else homes)
    return DataSchedule(
        ranks=_ranks(placement.slot_of, dp_size=topology.dp_size, num_microbatches=placement.num_microbatches),
        num_microbatches=placement.num_microbatches,
        cost_grid=placement.cost_grid,
        cost_shift=problem.cost_shift,
        predicted_cost=placement.predicted_cost,
        lower_bound=lower_bound(problem),
        objective=objective,
        algorithm=algorithm,
        lengths=original,
        padded_lengths=padded,
        oversized=tuple(np.flatnonzero(problem.weights > problem.capacity).tolist()),
        home_ranks=homes,
        move_samples=move_samples,
        topology=topology,
        limits=limits,
        cost_model=cost_model,
    )


def as_integers(values: Sequence[int] | NDArray[Any], *, name: str) -> NDArray[np.int64]:
    """Non-negative integers as int64, `[num_samples]` → `[num_samples]`.

    Args:
        values: a sequence or an array of integers.
        name: what the message calls them.

    Raises:
        BalanceError: says which entry is negative, no integer, or above 2**40.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise BalanceError(f"{name} has shape {array.shape}: it must have one entry for each sample.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        for index, value in enumerate(cast("Sequence[object]", values)):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise BalanceError(f"{name}[{index}] is {value!r}: it must be an integer of at least 0.")
    wrong = np.flatnonzero((array < 0) | (array > 2**40))
    if wrong.size:
        index = int(wrong[0])
        raise BalanceError(f"{name}[{index}] is {array[index]}: it must be an integer from 0 to 2**40.")
    return array.astype(np.int64)


def _ranks(slot_of: NDArray[np.int64], *, dp_size: int, num_microbatches: int) -> Ranks:
    """Slot numbers as nested tuples; a stable sort leaves the ids of a slot ascending."""
    ids = np.argsort(slot_of, kind="stable").tolist()
    ends = np.cumsum(np.bincount(slot_of, minlength=dp_size * num_microbatches)).tolist()
    slots = [tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        tuple(slots[first : first + num_microbatches])
        for first in range(0, dp_size * num_microbatches, num_microbatches)
    )


def _require(holds: bool, invariant: str, detail: str) -> None:
    """Like `assert`, but not removed by `python -O`."""
    if not holds:
        raise AssertionError(f"DataSchedule breaks the invariant '{invariant}': {detail}.")
