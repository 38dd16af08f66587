"""The plan of one global batch, and the invariants that hold for every plan.

A micro-batch is a first rank, its ranks and a slot. At one context-parallel size its rank is a data-parallel rank. With
`Topology.dynamic_cp` ranks are the `dp_size * cp_size` DP×CP ranks, `dp_rank * cp_size + cp_rank`, and a micro-batch
has as many neighbouring ranks as its size says.

    placed once     every sample is in exactly one micro-batch
    aligned         a micro-batch of s ranks starts at a multiple of s, and all its ranks run it in the same slot: they
                    meet in the order of slots, so there is no circular wait
    even slots      every rank has num_microbatches micro-batches, a multiple of microbatch_multiple; DP×CP ranks that
                    meet outside of groups only at the end of the step may have fewer, at least one
    last slot       a micro-batch is in the last slot of all its ranks or of none
    cap             a micro-batch over the cap holds one single over-long sample, at the largest size; none holds more
                    samples than `Limits.micro_batch_size`
    no empty slot   at one size an empty micro-batch, run as a masked dummy, exists only where there are fewer samples
                    than slots: over all ranks, or on that rank where samples or groups are bound to ranks
                    A forest may leave one empty: shared tokens leave less work.
    home            where samples may not move, every one is on its home rank
    groups          where groups are kept on a rank, every one is on one rank
    honest costs    cost_grid and predicted_cost follow from the assignment, and lower_bound is not above
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.planner.batch import ForestBatch, SizedBatch, batch_of, first_ranks
from megatron_balance.planner.level_packing import Batch
from megatron_balance.planner.metrics import ScheduleMetrics, gpu_costs, plan_metrics
from megatron_balance.planner.objective import resolve_objective
from megatron_balance.planner.problem import Ints, Problem, groups_that_split, sum_segments, sums

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank, for every slot: sample ids, which are positions in the global batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Assignment(Problem):
    """Samples in micro-batches, be it a plan or what a run did.

    Attributes:
        microbatch_of: `[num_samples]` int64 `rank * num_microbatches + slot` of each sample; with dynamic sizes the
            first rank of its micro-batch.
        cp_size_grid: `[num_ranks, num_microbatches]` int64 ranks that share each micro-batch by context parallelism;
            with dynamic sizes 1 for a dummy, 0 where a rank has no such slot.
    """

    microbatch_of: Ints
    cp_size_grid: Ints

    @property
    def num_microbatches(self) -> int:
        """Slots of every rank; with dynamic sizes the most of a rank."""
        return self.cp_size_grid.shape[1]

    def owner_slots(self) -> Ints:
        """`first_rank * num_microbatches + slot` of every rank's micro-batches, `[num_ranks, num_microbatches]`."""
        sizes = self.cp_size_grid if self.topology.dynamic_cp else np.ones_like(self.cp_size_grid)
        return first_ranks(sizes) * self.num_microbatches + np.arange(self.num_microbatches)

    def sample_ids(self) -> Ints:
        """All sample ids, rank by rank and slot by slot, each once, `[num_samples]`."""
        # A stable sort leaves the ids of a slot ascending.
        return np.argsort(self.microbatch_of, kind="stable")

    def samples(self) -> list[list[tuple[int, ...]]]:
        """`[num_ranks][num_microbatches]` sample ids, ascending; the same for all ranks that share a micro-batch."""
        ids: list[int] = self.sample_ids().tolist()
        ends: list[int] = np.cumsum(self.microbatch_counts()).tolist()
        microbatches = [tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        return [[microbatches[index] for index in slots] for slots in self.owner_slots().tolist()]

    def metrics(self, *, cost_model: CostModel | None = None, objective: str | None = None) -> ScheduleMetrics:
        """Figures of the assignment, by another cost model or objective than its own where given.

        Examples:
            >>> from megatron_balance import CostModel, Limits, Topology, build_data_schedule
            >>> schedule = build_data_schedule(
            ...     [7, 5, 4, 4], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(16)
            ... )
            >>> schedule.metrics().step_imbalance  # 11 tokens on one rank, 9 on the other
            1.1
        """
        objective = resolve_objective(objective or self.objective, topology=self.topology)
        return plan_metrics(replace(self, cost_model=cost_model or self.cost_model, objective=objective))

    @cached_property
    def padded_lengths(self) -> Ints:
        """`[num_samples]` padded tokens, at the size that each sample runs at."""
        return self.padded(self.cp_size_grid.reshape(-1)[self.microbatch_of])

    @cached_property
    def computed_lengths(self) -> Ints:
        """`[num_samples]` padded tokens; in a forest those that a sample adds to its micro-batch."""
        if self.forest is None:
            return self.padded_lengths
        ends = self.topology.padded_seq_len(np.append(self.forest.ends, 0))
        return ends[self.forest.node_of] - ends[self.forest.starts(self.microbatch_of)]

    def microbatch_tokens(self) -> Ints:
        """`[num_ranks * num_microbatches]` padded tokens, 0 on the further ranks of a micro-batch."""
        return sums(self.computed_lengths, self.microbatch_of, self.cp_size_grid.size)

    def is_over_cap(self) -> NDArray[np.bool_]:
        """`[num_ranks * num_microbatches]` True where several samples are over the cap, of tokens or of samples."""
        limits, counts = self.limits, self.microbatch_counts()
        over = counts > (limits.micro_batch_size or counts.size + self.lengths.size)
        if limits.max_tokens_per_gpu is not None:
            over |= self.microbatch_tokens() > limits.max_tokens_per_gpu * self.cp_size_grid.reshape(-1)
        return over & (counts > 1)

    def microbatch_counts(self) -> Ints:
        """`[num_ranks * num_microbatches]` samples, 0 on the further ranks of a micro-batch."""
        return np.bincount(self.microbatch_of, minlength=self.cp_size_grid.size)


@dataclass(frozen=True, eq=False, kw_only=True)
class DataSchedule(Assignment):
    """The plan of one global batch. Two plans are the same where their `digest()` is.

    With `Topology.dynamic_cp` a rank is a DP×CP rank, and `cost_grid` is 0 where it has no such slot. Costs are those
    of one GPU in units of the cost model, rounded up, so that plans of one batch can be compared whatever their sizes.

    Attributes:
        cost_grid: `[num_ranks, num_microbatches]` costs of a micro-batch's samples, plus `per_microbatch` for every
            slot, plus an even share of its expert-parallel group's work, on each of its GPUs (all stages of a pipeline
            have the same share). int64, or Python's integers where these do not fit.
        predicted_cost: the objective's value. `step`: the largest sum over a rank's slots; `microbatch`: the sum over
            slots of the costliest rank that meets there, of the slowest group, with images the costliest encoder phase
            and the costliest language phase; `pipeline`: the largest makespan.
        lower_bound: a cost that no plan that moves samples freely can beat.
        objective: `step`, `microbatch` or `pipeline`.
        lengths: `[num_samples]` int64 original tokens.
        num_segments: `[num_samples]` int64 segments of each sample, or None where each is one.
        segment_lengths: `[sum(num_segments)]` int64 original tokens, or None where each sample is one.
        images: those of the samples, or None where there are none.
        home_ranks: `[num_samples]` data-parallel rank that loaded each sample, or None where it is not known.
        forest: what samples share, or None where each is computed by itself.
        move_samples: True if samples may leave their home rank.
        groups: `[num_samples]` group of each sample, from 0, where groups are kept on a rank; else None.
        topology: the ranks.
        limits: token or sample cap of a micro-batch.
        cost_model: cost of a sample.

    Examples:
        >>> from megatron_balance import CostModel, Limits, Topology, build_data_schedule
        >>> schedule = build_data_schedule(
        ...     [7, 5, 4, 4], cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(16)
        ... )
        >>> print(schedule)
        2 ranks × 1 micro-batch, 1.100 × bound
        >>> schedule.ranks, schedule.cost_grid.tolist()
        ((((0, 3),), ((1, 2),)), [[11], [9]])
    """

    cost_grid: NDArray[Any]
    predicted_cost: int
    lower_bound: int
    move_samples: bool
    groups: Ints | None

    @classmethod
    def from_assignment(
        cls,
        problem: Problem,
        microbatch_of: Ints,
        cp_sizes: Ints,
        *,
        batch: Batch | SizedBatch | ForestBatch | None = None,
        move_samples: bool = True,
        groups: Ints | None = None,
    ) -> DataSchedule:
        """The schedule that assigns samples so, with its costs and its bound; `batch`: `batch_of(problem)`."""
        batch = batch_of(problem) if batch is None else batch
        grid, predicted, bound = gpu_costs(batch, microbatch_of, cp_sizes, topology=problem.topology)
        return cls(
            **{field.name: getattr(problem, field.name) for field in fields(Problem)},
            microbatch_of=microbatch_of,
            cp_size_grid=cp_sizes,
            cost_grid=grid,
            predicted_cost=predicted,
            lower_bound=bound,
            move_samples=move_samples,
            groups=groups,
        )

    def __str__(self) -> str:
        (num_ranks, number), bound = self.cp_size_grid.shape, max(self.lower_bound, 1)
        ranks = ("DP×CP rank" if self.topology.dynamic_cp else "rank") + "s" * (num_ranks != 1)
        microbatches = "micro-batch" + "es" * (number != 1)
        return f"{num_ranks} {ranks} × {number} {microbatches}, {max(self.predicted_cost, 1) / bound:.3f} × bound"

    def __repr__(self) -> str:
        return f"<DataSchedule of {self.lengths.size} samples: {self}>"

    @cached_property
    def ranks(self) -> Ranks:
        """`ranks[rank][slot]` are the sample ids of that micro-batch, ascending; the same for all that share it."""
        exists: list[list[bool]] = (self.cp_size_grid > 0).tolist()
        return tuple(
            tuple(ids for ids, is_slot in zip(slots, of_rank, strict=True) if is_slot)
            for slots, of_rank in zip(self.samples(), exists, strict=True)
        )

    @cached_property
    def oversized(self) -> tuple[int, ...]:
        """Ids of the samples longer than the cap at the largest size; each runs alone."""
        cap, size = self.limits.max_tokens_per_gpu, self.topology.dynamic_cp_sizes[-1]
        tokens = self.padded(np.full_like(self.lengths, size))
        return () if cap is None else tuple(np.flatnonzero(tokens > cap * size).tolist())

    @property
    def cp_sizes(self) -> tuple[tuple[int, ...], ...]:
        """`cp_sizes[rank][slot]`: ranks that share a micro-batch by context parallelism."""
        sizes: list[list[int]] = self.cp_size_grid.tolist()
        return tuple(tuple(size for size in slots if size) for slots in sizes)

    def destinations(self) -> Ints:
        """The data-parallel rank that runs each sample, `[num_samples]`; with dynamic sizes that of its first rank."""
        width = self.topology.cp_size if self.topology.dynamic_cp else 1
        return self.microbatch_of // (self.num_microbatches * width)

    def copies(self, *, cp_rank: int = 0) -> tuple[Ints, Ints]:
        """Where samples are sent among the data-parallel ranks of one context-parallel rank, which load each once.

        Returns:
            Sample ids, ascending, and the data-parallel rank that each goes to: `[num_copies]` both. At one size every
            sample once; with dynamic sizes as often as its micro-batch has ranks with this context-parallel rank.
        """
        if not self.topology.dynamic_cp:
            return np.arange(self.lengths.size), self.destinations()
        owners = self.owner_slots()[cp_rank :: self.topology.cp_size]
        dp_rank, slot = np.nonzero(self.cp_size_grid[cp_rank :: self.topology.cp_size])
        owner, counts = owners[dp_rank, slot], self.microbatch_counts()
        ids: list[Ints] = np.split(self.sample_ids(), np.cumsum(counts)[:-1])
        sources: list[int] = owner.tolist()
        samples, ranks = np.concatenate([ids[index] for index in sources]), np.repeat(dp_rank, counts[owner])
        by_sample = np.lexsort((ranks, samples))
        return samples[by_sample], ranks[by_sample]

    def slot_counts(self) -> Ints:
        """Samples in each micro-batch, `[num_ranks * num_microbatches]`, rank by rank."""
        return self.microbatch_counts()[self.owner_slots()].reshape(-1)

    def slot_tokens(self) -> Ints:
        """Padded tokens of each micro-batch, over all its ranks and before it is filled up, as `slot_counts`."""
        return self.microbatch_tokens()[self.owner_slots()].reshape(-1)

    def check(self) -> DataSchedule:
        """Asserts the invariants of this module.

        Returns:
            The schedule itself.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        _check_places(self)
        _check_cap(self)
        _check_bonds(self)
        _check_costs(self)
        return self

    def digest(self) -> int:
        """A number of 63 bits that is the same on every platform for the same plan: compare it across ranks."""
        ranks = [getattr(self.topology, field.name) for field in fields(self.topology)]
        header = [self.lengths.size, *self.cp_size_grid.shape, *(int(value or 0) for value in ranks)]
        parts = [np.array(header, dtype=np.int64), self.cp_size_grid, self.microbatch_of]
        canonical = b"".join(part.astype("<i8").tobytes() for part in parts)
        return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") >> 1


def _check_places(schedule: DataSchedule) -> None:
    """`placed once`, `aligned`, `even slots`, `last slot`."""
    topology, sizes, microbatch_of = schedule.topology, schedule.cp_size_grid, schedule.microbatch_of
    shape = (topology.dp_cp_size if topology.dynamic_cp else topology.dp_size, schedule.num_microbatches)
    require(sizes.shape == schedule.cost_grid.shape == shape, "even slots", f"the grids have no shape {shape}")
    exists = sizes > 0
    in_front = bool(exists[:, 0].all()) and bool((exists[:, 1:] <= exists[:, :-1]).all())
    require(in_front, "even slots", "a rank has no micro-batch, or a gap between them")
    if not topology.dynamic_cp or topology.has_equal_counts or schedule.objective != "step":
        even = bool(exists.all()) and shape[1] % topology.microbatch_multiple == 0
        require(even, "even slots", "ranks have different numbers of slots, or no multiple of microbatch_multiple")

    owners = schedule.owner_slots()
    known = microbatch_of.shape == schedule.lengths.shape and bool(np.isin(microbatch_of, owners[exists]).all())
    require(known, "placed once", "a sample is missing, or not on the first rank of a micro-batch")
    allowed = bool(np.isin(sizes[exists], topology.dynamic_cp_sizes).all())
    require(allowed, "aligned", "a size is none of the topology's")
    if topology.dynamic_cp:
        members = np.bincount(owners[exists], minlength=sizes.size)
        require(bool((members[owners] == sizes)[exists].all()), "aligned", "ranks disagree on a micro-batch they share")
        is_last = exists & (np.cumsum(exists, axis=1) == exists.sum(axis=1)[:, None])
        agree = is_last.reshape(-1)[owners] == is_last
        require(bool(agree[exists].all()), "last slot", "it is the last of some ranks only")


def _check_cap(schedule: DataSchedule) -> None:
    over = np.flatnonzero(schedule.is_over_cap())[:4].tolist()
    require(not over, "cap", f"micro-batches {over} (rank by rank) hold too much")
    alone = schedule.microbatch_of[list(schedule.oversized)]
    require(bool((schedule.microbatch_counts()[alone] == 1).all()), "cap", "an over-long sample does not run alone")
    cap, sizes = schedule.limits.max_tokens_per_gpu, schedule.cp_size_grid.reshape(-1)
    largest = sizes == schedule.topology.dynamic_cp_sizes[-1]
    fits = cap is None or bool((largest | (schedule.microbatch_tokens() <= cap * sizes)).all())
    require(fits, "cap", "an over-long sample does not run at the largest size")


def _check_bonds(schedule: DataSchedule) -> None:
    """`no empty slot`, `home`, `groups`: of plans at one size."""
    if schedule.topology.dynamic_cp:
        return
    counts, num_microbatches = schedule.slot_counts(), schedule.num_microbatches
    if schedule.forest is not None:
        full = True  # shared tokens leave less work than micro-batches
    elif schedule.move_samples and schedule.groups is None:
        full = schedule.lengths.size < counts.size or bool((counts > 0).all())
    else:
        of_ranks = counts.reshape(-1, num_microbatches)
        full = bool(((of_ranks > 0).all(axis=1) | (of_ranks.sum(axis=1) < num_microbatches)).all())
    require(full, "no empty slot", "a micro-batch is empty although there are enough samples")
    ranks = schedule.microbatch_of // num_microbatches
    if not schedule.move_samples:
        at_home = schedule.home_ranks is not None and bool((ranks == schedule.home_ranks).all())
        require(at_home, "home", "a sample left its home rank")
    if schedule.groups is not None:
        split = groups_that_split(schedule.groups, ranks=ranks)
        require(not split.size, "groups", f"groups {split[:4].tolist()} are on more than one rank")


def _check_costs(schedule: DataSchedule) -> None:
    if schedule.segment_lengths is not None:
        totals = sum_segments(schedule.segment_lengths, num_segments=schedule.num_segments)
        require(bool((totals == schedule.lengths).all()), "honest costs", "lengths are not the sums of their segments")
    sizes, topology = schedule.cp_size_grid, schedule.topology
    grid, predicted, _ = gpu_costs(batch_of(schedule), schedule.microbatch_of, sizes, topology=topology)
    honest = np.array_equal(grid, schedule.cost_grid) and predicted == schedule.predicted_cost
    require(honest, "honest costs", "cost_grid or predicted_cost does not follow from the placement")
    require(schedule.lower_bound <= schedule.predicted_cost, "honest costs", "lower_bound is above predicted_cost")


def require(holds: bool, invariant: str, detail: str) -> None:
    """Asserts an invariant of a schedule, also under `python -O`."""
    if not holds:
        raise AssertionError(f"The schedule breaks the invariant '{invariant}': {detail}.")
