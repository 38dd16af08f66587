"""The plan of one global batch, and the invariants that hold for every plan.

    placed once     every sample is in exactly one micro-batch
    even slots      every rank has num_microbatches micro-batches, a multiple of microbatch_multiple
    cap             a micro-batch over the cap holds one single over-long sample
    no empty slot   an empty micro-batch, run as a masked dummy, exists only where there are fewer samples than
                    slots: over all ranks, or on that rank where samples or groups are bound to ranks
    home            where samples may not move, every one is on its home rank
    groups          where groups are kept on a rank, every one is on one rank
    honest costs    cost_grid and predicted_cost follow from the placement, and lower_bound is not above

Sample ids ascend in a micro-batch by construction: a schedule stores the slot of each sample.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.grouping import groups_that_split
from megatron_balance.planner.images import Images
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.problem import Problem, build_problem
from megatron_balance.topology import Limits, Topology

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank, for every slot: sample ids, which are positions in the global batch."""


_DYNAMIC = ("dynamic_cp", "max_cp_size")
"""Fields of a topology that differ only with dynamic context-parallel sizes, which the digest includes."""


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
            of the costliest rank that meets there, of the slowest group, with images the costliest encoder part and
            the costliest language part; `pipeline`: the largest makespan.
        lower_bound: a cost that no plan that moves samples freely can beat, same units.
        objective: `step`, `microbatch` or `pipeline`.
        algorithm: name of the algorithm that made the plan.
        lengths: `[num_samples]` int64 original tokens.
        padded_lengths: `[num_samples]` int64 padded tokens.
        num_segments: `[num_samples]` int64 segments of each sample, or None where each is one.
        segment_lengths: `[sum(num_segments)]` int64 original tokens, or None where each sample is one.
        images: those of the samples, or None where there are none.
        oversized: ids of the samples longer than the cap; each runs alone.
        home_ranks: `[num_samples]` rank that loaded each sample, or None where it is not known.
        move_samples: True if samples may leave their home rank.
        moved_tokens_before_relabel: original tokens off their home rank before ranks were exchanged, or None.
        ranks_per_node: data-parallel ranks of one node, or None where nodes do not matter.
        groups: `[num_samples]` group of each sample, from 0, where groups are kept on a rank; else None.
        topology: the ranks.
        limits: token or sample cap of a micro-batch.
        cost_model: cost of a sample.
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
    images: Images | None
    oversized: tuple[int, ...]
    home_ranks: NDArray[np.int64] | None
    move_samples: bool
    moved_tokens_before_relabel: int | None
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

    @property
    def cp_sizes(self) -> tuple[tuple[int, ...], ...]:
        """`cp_sizes[dp_rank][slot]`: ranks that share a micro-batch by context parallelism."""
        sizes: list[list[int]] = self.cp_size_grid().tolist()
        return tuple(tuple(size for size in slots if size) for slots in sizes)

    def cp_size_grid(self) -> NDArray[np.int64]:
        """The same as an array, `[dp_size, num_microbatches]`; 0 where a rank has no such slot."""
        return np.full((self.topology.dp_size, self.num_microbatches), self.topology.cp_size)

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
        """Asserts the invariants of this module.

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
        header += [int(value) for name, value in vars(self.topology).items() if name not in _DYNAMIC]
        parts = [np.array(header, dtype=np.int64), self.slot_counts(), self.sample_ids()]
        canonical = b"".join(part.astype("<i8").tobytes() for part in parts)
        return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") >> 1

    def problem(self) -> Problem:
        """The planning problem that the schedule solves."""
        padded = self.padded_lengths
        if self.segment_lengths is not None:
            padded = self.topology.padded_seq_len(self.segment_lengths)
        return build_problem(
            padded,
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=OBJECTIVES[self.objective],
            num_segments=self.num_segments,
            images=self.images,
        )


def check_invariants(schedule: DataSchedule) -> None:
    """Asserts the invariants of this module, also under `python -O`.

    Raises:
        AssertionError: names the invariant that is broken.
    """
    dp_size, num_samples = schedule.topology.dp_size, schedule.lengths.size
    num_microbatches, slot_of = schedule.num_microbatches, schedule.slot_of

    # Slots before samples: a sample's slot is meaningless until their number is right.
    divisible = num_microbatches > 0 and num_microbatches % schedule.topology.microbatch_multiple == 0
    require(divisible, "even slots", f"{num_microbatches} is no multiple of microbatch_multiple")
    even = schedule.cost_grid.shape == (dp_size, num_microbatches)
    require(even, "even slots", f"cost_grid has shape {schedule.cost_grid.shape}")

    num_slots = dp_size * num_microbatches
    known = slot_of.shape == (num_samples,) and bool(((slot_of >= 0) & (slot_of < num_slots)).all())
    require(known, "placed once", "a sample is missing, or its slot does not exist")
    counts = np.bincount(slot_of, minlength=num_slots)

    cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    if cap is None:
        held, cap = counts, schedule.limits.micro_batch_size or 0
    else:
        held = schedule.slot_tokens()
    over = np.flatnonzero((held > cap) & (counts > 1))
    require(not over.size, "cap", f"micro-batches {over[:4].tolist()} (rank by rank) hold more than {cap}")
    alone = bool((counts[slot_of[list(schedule.oversized)]] == 1).all())
    require(alone, "cap", "an over-long sample does not run alone")

    if schedule.move_samples and schedule.groups is None:
        full = num_samples < num_slots or bool((counts > 0).all())
    else:
        of_ranks = counts.reshape(dp_size, -1)
        full = bool(((of_ranks > 0).all(axis=1) | (of_ranks.sum(axis=1) < num_microbatches)).all())
    require(full, "no empty slot", "a micro-batch is empty although there are enough samples")

    ranks = slot_of // num_microbatches
    if not schedule.move_samples:
        at_home = schedule.home_ranks is not None and bool((ranks == schedule.home_ranks).all())
        require(at_home, "home", "a sample left its home rank")
    if schedule.groups is not None:
        split = groups_that_split(schedule.groups, ranks=ranks)
        require(not split.size, "groups", f"groups {split[:4].tolist()} are on more than one rank")

    if schedule.segment_lengths is not None:
        sums = sum_segments(schedule.segment_lengths, num_segments=schedule.num_segments)
        require(bool((sums == schedule.lengths).all()), "honest costs", "lengths are not the sums of their segments")
    problem = schedule.problem()
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    image_grid = problem.image_grid(slot_of, num_microbatches=num_microbatches)
    predicted = problem.predicted_cost(grid, image_grid=image_grid)
    honest = bool((grid == schedule.cost_grid).all()) and predicted == schedule.predicted_cost
    require(honest, "honest costs", "cost_grid or predicted_cost does not follow from the placement")
    require(schedule.lower_bound <= schedule.predicted_cost, "honest costs", "lower_bound is above predicted_cost")


def require(holds: bool, invariant: str, detail: str) -> None:
    """Asserts an invariant of a schedule, also under `python -O`.

    Raises:
        AssertionError: names the invariant, with the detail.
    """
    if not holds:
        raise AssertionError(f"The schedule breaks the invariant '{invariant}': {detail}.")
