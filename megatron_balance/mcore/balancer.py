"""When a step's data is pulled, made and handed on.

The ranks that read data are the first of every tensor-parallel group, in every pipeline stage and
context-parallel rank alike: each makes steps with its own data-parallel group (`step_maker.py`). The other
ranks of a model replica learn the number of micro-batches and their lengths from its first (`replica.py`). The
next step is made by a thread while this one runs: what a step then waits for is what is not ready yet.

Invariants: every rank of a step gets the same num_microbatches; every rank makes the same steps in the same
order; a step that Megatron runs again gets the very same data; what is wrong with the data of one rank is raised
on every rank of its data-parallel group and its model replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.mcore import pool_files
from megatron_balance.mcore.pull_ahead import next_items, pull_ahead_of
from megatron_balance.mcore.sample_pool import SamplePool
from megatron_balance.mcore.step_maker import BalancedStep, StepMaker
from megatron_balance.runtime.online_calibration import CalibrationState
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.replica import share_counts

AS_LOADED = 0
"""Shared in place of num_microbatches where there is nothing to balance."""


class StepBalancer:
    """Turns what the data loader yields into balanced micro-batches.

    Args:
        maker: makes steps.
        replica_group: tensor-, pipeline- and context-parallel ranks of this model replica, or None where it is one
            rank; a group of its own, gloo.
        pool: samples that wait under look-ahead, or None without.
        shares_lengths: ranks that read no data learn `sequence_lengths` as well.

    Attributes:
        maker: as given.
    """

    def __init__(
        self,
        maker: StepMaker,
        *,
        replica_group: dist.ProcessGroup | None = None,
        pool: SamplePool | None = None,
        shares_lengths: bool = False,
    ) -> None:
        self.maker = maker
        self._shares_lengths = shares_lengths
        self._replica_group = replica_group
        self._pool = pool
        self._last: BalancedStep | None = None
        self._num_batches_to_skip = 0
        self._num_pulled = 0
        self._prepared: _Preparation | None = None
        # Joined before the interpreter ends: a thread that lived on would die in the middle of native code.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron_balance")

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep | list[Any]:
        """Pull one step's items and balance them.

        Args:
            data_iterator: of this rank, None where it reads no data.
            num_microbatches: items of a global batch that this rank loads.

        Returns:
            The balanced step; or the pulled items as they are where they hold no packed sequences (empty on a
            rank that reads no data), the same choice on every rank.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica alike.
        """
        started = time.perf_counter()
        if data_iterator is None:
            counts = self._share(None)
            return [] if counts[0] == AS_LOADED else self._learned(counts)
        if self._last is not None and getattr(data_iterator, "replaying", False):
            step, items = self._last, []
        else:
            try:
                items = self._pull(data_iterator, num_microbatches=num_microbatches)
                step = self._step_of(items, num_items=self._num_items(num_microbatches))
            except PeerError:
                raise  # the replica's other ranks find out by themselves, or are the ones that are lost
            except BalanceError as error:
                self._share(None, problem=str(error))
                raise
        if step is None:
            self._share([AS_LOADED])
        else:
            self._share(self._counts(step), fingerprint=step.fingerprint)
        if step is None:
            return items
        self._last, self._pool = step, step.pool
        return replace(step, exposed_seconds=time.perf_counter() - started)

    def prepare(
        self,
        data_iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        on_lost: Callable[[PeerError], None] = lambda error: None,
    ) -> None:
        """Begin the next step's data in a thread; `balance` will use it if the step asks for just that.

        Args:
            data_iterator: as in `balance`.
            num_microbatches: as the next step is expected to ask.
            on_lost: told at once, by the thread, when peers do not answer: the step that asks may never come.
        """
        if data_iterator is None or self._prepared is not None:
            return
        _, ahead = pull_ahead_of(data_iterator)
        ahead.begin_fetch()
        num_items, pool, first_item = self._num_items(num_microbatches), self._pool, self._num_pulled

        def work() -> tuple[list[Any], BalancedStep | None]:
            items = ahead.fetch(num_items)
            try:
                return items, self.maker.make(items, num_items=num_items, pool=pool, first_item=first_item)
            except PeerError as error:
                on_lost(error)
                raise

        self._prepared = _Preparation(self._thread.submit(work))

    def save(self, folder: Path) -> None:
        """Write what the newest step left: samples that wait, what calibration learned. Nothing without either.

        What an earlier run left in the folder goes away.
        """
        rank = self.maker.dp_group.rank()
        if self._pool is not None:
            self._pool.save(folder)
        if rank == 0:
            pool_files.forget_shares(folder, from_rank=0 if self._pool is None else self.maker.dp_group.size())
            learned = None if self.maker.calibration is None else self.maker.calibration.state
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
        if self.maker.calibration is not None:
            self.maker.calibration.state = CalibrationState.read(folder)

    def _num_items(self, num_microbatches: int) -> int:
        return num_microbatches * (1 if self._pool is None else self._pool.num_missing_batches)

    def _pull(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> list[Any]:
        """The items of this step; fewer where the data has ended, which is said to every rank later."""
        iterator, _ = pull_ahead_of(data_iterator)
        num_to_skip, num_items = self._num_batches_to_skip * num_microbatches, self._num_items(num_microbatches)
        for _ in range(num_to_skip):
            next(iterator, None)
        self._num_batches_to_skip = 0
        self._num_pulled += num_to_skip + num_items
        return next_items(iterator, num_items)

    def _step_of(self, items: Sequence[Any], *, num_items: int) -> BalancedStep | None:
        prepared, self._prepared = self._prepared, None
        # Under a growing batch size other items come than those prepared, on every rank.
        if prepared is not None and prepared.is_of(items):
            return prepared.result()
        first_item = self._num_pulled - num_items
        return self.maker.make(items, num_items=num_items, pool=self._pool, first_item=first_item)

    def _counts(self, step: BalancedStep) -> list[int]:
        """What ranks that read no data must know of a step: its shape, and where padding is if somebody asks."""
        counts = [step.num_microbatches, *step.microbatch_tokens]
        if self._shares_lengths:
            assert step.sequence_lengths is not None, "this rank packed the step"
            counts += [number for lengths in step.sequence_lengths for number in (len(lengths), *lengths)]
        return counts

    def _learned(self, counts: list[int]) -> BalancedStep:
        """The step that another rank's `_counts` describe."""
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
        assert counts is not None or problem is not None, "a rank that is a whole replica reads data"
        return counts or []


class _Preparation:
    """A step's data in the making, by a thread."""

    def __init__(self, made: Future[tuple[list[Any], BalancedStep | None]]) -> None:
        self._made = made

    def is_of(self, items: Sequence[Any]) -> bool:
        """Whether it was made from these very items. Waits for it to end.

        Raises:
            BalanceError: what went wrong in making it; the step that asks is the one it was for.
        """
        made_of, _ = self._made.result()
        return len(items) == len(made_of) and all(item is other for item, other in zip(items, made_of, strict=True))

    def result(self) -> BalancedStep | None:
        """The step's data; None where there is nothing to balance."""
        return self._made.result()[1]
