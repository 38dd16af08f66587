"""The command line of a training script, read outside a run."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.flags import add_flags
from megatron_balance.mcore.setup.one_flag import fill_in_flags


@dataclass(frozen=True)
class CommandLine:
    """The flags of a training script, as they were given.

    Attributes:
        args: Megatron's namespace with the balance flags; neither validated nor checked.
        unknown: what neither Megatron nor this package knows: the script's own.
    """

    args: argparse.Namespace
    unknown: tuple[str, ...]


def parse_command_line(flags: Sequence[str]) -> CommandLine:
    """Read flags with Megatron's own parser, outside a run.

    Raises:
        BalanceError: a flag's value is missing or wrong.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    # Megatron's own function: a hook in its place would refuse flags that are only read here.
    add_flags(inspect.unwrap(add_megatron_arguments)(parser))
    args, unknown = parser.parse_known_args(list(flags))
    fill_in_flags(args)
    return CommandLine(args, tuple(unknown))


def parse_balance_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Read the balance flags alone, where no script has parsed Megatron's; unchecked.

    Raises:
        BalanceError: a flag is not one of this package, or its value is wrong.
    """
    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    add_flags(parser)
    return parser.parse_args(list(flags))


class _OneLineParser(argparse.ArgumentParser):
    """Raises argparse's error message instead of printing it below the usage."""

    def error(self, message: str) -> NoReturn:
        raise BalanceError(f"{message}.")
