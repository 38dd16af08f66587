"""This package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup
from megatron_balance import build_data_schedule
from megatron_balance.planner.schedule import Ranks


def ours(lengths: NDArray[np.int64], setup: Setup) -> Ranks:
    """`build_data_schedule` as a training run calls it; its time includes costs, bound and schedule object."""
    return build_data_schedule(lengths, cost_model=setup.cost_model, topology=setup.topology, limits=setup.limits).ranks
