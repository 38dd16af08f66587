"""Values of flags: integers with bounds, files to write, and the options of a training script.

Invariant: an output destroys no input, and no file that is no earlier output.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MAX_LENGTH
from megatron_balance.mcore.setup.flags import parse_flags

STANDARD_OUTPUT = Path("-")

_MARKS = (b"megatron_balance", b"traceEvents")
"""One of them is at the beginning of all that this package writes."""


def integer(least: int, most: int = MAX_LENGTH) -> Callable[[str], int]:
    """The type of a flag: an integer from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            said = f"at least {least}" if not text.isdecimal() or int(text[:20]) < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"is {text[:40]}: it must be an integer of {said}.")
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
    for flag in ("json", "out", "trace"):
        if flag in given and given[flag] != STANDARD_OUTPUT:
            output = Path(os.path.realpath(given[flag]))
            for name in ("lengths", "record", "cost", "model"):
                source = Path(os.path.realpath(given.get(name, "")))
                if name in given and (
                    output == source or (source.is_dir() and output.parent == source and output.suffix == ".jsonl")
                ):
                    raise BalanceError(
                        f"--{flag} is {str(given[flag])!r}, and {str(given[name])!r} is read: name another file."
                    )


def options_of(flags: Sequence[str], *, balance: Sequence[str] = ()) -> dict[str, Any]:
    """Options by the names under which argparse stores them, of a training script's flags and of balance flags.

    Megatron's parser is not needed: a flag without a value is true, and so one that begins with `--no-` is false.
    """
    given: dict[str, Any] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            given[name] = _value(value) if value else True
            if name.startswith("no_"):
                given[name.removeprefix("no_")] = False
        elif name:
            value = _value(word)
            before = given[name] if isinstance(given[name], list) else [given[name]]
            given[name] = value if before == [True] else [*before, value]
        else:
            raise BalanceError(f"after --: {word!r} is no flag of a training script; flags begin with --.")
    return vars(parse_flags(balance)[0]) | given


def _value(word: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word
