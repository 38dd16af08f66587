"""Errors of one rank, and differences between ranks, raised on every rank of a group.

Peers would wait for a rank that raised alone: its text is sent in the next collective. There the original is the cause.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.comm import all_gather_bytes, exchange_parts, ranks_by_value, waiting_for

P = ParamSpec("P")
T = TypeVar("T")

MAX_NAMED = 5
"""Errors or settings that one error names."""

NO_DIGEST = -1

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
    def text(self) -> str:
        """For peers: BalanceError speaks for itself, any other error is named by its type."""
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


def mismatch(
    errors: Sequence[str | None], settings: Sequence[Mapping[str, str]], *, group: dist.ProcessGroup | None = None
) -> str:
    """Why ranks cannot train together, by the error and the settings of each; empty where they can."""
    by_error = ranks_by_value(errors, group=group)
    by_error.pop(None, None)
    if by_error:
        return " | ".join([f"{ranks} failed: {error}" for error, ranks in by_error.items()][:MAX_NAMED])
    differences: list[str] = []
    for name in dict.fromkeys(name for rank_settings in settings for name in rank_settings):
        values = [rank_settings.get(name, "not set") for rank_settings in settings]
        if len({*values}) > 1:
            phrases = [f"{value} on {ranks}" for value, ranks in ranks_by_value(values, group=group).items()]
            differences.append(f"{name} is {' and '.join(phrases)}")
    if not differences:
        return ""
    more = f"; and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    advice = "Give every rank the same command line and the same installation."
    return f"Ranks were started differently: {'; '.join(differences[:MAX_NAMED])}{more}. {advice}"


def check_same_schedule(digest: int, *, group: dist.ProcessGroup, error: str | None = None) -> None:
    """Check that all ranks computed the same schedule, in ⌈log₂(group size)⌉ rounds of small messages.

    Args:
        digest: a hash of the schedule, in [0, 2**63).
        group: the ranks that planned.
        error: of this rank.

    Raises:
        BalanceError: on every rank, naming the ranks that differ from the first, or an error of any.
    """
    _all_equal(digest, group=group, operation="the plans of all ranks (compare)", template=_OTHER_PLANS, error=error)


def broadcast_step(
    make_text: Callable[[], str] | None = None,
    *,
    group: dist.ProcessGroup | None,
    digest: int = 0,
    error: str | None = None,
) -> str:
    """Give the ranks of a model replica that load no data the step of those that do, as a text; all call it.

    `make_text` is called where text is needed, on the first rank of the group, which loads data; it is None on a rank
    that loads none, or has an error. `digest`, in [0, 2**63), must be equal on all ranks that made the step. All raise
    where it differs, or on an error. Empty where every rank made the step.
    """
    if group is None:
        if make_text is None:
            raise BalanceError(error or "the one rank of a model replica loads no data.")
        return ""
    operation = "the plan of this model replica"
    digest = NO_DIGEST if make_text is None else digest
    if _all_equal(digest, group=group, operation=operation, template=_OTHER_DATA, error=error):
        return ""
    text = make_text() if make_text is not None and group.rank() == 0 else ""
    return broadcast_text(text, group=group, operation=operation)


def broadcast_text(text: str, *, group: dist.ProcessGroup, operation: str) -> str:
    """The text, not empty, of the first rank of a group; others give any."""
    content = bytearray(text.encode())
    size = torch.tensor([len(content)])
    with waiting_for(operation, group=group):
        dist.broadcast(size, group=group, group_src=0)
        content = bytearray(int(size)) if group.rank() else content
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), group=group, group_src=0)
    return content.decode()


def _all_equal(
    digest: int,
    *,
    group: dist.ProcessGroup,
    operation: str,
    template: str,
    error: str | None = None,
) -> bool:
    """True if every rank has a digest; where two differ (`template` says which), or a rank has an error, all raise.

    The dissemination barrier (Hensgen, Finkel and Manber 1988): in round k a rank sends to the rank 2**k above.
    """
    equal, complete, value = error is None, digest != NO_DIGEST, digest
    rank, size = group.rank(), group.size()
    for distance in (1 << bit for bit in range((size - 1).bit_length())):
        state = torch.tensor([equal, complete, value])
        received = torch.empty_like(state)
        sizes: list[dict[int, int]] = [{(rank - distance) % size: 3}, {(rank + distance) % size: 3}]
        exchange_parts(received, state, receive_sizes=sizes[0], send_sizes=sizes[1], group=group, operation=operation)
        peer_equal, peer_complete, peer_value = received.tolist()
        equal &= bool(peer_equal) and (value == peer_value or NO_DIGEST in (value, peer_value))
        complete &= bool(peer_complete)
        value = max(value, peer_value)
    if equal:
        return complete
    states = all_gather_bytes(json.dumps([error, digest]).encode(), group=group, operation=operation)
    errors, digests = zip(*map(json.loads, states), strict=True)
    if any(errors):
        raise BalanceError(" | ".join(dict.fromkeys(filter(None, errors))))
    ranks = ranks_by_value(digests, group=group)
    ranks.pop(NO_DIGEST, None)
    first, *others = ranks.values()
    raise BalanceError(template.format(first=first, others=" and ".join(others)))
