"""Makes a step's data as it begins or, in a thread, while the step before it runs; the replica's other ranks get it.

The thread pulls and makes the next step once the same iterator was passed twice in a row on every data-parallel rank.
What was made is used if its items are the same objects as those that the step pulls. Otherwise, and if making it failed
on any rank (its iterator has ended), the step is made as it begins.

Megatron's rerun machine replays a step from the items that `RerunDataIterator` returned in it. Items are therefore
pulled from the source that this iterator wraps, and returned through it when their step begins.

Invariants: the thread talks to the data-parallel ranks alone; every rank makes the same steps in the same order, one at
a time; an item that was pulled ahead is returned by its own iterator, once; an error in the data of one rank is raised
on every rank of its data-parallel group and its model replica, once, at its position among the items.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step.packs import BalancedStep, pack
from megatron_balance.mcore.step.planner import Fetched, StepPlanner, warn_of
from megatron_balance.runtime.comm import PeerError
from megatron_balance.runtime.failure import Failure, attempt, broadcast_step
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.process import close_on_undo

_Prepared = tuple[list[Any], BalancedStep]
"""A step that the thread made, and its items, by which the step that begins recognizes it."""


def pull(iterator: Iterator[Any], num_items: int, *, after: Sequence[Any] = ()) -> Fetched:
    """The items before, and as many more as are missing. Megatron's iterators have no `__iter__`."""
    items = list(after)
    while len(items) < num_items:
        item = attempt(next, iterator)
        if isinstance(item, Failure):
            return Fetched(items, replace(item, during=f"fetching item {len(items)} of this step"))
        items.append(item)
    return Fetched(items)


