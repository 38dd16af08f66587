"""The ways to plan that are replayed. Those of other systems are the planner benchmark's own baselines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.baselines import BASELINES, FROM_WHEELS, Ranks
from benchmarks.replay.setups import ReplaySetup
from megatron_balance import build_data_schedule
from megatron_balance.cost.calibration import Calibration

TOKEN_SUM_KK = "first-fit + KK on tokens (slime --balance-data)"
"""The baseline, as in slime's pull request."""

OURS_FLOPS = "ours, FLOPs"
OURS_CALIBRATED = "ours, calibrated"

OTHERS = (
    "round-robin (Megatron's sampler)",
    TOKEN_SUM_KK,
    "KK by FLOPs, no cap (slime --balance-by-flops)",
    "equal-size KK (verl's way, recsys)",
    "verl 0.9.1, its own functions",
)
"""Keys of `BASELINES`. slime's by-flops gets this package's FLOPs, which are closer to the truth than its own."""


def plan_all(lengths: NDArray[np.int64], *, setup: ReplaySetup, calibration: Calibration) -> dict[str, Ranks]:
    """Plans one global batch in every way that can be run here.

    Returns:
        dict: by name; rows of wheels that are not installed are left out.
    """
    plans: dict[str, Ranks] = {}
    for name in OTHERS:
        try:
            plans[name] = BASELINES[name](lengths, setup)
        except ImportError:
            if name not in FROM_WHEELS:
                raise
    plans[OURS_FLOPS] = BASELINES["ours"](lengths, setup)
    plans[OURS_CALIBRATED] = build_data_schedule(
        lengths, cost_model=calibration.cost_model(), topology=setup.topology, limits=setup.limits
    ).ranks
    return plans
