"""Searches the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_balance.planner.bounds.time import least_time, min_num_microbatches
from megatron_balance.planner.packing.slot_layout import Placement
from megatron_balance.planner.problem import Problem
from megatron_balance.planner.timing import Timing

GOOD_ENOUGH = 1024
"""A plan within one part in this many of its lower bound ends the search."""


def search(
    problem: Problem, *, timing: Timing, bound: int, work: int, packs: Sequence[Callable[[int], Placement | None]]
) -> Placement:
    """The least predicted cost over the numbers that a timing proposes; the first of equals.

    Args:
        problem: the global batch.
        timing: the numbers to try, and when to end.
        bound: lower bound on the cost of any plan.
        work: lower bound on the work of the slowest group of ranks, without `per_microbatch`.
        packs: ways to place samples in a number of micro-batches, each until it has itself not improved for
            `timing.max_lost` numbers. The first takes more micro-batches if the samples need them; another one may
            return None then.
    """
    topology, multiple = problem.topology, problem.topology.microbatch_multiple
    counts = timing.counts(
        min_num_microbatches(problem),
        # More slots than samples would only add dummies.
        most=problem.num_samples // (topology.dp_size * multiple) * multiple,
        multiple=multiple,
        work=-(-int(problem.costs.sum()) // topology.dp_size),
        launch=problem.per_microbatch,
    )
    best: Placement | None = None
    least: list[int | None] = [None] * len(packs)
    lost_by = [0] * len(packs)
    reached = tried = lost = 0
    for num_microbatches in counts:
        # If the cap needed more micro-batches, the numbers up to `reached` are covered.
        if num_microbatches <= reached:
            continue
        if best is not None:
            dearer = least_time(problem, work=work, num_microbatches=num_microbatches) >= best.predicted_cost
            ended = tried == timing.max_tried or lost == timing.max_lost
            good = bound + (bound // GOOD_ENOUGH if timing.max_lost is None else 0)
            if dearer or best.predicted_cost <= good or ended:
                break
        tried, lost = tried + 1, lost + 1
        for index, pack in enumerate(packs):
            if lost_by[index] == timing.max_lost:
                continue
            found = pack(num_microbatches)
            if found is None:
                continue
            reached = max(reached, found.num_microbatches)
            before = least[index]
            if before is None or found.predicted_cost < before:
                least[index], lost_by[index] = found.predicted_cost, 0
            else:
                lost_by[index] += 1
            if best is None or found.predicted_cost < best.predicted_cost:
                best, lost = found, 0
    assert best is not None
    return best
