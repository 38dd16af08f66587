"""Shifts work of a plan from slow ranks to fast ones, for runs whose ranks wait for one another once a step.

Invariants: micro-batches hold as many samples as before, and no more than the cap; integers alone decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_balance.planner.problem import Ints
from megatron_balance.planner.schedule import DataSchedule

MAX_ROUNDS = 8
"""Swaps for each rank."""

_BITS = 40  # of the work of all ranks, so that it can be multiplied by speeds


def with_speeds(schedule: DataSchedule, speeds: Sequence[int]) -> DataSchedule:
    """The plan with samples swapped between the rank that ends last and the one that ends first.

    Args:
        schedule: without dynamic sizes, pipeline stages and ranks that meet in micro-batches.
        speeds: of each rank, above 0: what it does in a time, in any unit.

    Examples:
        >>> from megatron_balance import CostModel, Limits, Topology, build_data_schedule
        >>> lengths = [6, 5, 4, 3, 3, 3]
        >>> plan = build_data_schedule(lengths, cost_model=CostModel.tokens(), topology=Topology(2), limits=Limits(16))
        >>> plan.cost_grid.sum(axis=1).tolist(), with_speeds(plan, [7, 5]).cost_grid.sum(axis=1).tolist()
        ([12, 12], [14, 10])
    """
    slots, tokens, topology = schedule.microbatch_of.copy(), schedule.padded_lengths, schedule.topology
    cap, speed = schedule.limits.max_tokens_per_microbatch(topology), np.array(speeds, dtype=np.int64)
    room = (int(tokens.sum()) if cap is None else cap) - schedule.microbatch_tokens()
    work = schedule.cost_grid.sum(axis=1)
    shift = max(int(work.sum()).bit_length() - _BITS, 0)
    work = (work >> shift).astype(np.int64)
    costs: Ints = (schedule.cost_model(tokens) // topology.gpus_per_rank >> shift).astype(np.int64)
    num_samples = np.bincount(slots // schedule.num_microbatches, minlength=len(speed))
    samples_of = np.split(schedule.sample_ids(), np.cumsum(num_samples)[:-1])
    for _ in range(MAX_ROUNDS * len(speed)):
        ends = (work << _BITS // 2) // speed
        last, first = int(ends.argmax()), int(ends.argmin())
        # What both end at the same time without.
        surplus = int(work[last] * speed[first] - work[first] * speed[last]) // int(speed[last] + speed[first])
        given, taken = samples_of[last], samples_of[first]
        moved = costs[given][:, None] - costs[taken]
        grown = tokens[given][:, None] - tokens[taken]
        fits = (grown <= room[slots[taken]]) & (-grown <= room[slots[given]][:, None])
        misses: Ints = np.where(fits, abs(moved - surplus), surplus)
        if misses.min(initial=surplus) >= surplus:
            break
        index, peer = divmod(int(misses.argmin()), len(taken))
        pair = np.array([given[index], taken[peer]])
        given[index], taken[peer] = pair[::-1]
        work[[last, first]] += moved[index, peer] * np.array([-1, 1])
        room[slots[pair]] += grown[index, peer] * np.array([1, -1])
        slots[pair] = slots[pair[::-1]]
    return DataSchedule.from_assignment(
        schedule,
        slots,
        schedule.cp_size_grid,
        move_samples=schedule.move_samples,
        groups=schedule.groups,
    )
