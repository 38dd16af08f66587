"""Runs that are killed with SIGKILL go on as if they had not been.

The runs are some of `scripts/bench resume`: real ranks, Megatron's own `pretrain()`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "num_cases"), [(["--lean"], 3), (["--only", "nnodes"], 1)])
def test_killed_runs_go_on(arguments: list[str], num_cases: int) -> None:
    command = [str(SCRIPT), "resume", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert sum(line.endswith("| good |") for line in done.stdout.splitlines()) == num_cases
