"""Ends the threads, processes and groups that this process has started for balanced runs, when hooks are undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_started = contextlib.ExitStack()


def close_on_undo(close: Callable[[], object]) -> None:
    """Have `close_all` call this function, before those that were given earlier."""
    _started.callback(close)


def close_all() -> None:
    """End everything, the latest first. Every rank calls it after the same step: a step may be in preparation."""
    _started.close()
