"""Counts the collectives of this process: which, from which thread, over how many ranks, with what traffic."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.scale import traffic
from benchmarks.scale.traffic import Traffic

KINDS = ("all_gather_into_tensor", "isend", "irecv", "gather", "broadcast")
"""All that this package calls while a run trains."""

OTHERS = ("all_reduce", "all_gather", "all_gather_object", "all_to_all", "all_to_all_single", "reduce", "scatter")
"""Counted as well, without their traffic, so that a new kind of call is noticed."""


@dataclass(frozen=True)
class Collective:
    """One that was called."""

    kind: str
    thread: str
    group_size: int
    traffic: Traffic

    @property
    def in_training(self) -> bool:
        """True if the training thread called it."""
        return self.thread == threading.main_thread().name


@contextmanager
def counted_collectives() -> Iterator[list[Collective]]:
    """Count what any thread calls meanwhile, messages between two ranks too; the list grows in the order of calls."""
    calls: list[Collective] = []
    stock = {name: getattr(dist, name) for name in (*KINDS, *OTHERS)}
    for name, function in stock.items():
        setattr(dist, name, _counting(function, calls=calls))
    try:
        yield calls
    finally:
        for name, function in stock.items():
            setattr(dist, name, function)


def _counting(function: Callable[..., Any], *, calls: list[Collective]) -> Callable[..., Any]:
    kind = function.__name__

    @functools.wraps(function)
    def call(*tensors: Any, group: dist.ProcessGroup | None = None, **keywords: Any) -> Any:
        members = group or dist.group.WORLD
        assert members is not None, "initialised"
        of_rank = _TRAFFIC.get(kind)
        own = Traffic() if of_rank is None else of_rank(members.size(), members.rank(), *tensors)
        calls.append(Collective(kind, threading.current_thread().name, members.size(), own))
        return function(*tensors, group=group, **keywords)

    return call


_TRAFFIC: dict[str, Callable[..., Traffic]] = {
    "all_gather_into_tensor": lambda n, rank, gathered, row: traffic.all_gather(n, row_nbytes=row.nbytes),
    "isend": lambda n, rank, sent: Traffic(sent=1, sent_nbytes=sent.nbytes),
    "irecv": lambda n, rank, received: Traffic(received=1, received_nbytes=received.nbytes),
    "gather": lambda n, rank, row, *_: traffic.gather(n, rank=rank, row_nbytes=row.nbytes),
    "broadcast": lambda n, rank, row, *_: traffic.broadcast(n, rank=rank, row_nbytes=row.nbytes),
}
