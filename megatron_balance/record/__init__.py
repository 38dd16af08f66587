"""The record of a run: plans and measured seconds of every step, written while it trains and read for reports."""

from megatron_balance.record.run_record import (
    MAX_GPUS,
    MAX_STAGES,
    RunInfo,
    RunRecord,
    is_record,
    line_of,
    read_record,
    step_of,
)
from megatron_balance.record.step import StepRecord
from megatron_balance.record.writing import RecordWriter, seconds_line, text_of

__all__ = [
    "MAX_GPUS",
    "MAX_STAGES",
    "RecordWriter",
    "RunInfo",
    "RunRecord",
    "StepRecord",
    "is_record",
    "line_of",
    "read_record",
    "seconds_line",
    "step_of",
    "text_of",
]
