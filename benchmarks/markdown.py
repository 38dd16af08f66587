"""Builds Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: str, rows: Iterable[Sequence[object]], *, align: str | None = None) -> str:
    """A table, without a newline at its end.

    Args:
        columns: names of the columns, with ` | ` between them.
        rows: cells, as many in a row as there are columns.
        align: `l` or `r` for each column; by default the first is left-aligned and the others right.
    """
    sides = align or "l" + "r" * columns.count(" | ")
    ruler = "|" + "".join("---:|" if side == "r" else "---|" for side in sides)
    return "\n".join([f"| {columns} |", ruler, *map(table_row, rows)])


def table_row(cells: Sequence[object]) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |"
