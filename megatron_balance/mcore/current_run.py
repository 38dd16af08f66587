"""The balanced run of this process, built once for Megatron's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron_balance.mcore.build_run import balanced_forward_backward
from megatron_balance.mcore.forward_backward import BalancedForwardBackward
from megatron_balance.runtime.process import close_all

_built: tuple[Any, BalancedForwardBackward | None] | None = None
"""Megatron's arguments and the run built for them; kept, since evaluation asks for a schedule repeatedly."""


def current() -> BalancedForwardBackward | None:
    """The balanced run, once its first step has begun; None in a stock run."""
    return None if _built is None else _built[1]


def run_of_process() -> BalancedForwardBackward | None:
    """The balanced run, built on the first call for Megatron's arguments; every rank of the world calls it."""
    from megatron.training import get_args

    global _built
    args = get_args()
    if _built is None or _built[0] is not args:
        assert args is not None, "training has begun"
        _built = args, balanced_forward_backward(args)
    return _built[1]


@contextlib.contextmanager
def serving(run: BalancedForwardBackward) -> Iterator[None]:
    """Have hooks act for the run of a hand-written loop in this context, in place of one built for arguments."""
    global _built
    outer, _built = _built, (None, run)
    try:
        yield
    finally:
        _built = outer


class CurrentRun:
    """The run as an entry of an `Installation`, which removes it."""

    def undo(self) -> None:
        """Forget the run, and end its threads, processes and groups."""
        global _built
        _built = None
        close_all()
