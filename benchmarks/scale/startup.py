"""Measures what the start costs as the world grows: meetings in the key-value store, process groups, gloo's meshes.

Nothing here needs as many processes as ranks: keys of absent ranks are written beforehand, and groups that this rank is
not in wait for nobody.
"""

# torch exports its stores and gloo's options under no public name.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from forked import free_port
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_balance.runtime.agreement import ROOT, Meeting, gather_texts

TIMEOUT = timedelta(seconds=120)
NUM_CLIENTS = 4
REQUESTS = 2000
NUM_TIMES = 5
"""A busy machine lengthens most of them."""


def meeting_seconds(num_ranks: int) -> dict[str, float]:
    """A meeting in which all ranks share a short text, on a store of this machine.

    Returns:
        `first_rank`: seconds in which rank 0 collects all texts and answers. `answer_nbytes`: that every other rank
        then reads.
    """
    with _server() as port:
        client = _client(port)
        for rank in range(1, num_ranks):
            client.set(f"{ROOT}/scale/1/rank/{rank}", json.dumps(rank // 8))
        meeting = Meeting(client, rank=0, num_ranks=num_ranks, timeout=TIMEOUT)
        started = time.perf_counter()
        gather_texts(json.dumps(0), meeting=meeting, topic="scale")
        seconds = time.perf_counter() - started
        return {"first_rank": seconds, "answer_nbytes": len(client.get(f"{ROOT}/scale/1/verdict"))}


def store_seconds(nbytes: int) -> float:
    """Seconds of the store for one rank's `wait` and `get` of a value, as several ranks ask at once; the least seen."""
    num_requests = max(REQUESTS * 1000 // (1000 + nbytes // 10), 50)
    seconds = []
    with _server() as port:
        _client(port).set("value", "x" * nbytes)
        for _ in range(NUM_TIMES):
            started = time.perf_counter()
            children = [_forked(lambda: _read(port, num_requests)) for _ in range(NUM_CLIENTS)]
            for child in children:
                os.waitpid(child, 0)
            seconds.append((time.perf_counter() - started) / (NUM_CLIENTS * num_requests))
    return min(seconds)


def group_seconds(num_ranks: int, *, group_size: int = 8) -> float:
    """Seconds of `new_group` for one group that this rank is not in."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        seconds = []
        for first in range(group_size, min(num_ranks, 200 * group_size), group_size):
            started = time.perf_counter()
            dist.new_group(list(range(first, first + group_size)), backend="gloo", timeout=TIMEOUT)
            seconds.append(time.perf_counter() - started)
    finally:
        dist.destroy_process_group()
    return statistics.median(seconds)


def mesh(num_ranks: int, *, lazy: bool) -> dict[str, float]:
    """Requests of one rank of a gloo group to the store until it has gathered once.

    Args:
        num_ranks: forked, on this machine.
        lazy: whether gloo connects two ranks when they first talk (TORCH_GLOO_LAZY_INIT=1), or all of them at once.
    """
    read, write = os.pipe()
    with _server() as port:
        children = [
            _forked(lambda rank=rank: _join(port, rank, num_ranks=num_ranks, lazy=lazy, out=write))
            for rank in range(num_ranks)
        ]
        for child in children:
            os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as lines:
        ranks = [json.loads(line) for line in lines]
    assert len(ranks) == num_ranks, "a rank failed"
    return {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0]}


class CountingStore(Store):
    """A store that counts what gloo reads from it."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner
        self.num_reads = self.read_nbytes = 0

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Read a value."""
        value = self._inner.get(key)
        self.num_reads += 1
        self.read_nbytes += len(value)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        """Wait for keys."""
        self._inner.wait(list(keys), timeout)


def _join(port: int, rank: int, *, num_ranks: int, lazy: bool, out: int) -> None:
    store = CountingStore(_client(port))
    num_files, cpu = len(os.listdir("/proc/self/fd")), time.process_time()
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=lazy)]
    options._timeout = TIMEOUT
    group = ProcessGroupGloo(PrefixStore("mesh", store), rank, num_ranks, options)
    row = torch.ones(128, dtype=torch.int64)
    group._allgather_base(torch.empty(128 * num_ranks, dtype=torch.int64), row).wait()
    line = {
        "reads": store.num_reads,
        "read_nbytes": store.read_nbytes,
        "files": len(os.listdir("/proc/self/fd")) - num_files,
        "cpu_seconds": time.process_time() - cpu,
    }
    os.write(out, f"{json.dumps(line)}\n".encode())


def _read(port: int, num_requests: int) -> None:
    client = _client(port)
    for _ in range(num_requests):
        client.wait(["value"], TIMEOUT)
        client.get("value")


def _client(port: int) -> Store:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


@contextlib.contextmanager
def _server() -> Iterator[int]:
    """The port of a store in a process of its own."""
    port = free_port()
    child = _forked(lambda: _serve(port))
    try:
        yield port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    while store.port:
        signal.pause()


def _forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - printed before the child ends
        traceback.print_exc()
    finally:
        os._exit(status)
