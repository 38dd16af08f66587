"""record_steps with random plans of dynamic context parallelism in place of the planner's.

MOST_SAMPLES=1 in the environment has every sample run alone.
"""

from __future__ import annotations

import os
from typing import Any

import record_steps
from dynamic_plans import random_schedule

from megatron_balance.mcore.step import planner
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology


def main() -> None:
    """Train."""
    planner.build_data_schedule = _plan  # type: ignore[assignment]
    record_steps.main()


def _plan(lengths: Any, *, topology: Topology, limits: Limits, **rest: Any) -> DataSchedule:
    rows = topology.microbatch_multiple if topology.has_even_slots else 0
    most = int(os.environ.get("MOST_SAMPLES", "4"))
    known = {name: rest[name] for name in ("cost_model", "num_segments", "home_ranks")}
    return random_schedule(lengths, topology=topology, limits=limits, rows=rows, most=most, **known)
