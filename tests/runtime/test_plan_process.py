"""A planning process: the same plans, its faults, and its end with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import World

from megatron_balance import BalanceError, CostModel, DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.lengths.read import synthetic_lengths
from megatron_balance.mcore.step.plan_process import MIN_SAMPLES, PlanProcess

REPOSITORY = Path(__file__).parent.parent.parent

DP4 = Topology(4)


@pytest.fixture
def process() -> Iterator[PlanProcess]:
    one = PlanProcess(timeout=timedelta(minutes=2))
    yield one
    one.close()


def arguments(num_samples: int, *, topology: Topology = DP4, **others: Any) -> dict[str, Any]:
    lengths = np.minimum(synthetic_lengths("code_files", num_samples=num_samples, seed=1), 4096)
    homes = np.arange(num_samples) % topology.dp_size
    cost_model = CostModel(linear=10, quadratic=1, expert_linear=5 * (topology.ep_size > 1), per_microbatch=1000)
    needed = {"lengths": lengths, "cost_model": cost_model, "topology": topology, "limits": Limits(4096)}
    return {"num_samples": num_samples, **needed, "home_ranks": homes, **others}


def planned_here(num_samples: int, **others: Any) -> DataSchedule:
    return build_data_schedule(**others)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"topology": Topology(8, ep_size=4)},
        {"topology": Topology(4, pp_size=4), "ranks_per_node": 2},
        {"topology": Topology(4, cp_size=2, dynamic_cp=True)},
        {"num_segments": np.full(MIN_SAMPLES, 1)},
        {"move_samples": False},
        {"algorithm": "karmarkar_karp"},
    ],
    ids=lambda others: " ".join(map(str, others)) or "plain",
)
def test_plans_are_equal_bit_by_bit(process: PlanProcess, others: dict[str, Any]) -> None:
    asked = arguments(MIN_SAMPLES, **others)
    there, here = process.plan(**asked), planned_here(**asked)
    assert process.pid is not None
    assert there.check().digest() == here.digest()
    assert vars(there).keys() == vars(here).keys()
    for name, value in vars(here).items():
        if name != "cp_groups":
            assert np.array_equal(getattr(there, name), value), name
    assert there.ranks == here.ranks


def test_small_batches_start_no_process(process: PlanProcess) -> None:
    process.plan(**arguments(MIN_SAMPLES - 1))
    assert process.pid is None


def test_wrong_arguments_raise_as_without_a_process(process: PlanProcess) -> None:
    wrong = arguments(MIN_SAMPLES, algorithm="fastest")
    with pytest.raises(BalanceError, match="algorithm is 'fastest'") as there:
        process.plan(**wrong)
    with pytest.raises(BalanceError) as here:
        planned_here(**wrong)
    assert str(there.value) == str(here.value)
    assert process.failure is None
    assert process.plan(**arguments(MIN_SAMPLES)).num_microbatches


def test_it_loads_no_torch(process: PlanProcess) -> None:
    process.plan(**arguments(MIN_SAMPLES))
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_its_death_is_named_and_the_step_is_planned_here(process: PlanProcess, number: signal.Signals) -> None:
    asked = arguments(MIN_SAMPLES)
    process.plan(**asked)
    pid = process.pid
    assert pid is not None
    os.kill(pid, number)
    for _ in range(2):  # and at every later plan
        assert process.plan(**asked).digest() == planned_here(**asked).digest()
        assert process.failure is not None
        assert f"planning process ({pid}) has ended with signal {int(number)}" in process.failure.problem


def test_a_hanging_one_is_named_and_ended() -> None:
    process = PlanProcess(timeout=timedelta(seconds=30))
    process.plan(**arguments(MIN_SAMPLES))
    process.close()
    process = PlanProcess(timeout=timedelta(seconds=3))
    asked = arguments(200 * MIN_SAMPLES)  # more than a socket buffers
    process._start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert process.plan(**asked).digest() == planned_here(**asked).digest()
    assert process.failure is not None
    assert "hangs: no answer in 3 s" in process.failure.problem
    assert not _runs(process.pid)


def test_one_that_cannot_start_is_named(process: PlanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    process.plan(**arguments(MIN_SAMPLES))
    assert process.failure is not None
    assert "cannot be started: [Errno 2]" in process.failure.problem


def test_another_error_in_it_is_named_with_its_traceback(process: PlanProcess) -> None:
    with pytest.raises(AttributeError):  # here as well, as ever
        process.plan(**arguments(MIN_SAMPLES, cost_model=None))
    assert process.failure is not None
    assert "AttributeError" in process.failure.problem
    assert "build_data_schedule" in process.failure.problem


def test_signals_to_all_processes_of_a_run_do_not_end_it(process: PlanProcess) -> None:
    process.plan(**arguments(MIN_SAMPLES))
    assert process.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(process.pid, number)
    process.plan(**arguments(MIN_SAMPLES))
    assert process.failure is None


PARENT = """
import os, sys, threading, time
from test_plan_process import arguments
from megatron_balance.mcore.step.plan_process import PlanProcess
process = PlanProcess(timeout=__import__("datetime").timedelta(minutes=5))
process.plan(**arguments(256))
if os.fork() == 0:  # as a data loader's worker, which holds the connection as well
    time.sleep(60)
    os._exit(0)
large = arguments(2_000_000)
threading.Thread(target=process.plan, kwargs=large, daemon=True).start()
print(process.pid, flush=True)
while sys.stdin.readline() == "\\n":
    pass
sys.exit(0)
"""


@pytest.mark.parametrize("end", ["kill", "interrupt", "exit"])
def test_it_ends_with_its_parent_also_in_the_middle_of_a_plan(end: str) -> None:
    search_path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search_path},
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        if end == "exit":
            parent.stdin.write("end\n")
            parent.stdin.flush()
        else:
            parent.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
        limit = time.monotonic() + 60
        while _runs(pid) and time.monotonic() < limit:
            time.sleep(0.05)
        assert not _runs(pid)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_every_rank_names_the_rank_whose_planning_process_failed(
    world2: World, overlap: bool, number: signal.Signals
) -> None:
    said = "has ended with signal 9" if number == signal.SIGKILL else "hangs: no answer in 3 s"
    for steps, error in world2.run("steps_with_a_planning_process", overlap=overlap, number=int(number)):
        assert steps == 3
        assert "rank 1 cannot go on" in error
        assert "planning process" in error
        assert said in error