class PullAhead(Iterator[Any]):
    """An iterator that another thread may fill."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._waiting = Fetched([])
        self._lock = threading.Lock()

    def __next__(self) -> Any:
        """The next item: one pulled ahead, else from the source. Waits while another thread pulls."""
        with self._lock:
            waiting = self._waiting
            if waiting.items:
                return waiting.items.pop(0)
            if waiting.failure is not None:
                self._waiting = Fetched([])
                raise waiting.failure.error
            return next(self.source)

    @property
    def num_waiting(self) -> int:
        """Items pulled ahead and not returned yet; 0 once the source has ended, as they do not fill a step."""
        waiting = self._waiting
        return 0 if waiting.ended else len(waiting.items) + (waiting.failure is not None)

    def fetch(self, num_items: int) -> Fetched:
        """Pull until this many items wait to be returned."""
        with self._lock:
            if self._waiting.failure is None:
                self._waiting = pull(self.source, num_items, after=self._waiting.items)
            return replace(self._waiting, items=self._waiting.items[:num_items])


class Sources:
    """The iterators of a run, each with the items pulled ahead from it."""

    def __init__(self) -> None:
        self._known: list[PullAhead] = []

    def of(self, iterator: Any) -> tuple[Iterator[Any], PullAhead]:
        """The iterator to ask for a step's items, and where to pull the next step's. No fetch may be running.

        A `PullAhead` is put between Megatron's RerunDataIterator and its source. Iterators over the same source share
        one. One without waiting items is dropped when another iterator is passed.
        """
        replays = hasattr(iterator, "replaying") and hasattr(iterator, "iterable")
        source = iterator.iterable if replays else iterator
        ahead = source if isinstance(source, PullAhead) else None
        ahead = ahead or next((known for known in self._known if known.source is source), None) or PullAhead(source)
        self._known = [ahead, *(known for known in self._known if known is not ahead and known.num_waiting)]
        if not replays:
            return ahead, ahead
        iterator.iterable = ahead
        return iterator, ahead

    @property
    def num_left(self) -> int:
        """Items pulled ahead from earlier iterators, which wait until their iterator is passed again."""
        return sum(known.num_waiting for known in self._known[1:])


class StepThread:
    """The thread of a rank that makes steps while others run: one for all of its prefetchers, which share a group.

    On a GPU it has the device of the thread that made it, and a stream of its own, which follows what was on the other
    when the job was submitted: a loader's `.cuda()` would else go to device 0, and copies to the host wait for the
    step's kernels.
    """

    def __init__(self) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._on_gpu = device is not None
        self._executor = ThreadPoolExecutor(1, "megatron_balance", initializer=_on_device, initargs=(device,))
        self._newest: Future[Any] | None = None
        close_on_undo(self._executor.shutdown)

    def submit(self, job: Callable[[], _Prepared | None]) -> Future[_Prepared | None]:
        """Queue a job."""
        submitted = torch.cuda.Event() if self._on_gpu else None
        if submitted is not None:
            submitted.record()

        def after_it() -> _Prepared | None:
            if submitted is not None:
                torch.cuda.current_stream().wait_event(submitted)
            return job()

        self._newest = self._executor.submit(after_it)
        return self._newest

    def finish(self) -> None:
        """Wait until it has nothing to do; errors are raised where results are asked for."""
        if self._newest is not None:
            wait([self._newest])


def _on_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())


class StepPrefetcher:
    """Turns the items of the data loader into balanced micro-batches.

    `replica` are the ranks of its model replica, None for this one alone. A `thread` is that of another prefetcher of
    this rank, which meets the same ranks.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        replica: dist.ProcessGroup | None = None,
        thread: StepThread | None = None,
    ) -> None:
        self.planner = planner
        self.replica = replica
        self.thread = thread or StepThread()
        self._sources = Sources()
        self._newest: PullAhead | None = None
        self._prepared: Future[_Prepared | None] | None = None
        self._last: BalancedStep | None = None
        self._num_steps = 0

    @property
    def num_left(self) -> int:
        """Items pulled ahead from an earlier iterator, which wait for it to come again."""
        return self._sources.num_left

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep:
        """Pull one step's items and balance them; the iterator is None where this rank loads no data.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica; the data loader's own
                error is its cause on the rank where it was raised.
        """
        started = time.perf_counter()
        if data_iterator is None:
            step = self._received()
        elif self._last is not None and getattr(data_iterator, "replaying", False):
            step = self._sent(self._last)
        else:
            step = self._sent(attempt(self._made, data_iterator, num_microbatches=num_microbatches))
        self._last = replace(step, exposed_seconds=time.perf_counter() - started)
        return self._last

    def prepare(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int, name: str) -> None:
        """Have the thread make the next step's data; `balance` uses it if the step pulls the same items.

        It warns at once of peers that do not answer or make another step, with the name of that step: training may be
        in a collective whose watchdog ends the process.
        """
        if self._prepared is not None or data_iterator is None or self._last is None or self._last.new_iterator:
            return
        _, ahead = self._sources.of(data_iterator)
        number = self._num_steps

        def work() -> _Prepared | None:
            fetched = ahead.fetch(num_microbatches)
            try:
                made = self.planner.make(fetched, num_items=num_microbatches, number=number)
            except (PeerError, OutOfStepError) as error:
                warn_of(f"prepares {name}: {error}")
                raise
            except BalanceError:
                return None  # on every data-parallel rank: `balance` makes the step again, and raises if that fails too
            return fetched.items, made

        self._prepared = self.thread.submit(work)

    def _made(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> BalancedStep:
        """The step, from the thread or made now."""
        # No other thread may pull or meet the other ranks meanwhile. What failed there failed on every one of them.
        self.thread.finish()
        prepared = None if self._prepared is None else self._prepared.result()
        self._prepared = None
        iterator, ahead = self._sources.of(data_iterator)
        new_iterator, self._newest = ahead is not self._newest, ahead
        fetched, number = pull(iterator, num_microbatches), self._num_steps
        self._num_steps += 1
        # A batch size that grows pulls more.
        if prepared is not None and [*map(id, prepared[0])] == [*map(id, fetched.items)]:
            return prepared[1]
        return self.planner.make(fetched, num_items=num_microbatches, number=number, new_iterator=new_iterator)

    def _received(self) -> BalancedStep:
        """The step of the ranks of the replica that load data."""
        planner = self.planner
        step = BalancedStep.from_text(broadcast_step(group=self.replica), cp_rank=planner.cp_rank)
        if not planner.loads_data:  # the first of its tensor-parallel group reads for it
            return step
        few_shapes = planner.settings.few_shapes
        starts = pack(step.slots, topology=planner.topology, few_shapes=few_shapes, pin_memory=planner.pin_memory)
        return replace(step, microbatches=starts)

    def _sent(self, made: BalancedStep | Failure) -> BalancedStep:
        """The step, or the error, once the replica's other ranks have received it."""
        if isinstance(made, Failure):
            # Other ranks notice lost peers themselves, or are the lost ones.
            if not isinstance(made.error, PeerError):
                with contextlib.suppress(BalanceError):
                    broadcast_step(group=self.replica, error=made.text)
            raise made.error
        broadcast_step(made.to_text(), group=self.replica, digest=made.fingerprint)
        return made
