"""Show a run, or a plan, as one HTML page that opens offline, and as a trace for Perfetto.

It draws each step on every rank, stock and balanced, with waiting times, predictions and measurements.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_balance.cli.flags import output_file
from megatron_balance.cli.screen import say
from megatron_balance.errors import BalanceError
from megatron_balance.record import read_record

_EPILOG = """\
examples:
  megatron-balance compare lengths.npy --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 \\
      --json plan.jsonl
  megatron-balance report plan.jsonl
      what balancing would do, before any training

  megatron-balance report record --trace trace.json
      what it did; record is the folder that --balance-record of the training run names

Open the trace at ui.perfetto.dev or chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `report`."""
    parser.epilog = _EPILOG
    parser.add_argument("record", type=Path, metavar="RUN", help="folder of a record, or file of compare --json")
    words = "the page (default: report.html)"
    parser.add_argument("--out", type=output_file, default="report.html", metavar="FILE", help=words)
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="also write a Chrome/Perfetto trace")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of a GPU: adds the MFU of a run by FLOPs")


def run(args: argparse.Namespace) -> int:
    """Write the page, and the trace if asked to."""
    if args.peak is not None and not 0 < args.peak < float("inf"):
        raise BalanceError(f"--peak is {args.peak:g}: it must be TFLOP/s above 0.")
    from megatron_balance.report import run_figures, write_page, write_trace

    figures = run_figures(read_record(args.record))
    write_page(figures, out=args.out, peak=args.peak)
    say(f"{args.out}: {len(figures.record.steps)} steps. Open it in a browser.")
    if args.trace is not None:
        write_trace(figures, out=args.trace)
        say(f"{args.trace}: open it at ui.perfetto.dev.")
    return 0
