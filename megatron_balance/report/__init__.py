"""The report of a run: one HTML page that opens offline, and a trace for Perfetto."""

from megatron_balance.report.figures import run_figures
from megatron_balance.report.page import write_page
from megatron_balance.report.timelines import write_trace

__all__ = ["run_figures", "write_page", "write_trace"]
