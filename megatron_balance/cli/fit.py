"""The subcommand `fit`: reads the micro-batches that a run with --balance-record has measured, writes seconds.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_balance.cli.terminal import output_file, say
from megatron_balance.cost.calibration import UNITS_PER_SECOND
from megatron_balance.record import read_record
from megatron_balance.record.fit import NOTABLE_ERROR, fit_record

_EPILOG = """\
examples:
  torchrun … train.py … --balance-data --balance-by-flops --balance-record record --train-iters 20
  megatron-balance fit record --out seconds.json
  torchrun … train.py … --balance-data --balance-cost seconds.json
  megatron-balance compare lengths.npy … --cost seconds.json

Three steps are enough where lengths differ. The first step of a run is left out where three others were measured. Costs
are of this model, precision and kind of GPU; other tensor- and context-parallel sizes are taken to share them evenly.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `fit`."""
    parser.epilog = _EPILOG
    parser.add_argument("record", type=Path, metavar="RECORD", help="folder that --balance-record of a run names")
    words = "file to write (default: seconds.json)"
    parser.add_argument("--out", type=output_file, default="seconds.json", metavar="FILE", help=words)


def run(args: argparse.Namespace) -> int:
    """Fit the seconds of a cost model to a recorded run, for plans by seconds in place of FLOPs."""
    record = read_record(args.record)
    fit, costs = fit_record(record)
    costs.write(args.out)
    per = costs.costs
    terms = (per.per_microbatch, per.linear + per.expert_linear, per.quadratic)
    launch, token, squared = (f"{term / UNITS_PER_SECOND:.3g} s" for term in terms)
    count, longest = costs.origin["num_microbatches"], costs.origin["longest_sequence"]
    say(f"Fitted to {count} micro-batches: {launch} each, {token} a token, {squared} a squared token.")
    say(f"On steps that were left out of the fit it is off by {fit.error:.1%} (median);")
    say(f"the costs that the run planned with, at the one rate that fits them, by {fit.planned_error:.1%}.")
    if fit.error > NOTABLE_ERROR:
        say("Warning: large error, predicted speeds may be as far off. Record more steps, on idle machines.")
    if "linear_tflops" in costs.origin:
        linear, attention = costs.origin["linear_tflops"], costs.origin["attention_tflops"]
        ratio = f"{attention / linear:.2g}"
        say(f"A rank runs what is linear at {linear:.3g} TFLOP/s and attention at {attention:.3g}, r = {ratio}:")
        say(f"--balance-attention-rate {ratio} without the file.")
    say(f"Sequences had up to {longest} tokens. Longer ones are extrapolated: record such sequences too.")
    say(f"Written to {args.out}. Use it: compare --cost {args.out}, or --balance-cost {args.out} in training.")
    return 0
