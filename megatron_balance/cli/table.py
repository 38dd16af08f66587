"""Prints a table: drawn by rich on a terminal where it is installed, plain text in a pipe or a log."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TextIO


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, emphasized: int | None = None, file: TextIO | None = None
) -> None:
    """Print rows under their column names; the first column is text, the others are numbers.

    Args:
        columns: names of the columns.
        rows: cells, as many in a row as there are columns.
        emphasized: index of the row that a terminal shows in bold; the last one by default.
        file: standard output by default.
    """
    target = sys.stdout if file is None else file
    if target.isatty() and importlib.util.find_spec("rich") is not None:
        _print_with_rich(columns, rows, len(rows) - 1 if emphasized is None else emphasized, target)
    else:
        print(plain_table(columns, rows), file=target)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as aligned text, without colours or lines that a log would garble."""
    cells = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _print_with_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], emphasized: int, target: TextIO) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # Few lines, so that many columns fit; where they do not, names of columns are folded and no cell is cut.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index == emphasized else None)
    Console(file=target).print(table)
