"""Errors for lost peers: they name the ranks, what was waited for, and the remedy.

torch reports a lost connection or an elapsed timeout, but not what was waited for. Every collective of this package
runs in `waiting_for`, which raises a PeerError that names it; `with_step_context` adds the iteration. Around other
collectives `annotate_peer_loss` adds a note to the error, which it does not replace.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megatron_balance.errors import BalanceError

MAX_RANKS_NAMED = 8  # an error on a thousand ranks must stay readable


_ADVICE = (
    "A rank has died, hangs or was cut off: the first error in the logs of the other ranks says why. If one was only "
    "slow, raise --distributed-timeout-minutes."
)

_GLOO_LOST = re.compile(r"gloo.*(Timed out|Connection closed|Connection reset|Broken pipe|No route|pair closure)", re.S)
"""A lost peer in the text of gloo's errors, which are bare RuntimeErrors."""


class PeerError(BalanceError):
    """A rank did not answer: it has died, hangs, or was cut off."""


@contextlib.contextmanager
def waiting_for(what: str, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn the failure of one collective into a PeerError; wrap the collective and nothing else.

    Args:
        what: this rank gets from its peers, a noun: `sample lengths`.
        group: the ranks that take part; None where they are not known yet.

    Raises:
        PeerError: the collective failed, with torch's error as its cause.
    """
    try:
        yield
    except RuntimeError as error:  # gloo raises it bare; torch.distributed's own errors derive from it
        ranks = "the other ranks" if group is None else f"world {named_ranks(dist.get_process_group_ranks(group))}"
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        # Without gloo's source location and its guesses.
        first_line = re.sub(r"^\[\S+:\d+\] ", "", first_line).partition(". This is typically")[0].rstrip(".")
        raise PeerError(f"waited for {what} among {ranks}, and not all answered ({first_line}). {_ADVICE}") from error


@contextlib.contextmanager
def annotate_peer_loss(when: str) -> Iterator[None]:
    """Add a note to an error about lost peers in collectives that are not this package's.

    Args:
        when: `iteration 7`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _GLOO_LOST.search(str(error)):
            error.add_note(
                f"megatron_balance: {when}: Megatron waited for other ranks in a collective of its own, and not all "
                f"answered. {_ADVICE}"
            )
        raise


@contextlib.contextmanager
def with_step_context(when: str) -> Iterator[None]:
    """Add the step to a PeerError.

    Args:
        when: `iteration 7`.
    """
    try:
        yield
    except PeerError as error:
        raise PeerError(f"{when}: {error}") from error.__cause__


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 7 more`."""
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
