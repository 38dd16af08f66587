"""Training over two hosts, which are network namespaces: `scripts/bench hosts` has more cases and more to say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rounding import ALLOWANCES

ROOT = Path(__file__).parents[2]
UNAVAILABLE = 69
TIMEOUT_SECONDS = 1800
NUM_RANKS = 4


@pytest.mark.hosts
def test_a_run_over_two_hosts_equals_one_host_until_the_link_goes_down_and_then_every_rank_says_why() -> None:
    command = [str(ROOT / "scripts" / "bench"), "hosts", "--cases", "down"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode == UNAVAILABLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    case = json.loads((ROOT / "build" / "bench" / "hosts.json").read_text())["raw"]["down"]
    assert case["num_steps"] >= 3
    assert case["largest_loss_difference"] <= ALLOWANCES["fp32"].loss
    assert [end["exit_code"] for end in case["ends"]] == [1] * NUM_RANKS
    assert all(end["error"] and end["waited_in"] != "torch" for end in case["ends"])
