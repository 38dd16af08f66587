"""Raises an error of one rank on every rank of its group.

A rank that raised alone would leave the others waiting in a collective. So an error is caught, its text is sent in the
next collective, and then every rank raises a BalanceError that names the rank and the error; where it happened, the
original is its cause.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import (
    MAX_RANKS_NAMED,
    UNKNOWN,
    all_gather_row,
    joined,
    named_ranks,
    ranks_by_value,
)

P = ParamSpec("P")
T = TypeVar("T")

OTHER_PLANS = (
    "{others} planned another schedule than {first}: the planner saw other lengths, other flags or another numpy there."
)


@dataclass(frozen=True)
class Failure:
    """An error that was caught, and the work under way, for people; empty where the error names it."""

    error: Exception
    during: str = ""

    @property
    def problem(self) -> str:
        """Text for peers: BalanceError speaks for itself, any other error is named by its type."""
        if isinstance(self.error, BalanceError):
            text = str(self.error)
        else:
            text = "".join(traceback.format_exception_only(self.error)).strip()
        text = f"{self.during}: {text}" if self.during else text
        return text.encode(errors="backslashreplace").decode()  # file names may hold bytes that are not UTF-8


def attempt(work: Callable[P, T], *positional: P.args, **keywords: P.kwargs) -> T | Failure:
    """Call a function; its outcome, or the error that it raised. KeyboardInterrupt and SystemExit pass."""
    try:
        return work(*positional, **keywords)
    except Exception as error:  # noqa: BLE001 - a data loader or a writer may raise anything; peers must learn of it
        return Failure(error)


def check_same_schedule(digest: int, *, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
    """Check that all ranks computed the same schedule, in ⌈log₂(group size)⌉ rounds of small messages.

    Args:
        digest: a hash of the schedule, in [0, 2**63).
        group: the ranks that planned.
        device: where the messages' buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first.
    """
    what = "the plans of all ranks (compare)"
    alike, _ = joined(digest, fine=True, group=group, what=what, device=device)
    if not alike:
        digests = all_gather_row(np.array([digest], dtype=np.int64), group=group, device=device, what=what)[:, 0]
        raise differing(digests.tolist(), group=group, text=OTHER_PLANS)


def differing(digests: Sequence[int], *, group: dist.ProcessGroup, text: str) -> BalanceError:
    """The error of all ranks, of which some have another digest than the `first` that has one: the `others`."""
    names = dist.get_process_group_ranks(group)
    first = next(rank for rank, digest in enumerate(digests) if digest != UNKNOWN)
    others = [names[rank] for rank, digest in enumerate(digests) if digest not in (UNKNOWN, digests[first])]
    return BalanceError(text.format(others=named_ranks(others), first=named_ranks([names[first]])))


def cannot_go_on(failed: NDArray[np.bool_], *, texts: Sequence[bytes], group: dist.ProcessGroup) -> BalanceError:
    """The error of all ranks: who `[group_size]` failed, and why."""
    names = dist.get_process_group_ranks(group)
    who = named_ranks([names[rank] for rank in np.flatnonzero(failed)])
    problems = [text.decode() if bad else None for text, bad in zip(texts, failed, strict=True)]
    said = ranks_by_value(problems, group=group).items()
    each = [f"{ranks}: {problem}" for problem, ranks in said if problem is not None]
    return BalanceError(f"{who} cannot go on. " + " | ".join(each[:MAX_RANKS_NAMED]))
