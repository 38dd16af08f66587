"""The report of a run: one HTML page that opens offline."""

from megatron_balance.report.figures import run_figures
from megatron_balance.report.page import write_page

__all__ = ["run_figures", "write_page"]
