"""The command `megatron-balance`.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`, and a row in `_COMMANDS`. Its
heavy imports belong inside `run`: `--help` should not wait for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from megatron_balance.cli import compare, doctor, fit, report
from megatron_balance.cli.flags import refuse_overwriting
from megatron_balance.cli.screen import in_a_line
from megatron_balance.errors import BalanceError
from megatron_balance.version import build_version

_COMMANDS: dict[str, ModuleType] = {"compare": compare, "report": report, "fit": fit, "doctor": doctor}

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
    shared: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    words = "Balances the data-parallel ranks of Megatron-LM when samples have very different lengths."
    parser = _Parser(prog="megatron-balance", description=words, epilog=_EPILOG, **shared)
    parser.add_argument("--debug", action="store_true", help="before COMMAND: show where an error comes from")
    parser.add_argument("--version", action="version", version=f"megatron-balance {build_version()}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
        command = subparsers.add_parser(name, help=summary, description=summary + ".", **shared)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
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
