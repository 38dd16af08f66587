"""Check this environment: packages, hooks into Megatron, your script's flags and, under torchrun, all ranks together.

Prints a line for each check: `ok`, `note`, or `problem` with its remedy.
Exits with 0, or with 1 where there is a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Iterable

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import quiet_imports

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


@quiet_imports()
def run(args: argparse.Namespace) -> int:
    """Check and print; the result is the exit status."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # of flags: the checks report them
    try:
        from megatron_balance.mcore import doctor
        from megatron_balance.runtime.cluster import check_cluster
    except ImportError as error:
        raise BalanceError(f"torch does not load ({error}): pip install '.[megatron]' in a clone.") from error

    on_cluster = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ  # torchrun's
    silent = on_cluster and os.environ["RANK"] != "0"
    problems: list[str] = []

    def section(title: str, findings: Iterable[doctor.Finding]) -> None:
        print(f"\n{title}")
        for finding in findings:
            message = " ".join(finding.message.split())  # one line, whatever a library has put into it
            if not finding.ok:
                problems.append(message)
            kind = "problem" if not finding.ok else "note" if finding.is_note else "ok"
            print(f"  {kind:8} {message}", flush=True)

    with contextlib.redirect_stdout(None) if silent else contextlib.nullcontext():
        section("packages", doctor.check_packages())
        section("hooks into Megatron, and why each is there", doctor.check_hooks())
        section("machine and environment", doctor.check_environment())
        if flags := args.megatron_args:
            section("your flags", doctor.check_flags(flags))
        else:
            print("\nyour flags: put your script's after -- to check them")
        if on_cluster:
            section(
                "all ranks", check_cluster(flags=flags, problems=tuple(problems), step_nbytes=doctor.step_nbytes(flags))
            )
        print("\nno problem" if not problems else f"\nproblems: {len(problems)}")
    return 1 if problems and not silent else 0
