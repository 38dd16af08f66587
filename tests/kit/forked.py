"""Starts training runs whose ranks are forks of one process that has imported torch and Megatron already.

Imports are most of a rank's time. A rank is a process of its own, as under torchrun: it reads its flags and its
environment, joins gloo, runs the `main` of a module and ends. A program that has called `import_once` forks its ranks
itself (`train_forked`); tests ask a server, which lives as long as they do (`train`, `call`, `gloo_ranks.run_ranks`).

Invariants: the process that forks starts no thread, so that a fork lacks nothing; every fork has ended when a run
returns.
"""

import argparse
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from training_run import (
    CPU_FLAGS,
    ENVIRONMENT,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    Recorded,
    RunFailed,
    read_records,
    search_path,
)

_LAST_CHARACTERS = 3000
_PR_SET_PDEATHSIG = 1

PORTS = range(12_000, 32_000)
"""Below the range that Linux takes the ports of connections from (ip_local_port_range)."""

_port_numbers = itertools.count(97 * os.getpid())


def train(record, flags, *, num_ranks, **keywords):
    """`train_forked` by the server, with its keywords."""
    keywords = {"timeout_seconds": 300, **keywords}
    call("forked:train_here", str(record), list(flags), num_ranks=num_ranks, **keywords)
    return Recorded(read_records(record, num_ranks=num_ranks), _log(record, 0).read_text(errors="replace"))


def train_here(record, flags, **keywords):
    """`train_forked` with arguments in JSON's types."""
    train_forked(Path(record), flags, **keywords)


def call(function, *positional, imports=(), **keywords):
    """Call `MODULE:NAME` in the server that has these imports; arguments and answer are in JSON's types.

    Without `imports` it has those of a training run. RunFailed is passed on.
    """
    server = _server(*imports)
    assert server.stdin is not None, "a pipe"
    assert server.stdout is not None, "a pipe"
    server.stdin.write(json.dumps([function, positional, keywords]) + "\n")
    server.stdin.flush()
    try:
        answer, problem = json.loads(server.stdout.readline())
    except BaseException:  # a test's time-out: its answer would be taken for that of a later call
        _end(server)
        _server.cache_clear()
        raise
    if problem is not None:
        raise RunFailed(problem)
    return answer


@functools.cache
def _server(*imports):
    server = subprocess.Popen(
        [sys.executable, __file__, *imports],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": search_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server):
    server.kill()
    server.wait()
    for pipe in filter(None, (server.stdin, server.stdout)):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def serve(imports):
    """Answer calls, one a line, until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # some modules print lines when they are imported
    for name in imports:
        importlib.import_module(name)
    if not imports:
        import_once()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    for line in sys.stdin:
        function, positional, keywords = json.loads(line)
        module, name = function.split(":")
        answer = problem = None
        try:
            answer = getattr(importlib.import_module(module), name)(*positional, **keywords)
        except RunFailed as error:
            problem = str(error)
        answers.write(json.dumps([answer, problem]) + "\n")
        answers.flush()


def import_once(also=()):
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

    # Megatron parses the source of its dataclasses for the help of its flags: a quarter of a rank's CPU seconds.
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    stock, known = factory._get_field_docstrings, {}

    def docstrings_of(self, of_class):
        if of_class not in known:
            known[of_class] = stock(self, of_class)
        return known[of_class]

    factory._get_field_docstrings = docstrings_of
    arguments.add_megatron_arguments(argparse.ArgumentParser())
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, which a fork would lack"


def train_forked(record, flags, *, num_ranks, module="record_steps", leave_out=(), **keywords):
    """As `training_run.train`, in forks of this process; the output is that of rank 0.

    Each rank runs the `main` of `module`; `leave_out` names common flags to do without, and `keywords` are those of
    `run_forked`.
    """
    common = (flag for flag in f"{CPU_FLAGS} {MODEL_FLAGS} {TRAINING_FLAGS}".split() if flag not in leave_out)
    started = time.monotonic()
    cpu_seconds = run_forked(
        lambda: importlib.import_module(module).main(),
        folder=record,
        num_ranks=num_ranks,
        arguments=[f"{module}.py", str(record), *common, *flags],
        **keywords,
    )
    output, ranks = _log(record, 0).read_text(errors="replace"), read_records(record, num_ranks=num_ranks)
    return Recorded(ranks, output, cpu_seconds=cpu_seconds, seconds=time.monotonic() - started)


def run_forked(
    main,
    *,
    folder,
    num_ranks,
    timeout_seconds,
    arguments=(),
    environment=None,
    watch=lambda ranks: None,
    grace_seconds=0.0,
    dead=(),
):
    """Run `main` on ranks that write logs into `folder`; CPU seconds of all.

    `watch` is called again and again while ranks run, with process id → rank. Once a rank has failed the others, all
    but the `dead`, have `grace_seconds` to end by themselves, and are killed then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started, port = time.monotonic(), free_port()
    running = {}
    failed = None
    cpu_seconds = 0.0
    try:
        for rank in range(num_ranks):
            of_rank = {**(environment or {}), **rank_environment(rank, num_ranks=num_ranks, port=port)}
            log = _log(folder, rank)
            pid = fork_rank(main, arguments=arguments, environment=of_rank, log=log, leave=_leave_at_once)
            running[pid] = rank
        while running and failed is None:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid in running:
                rank = running.pop(pid)
                cpu_seconds += usage.ru_utime + usage.ru_stime
                if status:
                    failed = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
            elif time.monotonic() - started > timeout_seconds:
                failed, rank = f"no end after {timeout_seconds:.0f} s", min(running.values())
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
        raise RunFailed(f"{failed}:\n{_log(folder, rank).read_text(errors='replace')[-_LAST_CHARACTERS:]}")
    return cpu_seconds


def _log(record, rank):
    return record / f"rank{rank}.log"


def free_port():
    """A port for the rendezvous of a run, which the kernel gives to no connection meanwhile."""
    for number in _port_numbers:
        port = PORTS[number % len(PORTS)]
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers do not end")


def rank_environment(rank, *, num_ranks, port):
    """The variables that torchrun gives a rank of one machine."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {name: str(value) for name, value in (values | {"MASTER_PORT": port}).items()} | {"MASTER_ADDR": "127.0.0.1"}


def _leave_at_once(status):
    atexit._run_exitfuncs()  # what Python does at its end, and os._exit does not
    os._exit(status)


def fork_rank(main, *, arguments, environment, log, leave):
    """Start a rank as torchrun and the launcher would, with these arguments, its name first; `leave` ends it.

    Returns its process id. The rank is killed when this process ends.
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
        if "torch.distributed" in sys.modules:  # it has read TORCH_DISTRIBUTED_DEBUG when it was imported
            sys.modules["torch.distributed"].set_debug_level_from_env()
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


if __name__ == "__main__":
    import forked  # functions that are called by name are of that module

    forked.serve(sys.argv[1:])
