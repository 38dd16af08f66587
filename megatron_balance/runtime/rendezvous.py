"""Checks that all ranks of a run have the same settings, before any of them makes a process group.

Making a process group waits for every member until the timeout, and no error names a missing rank. So ranks meet in the
key-value store of init_process_group, where rank 0 reads the entries of all ranks (JSON) and writes one verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import named_ranks, waiting_for
from megatron_balance.runtime.failure import mismatch

ROOT = "megatron_balance"
SLICE = timedelta(seconds=1)  # a wait is cut into these: between two of them Ctrl-C is heard
READ_SECONDS = 10.0
"""Rank 0 may be where the store lives, and stays this long at most for the others to read the fatal verdict."""

JUDGING_FRACTION = 0.9
"""Of the timeout; then rank 0 waits no longer, so that the others still get the names of missing ranks."""


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
    started, seconds = time.monotonic(), rendezvous.timeout.total_seconds()
    with waiting_for(f"the {topic} check of all ranks"):
        # Numbered, so that a second check of this topic does not read the first one's verdict.
        folder = f"{ROOT}/{topic}/{store.add(f'{ROOT}/{topic}/checks/{rank}', 1)}"
        entries = [f"{folder}/rank/{number}" for number in range(num_ranks)]
        store.set(entries[rank], json.dumps([error, {**settings}, payload]))
        if rank == 0:
            deadline = started + JUDGING_FRACTION * seconds
            missing = [number for number, entry in enumerate(entries) if not _wait(store, entry, deadline=deadline)]
            verdict, payloads = "", list[str]()
            if missing:
                verdict = (
                    f"{named_ranks(missing)} of {num_ranks} did not join the {topic} check within "
                    f"{JUDGING_FRACTION * seconds:.0f} s. Such a rank has died, hangs, or trains without "
                    "megatron_balance: start every rank with the same command (the launcher or the import line) and "
                    "the same installation."
                )
            else:
                errors, all_settings, payloads = zip(*(json.loads(store.get(entry)) for entry in entries), strict=True)
                verdict = mismatch(errors, all_settings)
            store.set(f"{folder}/verdict", json.dumps([verdict, payloads]))
        elif not _wait(store, f"{folder}/verdict", deadline=started + seconds):
            raise RuntimeError("rank 0 did not respond")
        verdict, payloads = json.loads(store.get(f"{folder}/verdict"))
        if verdict:
            store.set(f"{folder}/read/{rank}", "")
            deadline = time.monotonic() + READ_SECONDS
            for number, entry in enumerate(entries if rank == 0 else []):
                if store.check([entry]):
                    _wait(store, f"{folder}/read/{number}", deadline=deadline)
            raise BalanceError(verdict)
    return payloads


def _wait(store: Store, key: str, *, deadline: float) -> bool:
    """Wait for a key; False where it is missing at the deadline. A key that exists is found after the deadline too."""
    while True:
        remaining = timedelta(seconds=max(deadline - time.monotonic(), 0.01))
        try:
            store.wait([key], min(SLICE, remaining))
        except RuntimeError as error:
            # A file store raises no DistStoreError. Any other error is of a store that is gone.
            if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
                raise
            if time.monotonic() >= deadline:
                return store.check([key])
        else:
            return True
