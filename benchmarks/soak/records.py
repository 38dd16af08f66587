"""Reads records of a run, also of one that was ended early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_records(folder: Path, *, num_ranks: int) -> list[list[dict[str, Any]]]:
    """The rows that every rank has written whole.

    Args:
        folder: of the records.
        num_ranks: ranks of the run.
    """
    ranks = [(folder / f"rank{rank}.jsonl").read_text().rpartition("\n")[0].splitlines() for rank in range(num_ranks)]
    num_rows = min(map(len, ranks))
    return [[json.loads(row) for row in rows[:num_rows]] for rows in ranks]
