"""The plan of one global batch with dynamic context-parallel sizes.

Invariants that hold for every plan:

    placed once     every sample is in exactly one group, and no group is empty
    aligned         a group is a power of two of leaves, at most the largest size, from a multiple of its size on
    same slot       all leaves of a group run it in the same slot, and a leaf runs one group a slot: the order of slots
                    is the order in which groups meet, so no ranks wait for one another in a circle
    even slots      if ranks also meet outside of groups, all leaves have the same number of slots, a multiple of
                    microbatch_multiple; else every leaf has at least one
    last slot       a group is in the last slot of all its leaves or of none
    cap             a group over the cap holds one single sample, too long for the largest size, at that size
    honest costs    cost_grid and predicted_cost follow from the groups, and lower_bound is not above
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.dynamic_cp.samples import SizedSamples
from megatron_balance.planner.dynamic_cp.sizing import size_samples
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.problem import Problem
from megatron_balance.planner.schedule import DataSchedule, Ranks, require
from megatron_balance.topology import Limits, Topology


@dataclass(frozen=True, eq=False)
class DynamicCpSchedule(DataSchedule):
    """A plan over `dp_size * cp_size` leaves, leaf `dp_rank * cp_size + cp_rank`.

    Differences from DataSchedule: `slot_of` is `first_leaf * num_microbatches + slot` of a sample's group,
    `num_microbatches` is the most slots of a leaf, and `cost_grid` is `[num_leaves, num_microbatches]`, 0 where a
    leaf has no such slot. `padded_lengths` are padded for the size that each sample runs at.

    Attributes:
        cp_groups: micro-batches with their leaves and slots.
    """

    cp_groups: Groups

    @classmethod
    def of_groups(
        cls,
        groups: Groups,
        *,
        lengths: NDArray[np.int64],
        num_segments: NDArray[np.int64] | None,
        home_ranks: NDArray[np.int64] | None,
        samples: SizedSamples,
        cost_shift: int,
        objective: str,
        algorithm: str,
        lower_bound: int,
        topology: Topology,
        limits: Limits,
        cost_model: CostModel,
    ) -> DynamicCpSchedule:
        """The schedule of these groups; its costs and padded lengths follow from them.

        Args:
            groups: micro-batches with their leaves and slots.
            lengths: `[num_samples]` original tokens; with `num_segments`, of every segment.
            num_segments: `[num_samples]` segments of each sample, or None where each is one.
            home_ranks: `[num_samples]` rank that loaded each sample, or None.
            samples: their costs and tokens at every size.
            cost_shift: costs are in units of `2**cost_shift` of the cost model's.
            objective: `step`, `microbatch` or `pipeline`.
            algorithm: name of the algorithm that made the groups.
            lower_bound: lower bound on the time of any plan, in the units of the costs.
            topology: the ranks, with `dynamic_cp`.
            limits: tokens that a GPU holds in a micro-batch.
            cost_model: cost of a sample.
        """
        num_microbatches = int(groups.num_slots.max())
        levels = groups.levels[groups.group_of]
        return cls(
            slot_of=groups.first_leaves[groups.group_of] * num_microbatches + groups.slots[groups.group_of],
            num_microbatches=num_microbatches,
            cost_grid=groups.cost_grid(samples),
            cost_shift=cost_shift,
            predicted_cost=OBJECTIVES[objective].groups_time(samples, groups, topology=topology),
            lower_bound=lower_bound,
            objective=objective,
            algorithm=algorithm,
            lengths=sum_segments(lengths, num_segments=num_segments),
            padded_lengths=samples.tokens[levels, np.arange(levels.size)] << levels,
            num_segments=num_segments,
            segment_lengths=None if num_segments is None else lengths,
            images=None,
            oversized=tuple(np.flatnonzero(samples.oversized).tolist()),
            home_ranks=home_ranks,
            move_samples=True,
            moved_tokens_before_relabel=None,
            ranks_per_node=None,
            groups=None,
            topology=topology,
            limits=limits,
            cost_model=cost_model,
            cp_groups=groups,
        )

    @cached_property
    def ranks(self) -> Ranks:
        """`ranks[leaf][slot]` are sample ids, ascending: the same for all leaves of a group, none for a dummy."""
        groups = self.cp_groups
        order: list[int] = np.argsort(groups.group_of, kind="stable").tolist()
        ends: list[int] = np.cumsum(np.bincount(groups.group_of, minlength=groups.levels.size)).tolist()
        ids = [tuple(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        ids.append(())
        return tuple(tuple(ids[group] for group in slots) for slots in groups.of_leaves())

    def cp_size_grid(self) -> NDArray[np.int64]:
        """Leaves that share each micro-batch, `[num_leaves, num_microbatches]`: 1 for a dummy, 0 for no slot."""
        groups = self.cp_groups
        sizes = np.append(1 << groups.levels, 1)[groups.group_grid()]
        sizes[np.arange(self.num_microbatches) >= groups.num_slots[:, None]] = 0
        return sizes

    def destinations(self) -> NDArray[np.int64]:
        """Refused: a sample may run on several data-parallel ranks; `cp_groups` says on which leaves."""
        raise BalanceError("destinations() names one rank a sample: with Topology.dynamic_cp read ranks or cp_groups.")

    def slot_counts(self) -> NDArray[np.int64]:
        """Samples of every leaf in every slot, `[num_leaves * num_microbatches]`, leaf by leaf."""
        groups = self.cp_groups
        return self._on_leaves(np.bincount(groups.group_of, minlength=groups.levels.size))

    def slot_tokens(self) -> NDArray[np.int64]:
        """Padded tokens of every leaf's micro-batch, all its ranks together, `[num_leaves * num_microbatches]`."""
        groups = self.cp_groups
        tokens = np.zeros(groups.levels.size, dtype=np.int64)
        np.add.at(tokens, groups.group_of, self.padded_lengths)
        return self._on_leaves(tokens)

    def _on_leaves(self, of_groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.append(of_groups, 0)[self.cp_groups.group_grid()].reshape(-1)

    def check(self) -> DynamicCpSchedule:
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
        groups = self.cp_groups
        sizes = np.array([super().digest(), *self.topology.dynamic_cp_sizes], dtype=np.int64)
        parts = [sizes, groups.levels, groups.first_leaves, groups.slots, groups.num_slots, groups.group_of]
        canonical = b"".join(part.astype("<i8").tobytes() for part in parts)
        return int.from_bytes(hashlib.sha256(canonical).digest()[:8], "little") >> 1

    def problem(self) -> Problem:
        """Refused: the problem of a plan at one size; `samples()` are those of this one."""
        raise BalanceError("problem() is that of one context-parallel size: with Topology.dynamic_cp read samples().")

    def with_groups(self, groups: Groups, *, samples: SizedSamples) -> DynamicCpSchedule:
        """The same samples in other groups.

        Args:
            groups: micro-batches with their leaves and slots.
            samples: as `samples()` makes them.
        """
        return DynamicCpSchedule.of_groups(
            groups,
            lengths=self.lengths if self.segment_lengths is None else self.segment_lengths,
            num_segments=self.num_segments,
            home_ranks=self.home_ranks,
            samples=samples,
            cost_shift=self.cost_shift,
            objective=self.objective,
            algorithm=self.algorithm,
            lower_bound=self.lower_bound,
            topology=self.topology,
            limits=self.limits,
            cost_model=self.cost_model,
        )

    def samples(self) -> SizedSamples:
        """Cost and tokens of every sample at every size."""
        lengths = self.lengths if self.segment_lengths is None else self.segment_lengths
        samples, _ = size_samples(
            lengths,
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            num_segments=self.num_segments,
        )
        return samples


def check_invariants(schedule: DynamicCpSchedule) -> None:
    """Asserts the invariants of this module, also under `python -O`.

    Raises:
        AssertionError: names the invariant that is broken.
    """
    groups, topology, samples = schedule.cp_groups, schedule.topology, schedule.samples()
    num_leaves, num_groups = topology.num_leaves, groups.levels.size
    known = groups.group_of.shape == (schedule.lengths.size,) and bool(
        ((groups.group_of >= 0) & (groups.group_of < num_groups)).all()
    )
    require(known, "placed once", "a sample is missing, or its group is not there")
    counts = np.bincount(groups.group_of, minlength=num_groups)
    require(bool((counts > 0).all()), "placed once", "a group holds no sample")

    in_range = bool(((groups.levels >= 0) & (groups.levels < len(topology.dynamic_cp_sizes))).all())
    require(in_range, "aligned", "a size is none of the topology's")
    sizes = 1 << groups.levels
    ends = groups.first_leaves + sizes
    aligned = bool(((groups.first_leaves % sizes == 0) & (groups.first_leaves >= 0) & (ends <= num_leaves)).all())
    require(aligned, "aligned", "a group does not start at a multiple of its size, or passes the last leaf")

    num_slots = groups.num_slots
    require(num_slots.shape == (num_leaves,) and bool((num_slots > 0).all()), "even slots", "a leaf has no slot")
    if OBJECTIVES[schedule.objective].has_even_slots(topology):
        even = bool((num_slots == num_slots[0]).all()) and int(num_slots[0]) % topology.microbatch_multiple == 0
        require(even, "even slots", "leaves have different numbers of slots, or no multiple of microbatch_multiple")

    last = np.repeat(groups.slots, sizes) == num_slots[_leaves(groups)] - 1
    there = np.repeat(groups.slots, sizes) < num_slots[_leaves(groups)]
    require(bool(there.all()) and bool((groups.slots >= 0).all()), "same slot", "a leaf lacks the slot of its group")
    grid = groups.group_grid()
    require(int((grid >= 0).sum()) == int(sizes.sum()), "same slot", "a leaf has two groups in one slot")
    num_last = np.zeros(num_groups, dtype=np.int64)
    np.add.at(num_last, np.repeat(np.arange(num_groups), sizes), last)
    require(bool(((num_last == 0) | (num_last == sizes)).all()), "last slot", "a group is the last of some leaves only")

    levels = groups.levels[groups.group_of]
    held = np.zeros(num_groups, dtype=np.int64)
    np.add.at(held, groups.group_of, samples.tokens[levels, np.arange(levels.size)])
    over = np.zeros(num_groups, dtype=bool)
    over[groups.group_of[samples.oversized]] = True
    require(bool((counts[over] == 1).all()), "cap", "an over-long sample does not run alone")
    largest = groups.levels == len(topology.dynamic_cp_sizes) - 1
    within = (held <= samples.capacity) | (over & largest)
    require(bool(within.all()), "cap", f"a rank of groups {np.flatnonzero(~within)[:4].tolist()} holds too many tokens")

    honest = np.array_equal(groups.cost_grid(samples), schedule.cost_grid)
    time = OBJECTIVES[schedule.objective].groups_time(samples, groups, topology=topology)
    honest = honest and time == schedule.predicted_cost
    require(honest, "honest costs", "cost_grid or predicted_cost does not follow from the groups")
    require(schedule.lower_bound <= schedule.predicted_cost, "honest costs", "lower_bound is above predicted_cost")


def _leaves(groups: Groups) -> NDArray[np.int64]:
    """The leaves of all groups, group by group, `[sum(sizes)]`."""
    sizes = 1 << groups.levels
    starts = np.cumsum(sizes) - sizes
    return np.repeat(groups.first_leaves - starts, sizes) + np.arange(int(sizes.sum()))
