"""Checks the values of flags and the files to write, and prints text, tables and progress.

With rich, on a terminal, output is in colour; else it is the same text, plain.

Invariants: nothing that a file holds reaches the terminal with control characters; an output destroys no input, and no
file that is not an earlier output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_balance.errors import BalanceError
from megatron_balance.lengths import MAX_LENGTH

STANDARD_OUTPUT = Path("-")

_MARK = b"megatron_balance"  # begins all that this package writes


def integer(minimum: int) -> Callable[[str], int]:
    """The type of a flag: an integer from `minimum` to MAX_LENGTH."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not minimum <= int(text) <= MAX_LENGTH:
            raise argparse.ArgumentTypeError(f"is {text[:40]}: it must be an integer from {minimum} to {MAX_LENGTH}.")
        return int(text)

    return parse


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
    if content and _MARK not in content:
        raise argparse.ArgumentTypeError(f"is {text!r}: the file is not an earlier output; remove it, or name another.")
    return Path(text)


def refuse_overwriting(args: argparse.Namespace) -> None:
    """Raise where a file to write is one that the command reads, or lies in a record that it reads."""
    texts = {name: str(value) for name, value in vars(args).items() if isinstance(value, str | Path)}
    paths = {name: text for name, text in texts.items() if text != str(STANDARD_OUTPUT)}
    sources = {os.path.realpath(paths[name]) for name in {"lengths", "record", "cost", "model"} & paths.keys()}
    for flag in sorted({"json", "out", "save_lengths"} & paths.keys()):
        output = Path(os.path.realpath(paths[flag]))
        folder = output.parent if output.suffix == ".jsonl" else output  # files of a record
        if sources & {str(output), str(folder)}:
            raise BalanceError(
                f"--{flag.replace('_', '-')} is {paths[flag]!r}, an input of this command: name another file."
            )


def printable(text: str) -> str:
    """The text with control characters escaped, but for line ends."""
    return "".join(char if char == "\n" or char.isprintable() else repr(char)[1:-1] for char in text)


def in_a_line(text: str, *, length: int = 400) -> str:
    """The text of a file or of a library as part of a line, of bounded length."""
    line = " ".join(printable(text[: 2 * length]).split())
    return line if len(line) <= length else f"{line[: length - 1]}…"


def _rich(stream: TextIO) -> Any:
    """A console of rich on a terminal, where it is installed, else None."""
    with contextlib.suppress(ImportError):
        if stream.isatty() or os.environ.get("FORCE_COLOR"):
            return importlib.import_module("rich.console").Console(file=stream)
    return None


def say(text: object = "", *, style: str = "") -> None:
    """Print text, in one of rich's styles."""
    console, line = _rich(sys.stdout), printable(str(text))
    if console is None:
        print(line)
    else:
        console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, strong: str = "") -> None:
    """Print rows under their column names, the first column to the left; the row that begins with `strong` is."""
    cells = [[in_a_line(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    say(lines[0], style="bold")
    say("  ".join("-" * width for width in widths), style="dim")
    for row, line in zip(cells[1:], lines[1:], strict=True):
        say(line, style="bold green" if row[0] == strong else "")


@contextlib.contextmanager
def progress(words: str, *, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A function that shows with rich on a terminal how far long work is; it leaves nothing behind."""
    console = _rich(sys.stderr)
    if console is None:
        yield lambda count: None
        return
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bars:
        task = bars.add_task(words, total=total)
        yield lambda count: bars.update(task, completed=count, description=f"{words}: {count}")
