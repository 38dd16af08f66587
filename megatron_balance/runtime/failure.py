"""Errors of one rank, and differences between ranks, raised on every rank of a group.

Peers would wait for a rank that raised alone: its text is sent in the next collective. There the original is the cause.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import (
    all_gather_bytes,
    all_gather_row,
    exchange_parts,
    ranks_by_value,
    waiting_for,
)

P = ParamSpec("P")
T = TypeVar("T")

MAX_NAMED = 5
"""Problems or settings that one error names."""

UNKNOWN = -1
"""The digest of a rank that has none."""

_OTHER_PLANS = (
    "{others} planned another schedule than {first}: the planner saw other lengths, other flags or another numpy there."
)
_OTHER_DATA = (
    "the data of this step differs within a model replica: in the data-parallel group of {others} other samples were "
    "read than in that of {first}. Every pipeline stage and context-parallel rank must read the same data, in one "
    "order."
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


def disagreement(
    problems: Sequence[str | None], settings: Sequence[Mapping[str, str]], *, group: dist.ProcessGroup | None = None
) -> str:
    """The reason why ranks cannot go on together, by the problem and the settings of each; empty where they can."""
    said = ranks_by_value(problems, group=group).items()
    if failed := [f"{ranks} cannot go on: {problem}" for problem, ranks in said if problem is not None]:
        return " | ".join(failed[:MAX_NAMED])
    # A setting that some ranks lack is named only where nothing else differs: it follows from the difference.
    phrases: dict[bool, list[str]] = {True: [], False: []}
    for name in dict.fromkeys(name for of_rank in settings for name in of_rank):
        ranks = ranks_by_value((of_rank.get(name, "not set") for of_rank in settings), group=group)
        if len(ranks) > 1:
            phrase = f"{name} is " + " and ".join(f"{value} on {on}" for value, on in ranks.items())
            phrases[all(name in of_rank for of_rank in settings)].append(phrase)
    found = phrases[True] or phrases[False]
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    advice = "Give every rank the same command line and the same installation."
    return f"Ranks were started differently: {'; '.join(found[:MAX_NAMED])}{more}. {advice}" if found else ""


def check_same_schedule(digest: int, *, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
    """Check that all ranks computed the same schedule, in ⌈log₂(group size)⌉ rounds of small messages.

    Args:
        digest: a hash of the schedule, in [0, 2**63).
        group: the ranks that planned.
        device: where the messages' buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first.
    """
    _agree(digest, group=group, what="the plans of all ranks (compare)", differ=_OTHER_PLANS, device=device)


def share(
    text: str | None = None, *, group: dist.ProcessGroup | None, digest: int = 0, problem: str | None = None
) -> str:
    """Gives all ranks of a model replica the step that those of them made which load data; all call it.

    `text` is the step's, None on a rank that loads no data (it gets that of the first rank of the group, which does) or
    has a problem; `digest`, in [0, 2**63), must be equal on all ranks that made it. All raise where it differs, or on a
    problem.
    """
    if group is None:
        if text is None:
            raise BalanceError(problem or "the one rank of a model replica loads no data.")
        return text
    what = "the plan of this model replica"
    known = UNKNOWN if text is None else digest
    complete = _agree(known, group=group, what=what, differ=_OTHER_DATA, problem=problem)
    sent = bytearray((text or "").encode())
    if not complete:
        size = torch.tensor([len(sent)])
        with waiting_for(what, group=group):
            dist.broadcast(size, group=group, group_src=0)
            sent = bytearray(int(size)) if group.rank() else sent
            dist.broadcast(torch.frombuffer(sent, dtype=torch.uint8), group=group, group_src=0)
    return text or sent.decode()


def _agree(
    digest: int,
    *,
    group: dist.ProcessGroup,
    what: str,
    differ: str,
    problem: str | None = None,
    device: torch.device | str = "cpu",
) -> bool:
    """True if every rank has a digest; where two differ, or a rank has a problem, all raise.

    The dissemination barrier (Hensgen, Finkel and Manber 1988): in round k a rank hands what it knows to the rank 2**k
    above.
    """
    alike, complete, value = problem is None, digest != UNKNOWN, digest
    rank, size = group.rank(), group.size()
    for distance in (1 << bit for bit in range((size - 1).bit_length())):
        sent = torch.tensor([alike, complete, value], device=device)
        received = torch.empty_like(sent)
        below, above = (rank - distance) % size, (rank + distance) % size
        exchange_parts(received, sent, receive_sizes={below: 3}, send_sizes={above: 3}, group=group, what=what)
        also_alike, also_complete, other = received.tolist()
        alike &= bool(also_alike) and (value == other or UNKNOWN in (value, other))
        complete &= bool(also_complete)
        value = max(value, other)
    if alike:
        return complete
    said = (problem or "").encode()
    rows = all_gather_row(np.array([len(said), digest]), group=group, what=what, device=device)
    if rows[:, 0].any():
        texts = all_gather_bytes(said, sizes=rows[:, 0], group=group, what=what, device=device)
        raise BalanceError(" | ".join(dict.fromkeys(text.decode() for text in texts if text)))
    ranks = ranks_by_value(rows[:, 1].tolist(), group=group)
    ranks.pop(UNKNOWN, None)
    first, *others = ranks.values()
    raise BalanceError(differ.format(first=first, others=" and ".join(others)))
