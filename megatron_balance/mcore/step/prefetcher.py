"""Pulls a step's data from the loader, balances it, and passes it to every rank of the model replica.

The ranks that load data are the first of every tensor-parallel group, in every context-parallel rank and in those
pipeline stages that need it: each makes steps with its own data-parallel group (`planner.py`). The other ranks of a
model replica receive the number of micro-batches and their lengths from its first (`replica.py`). A thread prepares the
next step while this one runs and passes it on in the replica, so that a step waits only for the part that is not ready
yet.

A step is prepared once the same iterator was passed twice in a row, on every rank: a loop that passes a new iterator
each step is never read ahead. A prepared step is used if its items are the same objects as those that the step pulls.
Otherwise, and if preparing failed on any rank (its iterator has ended), the step is made at its beginning. Ranks that
load no data cannot see that another iterator came, so those that do pass on the choice: one number, which does not wait
for an answer. Ranks that decide differently notice it when they gather lengths, or plans, for different steps.

Invariants: every rank of a step gets the same num_microbatches; every rank makes the same steps in the same
order; a step that Megatron runs again gets the same data; an item that was pulled ahead is returned by its own
iterator, once; an error in the data of one rank is raised on every rank of its data-parallel group and its model
replica.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step.background import BackgroundThread
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.own_slots import Microbatch
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prepared_step import PreparedStep, Pulled
from megatron_balance.mcore.step.pull_ahead import PullAhead, Sources, next_items
from megatron_balance.mcore.step.step_numbers import numbers_of, step_of
from megatron_balance.runtime.failure import AgreedError, Failure, attempt
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import Choice, Replica, Share


class StepPrefetcher:
    """Turns the items of the data loader into balanced micro-batches.

    Args:
        planner: makes steps, on ranks that load data.
        replica: the ranks of this model replica; None for this one alone.
        shares_lengths: ranks that load no data receive `sequence_lengths` as well.
        pack_starts: makes this rank's micro-batches, which say where sequences start, where it loads no data and its
            forward step reads them.

    Attributes:
        planner: as given.
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
        self._shares_lengths = shares_lengths
        self._pack_starts = pack_starts
        self._replica = replica or Replica()
        self._last: BalancedStep | None = None
        self._num_pulled = 0
        self._num_steps = 0
        self._sources = Sources()
        self._newest: PullAhead | None = None
        self._prepared: Future[PreparedStep | None] | None = None
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
        # Waits: no other thread may pull meanwhile, or use the replica's groups. What fails there fails on every rank.
        prepared = None if self._prepared is None else self._prepared.result()
        pulled, choice = None, None
        if data_iterator is not None:
            if self._last is not None and getattr(data_iterator, "replaying", False):
                choice = Choice.LAST
            else:
                pulled = attempt(self._pull, data_iterator, num_microbatches=num_microbatches)
                fits = prepared is not None and isinstance(pulled, Pulled) and prepared.is_of(pulled)
                choice = Choice.PREPARED if fits else Choice.MADE_NOW
        choice = self._replica.decide(choice)
        if choice == Choice.LAST:
            assert self._last is not None, "a step that has run"
            step = self._last
        else:
            usable = prepared if choice == Choice.PREPARED else None
            step = self._begun(pulled, prepared=usable, num_microbatches=num_microbatches)
            self._prepared = None
            self._num_steps += 1
            self._last = step
        return replace(step, exposed_seconds=time.perf_counter() - started, num_left=self._sources.num_left)

    def prepare(
        self,
        data_iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        on_lost: Callable[[BalanceError], None] = lambda error: None,
    ) -> None:
        """Start a thread that makes the next step's data; `balance` uses it if the step pulls the same items.

        Args:
            data_iterator: as in `balance`.
            num_microbatches: number expected for the next step.
            on_lost: called by the thread as soon as peers do not answer or make another step, since the next step may
                never begin.
        """
        if self._prepared is not None or self._last is None or self._last.new_iterator:
            return
        ahead = None
        if data_iterator is not None:
            _, ahead = self._sources.of(data_iterator)
            ahead.begin_fetch()
        step, first_item = self._num_steps, self._num_pulled

        def work() -> PreparedStep | None:
            made, items = None, []
            if ahead is not None:
                fetched = ahead.fetch(num_microbatches)
                items = fetched.items
                made = attempt(self.planner.make, fetched, num_items=num_microbatches, step=step, first_item=first_item)
            try:
                return PreparedStep(ahead, items, self._shared(made, step=step))
            except (PeerError, OutOfStepError) as error:
                on_lost(error)
                raise
            except BalanceError:
                return None  # on every rank: `balance` makes the step again, and raises if that fails too

        self._prepared = self._thread.submit(work)

    def _pull(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> Pulled:
        iterator, ahead = self._sources.of(data_iterator)
        new_iterator, self._newest = ahead is not self._newest, ahead
        self._num_pulled += num_microbatches
        return Pulled(ahead, next_items(iterator, num_microbatches), new_iterator=new_iterator)

    def _begun(
        self, pulled: Pulled | Failure | None, *, prepared: PreparedStep | None, num_microbatches: int
    ) -> BalancedStep:
        """The step from what was prepared, else from what was pulled; None where this rank loads no data."""
        if prepared is not None:
            return prepared.step
        made = None
        if isinstance(pulled, Failure):
            made = pulled
        elif pulled is not None:
            made = attempt(self._make_now, pulled, num_microbatches=num_microbatches)
        try:
            return self._shared(made, step=self._num_steps)
        except AgreedError as error:
            agreed = error
        agreed.original.add_note(f"megatron_balance: {agreed}")
        raise agreed.original

    def _make_now(self, pulled: Pulled, *, num_microbatches: int) -> BalancedStep:
        return self.planner.make(
            pulled.fetched,
            num_items=num_microbatches,
            step=self._num_steps,
            new_iterator=pulled.new_iterator,
            first_item=self._num_pulled - num_microbatches,
        )

    def _shared(self, made: BalancedStep | Failure | None, *, step: int) -> BalancedStep:
        """The step as all ranks of the replica run it; None where this rank loads no data. Raises on all or none."""
        if isinstance(made, Failure):
            self._raise(made, step=step)
        if made is None:
            shared = self._replica.share(Share(step))
            made = step_of(
                shared.numbers,
                topology=self.planner.topology,
                cp_rank=self.planner.cp_rank,
                with_lengths=self._shares_lengths,
            )
            if self._pack_starts is not None:
                made = replace(made, microbatches=self._pack_starts(made))
        else:
            numbers = numbers_of(made, with_lengths=self._shares_lengths)
            own = Share(
                step,
                numbers,
                digest=made.fingerprint,
                new_source=made.new_iterator,
            )
            shared = self._replica.share(own)
        return replace(made, new_iterator=shared.new_source)

    def _raise(self, failure: Failure, *, step: int) -> NoReturn:
        """Raise it here once the replica's other ranks have received it."""
        error = failure.error
        # Other ranks notice lost peers themselves, or are the lost ones.
        if not isinstance(error, PeerError):
            lost = isinstance(error, OutOfStepError) or not isinstance(error, BalanceError)
            with contextlib.suppress(BalanceError):
                self._replica.share(Share(step, problem=failure.problem, lost=lost))
        raise error
