"""Measures the loss from a wrong cost model: plans made with one, timed by another.

The truth is a calibration: one measured on a device, or one of an assumed family (`device_rates.py`). Each batch
is planned once with the truth and once in each way of `cost_ways.py`, always by this package's planner. A
way's loss is the step time of its plan over that of the plan made with the truth, less one: ranks meet
once a step (the slowest rank's sum) or in every micro-batch (the sum over slots of the slowest).

A loss can be a little below zero: neither plan is perfect.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.cost_ways import COST_WAYS
from benchmarks.planner.device_rates import DeviceRates
from benchmarks.planner.setups import SETUPS, Setup, global_batches
from megatron_balance import CostModel, ModelShape, build_data_schedule
from megatron_balance.planner.metrics import schedule_metrics
from megatron_balance.planner.schedule import DataSchedule

ABLATED_SETUPS = SETUPS[:6]
"""The four of slime's pull request, and 32 ranks with and without experts over them."""


@dataclass(frozen=True)
class Loss:
    """One way of counting cost, on one setup and length set, with one device as the reference.

    Attributes:
        setup: name of the setup.
        device: name of the device.
        way: key of `COST_WAYS`.
        lengths: name of the length set.
        losses: `[num_batches]` step time over that of the plan made with the truth, less one.
        over_bound: `[num_batches]` the latter over its lower bound: what the planner itself leaves.
    """

    setup: str
    device: str
    way: str
    lengths: str
    losses: tuple[float, ...]
    over_bound: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean loss."""
        return statistics.fmean(self.losses)

    @property
    def worst(self) -> float:
        """Largest loss."""
        return max(self.losses)


def measure_losses(
    setups: Sequence[Setup],
    *,
    devices: Sequence[DeviceRates],
    lengths_folder: Path | None,
    announce: Callable[[str], None] = lambda line: None,
) -> list[Loss]:
    """Plans every batch of every setup in every way and judges the plans on every device.

    Returns:
        list: one entry for each setup, length set, device and way.
    """
    losses: list[Loss] = []
    for setup in setups:
        announce(f"ablation: {setup.name}")
        batches = list(global_batches(setup, lengths_folder=lengths_folder))
        for index, name in enumerate(setup.length_names):
            of_set = batches[index * setup.num_batches : (index + 1) * setup.num_batches]
            losses += _losses_of_set(setup, lengths=name, batches=of_set, devices=devices)
    return losses


def _losses_of_set(
    setup: Setup, *, lengths: str, batches: Sequence[NDArray[np.int64]], devices: Sequence[DeviceRates]
) -> list[Loss]:
    shape = ModelShape.preset(setup.model)
    # A plan does not depend on the device that judges it.
    plans = {
        way: [_plan(batch, setup=setup, cost_model=make(shape, setup)) for batch in batches]
        for way, make in COST_WAYS.items()
    }
    losses: list[Loss] = []
    for device in devices:
        truth = true_cost_model(setup, device=device)
        best = [schedule_metrics(_plan(batch, setup=setup, cost_model=truth), cost_model=truth) for batch in batches]
        for way, of_way in plans.items():
            costs = [schedule_metrics(plan, cost_model=truth).predicted_cost for plan in of_way]
            losses.append(
                Loss(
                    setup.name,
                    device=device.name,
                    way=way,
                    lengths=lengths,
                    losses=tuple(cost / metrics.predicted_cost - 1 for cost, metrics in zip(costs, best, strict=True)),
                    over_bound=tuple(metrics.over_bound for metrics in best),
                )
            )
    return losses


def true_cost_model(setup: Setup, *, device: DeviceRates) -> CostModel:
    """Times of a sample on the device, tokens and heads spread over the setup's model-parallel ranks."""
    topology = setup.topology
    return device.calibration(ModelShape.preset(setup.model)).cost_model(
        ep_size=topology.ep_size, model_parallel_size=topology.tp_size * topology.cp_size
    )


def _plan(batch: NDArray[np.int64], *, setup: Setup, cost_model: CostModel) -> DataSchedule:
    return build_data_schedule(batch, cost_model=cost_model, topology=setup.topology, limits=setup.limits)
