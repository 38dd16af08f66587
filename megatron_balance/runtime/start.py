"""Lets all ranks of a run agree on settings before any of them makes a process group.

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
from megatron_balance.runtime.failure import disagreement

ROOT = "megatron_balance"
SLICE = timedelta(seconds=1)  # a wait is cut into these: between two of them Ctrl-C is heard
READ_SECONDS = 10.0
"""Rank 0 may be where the store lives, and stays this long at most for the others to read a verdict that ends them."""

JUDGING_SHARE = 0.9
"""Part of the timeout after which rank 0 no longer waits, so that the others still get the names of missing ranks."""


@dataclass(frozen=True)
class Meeting:
    """The key-value store, this rank of so many, and the time after which missing ranks are named."""

    store: Store
    rank: int
    num_ranks: int
    timeout: timedelta


def agree(
    settings: Mapping[str, str], *, meeting: Meeting, topic: str, problem: str | None = None, said: str = ""
) -> list[str]:
    """Continue only if every rank takes part, with the same settings and without a problem; what each rank said.

    `settings` are for people too; a name that a rank lacks counts as another value. `said` are a few bytes that every
    rank gets. Every rank raises BalanceError that names the differing settings, the problem or the missing ranks;
    PeerError where rank 0 is missing or the store is gone.
    """
    store, rank = meeting.store, meeting.rank
    started, seconds = time.monotonic(), meeting.timeout.total_seconds()
    with waiting_for(f"all ranks to agree on their {topic}"):
        # Numbered, so that ranks that meet again on this topic do not read an earlier verdict.
        folder = f"{ROOT}/{topic}/{store.add(f'{ROOT}/{topic}/meetings/{rank}', 1)}"
        entries = [f"{folder}/rank/{other}" for other in range(meeting.num_ranks)]
        store.set(entries[rank], json.dumps([problem, {**settings}, said]))
        if rank == 0:
            until = started + JUDGING_SHARE * seconds
            missing = [other for other, entry in enumerate(entries) if not _came(store, entry, until=until)]
            verdict = (
                f"{named_ranks(missing)} of {meeting.num_ranks} did not come to agree on {topic} within "
                f"{JUDGING_SHARE * seconds:.0f} s. Such a rank has died, hangs, or trains without megatron_balance: "
                "start every rank with the same command (the launcher or the import line) and the same installation."
            )
            of_ranks: tuple[str, ...] = ()
            if not missing:
                problems, all_settings, of_ranks = zip(
                    *(json.loads(store.get(entry)) for entry in entries), strict=True
                )
                verdict = disagreement(problems, all_settings)
            store.set(f"{folder}/verdict", json.dumps([verdict, of_ranks]))
        elif not _came(store, f"{folder}/verdict", until=started + seconds):
            raise RuntimeError("no word from rank 0")
        verdict, answer = json.loads(store.get(f"{folder}/verdict"))
        if verdict:
            store.set(f"{folder}/read/{rank}", "")
            until = time.monotonic() + READ_SECONDS
            for other, entry in enumerate(entries if rank == 0 else []):
                if store.check([entry]):
                    _came(store, f"{folder}/read/{other}", until=until)
    if verdict:
        raise BalanceError(verdict)
    return answer


def _came(store: Store, key: str, *, until: float) -> bool:
    """Wait for a key; False where it is missing at the deadline. A key that exists is found after the deadline too."""
    while True:
        left = timedelta(seconds=max(until - time.monotonic(), 0.01))
        try:
            store.wait([key], min(SLICE, left))
        except RuntimeError as error:
            # A file store raises no DistStoreError. Any other error is of a store that is gone.
            if not isinstance(error, dist.DistStoreError) and "Wait timeout" not in str(error):
                raise
            if time.monotonic() >= until:
                return store.check([key])
        else:
            return True
