"""record_steps with random plans of dynamic context parallelism in place of the planner's.

MOST_SAMPLES=1 in the environment has every sample run alone.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import record_steps
from dynamic_plans import random_schedule

from megatron_balance.mcore.step import plan_process
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology


def main() -> None:
    """Train."""
    mock.patch.object(plan_process, "build_data_schedule", _plan).start()
    mock.patch.object(plan_process, "MIN_SAMPLES", sys.maxsize).start()  # none in a process of its own
    record_steps.main()


def _plan(lengths: Any, *, topology: Topology, limits: Limits, **rest: Any) -> DataSchedule:
    rows = topology.microbatch_multiple if topology.has_even_slots else 0
    most = int(os.environ.get("MOST_SAMPLES", "4"))
    known = {name: rest[name] for name in ("cost_model", "num_segments", "home_ranks")}
    return random_schedule(lengths, topology=topology, limits=limits, rows=rows, most=most, **known)
