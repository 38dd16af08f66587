"""Runs that are killed with SIGKILL go on as if they had not been; what was half written is not taken for whole.

The runs are those of scripts/check_resume.sh, which has many more: real ranks, Megatron's own `pretrain()`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows_of(*arguments: str) -> list[str]:
    command = [str(ROOT / "scripts" / "check_resume.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.startswith("|")][2:]


@pytest.mark.slow
def test_killed_runs_go_on_and_what_is_half_written_is_refused() -> None:
    rows = rows_of("--lean")
    assert len(rows) == 7
    assert all(row.endswith("| good |") for row in rows)


@pytest.mark.slow
def test_torchrun_goes_on_with_the_node_that_is_left() -> None:
    (row,) = rows_of("--only", "nnodes")
    assert row.endswith("| good |")
