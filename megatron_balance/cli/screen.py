"""Output of the commands: text, tables and progress. With rich, on a terminal, in colour; else the same text, plain.

Invariant: nothing that a file holds reaches the terminal with control characters.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO


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
        yield lambda done: None
        return
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bars:
        task = bars.add_task(words, total=total)
        yield lambda done: bars.update(task, completed=done, description=f"{words}: {done}")
