"""Values of flags: integers with bounds, files to write, and the options of a training script.

Invariant: an output destroys no input, and no file that is no earlier output.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MAX_LENGTH
from megatron_balance.mcore.setup.flags import parse_flags

STANDARD_OUTPUT = Path("-")

_MARKS = (b"megatron_balance", b"traceEvents")  # one begins all that this package writes


def integer(least: int, most: int = MAX_LENGTH) -> Callable[[str], int]:
    """The type of a flag: an integer from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"is {text[:40]}: it must be an integer from {least} to {most}.")
        return int(text)

    return read


count = integer(1)


def output_file(text: str) -> Path:
    """A file to write, the value of a flag: its folder is made, and the file opened, before anything is computed."""
    path = Path(os.path.realpath(text))  # what a link names is made, and the link stays
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if new:
            path.unlink()
            return Path(text)
        with path.open("rb") as file:
            content = file.read(2**16)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: it cannot be written ({error.strerror}).") from error
    if content and not any(mark in content for mark in _MARKS):
        raise argparse.ArgumentTypeError(
            f"is {text!r}: the file there is no earlier output; remove it, or name another."
        )
    return Path(text)


def refuse_overwriting(args: argparse.Namespace) -> None:
    """Raise where a file to write is one that the command reads, or lies in a record that it reads."""
    given = {name: value for name, value in vars(args).items() if isinstance(value, str | Path)}
    paths = {name: str(value) for name, value in given.items() if str(value) != str(STANDARD_OUTPUT)}
    sources = {os.path.realpath(paths[name]) for name in {"lengths", "record", "cost", "model"} & paths.keys()}
    for flag in sorted({"json", "out", "trace"} & paths.keys()):
        output = Path(os.path.realpath(paths[flag]))
        folder = output.parent if output.suffix == ".jsonl" else output  # files of a record
        if sources & {str(output), str(folder)}:
            raise BalanceError(f"--{flag} is {paths[flag]!r}, and it is read: name another file.")


def options_of(flags: Sequence[str], *, balance: Sequence[str] = ()) -> dict[str, Any]:
    """Options by the names under which argparse stores them, of a training script's flags and of balance flags.

    Megatron's parser is not needed: a flag without a value is true, and so one that begins with `--no-` is false.
    """
    given: dict[str, list[str]] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            given[name] = [value] if value else []
        elif not name:
            raise BalanceError(f"after --: {word!r} is no flag of a training script; flags begin with --.")
        else:
            given[name].append(word)
    values = {name: _value(words) for name, words in given.items()}
    values |= {name.removeprefix("no_"): False for name in given if name.startswith("no_")}
    return vars(parse_flags(balance)[0]) | values


def _value(words: Sequence[str]) -> Any:
    """What argparse makes of the words behind a flag, as far as they show it."""
    values: list[Any] = []
    for word in words:
        try:
            values.append(json.loads(word))
        except ValueError:
            values.append(word)
    return (values or [True])[0] if len(values) < 2 else values
