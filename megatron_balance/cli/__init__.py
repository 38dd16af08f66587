"""The command `megatron-balance`: its parser, and the subcommands `report` and `doctor`.

A subcommand has a row in `_COMMANDS`: a function that declares its flags, and one that runs it, whose docstring is its
help. Its heavy imports belong inside the latter: `--help` should not wait for them.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_balance.cli import compare, fit
from megatron_balance.cli.terminal import in_a_line, output_file, refuse_overwriting, say
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import quiet_imports
from megatron_balance.record import read_record
from megatron_balance.version import build_version

if TYPE_CHECKING:
    from megatron_balance.runtime.cluster import Finding

_EPILOG = """\
start here:
  megatron-balance compare lengths.npz --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 --model Qwen3-8B
  megatron-balance COMMAND --help
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": is ", " is ", 1)
        raise BalanceError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    summary = "Balances the data-parallel ranks of Megatron-LM when samples have very different lengths."
    parser = _Parser(prog="megatron-balance", description=summary, epilog=_EPILOG, **options)
    parser.add_argument("--debug", action="store_true", help="before COMMAND: show where an error comes from")
    parser.add_argument("--version", action="version", version=f"megatron-balance {build_version()}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run) in _COMMANDS.items():
        summary = (run.__doc__ or "").partition(".\n")[0].removesuffix(".")
        command = subparsers.add_parser(name, help=summary, description=summary + ".", **options)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the result is the exit status, 2 where a flag or a file cannot be used."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        end = arguments.index("--") if "compare" in arguments[:2] and "--" in arguments else len(arguments)
        args, unknown = build_parser().parse_known_args(arguments[:end])
        args.script_flags = arguments[end + 1 :]
        if unknown:
            raise BalanceError(
                f"unrecognized arguments: {' '.join(unknown)} (see megatron-balance {args.command} --help)"
            )
        refuse_overwriting(args)
        with warnings.catch_warnings():
            warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_, **__: print(
                f"Warning: {in_a_line(str(message))}", file=sys.stderr
            )
            status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`): buffered output is dropped at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ArithmeticError, KeyboardInterrupt, MemoryError, OSError, RecursionError, ValueError) as error:
        if "--debug" in arguments:
            raise
        if isinstance(error, KeyboardInterrupt):
            return 130  # as shells report it
        # One line of bounded length, whatever a file or a library put into its part of the message.
        message = str(error)
        if not isinstance(error, BalanceError | OSError):
            message = f"a value is beyond what is computed with ({type(error).__name__}: {error}); --debug shows where."
        print(f"megatron-balance: {in_a_line(message, length=1900)}", file=sys.stderr)
        return 2


_REPORT_EPILOG = """\
examples:
  megatron-balance compare lengths.npy --global-batch-size 256 --dp-size 8 --max-tokens-per-gpu 16384 \\
      --json plan.jsonl
  megatron-balance report plan.jsonl
      what balancing would do, before any training

  megatron-balance report record
      what it did; record is the folder that --balance-record of the training run names
"""


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _REPORT_EPILOG
    parser.add_argument("record", type=Path, metavar="RUN", help="folder of a record, or file of compare --json")
    words = "the page (default: report.html)"
    parser.add_argument("--out", type=output_file, default="report.html", metavar="FILE", help=words)
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of a GPU: adds the MFU of a run by FLOPs")


def _report(args: argparse.Namespace) -> int:
    """Show a run, or a plan, as one HTML page that opens offline."""
    if args.peak is not None and not 0 < args.peak < float("inf"):
        raise BalanceError(f"--peak is {args.peak:g}: it must be TFLOP/s above 0.")
    from megatron_balance.report import run_figures, write_page

    figures = run_figures(read_record(args.record))
    write_page(figures, out=args.out, peak=args.peak)
    say(f"{args.out}: {len(figures.record.steps)} steps. Open it in a browser.")
    return 0


_DOCTOR_EPILOG = """\
examples:
  megatron-balance doctor
  megatron-balance doctor -- --num-layers 32 … --use-dynamic-batch-size --balance-by-flops
      flags after -- are those of your training script; conflicts among them are reported
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint … -m megatron_balance doctor -- --num-layers 32 …
      all ranks compare versions and flags, meet over gloo, and measure it; the first one prints

It changes nothing.
"""


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _DOCTOR_EPILOG
    parser.add_argument("megatron_args", nargs="*", metavar="-- MEGATRON_ARGS", help="your script's flags, after --")


@quiet_imports()
def _doctor(args: argparse.Namespace) -> int:
    """Check this environment: packages, hooks into Megatron, flags of your script, and under torchrun all ranks."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # of flags: the checks report them
    try:
        from megatron_balance.mcore import doctor
        from megatron_balance.runtime.cluster import check_cluster
    except ImportError as error:
        raise BalanceError(f"torch does not load ({error}): pip install '.[megatron]' in a clone.") from error

    on_cluster = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ  # torchrun's
    silent = on_cluster and os.environ["RANK"] != "0"
    problems: list[str] = []

    def section(title: str, findings: Iterable[Finding]) -> None:
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
            section("all ranks", check_cluster(flags=flags, problems=tuple(problems)))
        print("\nno problem" if not problems else f"\nproblems: {len(problems)}")
    return 1 if problems and not silent else 0


_Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

_COMMANDS: dict[str, _Command] = {
    "compare": (compare.add_arguments, compare.run),
    "report": (_add_report_arguments, _report),
    "fit": (fit.add_arguments, fit.run),
    "doctor": (_add_doctor_arguments, _doctor),
}
