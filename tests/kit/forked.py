"""Starts training runs whose ranks are forks of one process that has imported torch and Megatron already.

A rank spends most of its time on imports, and a run of eight steps of a tiny model hardly any. So this process imports
once and forks every rank of every run. A rank is then a process of its own, as under torchrun: it reads its flags and
its environment, joins gloo, runs Megatron's `pretrain()` through tests/kit/record_steps.py and ends.

Invariants: this process starts no thread, so that a fork lacks nothing; every fork has ended when a run returns.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from training_run import CPU_FLAGS, MODEL_FLAGS, TRAINING_FLAGS, Recorded, RunFailed, read_records

_LAST_CHARACTERS = 3000
_PR_SET_PDEATHSIG = 1

PORTS = range(12_000, 32_000)
"""Below the range that Linux takes the ports of connections from (ip_local_port_range)."""

_port_numbers = itertools.count(97 * os.getpid())


@dataclass(frozen=True)
class ForkedRun:
    """Records and times of a run.

    Attributes:
        recorded: its steps, rank by rank; the output is that of rank 0.
        cpu_seconds: of all ranks, start and end included.
        seconds: from the first fork to the last end.
    """

    recorded: Recorded
    cpu_seconds: float
    seconds: float


def import_once(also: Sequence[str] = ()) -> None:
    """Import all that a rank would, and these modules. Set OMP_NUM_THREADS=1 before Python starts."""
    from cpu_shim import enable_cpu, patch_megatron

    from megatron_balance.mcore import install

    enable_cpu()
    install()
    patch_megatron()
    late = "megatron.core.tokenizers.text.libraries"  # and slowly
    for name in ("record_steps", late, *also):
        importlib.import_module(name)
    # It compiles fused functions, which a CPU does not, on random numbers, as many as a micro-batch has: the initial
    # weights of MoE routers, drawn after them, would depend on --micro-batch-size.
    importlib.import_module("megatron.training.training").set_jit_fusion_options = lambda *_, **__: None

    _read_help_once()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, which a fork would lack"


def _read_help_once() -> None:
    """Megatron parses the source of its dataclasses for the help of its flags: a quarter of a rank's CPU seconds."""
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    stock, known = factory._get_field_docstrings, {}

    def docstrings_of(self: Any, of_class: type) -> Any:
        if of_class not in known:
            known[of_class] = stock(self, of_class)
        return known[of_class]

    factory._get_field_docstrings = docstrings_of  # type: ignore[method-assign]
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def train_forked(
    record: Path,
    flags: Sequence[str],
    *,
    num_ranks: int,
    timeout_seconds: float,
    module: str = "record_steps",
    environment: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    watch: Callable[[Mapping[int, int]], None] = lambda ranks: None,
    grace_seconds: float = 0.0,
    dead: Collection[int] = (),
) -> ForkedRun:
    """As `training_run.train`, in forks of this process.

    Args:
        record: folder for the records and for what each rank prints.
        flags: added to the common ones.
        num_ranks: processes.
        timeout_seconds: after which the run is killed.
        module: whose `main` each of them runs; it records as record_steps.py does.
        environment: variables beside those of this process.
        leave_out: common flags to do without.
        watch: called again and again while ranks run, with process id → rank.
        grace_seconds: for the other ranks to end by themselves after one failed; then they are killed.
        dead: ranks that are not waited for then.

    Raises:
        RunFailed: a rank ended with an error, or the run was killed.
    """
    record.mkdir(parents=True, exist_ok=True)
    common = (flag for flag in f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS}".split() if flag not in leave_out)
    arguments = [str(record), *common, *flags]
    started, port = time.monotonic(), free_port()
    running: dict[int, int] = {}
    failed: str | None = None
    cpu_seconds = 0.0
    try:
        for rank in range(num_ranks):
            pid = fork_rank(
                lambda: importlib.import_module(module).main(),
                arguments=[f"{module}.py", *arguments],
                environment=dict(environment or {}) | rank_environment(rank, num_ranks=num_ranks, port=port),
                log=_log(record, rank),
                leave=_leave_at_once,
            )
            running[pid] = rank
        while running and failed is None:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in running:
                rank = running.pop(pid)
                cpu_seconds += usage.ru_utime + usage.ru_stime
                if status:
                    failed = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
            elif time.monotonic() - started > timeout_seconds:
                failed = f"no end after {timeout_seconds:.0f} s"
                rank = 0
            else:
                watch(running)
                time.sleep(0.02)
        until = time.monotonic() + grace_seconds
        while set(running.values()) - set(dead) and time.monotonic() < until:
            running.pop(os.waitpid(-1, os.WNOHANG)[0], None)
            time.sleep(0.02)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if failed is not None:
        raise RunFailed(f"{failed}:\n{_log(record, rank).read_text(errors='replace')[-_LAST_CHARACTERS:]}")
    output = _log(record, 0).read_text(errors="replace")
    recorded = Recorded(ranks=read_records(record, num_ranks=num_ranks), output=output)
    return ForkedRun(recorded, cpu_seconds=cpu_seconds, seconds=time.monotonic() - started)


def _log(record: Path, rank: int) -> Path:
    return record / f"rank{rank}.log"


def free_port() -> int:
    """A port for the rendezvous of a run, which the kernel gives to no connection meanwhile."""
    for number in _port_numbers:
        port = PORTS[number % len(PORTS)]
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers do not end")


def rank_environment(rank: int, *, num_ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives a rank of one machine."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(value) for name, value in values.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _leave_at_once(status: int) -> None:
    atexit._run_exitfuncs()  # what Python does at its end, and os._exit does not
    os._exit(status)


def leave_as_python_does(status: int) -> None:
    """Wait for threads, run what is registered for the end, and destroy all objects, as at the end of any program."""
    ctypes.pythonapi.Py_Exit(status)


def fork_rank(
    main: Callable[[], object],
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    leave: Callable[[int], object] = leave_as_python_does,
) -> int:
    """Start a rank as torchrun and the launcher would.

    Args:
        main: trains.
        arguments: of the process, its name first.
        environment: variables beside those of this process.
        log: file for what the rank prints.
        leave: ends the rank with an exit status.

    Returns:
        Its process id. The rank is killed when this process ends.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
        with log.open("w") as out, open(os.devnull) as nothing:
            for target, source in ((0, nothing), (1, out), (2, out)):
                os.dup2(source.fileno(), target)
        os.environ |= environment
        sys.argv = list(arguments)
        dist.set_debug_level_from_env()  # torch has read TORCH_DISTRIBUTED_DEBUG when it was imported
        try:
            main()
            status = 0
        except SystemExit as end:  # how Megatron ends at --exit-interval
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
        except BaseException:  # noqa: BLE001 - printed before what waits at the end
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        leave(status)
    finally:  # nothing may leave a fork but by its status: it would go on as a second parent
        os._exit(status)
