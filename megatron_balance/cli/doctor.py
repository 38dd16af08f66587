"""Check this environment: packages, hooks into Megatron, your script's flags and, under torchrun, all ranks together.

Prints a line for each check, `ok` or `problem` and its remedy. Exits with 0, or with 1 where there is a problem.
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_balance.mcore.checks import Finding

_EPILOG = """\
examples:
  megatron-balance doctor
  megatron-balance doctor -- --num-layers 32 … --use-dynamic-batch-size --balance-by-flops
      flags after -- are those of your training script; conflicts among them are reported
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint … -m megatron_balance doctor -- --num-layers 32 …
      all ranks compare versions and flags, meet over gloo, and measure it; the first one prints

It changes nothing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `doctor`."""
    parser.epilog = _EPILOG
    parser.add_argument("megatron_args", nargs="*", metavar="-- MEGATRON_ARGS", help="your script's flags, after --")


def run(args: argparse.Namespace) -> int:
    """Check and print; the result is the exit status."""
    _quieten_imports()
    from megatron_balance.mcore import checks

    on_cluster = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ  # torchrun's
    report = _Report(silent=on_cluster and os.environ["RANK"] != "0")
    report.section("packages", checks.check_packages())
    report.section("hooks into Megatron", checks.check_hooks())
    if args.megatron_args:
        report.section("your flags", checks.check_flags(args.megatron_args))
    elif not report.silent:
        _print_rules()
    if on_cluster:
        from megatron_balance.mcore import cluster_checks  # loads torch

        found = cluster_checks.check_cluster(flags=args.megatron_args, problems=tuple(report.problems))
        report.section("all ranks", found)
    if not report.silent:
        print("\nno problem" if not report.problems else f"\nproblems: {len(report.problems)}")
    return 1 if report.problems and not report.silent else 0


class _Report:
    """Prints findings as they come; ranks other than the first are silent."""

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent
        self.problems: list[str] = []

    def section(self, title: str, findings: Iterable[Finding]) -> None:
        if not self.silent:
            print(f"\n{title}")
        for finding in findings:
            says = " ".join(finding.says.split())  # one line, whatever a library has put into its message
            if not finding.ok:
                self.problems.append(says)
            if not self.silent:
                print(f"  {'ok' if finding.ok else 'problem':8} {says}", flush=True)


def _print_rules() -> None:
    from megatron_balance.mcore.options import RULES

    print("\nflags (put your script's after -- to check them)")
    for rule in RULES:
        if rule.subject == "Balance flags":
            print(f"  {'rule':8} {rule.words}: {rule.says}")


def _quieten_imports() -> None:
    """Silences warnings of packages on import: the checks report missing kernels themselves."""
    warnings.simplefilter("ignore")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
