"""Checks the invariants of a schedule one by one.

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

from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.planner.grouping import groups_that_split
from megatron_balance.planner.inputs import sum_segments

if TYPE_CHECKING:
    from megatron_balance.planner.schedule import DataSchedule


def check_invariants(schedule: DataSchedule) -> None:
    """Asserts the invariants of this module, also under `python -O`.

    Raises:
        AssertionError: names the invariant that is broken.
    """
    dp_size, num_samples = schedule.topology.dp_size, schedule.lengths.size
    num_microbatches, slot_of = schedule.num_microbatches, schedule.slot_of

    # Slots before samples: a sample's slot means nothing until their number is right.
    divisible = num_microbatches > 0 and num_microbatches % schedule.topology.microbatch_multiple == 0
    _require(divisible, "even slots", f"{num_microbatches} is no multiple of microbatch_multiple")
    even = schedule.cost_grid.shape == (dp_size, num_microbatches)
    _require(even, "even slots", f"cost_grid has shape {schedule.cost_grid.shape}")

    num_slots = dp_size * num_microbatches
    known = slot_of.shape == (num_samples,) and bool(((slot_of >= 0) & (slot_of < num_slots)).all())
    _require(known, "placed once", "a sample is missing, or its slot is not there")
    counts = np.bincount(slot_of, minlength=num_slots)

    cap = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    if cap is None:
        held, cap = counts, schedule.limits.micro_batch_size or 0
    else:
        held = schedule.slot_tokens()
    over = np.flatnonzero((held > cap) & (counts > 1))
    _require(not over.size, "cap", f"micro-batches {over[:4].tolist()} (rank by rank) hold more than {cap}")
    alone = bool((counts[slot_of[list(schedule.oversized)]] == 1).all())
    _require(alone, "cap", "an over-long sample does not run alone")

    if schedule.move_samples and schedule.groups is None:
        full = num_samples < num_slots or bool((counts > 0).all())
    else:
        of_ranks = counts.reshape(dp_size, -1)
        full = bool(((of_ranks > 0).all(axis=1) | (of_ranks.sum(axis=1) < num_microbatches)).all())
    _require(full, "no empty slot", "a micro-batch is empty although there are enough samples")

    ranks = slot_of // num_microbatches
    if not schedule.move_samples:
        at_home = schedule.home_ranks is not None and bool((ranks == schedule.home_ranks).all())
        _require(at_home, "home", "a sample left its home rank")
    if schedule.groups is not None:
        split = groups_that_split(schedule.groups, ranks=ranks)
        _require(not split.size, "groups", f"groups {split[:4].tolist()} are on more than one rank")

    if schedule.segment_lengths is not None:
        sums = sum_segments(schedule.segment_lengths, num_segments=schedule.num_segments)
        _require(bool((sums == schedule.lengths).all()), "honest costs", "lengths are not the sums of their segments")
    problem = schedule.problem()
    grid = problem.cost_grid(slot_of, num_microbatches=num_microbatches)
    honest = bool((grid == schedule.cost_grid).all()) and problem.predicted_cost(grid) == schedule.predicted_cost
    _require(honest, "honest costs", "cost_grid or predicted_cost does not follow from the placement")
    _require(schedule.lower_bound <= schedule.predicted_cost, "honest costs", "lower_bound is above predicted_cost")


def _require(holds: bool, invariant: str, detail: str) -> None:
    """Like `assert`, but not removed by `python -O`."""
    if not holds:
        raise AssertionError(f"DataSchedule breaks the invariant '{invariant}': {detail}.")
