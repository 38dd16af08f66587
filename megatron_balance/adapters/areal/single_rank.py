"""Lets one rank load for all: the others wait for it, load nothing and raise if it fails.

A rollout may take longer than the time-out of a process group, so ranks do not wait in the group that moves data but in
one of their own, over gloo, whose time-out is a parameter. They go on together when the rank that loads has finished or
failed.

Invariants: `load` runs on one rank. Where it fails every rank raises: that rank its own error, the others one that
quotes it. Batches never run out because an epoch ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError

Item = TypeVar("Item")

_MAX_TEXT_NBYTES = 4096
"""Longest error text sent to the ranks that wait; longer ones are cut."""

MAX_WAIT = timedelta(days=7)
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""


class SingleRankLoad:
    """Ranks of which one loads. Every rank of the world constructs it, in the same order as its process groups.

    Args:
        loads: True if this rank loads.
        max_wait: time-out of the others for one load.

    Raises:
        BalanceError: on every rank: not exactly one rank loads.
    """

    def __init__(self, *, loads: bool, max_wait: timedelta = MAX_WAIT) -> None:
        self.loads = loads
        group = dist.new_group(backend="gloo", timeout=max_wait)
        assert isinstance(group, dist.ProcessGroup), "every rank of the world is a member"
        self._waiting_group = group
        answers = [torch.zeros(1, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(answers, torch.tensor([loads], dtype=torch.uint8), group=self._waiting_group)
        loading = [rank for rank, answer in enumerate(answers) if answer]
        if len(loading) != 1:
            raise BalanceError(f"single_rank_load: the ranks that load are {loading}: it must be exactly one.")
        self._source = loading[0]

    def run(self, load: Callable[[], list[Item]]) -> list[Item]:
        """The result of `load` on the rank that loads; an empty list on the others, once that has finished.

        Raises:
            BalanceError: on the ranks that wait, where `load` failed; the rank that loads raises what `load` did.
        """
        if self.loads:
            with _Announcement(self):
                return load()
        failure = _as_text(self._broadcast(""))
        if failure:
            raise BalanceError(f"rank {self._source}, which loads for all, failed: {failure}")
        return []

    def announce(self, failure: str | None) -> None:
        """Let the other ranks continue, or raise `failure` where it is given."""
        self._broadcast(failure or "")

    def _broadcast(self, text: str) -> Tensor:
        """The text of the rank that loads, as uint8 `[_MAX_TEXT_NBYTES]` filled up with zeros."""
        message = torch.zeros(_MAX_TEXT_NBYTES, dtype=torch.uint8)
        encoded = text.encode(errors="replace")[:_MAX_TEXT_NBYTES]
        message[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        dist.broadcast(message, src=self._source, group=self._waiting_group)
        return message


def _as_text(message: Tensor) -> str:
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


class _Announcement:
    """Announces success or failure to the other ranks on exit; an exception passes through."""

    def __init__(self, single: SingleRankLoad) -> None:
        self._single = single

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._single.announce(None if kind is None else f"{kind.__name__}: {error}")


class IdleDataLoader:
    """Replaces the data loader on ranks that load nothing: it has a length and no data.

    Args:
        num_batches: batches of an epoch, from which trainers count steps.
        batch_size: samples of a batch.
    """

    def __init__(self, *, num_batches: int, batch_size: int) -> None:
        self._num_batches = num_batches
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        raise BalanceError("this rank loads nothing under single_rank_load: only the rank that loads has batches.")

    def state_dict(self) -> dict[str, Any]:
        """An empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accepts an empty state."""


def endless(loader: Iterable[Item]) -> Iterator[Item]:
    """The batches of a loader, epoch after epoch: every `next` gives one, also where an epoch has just ended.

    Raises:
        BalanceError: an epoch without batches.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise BalanceError("the data loader gives no batches: its data set is smaller than one batch.")
