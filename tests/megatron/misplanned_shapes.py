"""Train with shapes of pipeline messages in another order than that of the schedule: run by test_pipeline_shapes.py."""

from __future__ import annotations

import record_steps
from megatron.core.pipeline_parallel import schedules


def main() -> None:
    """Record while the script trains."""
    ordered = schedules.get_schedule_table
    schedules.get_schedule_table = lambda *sizes: ordered(*sizes)[::-1]
    record_steps.main()
