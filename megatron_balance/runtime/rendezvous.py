"""Checks that all ranks of a run have the same settings, before any of them makes a process group.

Making a process group waits for every member until the timeout, and no error names a missing rank. So ranks meet in the
key-value store of init_process_group, where rank 0 reads the entries of all ranks (JSON) and writes one verdict.

`megatron-balance doctor` under torchrun checks in the same way whether a cluster meets, and makes a group over gloo.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import named_ranks, waiting_for
from megatron_balance.runtime.failure import mismatch
from megatron_balance.runtime.process import version_of
from megatron_balance.version import build_version

ROOT = "megatron_balance"
READ_SECONDS = 10.0
"""Rank 0 may be where the store lives, and stays this long at most for the others to read the fatal verdict."""

JUDGING_FRACTION = 0.9
"""Of the timeout; then rank 0 waits no longer, so that the others still get the names of missing ranks."""

DOCTOR_TIMEOUT = timedelta(seconds=60)

COMPARED = ("megatron-core", "torch", "numpy", "transformer-engine")
"""Packages whose other versions might plan or compute differently."""


@dataclass(frozen=True)
class Rendezvous:
    """The key-value store, this rank of so many, and the time after which missing ranks are named."""

    store: Store
    rank: int
    num_ranks: int
    timeout: timedelta


def check_settings_match(
    settings: Mapping[str, str], *, rendezvous: Rendezvous, topic: str, error: str | None = None, payload: str = ""
) -> list[str]:
    """Continue only if every rank takes part, with the same settings and without an error; the payload of each rank.

    Every rank raises a BalanceError that names what differs, the error or missing ranks; PeerError without rank 0.
    """
    store, rank, num_ranks = rendezvous.store, rendezvous.rank, rendezvous.num_ranks
    seconds = rendezvous.timeout.total_seconds()
    with waiting_for(f"the {topic} check of all ranks"):
        # Numbered, so that a second check of this topic does not read the first one's verdict.
        folder = f"{ROOT}/{topic}/{store.add(f'{ROOT}/{topic}/checks/{rank}', 1)}"
        entries = [f"{folder}/rank/{number}" for number in range(num_ranks)]
        store.set(entries[rank], json.dumps([error, {**settings}, payload]))
        if rank == 0:
            verdict, payloads = "", list[str]()
            if _wait(store, entries, seconds=JUDGING_FRACTION * seconds):
                errors, all_settings, payloads = zip(*(json.loads(store.get(entry)) for entry in entries), strict=True)
                verdict = mismatch(errors, all_settings)
            else:
                missing = [number for number, entry in enumerate(entries) if not store.check([entry])]
                verdict = (
                    f"{named_ranks(missing)} of {num_ranks} did not join the {topic} check within "
                    f"{JUDGING_FRACTION * seconds:.0f} s. Such a rank has died, hangs, or trains without "
                    "megatron_balance: start every rank with the same command (the launcher or the import line) and "
                    "the same installation."
                )
            store.set(f"{folder}/verdict", json.dumps([verdict, payloads]))
        elif not _wait(store, [f"{folder}/verdict"], seconds=seconds):
            raise RuntimeError("rank 0 did not respond")
        verdict, payloads = json.loads(store.get(f"{folder}/verdict"))
        if verdict:
            store.set(f"{folder}/read/{rank}", "")
            if rank == 0:
                present = [number for number, entry in enumerate(entries) if store.check([entry])]
                _wait(store, [f"{folder}/read/{number}" for number in present], seconds=READ_SECONDS)
            raise BalanceError(verdict)
    return payloads


def _wait(store: Store, keys: Sequence[str], *, seconds: float) -> bool:
    """Wait for keys; False where one is missing after that."""
    try:
        store.wait([*keys], timedelta(seconds=seconds))
    except RuntimeError as error:
        # A file store raises no DistStoreError. Any other error is of a store that is gone.
        if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
            raise
        return store.check([*keys])
    return True


class Finding(NamedTuple):
    """One line of the report: a check that passed or not, and the remedy where it did not; or a note."""

    ok: bool
    message: str
    is_note: bool = False


def check_cluster(*, flags: Sequence[str], problems: Sequence[str]) -> Iterator[Finding]:
    """Meet with the other ranks, which have seen `problems`; `flags` are those of the script. Every rank calls it."""
    # What MASTER_ADDR and MASTER_PORT lead to is the store of torchrun's agent, or that of rank 0.
    store, rank, num_ranks = next(rendezvous("env://", timeout=DOCTOR_TIMEOUT))
    world = Rendezvous(store, rank=rank, num_ranks=num_ranks, timeout=DOCTOR_TIMEOUT)
    settings = {f"version of {package}": version_of(package) or "none" for package in COMPARED}
    settings |= {"version of megatron_balance": build_version(), "version of python": platform.python_version()}
    settings["the command line"] = " ".join(flags)
    error, host = "; ".join(problems) or None, socket.gethostname()
    try:
        hosts = check_settings_match(settings, rendezvous=world, topic="doctor", error=error, payload=host)
    except BalanceError as difference:
        yield Finding(False, str(difference))
        return
    names = dict.fromkeys(hosts)
    yield Finding(True, f"{num_ranks} ranks on {len(names)} hosts meet in the store: {', '.join(names)}")
    yield Finding(True, "all ranks have the same versions and flags")
    yield _meet_over_gloo(world)


def _meet_over_gloo(world: Rendezvous) -> Finding:
    started = time.perf_counter()
    try:
        store = dist.distributed_c10d.PrefixStore("doctor", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.num_ranks, timeout=world.timeout)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        remedy = (
            "set GLOO_SOCKET_IFNAME on every host to the interface that reaches the others (gloo may listen on "
            "127.0.0.1), or open TCP between them on all ports"
        )
        return Finding(False, f"gloo: {str(error).splitlines()[0]}; {remedy}")
    seconds = time.perf_counter() - started
    return Finding(True, f"all ranks meet over gloo in {seconds:.1f} s; training needs TCP on all ports between them")
