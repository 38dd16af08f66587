"""The record of a run: plans and measured seconds of every step, written while it trains and read for reports."""

from megatron_balance.record.plan_file import read_plan
from megatron_balance.record.run_record import RunInfo, RunRecord, read_record
from megatron_balance.record.step import StepRecord
from megatron_balance.record.writers import PlanWriter, SecondsWriter

__all__ = ["PlanWriter", "RunInfo", "RunRecord", "SecondsWriter", "StepRecord", "read_plan", "read_record"]
