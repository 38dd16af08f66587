"""Pulls a step's data from the loader, balances it, and passes it to every rank of the model replica.

The ranks that read data are the first of every tensor-parallel group, in every pipeline stage and
context-parallel rank: each makes steps with its own data-parallel group (`planner.py`). The other
ranks of a model replica receive the number of micro-batches and their lengths from its first (`replica.py`). A
thread prepares the next step while this one runs, so that a step waits only for the part that is not ready yet.

A step is prepared once the same iterator was passed twice in a row, on every rank of the data-parallel group: a loop
that passes a new iterator each step is never read ahead. A prepared step is used if its items are the same objects as
those that the step pulls. Otherwise, and if preparing failed on any rank (its iterator has ended), the step is made at
its beginning. Ranks that decide differently notice it when they gather lengths for different steps.

Invariants: every rank of a step gets the same num_microbatches; every rank makes the same steps in the same
order; a step that Megatron runs again gets the same data; an item that was pulled ahead is returned by its own
iterator, once; an error in the data of one rank is raised on every rank of its data-parallel group and its model
replica.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_balance.calibration.online import CalibrationState
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step import pool_files
from megatron_balance.mcore.step.background import BackgroundThread
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.leaf_slots import LeafSlots
from megatron_balance.mcore.step.planned_step import PlannedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.pull_ahead import Fetched, PullAhead, Sources, next_items
from megatron_balance.mcore.step.sample_pool import SamplePool
from megatron_balance.runtime.failure import AgreedError, Failure, attempt
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import share_counts


class StepPrefetcher:
    """Turns the items of the data loader into balanced micro-batches.

    Args:
        planner: makes steps.
        replica_group: tensor-, pipeline- and context-parallel ranks of this model replica, or None where it is one
            rank; a group of its own, gloo.
        pool: samples that wait under look-ahead, or None without.
        shares_lengths: ranks that read no data receive `sequence_lengths` as well.

    Attributes:
        planner: as given.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        replica_group: dist.ProcessGroup | None = None,
        pool: SamplePool | None = None,
        shares_lengths: bool = False,
    ) -> None:
        self.planner = planner
        self._shares_lengths = shares_lengths
        self._replica_group = replica_group
        self._pool = pool
        self._last: BalancedStep | None = None
        self._num_batches_to_skip = 0
        self._num_pulled = 0
        self._num_steps = 0
        self._sources = Sources()
        self._newest: PullAhead | None = None
        self._prepared: Future[_Prepared | None] | None = None
        self._thread = BackgroundThread()

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep:
        """Pull one step's items and balance them.

        Args:
            data_iterator: of this rank, None where it reads no data.
            num_microbatches: items of a global batch that this rank loads.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica.
            Exception: the data loader's own error, on the rank where it was raised; BalanceError on all others.
        """
        started = time.perf_counter()
        if data_iterator is None:
            return self._learned(self._share(None))
        if self._last is not None and getattr(data_iterator, "replaying", False):
            step = self._last
        else:
            made = attempt(self._next_step, data_iterator, num_microbatches=num_microbatches)
            if isinstance(made, Failure):
                self._raise(made)
            step = made
        self._share(self._counts(step), fingerprint=step.fingerprint)
        self._last, self._pool = step, step.pool
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
        if data_iterator is None or self._prepared is not None or self._last is None or self._last.new_iterator:
            return
        _, ahead = self._sources.of(data_iterator)
        ahead.begin_fetch()
        pool, step, first_item = self._pool, self._num_steps, self._num_pulled
        num_items = self._num_items(num_microbatches)

        def work() -> _Prepared | None:
            fetched = ahead.fetch(num_items)
            try:
                made = self.planner.prepare(fetched, num_items=num_items, pool=pool, step=step, first_item=first_item)
            except (PeerError, OutOfStepError) as error:
                on_lost(error)
                raise
            except BalanceError:
                return None  # on every rank: `balance` makes the step again, and raises if that fails too
            return _Prepared(ahead, fetched.items, made)

        self._prepared = self._thread.submit(work)

    def save(self, folder: Path) -> None:
        """Write the state after the newest step: waiting samples and the calibration; nothing without either.

        State of an earlier run in the folder is removed.
        """
        rank = self.planner.dp_group.rank()
        if self._pool is not None:
            self._pool.save(folder)
        if rank == 0:
            pool_files.forget_shares(folder, from_rank=0 if self._pool is None else self.planner.dp_group.size())
            learned = None if self.planner.calibration is None else self.planner.calibration.state
            if self._last is not None:
                learned = self._last.calibration  # the thread may have planned a step that is not run yet
            if learned is not None:
                learned.write(folder)
            else:
                CalibrationState.forget(folder)

    def restore(self, folder: Path) -> None:
        """Read the state, before the first step. Batches that the pool has loaded already are skipped."""
        if self._pool is not None and pool_files.has_pool(folder):
            self._pool.restore(folder)
            self._num_batches_to_skip = self._pool.num_batches_ahead
        if self.planner.calibration is not None:
            self.planner.calibration.state = CalibrationState.read(folder)

    def _num_items(self, num_microbatches: int) -> int:
        return num_microbatches * (1 if self._pool is None else self._pool.num_missing_batches)

    def _next_step(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> BalancedStep:
        preparation, self._prepared = self._prepared, None
        prepared = None if preparation is None else preparation.result()  # waits: no other thread may pull meanwhile
        iterator, ahead = self._sources.of(data_iterator)
        new_iterator, self._newest = ahead is not self._newest, ahead
        fetched = self._pull(iterator, num_microbatches=num_microbatches)
        usable = prepared is not None and prepared.is_of(fetched, ahead=ahead)
        self.planner.agree_to_use(usable)
        if prepared is not None and usable:
            step = prepared.step.receive() if isinstance(prepared.step, PlannedStep) else prepared.step
        else:
            num_items = self._num_items(num_microbatches)
            step = self.planner.make(
                fetched,
                num_items=num_items,
                pool=self._pool,
                step=self._num_steps,
                new_iterator=new_iterator,
                first_item=self._num_pulled - num_items,
            )
        self._num_steps += 1
        return step

    def _pull(self, iterator: Iterator[Any], *, num_microbatches: int) -> Fetched:
        num_to_skip, num_items = self._num_batches_to_skip * num_microbatches, self._num_items(num_microbatches)
        self._num_batches_to_skip = 0
        self._num_pulled += num_to_skip + num_items
        skipped = next_items(iterator, num_to_skip)
        return skipped if skipped.failure is not None else next_items(iterator, num_items)

    def _raise(self, failure: Failure) -> NoReturn:
        """Raise it here once the replica's other ranks have received it."""
        error = failure.error
        # Other ranks notice lost peers themselves, or are the lost ones.
        if self._replica_group is not None and not isinstance(error, PeerError):
            with contextlib.suppress(BalanceError):
                self._share(None, problem=failure.problem)
        if isinstance(error, AgreedError):
            error.original.add_note(f"megatron_balance: {error}")
            raise error.original
        raise error

    def _counts(self, step: BalancedStep) -> list[int]:
        """The numbers sent to ranks that read no data: a step's shape, and its lengths if routers need them."""
        if step.leaves is not None:
            return [number for leaf in step.leaves for number in leaf.to_numbers()]
        counts = [step.num_microbatches, *step.microbatch_tokens]
        if self._shares_lengths:
            assert step.sequence_lengths is not None, "this rank packed the step"
            counts += [number for lengths in step.sequence_lengths for number in (len(lengths), *lengths)]
        return counts

    def _learned(self, counts: list[int]) -> BalancedStep:
        """The step that another rank's `_counts` describe."""
        if self.planner.topology.dynamic_cp:
            numbers = iter(counts)
            leaves = tuple(LeafSlots.from_numbers(numbers) for _ in range(self.planner.topology.cp_size))
            own = leaves[self.planner.cp_rank]
            return BalancedStep(
                len(own.cp_sizes),
                own.num_tokens,
                sequence_lengths=own.sequence_lengths,
                cp_sizes=own.cp_sizes,
                leaves=leaves,
            )
        num_microbatches, *rest = counts
        tokens, numbers = rest[:num_microbatches], iter(rest[num_microbatches:])
        if not self._shares_lengths:
            return BalancedStep(num_microbatches, tokens)
        lengths = [list(islice(numbers, next(numbers))) for _ in tokens]
        return BalancedStep(num_microbatches, tokens, sequence_lengths=lengths)

    def _share(self, counts: list[int] | None, *, fingerprint: int = 0, problem: str | None = None) -> list[int]:
        """`_counts` of the step, the same on all ranks of the replica, or the same error."""
        if self._replica_group is not None:
            return share_counts(counts, group=self._replica_group, digest=fingerprint, problem=problem)
        assert counts is not None, "a rank that is a whole replica reads data"
        return counts


@dataclass(frozen=True)
class _Prepared:
    """A step's data, made by the thread.

    Attributes:
        ahead: source of the items.
        items: items of the step.
        step: the data, or the plan to receive it by.
    """

    ahead: PullAhead
    items: list[Any]
    step: BalancedStep | PlannedStep

    def is_of(self, fetched: Fetched, *, ahead: PullAhead) -> bool:
        """True if the step pulled these items from the same iterator; a growing batch size pulls more."""
        same = len(fetched.items) == len(self.items) and all(map(operator.is_, fetched.items, self.items))
        return ahead is self.ahead and fetched.failure is None and same
