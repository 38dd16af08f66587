"""Checks whether all ranks of a cluster meet, for `megatron-balance doctor`, and measures what a step does among them.

Under torchrun ranks first meet in its store, which needs no interface of gloo's: there they compare versions, flags and
problems, and report where gloo would listen. Then they make a group over gloo and measure it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.process import version_of
from megatron_balance.runtime.rendezvous import Rendezvous, check_settings_match
from megatron_balance.version import build_version

TIMEOUT = timedelta(seconds=60)
IFNAME = "GLOO_SOCKET_IFNAME"

COMPARED = ("megatron-core", "torch", "numpy", "transformer-engine")
"""Packages whose other versions might plan or compute differently."""

_MESSAGE_NBYTES = 16 << 20
_SIOCGIFADDR = 0x8915


class Finding(NamedTuple):
    """One line of the report: a check that passed or not, and the remedy where it did not; or a note."""

    ok: bool
    message: str
    is_note: bool = False


class HostInfo(NamedTuple):
    """Where a rank runs, the address and interface that gloo would listen on there, and the way to MASTER_ADDR."""

    host: str
    requested: str
    address: str
    interface: str
    towards_master: str

    def problem(self, *, several_hosts: bool) -> str:
        """The reason why ranks of other hosts would not find this one; empty where there is none."""
        advice = f"set {IFNAME}={self.towards_master or 'the interface that reaches the other hosts'} on {self.host}"
        if self.requested and not self.address:
            return f"{self.host}: {IFNAME} is {self.requested}, which has no address here; {advice}"
        if several_hosts and (not self.address or self.address.startswith("127.")):
            address = f"{self.address} ({self.interface})" if self.address else "no address"
            return f"{self.host}: gloo would listen on {address}, where no other host reaches it; {advice}"
        return ""


def check_cluster(*, flags: Sequence[str], problems: Sequence[str], step_nbytes: int) -> Iterator[Finding]:
    """Meet with the other ranks; every rank of the world calls it.

    Args:
        flags: of the training script.
        problems: that this rank has seen before.
        step_nbytes: that a rank sends if every sample of a step moves; 0 where it is not known.
    """
    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
    world = Rendezvous(store, rank=rank, num_ranks=num_ranks, timeout=TIMEOUT)
    try:
        texts = check_settings_match({}, rendezvous=world, topic="doctor", payload=json.dumps(_host_info()))
    except BalanceError as error:
        yield Finding(False, str(error))
        return
    infos = [HostInfo(*json.loads(text)) for text in texts]
    hosts = list(dict.fromkeys(info.host for info in infos))
    yield Finding(True, f"{num_ranks} ranks on {len(hosts)} hosts meet in the store: {', '.join(hosts)}")
    settings = {f"version of {package}": version_of(package) or "none" for package in COMPARED}
    settings |= {"version of megatron_balance": build_version(), "version of python": platform.python_version()}
    settings["the command line"] = " ".join(flags)
    try:
        check_settings_match(settings, rendezvous=world, topic="versions and flags", error="; ".join(problems) or None)
        yield Finding(True, "all ranks have the same versions and flags")
    except BalanceError as error:
        yield Finding(False, str(error))
    is_reachable = True
    for info in dict.fromkeys(infos):
        problem = info.problem(several_hosts=len(hosts) > 1)
        text = f"{info.host}: gloo listens on {info.address} ({info.interface or 'no interface'})"
        yield Finding(not problem, problem or f"{text}, {IFNAME} is {info.requested or 'not set'}")
        is_reachable = is_reachable and not problem
    if is_reachable:  # else ranks would wait for each other until the timeout
        yield from _measure(world, hosts=[info.host for info in infos], step_nbytes=step_nbytes)


def _host_info() -> HostInfo:
    host, requested = socket.gethostname(), os.environ.get(IFNAME, "")
    address = towards_master = ""
    interfaces: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces[socket.inet_ntoa(answer[20:24])] = name
        with contextlib.suppress(OSError):  # this host's address on the way to MASTER_ADDR; nothing is sent
            probe.connect((os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))))
            towards_master = interfaces.get(probe.getsockname()[0], "")
    if requested:
        address = next((address for address, name in interfaces.items() if name == requested.split(",")[0]), "")
    else:
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "127.0.0.1"  # as torch does
    return HostInfo(host, requested, address, interfaces.get(address, ""), towards_master)


def _measure(rendezvous: Rendezvous, *, hosts: Sequence[str], step_nbytes: int) -> Iterator[Finding]:
    """Time what a step does: ranks gather a few numbers, and send samples to ranks of other hosts."""
    rank, num_ranks, started = rendezvous.rank, rendezvous.num_ranks, time.perf_counter()

    def time_calls(function: Callable[[], object], *, num_calls: int) -> list[float]:
        seconds = []
        for _ in range(num_calls):
            dist.barrier()
            call_started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - call_started)
        return seconds

    def gather(*numbers: float) -> list[float]:
        gathered = torch.zeros(num_ranks * len(numbers), dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, torch.tensor(numbers, dtype=torch.float64))
        return gathered.tolist()

    def exchange() -> None:
        half = num_ranks // 2  # that far away is another host, where there are several
        works = dist.irecv(incoming, (rank - half) % num_ranks), dist.isend(outgoing, (rank + half) % num_ranks)
        for work in filter(None, works):
            work.wait()

    try:
        store = dist.distributed_c10d.PrefixStore("doctor", rendezvous.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        seconds_to_meet = time.perf_counter() - started
        latency = statistics.median(time_calls(lambda: gather(*range(8)), num_calls=20))
        outgoing, incoming = (torch.zeros(_MESSAGE_NBYTES, dtype=torch.uint8) for _ in range(2))
        seconds = gather(time_calls(exchange, num_calls=3)[-1])  # the first one connects
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = f"open TCP between the hosts on all ports, or set {IFNAME} to the interface that reaches the others"
        yield Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
        return
    yield Finding(
        True, f"a group of all ranks is made in {seconds_to_meet:.1f} s, a gather takes {1e3 * latency:.2f} ms"
    )
    slowest = max(range(num_ranks), key=seconds.__getitem__)
    lowest, highest = (_MESSAGE_NBYTES / value / 1e6 for value in (seconds[slowest], min(seconds)))
    yield Finding(
        True,
        f"ranks receive {_MESSAGE_NBYTES >> 20} MiB from far ranks at {lowest:.0f} to {highest:.0f} MB/s, slowest on "
        f"rank {slowest} ({hosts[slowest]})",
    )
    text = "the first step needs TCP on all ports between these addresses"
    if step_nbytes:
        text += f"; if every sample moves, a rank sends {step_nbytes / 2**20:.1f} MiB in "
        text += f"{step_nbytes / lowest / 1e6:.2f} s, while the step before runs"
    yield Finding(True, text)
