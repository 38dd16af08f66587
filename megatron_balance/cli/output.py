"""Prints tables and a progress bar, and checks output files before any work."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError


def check_writable(path: Path | None, *, flag: str) -> None:
    """Makes the folder of an output file, and opens the file, before anything is computed.

    Raises:
        BalanceError: it cannot be written.
    """
    if path is None:
        return
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise BalanceError(f"{flag} is {str(path)!r}: it cannot be written ({error.strerror}).") from error


@contextlib.contextmanager
def progress_bar(label: str, *, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while the block runs; silent without a terminal or rich. Yields what moves it by one."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Removed when done, so that only the command's own output stays.
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, emphasized: int = -1) -> None:
    """Print rows under their column names: drawn by rich on a terminal, aligned text in a pipe or a log.

    Args:
        columns: names of the columns; the first column is text, the others are numbers.
        rows: cells, as many in a row as there are columns.
        emphasized: index of the row that a terminal shows in bold; the last one by default.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        # Few lines, so that many columns fit; where they do not, names of columns are folded and no cell is cut.
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=not index, overflow="fold")
        for index, row in enumerate(rows):
            table.add_row(*row, style="bold" if index == emphasized % len(rows) else None)
        Console(file=sys.stdout).print(table)
        return
    cells = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    print("\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]))
