"""Converts predicted costs to predicted seconds and tokens per second.

    flops        seconds = FLOPs of the model / (peak * efficiency * GPUs that share a sample)
    seconds      were measured in a run; the cost model has them
    measured     a recorded run gives the seconds of a unit of cost
    tokens       the seconds of a token are unknown: only ratios are meaningful

Communication, optimiser and data loading are not included. Where the time is not a makespan, all pipeline stages work
at the same time, so the work is divided by them.

Invariant: `is_absolute` is False exactly where seconds are in an arbitrary unit; those must not be shown as seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.errors import BalanceError
from megatron_balance.planner import is_makespan
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class CostRate:
    """The time that a unit of a cost model takes.

    Attributes:
        seconds_per_cost: on the GPUs that share a data-parallel rank's sample, those of one pipeline stage.
        is_absolute: these are seconds; otherwise an arbitrary unit, good for ratios.
        source: origin of the number, for people.
    """

    seconds_per_cost: float
    is_absolute: bool
    source: str


def rate_of_flops(topology: Topology, *, peak_tflops: float | None, efficiency: float) -> CostRate:
    """The cost is FLOPs of the whole model.

    Args:
        topology: tensor- and context-parallel ranks share a sample.
        peak_tflops: of one GPU, dense, in the precision of training; None where it is not known.
        efficiency: part of the peak that is reached.

    Raises:
        BalanceError: a number is out of range.
    """
    if not 0 < efficiency <= 1:
        raise BalanceError(f"--efficiency is {efficiency}: it must be a part of the peak, above 0 and at most 1.")
    if peak_tflops is None:
        return CostRate(1 / _sharing(topology), is_absolute=False, source="FLOPs")
    if not 0 < peak_tflops < float("inf"):
        raise BalanceError(f"--peak-tflops is {peak_tflops}: it must be the TFLOPS of one GPU, above 0.")
    return CostRate(
        1 / (peak_tflops * 1e12 * efficiency * _sharing(topology)),
        is_absolute=True,
        source=f"FLOPs at {efficiency:.0%} of {peak_tflops:g} TFLOPS",
    )


def rate_of_tokens(topology: Topology) -> CostRate:
    """The cost is tokens."""
    return CostRate(1 / _sharing(topology), is_absolute=False, source="tokens")


def rate_of_calibration() -> CostRate:
    """The cost is in seconds, which have taken tensor and context parallelism into account."""
    return CostRate(1 / UNITS_PER_SECOND, is_absolute=True, source="seconds of a run")


def rate_of_run(seconds_per_cost: float, *, ran_on: Topology, topology: Topology) -> CostRate:
    """The cost is one whose seconds a recorded run has measured.

    Args:
        seconds_per_cost: of one pipeline stage, as that run had them.
        ran_on: the ranks of the run.
        topology: the ranks to predict for.
    """
    same_stage = seconds_per_cost * ran_on.pp_size * _sharing(ran_on) / _sharing(topology)
    return CostRate(same_stage, is_absolute=True, source="seconds that the run's micro-batches took")


def step_seconds(predicted_cost: int, *, objective: str, topology: Topology, rate: CostRate) -> float:
    """Predicted time of a step, or of several whose costs are summed.

    Args:
        predicted_cost: as in ScheduleMetrics.
        objective: that it was predicted under, resolved.
        topology: the ranks.
        rate: time of a unit of cost.
    """
    stages = 1 if is_makespan(objective, topology=topology) else topology.pp_size
    return predicted_cost * rate.seconds_per_cost / stages


def num_gpus(topology: Topology) -> int:
    """GPUs of the run. Experts are spread over those that are there already."""
    return topology.num_leaves * topology.pp_size * topology.tp_size


def _sharing(topology: Topology) -> int:
    """GPUs that do the work a cost counts, on one pipeline stage: with dynamic context-parallel sizes a leaf's."""
    return topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
