"""Checks the values of flags and the files to write, and prints text, tables and progress.

On a terminal output is in colour; else it is the same text, plain.

Invariants: nothing that a file holds reaches the terminal with control characters; an output destroys no input, and no
file that is not an earlier output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MAX_LENGTH

STANDARD_OUTPUT = Path("-")

_MARK = b"megatron_balance"  # begins all that this package writes


def integer(minimum: int, maximum: int = MAX_LENGTH) -> Callable[[str], int]:
    """The type of a flag: an integer from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"is {text[:40]}: it must be an integer from {minimum} to {maximum}.")
        return int(text)

    return parse


count = integer(1)


def output_file(text: str) -> Path:
    """A file to write, the value of a flag: its folder is made, and the file opened, before anything is computed."""
    path = Path(os.path.realpath(text))  # what a link names is made, and the link stays
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            content = file.read(2**16)
        if is_new:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}: it cannot be written ({error.strerror}).") from error
    if content and _MARK not in content:
        raise argparse.ArgumentTypeError(f"is {text!r}: the file is not an earlier output; remove it, or name another.")
    return Path(text)


def refuse_overwriting(args: argparse.Namespace) -> None:
    """Raise where a file to write is one that the command reads, or lies in a record that it reads."""
    inputs = [getattr(args, name, None) for name in ("lengths", "record", "cost", "model")]
    sources = {os.path.realpath(path) for path in inputs if path is not None}
    for name in ("json", "out"):
        path = getattr(args, name, None)
        if not isinstance(path, Path) or path == STANDARD_OUTPUT:
            continue
        output = Path(os.path.realpath(path))
        # Files of a record end in .jsonl.
        if str(output) in sources or (output.suffix == ".jsonl" and str(output.parent) in sources):
            raise BalanceError(f"--{name} is {str(path)!r}, an input of this command: name another file.")


def printable(text: str) -> str:
    """The text with control characters escaped, but for line ends."""
    return "".join(char if char == "\n" or char.isprintable() else repr(char)[1:-1] for char in text)


def in_a_line(text: str, *, length: int = 400) -> str:
    """The text of a file or of a library as part of a line, of bounded length."""
    line = " ".join(printable(text[: 2 * length]).split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


_STYLES = {"bold": "1", "dim": "2", "yellow": "33", "bold green": "1;32"}


def say(text: object = "", *, style: str = "") -> None:
    """Print text; on a terminal in a style."""
    line, is_coloured = printable(str(text)), sys.stdout.isatty() or os.environ.get("FORCE_COLOR")
    print(f"\x1b[{_STYLES[style]}m{line}\x1b[0m" if style and is_coloured else line)


def show_progress(text: str = "") -> None:
    """Show on a terminal how far long work is, in a line that the next one replaces; without text it goes."""
    if sys.stderr.isatty():
        print(f"{text}\x1b[K", end="\r", file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, strong: str = "") -> None:
    """Print rows under their column names, the first column to the left; the row that begins with `strong` is."""
    cells = [[in_a_line(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    say(lines[0], style="bold")
    say("  ".join("-" * width for width in widths), style="dim")
    for row, line in zip(cells[1:], lines[1:], strict=True):
        say(line, style="bold green" if row[0] == strong else "")
