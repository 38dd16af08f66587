"""The checks of `megatron-balance doctor` under torchrun: whether the ranks of a cluster meet as the first step needs.

Ranks first meet in torchrun's store, which needs no interface of gloo's: there they compare versions, flags and
problems, and say where gloo would listen. Then they make a group over gloo and measure it. Only the first rank reports.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_balance import __version__
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.checks import Finding
from megatron_balance.mcore.run import PACKAGES
from megatron_balance.mcore.setup.flags import parse_command_line
from megatron_balance.runtime.comm import named_ranks
from megatron_balance.runtime.process import local_world_size
from megatron_balance.runtime.start import Meeting, differences, gather_texts

TIMEOUT = timedelta(seconds=60)
IFNAME = "GLOO_SOCKET_IFNAME"
BYTES_OF_A_TOKEN = 28
"""Of a row: tokens, labels and positions as int64, a loss mask as float32."""

_NUM_BYTES = 16 << 20
_ROUNDS = 20
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class _Place:
    """Where a rank runs, and where gloo would listen there.

    Attributes:
        host: its name.
        chosen: GLOO_SOCKET_IFNAME, or empty.
        address: that gloo listens on; empty where there is none.
        interface: that has this address; empty where none has.
        towards_master: the interface by which MASTER_ADDR is reached, or empty.
    """

    host: str
    chosen: str
    address: str
    interface: str
    towards_master: str

    @classmethod
    def of_this_rank(cls) -> _Place:
        interfaces = {name: _address_of(name) for _, name in socket.if_nameindex()}
        of_address = {address: name for name, address in interfaces.items() if address}
        host, chosen = socket.gethostname(), os.environ.get(IFNAME, "")
        address = interfaces.get(chosen.split(",")[0], "") if chosen else _resolved(host)
        return cls(host, chosen, address, of_address.get(address, ""), of_address.get(_towards_master(), ""))

    def problem(self, *, several_hosts: bool) -> str:
        """The reason why ranks of other hosts would not find this one; empty where there is none."""
        advice = f"set {IFNAME}={self.towards_master or 'the interface that reaches the other hosts'} on {self.host}"
        if self.chosen and not self.address:
            return f"{self.host}: {IFNAME} is {self.chosen}, which has no address here; {advice}"
        if several_hosts and (not self.address or self.address.startswith("127.")):
            found = f"{self.address} ({self.interface})" if self.address else "no address"
            return f"{self.host}: gloo would listen on {found}, where no other host reaches it; {advice}"
        return ""


def check_cluster(*, flags: Sequence[str], problems: Sequence[str]) -> Iterator[Finding]:
    """Meet with the other ranks; every rank of the world calls it.

    Args:
        flags: of the training script.
        problems: found on this rank before.
    """
    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
    meeting = Meeting(store, rank=rank, num_ranks=num_ranks, timeout=TIMEOUT)
    said = {"place": asdict(_Place.of_this_rank()), "settings": _settings(flags), "problems": list(problems)}
    try:
        all_said = [json.loads(text) for text in gather_texts(json.dumps(said), meeting=meeting, topic="the doctor")]
    except BalanceError as error:
        yield Finding(False, str(error))
        return
    places = [_Place(**one["place"]) for one in all_said]
    hosts = list(dict.fromkeys(place.host for place in places))
    yield Finding(True, f"{num_ranks} ranks on {len(hosts)} hosts meet in the store: {', '.join(hosts)}")
    yield from _compare(all_said)
    for place in dict.fromkeys(places):
        problem = place.problem(several_hosts=len(hosts) > 1)
        where = f"{place.host}: gloo listens on {place.address} ({place.interface or 'no interface'})"
        yield Finding(not problem, problem or f"{where}, {IFNAME} is {place.chosen or 'not set'}")
    if any(place.problem(several_hosts=len(hosts) > 1) for place in places):
        return  # ranks would wait for each other until the timeout
    yield from _measured(store, rank=rank, num_ranks=num_ranks, places=places, step_tokens=_step_tokens(flags))


def _step_tokens(flags: Sequence[str]) -> int:
    """Tokens of a global batch, at most; 0 where no flags say so."""
    try:
        args, _ = parse_command_line(flags)
    except (BalanceError, ImportError):
        return 0  # said above
    return (args.seq_length or 0) * (args.global_batch_size or 0)


def _settings(flags: Sequence[str]) -> Mapping[str, str]:
    settings = {"version of megatron_balance": __version__, "version of python": sys.version.split()[0]}
    for name in (*PACKAGES, "transformer-engine"):
        try:
            settings[f"version of {name}"] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            settings[f"version of {name}"] = "none"
    return settings | {"the command line": " ".join(flags)}


def _compare(all_said: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    differ = differences([one["settings"] for one in all_said])
    yield Finding(not differ, differ or "all ranks have the same versions and flags")
    ranks_with: dict[str, list[int]] = {}
    for rank, one in enumerate(all_said[1:], start=1):  # those of rank 0 are printed above
        for problem in one["problems"]:
            if problem not in all_said[0]["problems"]:
                ranks_with.setdefault(problem, []).append(rank)
    yield from (Finding(False, f"{named_ranks(ranks)}: {problem}") for problem, ranks in ranks_with.items())


def _measured(
    store: Store, *, rank: int, num_ranks: int, places: Sequence[_Place], step_tokens: int
) -> Iterator[Finding]:
    """Time what a step does: ranks gather a few numbers, and send samples to ranks of other hosts."""
    started = time.perf_counter()
    try:
        dist.init_process_group(
            "gloo", store=PrefixStore("doctor", store), rank=rank, world_size=num_ranks, timeout=TIMEOUT
        )
        seconds_to_meet = time.perf_counter() - started
        latency = _seconds_of_a_gather(num_ranks)
        of_ranks = _seconds_of_a_message(rank, num_ranks)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = f"open TCP between the hosts on all ports, or set {IFNAME} to the interface that reaches the others"
        yield Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
        return
    slowest = max(range(num_ranks), key=of_ranks.__getitem__)
    speed = _NUM_BYTES / of_ranks[slowest]
    yield Finding(
        True, f"a group of all ranks is made in {seconds_to_meet:.1f} s, a gather takes {1e3 * latency:.2f} ms"
    )
    yield Finding(
        True,
        f"ranks receive {_NUM_BYTES >> 20} MiB from the next host at {_NUM_BYTES / min(of_ranks) / 1e6:.0f} to "
        f"{speed / 1e6:.0f} MB/s, slowest on rank {slowest} ({places[slowest].host})",
    )
    needs = "the first step needs TCP on all ports between these addresses"
    if step_tokens:
        most = step_tokens * BYTES_OF_A_TOKEN / num_ranks
        needs += (
            f"; if every sample moves, a rank sends {most / 2**20:.1f} MiB in {most / speed:.2f} s, while the step "
            "before runs"
        )
    yield Finding(True, needs)


def _seconds_of_a_gather(num_ranks: int) -> float:
    own, of_all = torch.zeros(8, dtype=torch.int64), torch.zeros(8 * num_ranks, dtype=torch.int64)
    seconds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        dist.all_gather_into_tensor(of_all, own)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _seconds_of_a_message(rank: int, num_ranks: int) -> list[float]:
    """For each rank the seconds until a large message has come from the rank one host before."""
    distance = local_world_size() or 1
    distance = distance if distance < num_ranks else 1
    sent, received = torch.zeros(_NUM_BYTES, dtype=torch.uint8), torch.empty(_NUM_BYTES, dtype=torch.uint8)
    seconds = torch.zeros(1, dtype=torch.float64)
    for _ in range(3):  # the first one connects
        dist.barrier()
        started = time.perf_counter()
        sending = dist.isend(sent, (rank + distance) % num_ranks)
        dist.recv(received, (rank - distance) % num_ranks)
        seconds[0] = time.perf_counter() - started
        assert sending is not None, "this rank is in the group"
        sending.wait()
    of_ranks = torch.zeros(num_ranks, dtype=torch.float64)
    dist.all_gather_into_tensor(of_ranks, seconds)
    return of_ranks.tolist()


def _address_of(interface: str) -> str:
    """Its IPv4 address; empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _resolved(host: str) -> str:
    """The address of the host's own name, on which gloo listens; loopback where it has none, as torch does."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1"


def _towards_master() -> str:
    """This host's address on the way to MASTER_ADDR; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "1"))))
        except OSError:
            return ""
        return probe.getsockname()[0]
