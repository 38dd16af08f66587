"""Content of a picture: rows of bars over time. Knows nothing of drawing, so that tests need no matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Bar:
    """Activity of a rank for a while.

    Attributes:
        row: from 0, the first on top.
        start: on the time axis.
        duration: likewise.
        shade: 0 (cheap) to 1 (costliest); None while it waits.
        label: written into the bar.
        num_rows: rows that it reaches over, `row` the first of them.
    """

    row: int
    _: KW_ONLY
    start: float
    duration: float
    shade: float | None
    label: str = ""
    num_rows: int = 1


@dataclass(frozen=True)
class Panel:
    """One timeline.

    Attributes:
        title: above it.
        rows: names of the rows.
        bars: what is drawn.
        meetings: times at which all rows wait for one another.
    """

    title: str
    _: KW_ONLY
    rows: Sequence[str]
    bars: Sequence[Bar]
    meetings: Sequence[float] = ()
