"""The log of a run: lines of rank 0, and warnings, of the logger `megatron_balance`.

They are printed as `megatron_balance: TEXT`, whatever Megatron's root logger does, unless the run has given this logger
a handler of its own before training; `logging.getLogger("megatron_balance").setLevel(...)` leaves levels out.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist

from megatron_balance.runtime.process import close_on_undo

LOG = logging.getLogger("megatron_balance")
"""INFO: lines; WARNING: warnings, each once."""

_warned: set[str] = set()


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return f"megatron_balance: {level}{super().format(record)}"


def start_log() -> None:
    """Print what is logged from now on until the run is undone."""
    close_on_undo(_warned.clear)
    if LOG.handlers:
        return
    handler, stock = logging.StreamHandler(sys.stdout), (LOG.level, LOG.propagate)
    handler.setFormatter(_Line())
    LOG.addHandler(handler)
    LOG.propagate = False
    if LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)

    def undo() -> None:
        LOG.removeHandler(handler)
        LOG.level, LOG.propagate = stock

    close_on_undo(undo)


def log_info(text: str) -> None:
    """A line, from rank 0."""
    if _rank() == 0:
        LOG.info("%s", text)


def warn_once(text: str, *, topic: str | None = None, every_rank: bool = False) -> None:
    """A warning, the first time, from rank 0 or from `every_rank`, by number; texts of one topic count as one."""
    if (topic or text) in _warned or not (every_rank or _rank() == 0):
        return
    _warned.add(topic or text)
    LOG.warning("%s", f"rank {_rank()} {text}" if every_rank else text)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
