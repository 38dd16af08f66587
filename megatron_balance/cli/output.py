"""Checks output files before any work, and prints tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError


def check_writable(path: Path | None, *, flag: str) -> None:
    """Makes the folder of an output file, and opens the file, before anything is computed."""
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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their column names; the first column is text, the others are numbers."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells]
    print("\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]))
