"""The record of a run: plans and measured seconds of every step, written while it trains and read for reports."""

from megatron_balance.record.run_record import RunInfo, RunRecord, is_record, read_record
from megatron_balance.record.step import StepRecord
from megatron_balance.record.writers import PlanWriter, SecondsWriter, text_of

__all__ = [
    "PlanWriter",
    "RunInfo",
    "RunRecord",
    "SecondsWriter",
    "StepRecord",
    "is_record",
    "read_record",
    "text_of",
]
