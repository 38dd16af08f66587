"""Pulls a step's data from the loader, balances it, and passes it to every rank of the model replica.

The ranks that load data are the first of every tensor-parallel group, in every context-parallel rank and in those
pipeline stages that need it: each makes steps with its own data-parallel group (`planner.py`). As the step begins, they
pass it on to the other ranks of their model replica (`runtime/replica.py`).

A thread pulls and makes the next step while this one runs, once the same iterator was passed twice in a row on every
data-parallel rank: a loop that passes a new iterator each step is never read ahead. What was made is used if its items
are the same objects as those that the step pulls. Otherwise, and if making it failed on any rank (its iterator has
ended), the step is made as it begins.

Invariants: the thread talks to the data-parallel ranks alone, and all else is of the training thread; every rank makes
the same steps in the same order; a step that Megatron runs again gets the same data; an item that was pulled ahead is
returned by its own iterator, once; an error in the data of one rank is raised on every rank of its data-parallel group
and its model replica.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step.background import BackgroundThread
from megatron_balance.mcore.step.balanced_step import BalancedStep, Microbatch, numbers_of, step_of
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.pull_ahead import PullAhead, Sources, next_items
from megatron_balance.runtime.failure import AgreedError, Failure, attempt
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import Replica, Share


@dataclass(frozen=True)
class _Prepared:
    """A step that the thread made, and the items by which the step that begins recognizes it."""

    ahead: PullAhead
    items: list[Any]
    step: BalancedStep


class StepPrefetcher:
    """Turns the items of the data loader into balanced micro-batches.

    Args:
        planner: makes steps, on ranks that load data.
        replica: the ranks of this model replica.
        shares_lengths: ranks that load no data receive `sequence_lengths` as well.
        pack_starts: makes this rank's micro-batches, which say where sequences start, where it loads no data and its
            forward step reads them.

    Attributes:
        planner: as given.
        replica: as given.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        replica: Replica | None = None,
        shares_lengths: bool = False,
        pack_starts: Callable[[BalancedStep], list[Microbatch]] | None = None,
    ) -> None:
        self.planner = planner
        self.replica = replica or Replica()
        self._shares_lengths = shares_lengths
        self._pack_starts = pack_starts
        self._last: BalancedStep | None = None
        self._num_pulled = 0
        self._num_steps = 0
        self._sources = Sources()
        self._newest: PullAhead | None = None
        self._prepared: Future[_Prepared | None] | None = None
        self._thread = BackgroundThread()

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep:
        """Pull one step's items and balance them.

        Args:
            data_iterator: of this rank, None where it loads no data.
            num_microbatches: items of a global batch that this rank loads.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica.
            Exception: the data loader's own error, on the rank where it was raised; BalanceError on all others.
        """
        started = time.perf_counter()
        made: BalancedStep | Failure | None = None
        if data_iterator is not None:
            if self._last is not None and getattr(data_iterator, "replaying", False):
                made = self._last
            else:
                made = attempt(self._made, data_iterator, num_microbatches=num_microbatches)
        step = self._last = self._shared(made)
        return replace(step, exposed_seconds=time.perf_counter() - started, num_left=self._sources.num_left)

    def prepare(
        self,
        data_iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        on_lost: Callable[[BalanceError], None] = lambda error: None,
    ) -> None:
        """Have the thread make the next step's data; `balance` uses it if the step pulls the same items.

        Args:
            data_iterator: as in `balance`.
            num_microbatches: number expected for the next step.
            on_lost: called by the thread as soon as peers do not answer or make another step, since the next step may
                never begin.
        """
        waits = self._prepared is not None
        if waits or data_iterator is None or self._last is None or self._last.new_iterator:
            return
        _, ahead = self._sources.of(data_iterator)
        ahead.begin_fetch()
        step, first_item = self._num_steps, self._num_pulled

        def work() -> _Prepared | None:
            fetched = ahead.fetch(num_microbatches)
            try:
                made = self.planner.make(fetched, num_items=num_microbatches, step=step, first_item=first_item)
            except (PeerError, OutOfStepError) as error:
                on_lost(error)
                raise
            except BalanceError:
                return None  # on every data-parallel rank: `balance` makes the step again, and raises if that fails too
            return _Prepared(ahead, fetched.items, made)

        self._prepared = self._thread.submit(work)

    def _made(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> BalancedStep:
        """The step, from the thread or made now."""
        # Waits: no other thread may pull meanwhile. What fails there fails on every data-parallel rank.
        prepared = None if self._prepared is None else self._prepared.result()
        self._prepared = None
        iterator, ahead = self._sources.of(data_iterator)
        new_iterator, self._newest = ahead is not self._newest, ahead
        fetched, first_item, number = next_items(iterator, num_microbatches), self._num_pulled, self._num_steps
        self._num_pulled += num_microbatches
        self._num_steps += 1
        if prepared is not None and prepared.ahead is ahead and fetched.failure is None:
            same_number = len(prepared.items) == len(fetched.items)  # a growing batch size pulls more
            if same_number and all(map(operator.is_, prepared.items, fetched.items)):
                return prepared.step
        return self.planner.make(
            fetched, num_items=num_microbatches, step=number, new_iterator=new_iterator, first_item=first_item
        )

    def _shared(self, made: BalancedStep | Failure | None) -> BalancedStep:
        """The step as all ranks of the replica run it; None where this rank loads no data. Raises on all or none."""
        if isinstance(made, Failure):
            self._raise(made)
        if made is not None:
            numbers = numbers_of(made, with_lengths=self._shares_lengths)
            self.replica.share(Share(numbers, digest=made.fingerprint))
            return made
        planner = self.planner
        step = step_of(
            self.replica.share(Share()),
            topology=planner.topology,
            cp_rank=planner.cp_rank,
            with_lengths=self._shares_lengths,
        )
        return step if self._pack_starts is None else replace(step, microbatches=self._pack_starts(step))

    def _raise(self, failure: Failure) -> NoReturn:
        """Raise it here once the replica's other ranks have received it."""
        error = failure.error
        # Other ranks notice lost peers themselves, or are the lost ones.
        if not isinstance(error, PeerError):
            with contextlib.suppress(BalanceError):
                self.replica.share(Share(problem=failure.problem))
        if isinstance(error, AgreedError):
            error.original.add_note(f"megatron_balance: {error}")
            raise error.original
        raise error
