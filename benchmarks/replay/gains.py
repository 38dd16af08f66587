"""Predicts the gains of plans on several length sets, to find which the published gains need; no device runs.

    gain = 1 - (step time of our plan) / (step time of token-sum Karmarkar-Karp's plan)

Step times are those of a cost model: FLOPs, or a calibration's seconds. Ours plans with the cost model that
judges. Two things make a gain. Long samples among short ones: micro-batches of as many tokens then differ in
attention. And few micro-batches a rank: first-fit makes as many as the tokens need, whatever the number of ranks,
and the next multiple of it is reached by halving some.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines import BASELINES
from benchmarks.planner.device_rates import DeviceRates
from benchmarks.replay.length_sets import LENGTH_SETS, draw_batches
from benchmarks.replay.policies import TOKEN_SUM_KK
from benchmarks.replay.setups import ReplaySetup
from megatron_balance import CostModel, build_data_schedule
from megatron_balance.planner.metrics import assignment_metrics

NUM_BATCHES = 8
"""Global batches of each length set."""

BY_FLOPS = "FLOPs"
"""The judge that needs no device."""


@dataclass(frozen=True)
class Gain:
    """Our gain over token-sum Karmarkar-Karp.

    Attributes:
        setup: name of the setup.
        judge: `FLOPs`, or the name of a device.
        lengths: name of the length set.
        values: `[num_batches]` parts of the train time saved.
    """

    setup: str
    judge: str
    lengths: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over batches."""
        return statistics.fmean(self.values)


def predict_gains(
    setups: Sequence[ReplaySetup],
    *,
    devices: Sequence[DeviceRates],
    lengths_folder: Path | None,
    names: Sequence[str] = LENGTH_SETS,
) -> list[Gain]:
    """Gains on length sets, real (or their fits) and made up."""
    gains: list[Gain] = []
    for setup in setups:
        judges = {BY_FLOPS: setup.cost_model}
        judges |= {device.name: device.calibration(setup.shape).cost_model() for device in devices}
        for name in names:
            batches = draw_batches(name, setup=setup, num_batches=NUM_BATCHES, lengths_folder=lengths_folder)
            for judge, cost_model in judges.items():
                values = tuple(gain(batch, setup=setup, cost_model=cost_model) for batch in batches)
                gains.append(Gain(setup.name, judge=judge, lengths=name, values=values))
    return gains


def gain(batch: NDArray[np.int64], *, setup: ReplaySetup, cost_model: CostModel) -> float:
    """Part of the step time that our plan saves over token-sum Karmarkar-Karp's."""
    ours = build_data_schedule(batch, cost_model=cost_model, topology=setup.topology, limits=setup.limits)
    before, after = (
        assignment_metrics(
            ranks,
            lengths=batch,
            cost_model=cost_model,
            topology=setup.topology,
            limits=setup.limits,
            objective=setup.objective,
        ).predicted_cost
        for ranks in (BASELINES[TOKEN_SUM_KK](batch, setup), ours.ranks)
    )
    return 1 - after / before
