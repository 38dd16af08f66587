"""Check this environment: packages, hooks into Megatron, your script's flags, and a run of two ranks.

Prints a line for each check, `ok` or `problem` and its remedy. Exits with 0, or with 1 where there is a problem.
"""

from __future__ import annotations

import argparse
import logging
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

It changes nothing. The run trains a tiny model of its own on this machine's CPU, for about ten seconds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `doctor`."""
    parser.epilog = _EPILOG
    parser.add_argument("megatron_args", nargs="*", metavar="-- MEGATRON_ARGS", help="your script's flags, after --")


def run(args: argparse.Namespace) -> int:
    """Check and print; the result is the exit status."""
    _quieten_imports()
    from megatron_balance.mcore import checks

    num_problems = _print("packages", checks.check_packages(), details=args.debug)
    num_problems += _print("hooks into Megatron", checks.check_hooks(), details=args.debug)
    if args.megatron_args:
        num_problems += _print("your flags", checks.check_flags(args.megatron_args), details=args.debug)
    else:
        _print_rules()
    print("\nno problem" if not num_problems else f"\nproblems: {num_problems}")
    return 1 if num_problems else 0


def _print(title: str, findings: Iterable[Finding], *, details: bool) -> int:
    """Print findings as they come.

    Returns:
        The number of problems.
    """
    num_problems = 0
    print(f"\n{title}")
    for finding in findings:
        num_problems += not finding.ok
        # One line, whatever line breaks a library has put into its message.
        print(f"  {'ok' if finding.ok else 'problem':8} {' '.join(finding.says.split())}", flush=True)
        if details and finding.details:
            print(finding.details, flush=True)
    return num_problems


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
