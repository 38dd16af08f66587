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
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.collectives import all_gather_bytes, all_gather_row, largest_row, ranks_where
from megatron_balance.runtime.peers import MAX_RANKS_NAMED

P = ParamSpec("P")
T = TypeVar("T")


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


def raise_together(failure: Failure | None, *, group: dist.ProcessGroup, what: str, digest: int = 0) -> None:
    """Raise on every rank the failure of one, or that ranks planned different schedules.

    One `largest_row` of three int64; all_gathers of digests or texts where there is something to raise.

    Args:
        failure: of this rank, or None.
        group: the ranks that continue together; gloo.
        what: the answer of the peers, named in the error where one does not answer.
        digest: of the schedule that this rank follows, in [0, 2**63), if any.

    Raises:
        BalanceError: on every rank, naming the ranks that failed, or that planned another schedule.
        AgreedError: on every rank, where the error is not a BalanceError.
    """
    text = b"" if failure is None else failure.problem.encode()
    size = -1 if failure is None else len(text)
    largest_size, largest_digest, negated = largest_row(np.array([size, digest, -digest]), group=group, what=what)
    # First of all: on ranks that follow different plans a failure is what came of it.
    if largest_digest != -negated:
        check_equal_digests(all_gather_row(np.array([digest]), group=group, what=what)[:, 0], group=group)
    if largest_size >= 0:
        with agreeing_on(failure):
            sizes = all_gather_row(np.array([size]), group=group, what=what)[:, 0]
            texts = all_gather_bytes(text, nbytes=np.maximum(sizes, 0), group=group, what=what)
            raise cannot_go_on(sizes >= 0, texts=texts, group=group)


def check_equal_digests(digests: NDArray[np.int64], *, group: dist.ProcessGroup) -> None:
    """Check that all ranks computed the same schedule.

    Args:
        digests: `[group_size]`, of each rank's schedule; the same array on every rank.
        group: the ranks that planned.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first.
    """
    differ = digests != digests[0]
    if differ.any():
        raise BalanceError(
            f"{ranks_where(differ, group=group)} planned another schedule than rank {dist.get_global_rank(group, 0)}: "
            "the planner saw other lengths, other flags or another numpy there."
        )


def cannot_go_on(failed: NDArray[np.bool_], *, texts: Sequence[bytes], group: dist.ProcessGroup) -> BalanceError:
    """The error of all ranks.

    Args:
        failed: `[group_size]`.
        texts: `[group_size]`, of those that failed.
        group: the ranks.
    """
    names = dist.get_process_group_ranks(group)
    said = (f"rank {names[rank]}: {texts[rank].decode()}" for rank in np.flatnonzero(failed)[:MAX_RANKS_NAMED])
    return BalanceError(f"{ranks_where(failed, group=group)} cannot go on. " + " | ".join(said))
