"""The command `megatron-balance`: its parser, and the subcommands `report` and `doctor`.

A subcommand has a row in `_COMMANDS`: a function that declares its flags, and one that runs it, whose docstring is its
help. Its heavy imports belong inside the latter: `--help` should not wait for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_balance.cli import compare, fit
from megatron_balance.cli.terminal import in_a_line, output_file, refuse_overwriting, say
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import quiet_imports
from megatron_balance.record import read_record
from megatron_balance.version import build_version

if TYPE_CHECKING:
    from megatron_balance.runtime.rendezvous import Finding

_EPILOG = """\
start here:
  megatron-balance compare synthetic:servegen_mlarge:4096 --data samples --global-batch-size 256 --dp-size 8 \\
      --max-tokens-per-gpu 16384 --model Qwen3-8B
  megatron-balance COMMAND --help
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": is ", " is ", 1)
        raise BalanceError(f"{message} (see {self.prog} --help; flags of your training script go after --)")


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
    arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    try:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        args = build_parser().parse_args(arguments[:end])
        args.script_flags = arguments[end + 1 :]
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
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, with every hook")


@quiet_imports()
def _doctor(args: argparse.Namespace) -> int:
    """Check this environment: packages, hooks into Megatron, flags of your script, and under torchrun all ranks."""
    logging.getLogger("megatron").setLevel(logging.ERROR)  # of flags: the checks report them
    try:
        from megatron_balance.mcore import doctor
        from megatron_balance.runtime.rendezvous import Finding, check_cluster
    except ImportError as error:
        raise BalanceError(f"torch does not load ({error}): pip install '.[megatron]' in a clone.") from error

    lines: list[dict[str, str]] = []

    def check(section: str, findings: Iterable[Finding]) -> None:
        for finding in findings:
            kind = "problem" if not finding.ok else "note" if finding.is_note else "ok"
            # In one line, whatever a library has put into it.
            lines.append({"section": section, "kind": kind, "message": " ".join(finding.message.split())})

    check("packages", doctor.check_packages())
    check(_HOOKS, doctor.check_hooks())
    check("machine and environment", doctor.check_environment())
    flags, advice = args.script_flags, "put those of your script after -- to check them"
    check("your flags", doctor.check_flags(flags) if flags else [Finding(True, advice, is_note=True)])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:  # torchrun's
        problems = [line["message"] for line in lines if line["kind"] == "problem"]
        check("all ranks", check_cluster(flags=flags, problems=problems))
        if os.environ["RANK"] != "0":
            return 0
    if args.json:
        print(json.dumps(lines, indent=1))
    else:
        _print_findings(lines)
    return int(any(line["kind"] == "problem" for line in lines))


_HOOKS = "hooks into Megatron"


def _print_findings(lines: Sequence[Mapping[str, str]]) -> None:
    """Problems first; hooks that apply are counted."""
    problems = [line for line in lines if line["kind"] == "problem"]
    for line in problems:
        print(f"problem  {line['message']}")
    hooks = [line for line in lines if line["section"] == _HOOKS and line["kind"] == "ok"]
    for section, findings in itertools.groupby(lines, key=lambda line: line["section"]):
        print(f"\n{section}")
        for line in findings:
            if line not in problems and line not in hooks:
                print(f"  {line['kind']:8} {line['message']}")
    print(f"\n{len(hooks)} hooks apply")
    print(f"problems: {len(problems)}, at the top" if problems else "no problem")


_Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

_COMMANDS: dict[str, _Command] = {
    "compare": (compare.add_arguments, compare.run),
    "report": (_add_report_arguments, _report),
    "fit": (fit.add_arguments, fit.run),
    "doctor": (_add_doctor_arguments, _doctor),
}
