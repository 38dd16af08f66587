"""Raises an error of one rank on every rank of its group.

A rank that raised alone would leave the others waiting in a collective. So an error is caught, its text is sent in the
next collective, and then every rank raises: the rank where it happened the original with its traceback, the others a
BalanceError that names the rank and the error.

`attempt` is the one place of this package that catches every Exception: a data loader is other code, and
may raise anything. KeyboardInterrupt and SystemExit pass.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
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
    all_gather_bytes,
    all_gather_row,
    joined,
    named_ranks,
    ranks_by_value,
)

P = ParamSpec("P")
T = TypeVar("T")

_OTHER_PLANS = (
    "{others} planned another schedule than {first}: the planner saw other lengths, other flags or another numpy there."
)


@dataclass(frozen=True)
class Failure:
    """An error that was caught.

    Attributes:
        error: as it was raised.
        during: the work under way, for people; empty where the error names it.
    """

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


class AgreedError(BalanceError):
    """An error of other code on this rank, raised after every rank of the group has learned of it.

    Args:
        text: as the other ranks raise it.
        original: the error raised on this rank.
    """

    def __init__(self, text: str, *, original: Exception) -> None:
        super().__init__(text)
        self.original = original


def attempt(work: Callable[P, T], *positional: P.args, **keywords: P.kwargs) -> T | Failure:
    """Call a function; its outcome, or the error that it raised."""
    try:
        return work(*positional, **keywords)
    except Exception as error:  # noqa: BLE001 - other code may raise anything, and peers must learn of it
        return Failure(error)


@contextlib.contextmanager
def agreeing_on(failure: Failure | None) -> Iterator[None]:
    """Context of the collective that sends `failure.problem` and raises it on every rank.

    Raises:
        AgreedError: where the failure is this rank's and its error is not a BalanceError.
    """
    try:
        yield
    except BalanceError as agreed:
        if failure is None or isinstance(failure.error, BalanceError):
            raise
        raise AgreedError(str(agreed), original=failure.error) from failure.error


def raise_together(
    problem: str | None,
    *,
    group: dist.ProcessGroup,
    what: str,
    plan: tuple[int, int] = (0, 0),
    differ: str = _OTHER_PLANS,
    named: bool = True,
) -> tuple[bool, tuple[int, int]]:
    """Raise on every rank the problem of one, or that ranks planned otherwise; else whether all have a plan, and it.

    Args:
        problem: of this rank, or None.
        group: the ranks that continue together; gloo.
        what: the answer of the peers, named in the error where one does not answer.
        plan: digest and size of what this rank planned, of at least 0; UNKNOWN where it has no plan.
        differ: the error where plans differ, of `{others}` and the `{first}` rank that has one.
        named: name the ranks that have a problem.

    Raises:
        BalanceError: on every rank, naming the ranks that have a problem, or that planned otherwise.
    """
    alike, complete, agreed = joined(plan, fine=problem is None, group=group, what=what)
    if alike:
        return complete, agreed
    text = b"" if problem is None else problem.encode()
    rows = all_gather_row(np.array([problem is not None, len(text), *plan]), group=group, what=what)
    failed, sizes = rows[:, 0] != 0, rows[:, 1]
    if failed.any():
        texts = all_gather_bytes(text, sizes=sizes, group=group, what=what)
        raise cannot_go_on(failed, texts=texts, group=group, named=named)
    raise _differing([*map(tuple, rows[:, 2:].tolist())], group=group, text=differ)


def check_same_schedule(digest: int, *, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
    """Check that all ranks computed the same schedule. One all_gather of one int64.

    Args:
        digest: a hash of the schedule, in [0, 2**63).
        group: the ranks that planned.
        device: where the collective's buffers live: `cuda` for NCCL.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first.
    """
    what = "the plans of all ranks (compare)"
    digests = all_gather_row(np.array([digest], dtype=np.int64), group=group, device=device, what=what)[:, 0].tolist()
    if len({*digests}) > 1:
        raise _differing(digests, group=group, text=_OTHER_PLANS)


def _differing(plans: Sequence[object], *, group: dist.ProcessGroup, text: str) -> BalanceError:
    """Of the plans of all ranks, `[group_size]`, which are not equal."""
    names = dist.get_process_group_ranks(group)
    first = next(rank for rank, plan in enumerate(plans) if plan != UNKNOWN)
    others = [names[rank] for rank, plan in enumerate(plans) if plan not in (UNKNOWN, plans[first])]
    return BalanceError(text.format(others=named_ranks(others), first=named_ranks([names[first]])))


def cannot_go_on(
    failed: NDArray[np.bool_], *, texts: Sequence[bytes], group: dist.ProcessGroup, named: bool = True
) -> BalanceError:
    """The error of all ranks.

    Args:
        failed: `[group_size]`.
        texts: `[group_size]`, of those that failed.
        group: the ranks.
        named: name them; their texts may do so.
    """
    problems = [text.decode() if bad else None for text, bad in zip(texts, failed, strict=True)]
    said = {problem: ranks for problem, ranks in ranks_by_value(problems, group=group).items() if problem is not None}
    if not named:
        return BalanceError(" | ".join(said))
    names = dist.get_process_group_ranks(group)
    who = named_ranks([names[rank] for rank in np.flatnonzero(failed)])
    each = [f"{ranks}: {problem}" for problem, ranks in said.items()]
    return BalanceError(f"{who} cannot go on. " + " | ".join(each[:MAX_RANKS_NAMED]))
