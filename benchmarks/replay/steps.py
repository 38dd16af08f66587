"""One step replayed: every data-parallel rank's micro-batches, one after another on one device.

    step        max over ranks of the sum over slots of measured seconds
    microbatch  sum over slots of the max over the ranks that meet there, of the slowest group of them

The micro-batches of all plans are measured in one run, in turn: slot by slot, rank by rank, plan by plan, so that a
device that slows down slows all of them. Micro-batches with the same lengths, in any order, share one
measurement. Each is run `repeats` times, a pass over all of them at a time, and its quickest run counts: the
first pays for what a new shape costs once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines import Ranks
from benchmarks.replay.setups import ReplaySetup
from megatron_balance import CostModel
from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.planner.metrics import assignment_metrics
from megatron_balance.planner.objectives import OBJECTIVES
from megatron_balance.planner.problem import build_problem

TICKS_PER_SECOND = 10**12
"""Measured seconds become integers, so that the planner's own objective adds them up: picoseconds."""

Microbatch = tuple[int, ...]
"""Lengths of its sequences, ascending, tokens."""


class Timer(Protocol):
    """Runs micro-batches on a device: `megatron_balance.mcore.calibration.timed_model.TimedModel`."""

    def seconds(self, lengths: Sequence[int]) -> float:
        """One forward and backward pass of a packed micro-batch."""
        ...


@dataclass
class Stopwatch:
    """Measures micro-batches and remembers them.

    Attributes:
        timer: runs them.
        repeats: passes over a step's micro-batches.
        measured: the quickest run of each, seconds.
    """

    timer: Timer
    _: KW_ONLY
    repeats: int = 2
    measured: dict[Microbatch, float] = field(default_factory=dict[Microbatch, float])

    def warm_up(self, microbatches: Sequence[Microbatch]) -> None:
        """Runs the largest once, unmeasured: the device's memory is then laid out."""
        self.timer.seconds(max(microbatches, key=sum))

    def measure(self, microbatches: Sequence[Microbatch]) -> None:
        """Measures those that were not, in this order, `repeats` times."""
        new = [one for one in dict.fromkeys(microbatches) if one not in self.measured]
        runs: dict[Microbatch, list[float]] = {one: [] for one in new}
        for _ in range(self.repeats):
            for one in new:
                runs[one].append(self.timer.seconds(one))
        self.measured |= {one: min(seconds) for one, seconds in runs.items()}


@dataclass(frozen=True)
class ReplayedStep:
    """One plan of one global batch.

    Attributes:
        policy: how it was planned.
        lengths: name of the length set.
        seconds: of the step, measured.
        by_calibration: of the step, as the calibration predicts it.
        by_flops: of the step, FLOPs.
        num_microbatches: slots of a rank.
        num_over_cap: micro-batches of two samples or more over the cap.
    """

    policy: str
    _: KW_ONLY
    lengths: str
    seconds: float
    by_calibration: float
    by_flops: int
    num_microbatches: int
    num_over_cap: int


def replay_step(
    batch: NDArray[np.int64],
    *,
    lengths: str,
    plans: Mapping[str, Ranks],
    setup: ReplaySetup,
    stopwatch: Stopwatch,
    calibration: Calibration,
) -> list[ReplayedStep]:
    """Measures all plans of one global batch.

    Returns:
        list: one entry for each plan.
    """
    grids = {policy: microbatches_of(ranks, batch=batch, setup=setup) for policy, ranks in plans.items()}
    in_turn = _in_turn(list(grids.values()))
    if not stopwatch.measured:
        stopwatch.warm_up(in_turn)
    stopwatch.measure(in_turn)
    steps: list[ReplayedStep] = []
    for policy, ranks in plans.items():
        by_flops, by_calibration = (
            assignment_metrics(
                ranks,
                lengths=batch,
                cost_model=cost_model,
                topology=setup.topology,
                limits=setup.limits,
                objective=setup.objective,
            )
            for cost_model in (setup.cost_model, calibration.cost_model())
        )
        seconds = [[stopwatch.measured[slot] for slot in slots] for slots in grids[policy]]
        steps.append(
            ReplayedStep(
                policy,
                lengths=lengths,
                seconds=step_seconds(seconds, setup=setup),
                by_calibration=by_calibration.predicted_cost / UNITS_PER_SECOND,
                by_flops=by_flops.predicted_cost,
                num_microbatches=by_flops.num_microbatches,
                num_over_cap=by_flops.num_over_cap,
            )
        )
    return steps


def microbatches_of(ranks: Ranks, *, batch: NDArray[np.int64], setup: ReplaySetup) -> list[list[Microbatch]]:
    """`[dp_size][num_microbatches]` micro-batches of a plan; an empty one runs the shortest sequence, masked."""
    padded = setup.padded(batch)
    dummy = (setup.topology.token_multiple,)
    return [[tuple(sorted(padded[sample] for sample in slot)) or dummy for slot in slots] for slots in ranks]


def step_seconds(grid: Sequence[Sequence[float]], *, setup: ReplaySetup) -> float:
    """Time of a step from the seconds of its micro-batches, `[dp_size][num_microbatches]`."""
    problem = build_problem(
        np.ones(1, dtype=np.int64),
        cost_model=CostModel.tokens(),
        topology=setup.topology,
        limits=setup.limits,
        objective=OBJECTIVES[setup.objective],
    )
    ticks = np.rint(np.array(grid) * TICKS_PER_SECOND).astype(np.int64)
    return problem.predicted_cost(ticks) / TICKS_PER_SECOND


def _in_turn(grids: Sequence[Sequence[Sequence[Microbatch]]]) -> list[Microbatch]:
    """Micro-batches of all plans, slot by slot, rank by rank, plan by plan."""
    most = max(len(slots) for grid in grids for slots in grid)
    return [
        grid[rank][slot]
        for slot in range(most)
        for rank in range(len(grids[0]))
        for grid in grids
        if slot < len(grid[rank])
    ]
