"""A planning process makes the plans that this one would, and ends with it.

It reads below the public names: a run shows neither which process made a plan nor what is left of one.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.mcore.plan_process import MIN_SAMPLES, PlanProcess


def arguments(*, topology, **others):
    lengths = np.random.default_rng(1).lognormal(6, 1, MIN_SAMPLES).astype(np.int64).clip(1, 4096)
    needed = {"lengths": lengths, "cost_model": CostModel(linear=10, quadratic=1), "topology": topology}
    return {**needed, "limits": Limits(4096), "home_ranks": np.arange(MIN_SAMPLES) % topology.dp_size, **others}


def test_plans_are_equal_and_errors_too():
    process = PlanProcess(timeout=timedelta(minutes=2))
    try:
        for asked in (
            arguments(topology=Topology(4)),
            arguments(topology=Topology(4, pp_size=4)),
            arguments(topology=Topology(4, cp_size=2, dynamic_cp=True)),
        ):
            there, here = process.plan(**asked), build_data_schedule(**asked)
            assert there.check().digest() == here.digest()
            assert there.ranks == here.ranks
        assert process._process is not None
        with pytest.raises(BalanceError, match="algorithm is 'fastest'"):
            process.plan(**arguments(topology=Topology(4), algorithm="fastest"))
    finally:
        process.close()


def test_one_that_hangs_is_left_behind_and_the_plans_go_on(monkeypatch):
    said = []
    monkeypatch.setattr("megatron_balance.runtime.log.warn_once", lambda text, **_: said.append(text))
    process = PlanProcess(timeout=timedelta(minutes=2))
    asked = arguments(topology=Topology(4))
    digest = process.plan(**asked).digest()
    process._seconds = 1.0  # of every later plan: on a loaded machine the process takes longer to start
    assert process._process is not None
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    assert [process.plan(**asked).digest() for _ in range(2)] == [digest] * 2
    assert len(said) == 1
    assert "there was no answer in 1 s" in said[0]
    assert not _runs(pid)


PARENT = """
import sys, time
from datetime import timedelta
from test_plan_process import MIN_SAMPLES, PlanProcess, Topology, arguments
process = PlanProcess(timeout=timedelta(minutes=5))
process.plan(**arguments(topology=Topology(4)))
print(process._process.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_parent_that_is_killed():
    search_path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search_path}, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _runs(pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    limit = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
