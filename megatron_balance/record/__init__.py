"""The record of a run: plans and measured seconds of every step, written while it trains and read for reports."""

from megatron_balance.record.run_record import (
    PlanWriter,
    RunInfo,
    RunRecord,
    SecondsWriter,
    is_record,
    line_of,
    read_record,
    text_of,
)
from megatron_balance.record.step import StepRecord

__all__ = [
    "PlanWriter",
    "RunInfo",
    "RunRecord",
    "SecondsWriter",
    "StepRecord",
    "is_record",
    "line_of",
    "read_record",
    "text_of",
]
