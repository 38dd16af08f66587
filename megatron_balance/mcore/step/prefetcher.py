"""Pulls a step's data from the loader, balances it, and hands it to every rank of the model replica.

The ranks that read data are the first of every tensor-parallel group, in every pipeline stage and
context-parallel rank: each makes steps with its own data-parallel group (`planner.py`). The other
ranks of a model replica learn the number of micro-batches and their lengths from its first (`replica.py`). The
next step is made by a thread while this one runs: what a step then waits for is what is not ready yet.

A step is prepared once the same iterator has come twice in a row, on every rank of the data-parallel group: a loop
that hands in a new iterator each step is never read ahead of. What was prepared is used where the step comes with the
very items that it was made from. Otherwise, and where preparing failed on any rank (its iterator has ended), the step
is made at its beginning. Ranks that decide differently find out when they gather lengths for different steps.

Invariants: every rank of a step gets the same num_microbatches; every rank makes the same steps in the same
order; a step that Megatron runs again gets the very same data; an item that was pulled ahead is handed out by the
iterator it came from, once; what fails in the data of one rank is raised on every rank of its data-parallel
group and its model replica.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_balance.calibration.online import CalibrationState
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step import pool_files
from megatron_balance.mcore.step.leaf_slots import LeafSlots
from megatron_balance.mcore.step.planner import BalancedStep, StepPlanner
from megatron_balance.mcore.step.pull_ahead import Fetched, PullAhead, Sources, next_items
from megatron_balance.mcore.step.sample_pool import SamplePool
from megatron_balance.runtime.failure import AgreedError, Failure, attempt
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import share_counts


class StepPrefetcher:
    """Turns what the data loader yields into balanced micro-batches.

    Args:
        planner: makes steps.
        replica_group: tensor-, pipeline- and context-parallel ranks of this model replica, or None where it is one
            rank; a group of its own, gloo.
        pool: samples that wait under look-ahead, or None without.
        shares_lengths: ranks that read no data learn `sequence_lengths` as well.

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
        # Joined before the interpreter ends: a thread that lived on would die in the middle of native code.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron_balance")

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep:
        """Pull one step's items and balance them.

        Args:
            data_iterator: of this rank, None where it reads no data.
            num_microbatches: items of a global batch that this rank loads.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica.
            Exception: what the data loader raised, on the rank where it did; BalanceError on all others.
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
        """Begin the next step's data in a thread; `balance` will use it if the step asks for just that.

        Args:
            data_iterator: as in `balance`.
            num_microbatches: as the next step is expected to ask.
            on_lost: called at once by the thread when peers do not answer or make another step: the step that asks
                may never come.
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
                made = self.planner.make(fetched, num_items=num_items, pool=pool, step=step, first_item=first_item)
            except (PeerError, OutOfStepError) as error:
                on_lost(error)
                raise
            except BalanceError:
                return None  # on every rank: the step that asks makes it anew, and raises if it fails then
            return _Prepared(ahead, fetched.items, made)

        self._prepared = self._thread.submit(work)

    def save(self, folder: Path) -> None:
        """Write what the newest step left: samples that wait, what calibration learned. Nothing without either.

        What an earlier run left in the folder goes away.
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
        """Read it back, before the first step. The loader's next batches are those already loaded: skip them."""
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
        if prepared is not None and prepared.is_of(fetched, ahead=ahead):
            step = prepared.step
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
        """Raise it here once the replica's other ranks have learned of it."""
        error = failure.error
        # Of lost peers they find out by themselves, or are the ones that are lost.
        if self._replica_group is not None and not isinstance(error, PeerError):
            with contextlib.suppress(BalanceError):
                self._share(None, problem=failure.problem)
        if isinstance(error, AgreedError):
            error.original.add_note(f"megatron_balance: {error}")
            raise error.original
        raise error

    def _counts(self, step: BalancedStep) -> list[int]:
        """The numbers sent to ranks that read no data: a step's shape, and where routers need them its lengths."""
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
        ahead: where the items came from.
        items: that it was made from.
        step: the data.
    """

    ahead: PullAhead
    items: list[Any]
    step: BalancedStep

    def is_of(self, fetched: Fetched, *, ahead: PullAhead) -> bool:
        """The step came with the same iterator and these very items; under a growing batch size it has more."""
        same = len(fetched.items) == len(self.items) and all(map(operator.is_, fetched.items, self.items))
        return ahead is self.ahead and fetched.failure is None and same
