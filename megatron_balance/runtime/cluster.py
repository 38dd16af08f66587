"""Checks whether all ranks of a cluster meet, for `megatron-balance doctor`.

Under torchrun ranks first meet in its store, which needs no interface of gloo's: there they compare versions, flags and
problems, and report where gloo would listen. Then they make a group over gloo.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.process import version_of
from megatron_balance.runtime.rendezvous import Rendezvous, check_settings_match
from megatron_balance.version import build_version

TIMEOUT = timedelta(seconds=60)
IFNAME = "GLOO_SOCKET_IFNAME"

COMPARED = ("megatron-core", "torch", "numpy", "transformer-engine")
"""Packages whose other versions might plan or compute differently."""


class Finding(NamedTuple):
    """One line of the report: a check that passed or not, and the remedy where it did not; or a note."""

    ok: bool
    message: str
    is_note: bool = False


def check_cluster(*, flags: Sequence[str], problems: Sequence[str]) -> Iterator[Finding]:
    """Meet with the other ranks, which have seen `problems`; `flags` are those of the script. Every rank calls it."""
    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=TIMEOUT))
    world = Rendezvous(store, rank=rank, num_ranks=num_ranks, timeout=TIMEOUT)
    payload = json.dumps([socket.gethostname(), _gloo_address()])
    try:
        texts = check_settings_match({}, rendezvous=world, topic="doctor", payload=payload)
    except BalanceError as error:
        yield Finding(False, str(error))
        return
    addresses = dict.fromkeys(tuple(json.loads(text)) for text in texts)
    hosts = list(dict.fromkeys(host for host, _ in addresses))
    yield Finding(True, f"{num_ranks} ranks on {len(hosts)} hosts meet in the store: {', '.join(hosts)}")
    settings = {f"version of {package}": version_of(package) or "none" for package in COMPARED}
    settings |= {"version of megatron_balance": build_version(), "version of python": platform.python_version()}
    settings["the command line"] = " ".join(flags)
    try:
        check_settings_match(settings, rendezvous=world, topic="versions and flags", error="; ".join(problems) or None)
        yield Finding(True, "all ranks have the same versions and flags")
    except BalanceError as error:
        yield Finding(False, str(error))
    findings = [address_finding(host, address, several_hosts=len(hosts) > 1) for host, address in addresses]
    yield from findings
    if all(finding.ok for finding in findings):  # else ranks would wait for each other until the timeout
        yield _meet_over_gloo(world)


def _gloo_address() -> str:
    """The address or interface that gloo would listen on here, as torch chooses it; empty where it cannot."""
    interface = os.environ.get(IFNAME, "").partition(",")[0]
    try:
        if not interface:
            return socket.gethostbyname(socket.gethostname())
        ProcessGroupGloo.create_device(interface=interface)
    except OSError:
        return "127.0.0.1"
    except RuntimeError:
        return ""
    return interface


def address_finding(host: str, address: str, *, several_hosts: bool) -> Finding:
    """Whether other hosts find this one where its gloo listens."""
    is_local = several_hosts and address.startswith("127.")
    text = f"{host}: gloo listens on {address}{', where no other host reaches it' if is_local else ''}"
    text = text if address else f"{host}: {IFNAME} names an interface without an address"
    if address and not is_local:
        return Finding(True, text)
    return Finding(False, f"{text}; set {IFNAME} there to the interface that reaches the other hosts")


def _meet_over_gloo(world: Rendezvous) -> Finding:
    started = time.perf_counter()
    try:
        store = dist.distributed_c10d.PrefixStore("doctor", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.num_ranks, timeout=TIMEOUT)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = f"open TCP between the hosts on all ports, or set {IFNAME} to the interface that reaches the others"
        return Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
    seconds = time.perf_counter() - started
    return Finding(True, f"all ranks meet over gloo in {seconds:.1f} s; training needs TCP on all ports between them")
