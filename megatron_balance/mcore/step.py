"""A training step: Megatron's forward-backward schedule over balanced micro-batches.

The schedule's place is taken by a function that pulls the items which the step would have read, balances them
(`prepare.py`), and calls the schedule with another iterator and another number of micro-batches. A thread prepares the
next step while this one runs. `get_num_microbatches()` is unchanged: the learning rate, consumed samples and resuming
depend on what was loaded.

Invariants: Megatron's state that is changed for a step is restored after it, also when it fails; a forward-only call is
Megatron's own, unless it is a step of a balanced evaluation; every rank makes the same steps in the same order, one at
a time, and the thread talks to the data-parallel ranks alone; an error in the data of one rank is raised on every rank
of its data-parallel group and its model replica, once.
"""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.mcore.autotune import Autotuner
from megatron_balance.mcore.lookahead import PullAhead, pull, step_thread, submit
from megatron_balance.mcore.microbatch import CpGroups, RunningStep
from megatron_balance.mcore.prepare import BalancedStep, StepBuilder, StepTotals, pack
from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.telemetry import Telemetry, figures_of
from megatron_balance.mcore.verify import verify_step
from megatron_balance.runtime.comm import PeerError, with_step_context
from megatron_balance.runtime.failure import Failure, attempt, broadcast_step
from megatron_balance.runtime.gather import OutOfStepError
from megatron_balance.runtime.log import warn_once

Schedule = Callable[..., Any]

Prepared = tuple[list[Any], BalancedStep]
"""A step that the thread made, and its items, by which the step that begins recognizes it."""


class BalancedForwardBackward:
    """Replaces the result of `get_forward_backward_func` while a run balances; every rank of the world makes one.

    `args` are those of Megatron's own loop, `num_steps_done` is the count of another loop that may run a step again.
    `running` is the step that Megatron's schedule runs now. `totals` are those of the newest training step; `log_scale`
    the micro-batches of a rank that were loaded for it, over those that it ran with samples, in the mean: Megatron's
    log divides by the first.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        layout: Layout,
        args: Namespace | None,
        num_steps_done: Callable[[], int] | None = None,
    ) -> None:
        topology, timeout = settings.topology, settings.timeout
        self._settings, self._args = settings, args
        self._num_steps = 0
        self._num_steps_done = num_steps_done or (lambda: self._num_steps)
        self.last_step: BalancedStep | None = None
        self.running: RunningStep | None = None
        self.totals: StepTotals | None = None
        self.log_scale = 1.0
        # In Megatron's own loop the first rank of a tensor-parallel group reads for all.
        dp_group = layout.data_group(timeout=timeout, on_every_tensor_rank=args is None)
        replica = layout.replica_group(timeout=timeout)
        self._coords, loads_data = layout.this_rank, dp_group is not None
        self._telemetry = Telemetry(settings, layout=layout, loads_data=loads_data, args=args)
        report = self._telemetry.report
        self._builder = builder = StepBuilder(settings, dp_group=dp_group, coords=self._coords, report=report)
        self._training = training = StepPrefetcher(builder, replica=replica)
        self._evaluation: StepPrefetcher | None = None
        self._eval_steps_left = 0
        if settings.eval_limits is not None:
            self._evaluation = StepPrefetcher(builder, replica=replica, training_thread=training.thread)
        self._autotuner: Autotuner | None = None
        if settings.tuned_steps:
            self._autotuner = Autotuner(settings, leads_replica=layout.leads_replica(), args=args)
        self.cp_groups: CpGroups | None = None
        if topology.dynamic_cp:
            for_routers = settings.counts_router_tokens
            self.cp_groups = CpGroups(topology, layout=layout, timeout=timeout, for_routers=for_routers)

    @property
    def evaluates(self) -> bool:
        """True if evaluation is balanced too."""
        return self._evaluation is not None

    @property
    def _iteration(self) -> int:
        """The number in the log of the newest step, from 1; under `--skip-train` it is the checkpoint's."""
        if self._args is None:
            return self._num_steps_done() + 1
        before = getattr(self._args, "curr_iteration", None)
        return self._args.iteration if before is None else before + 1

    @contextlib.contextmanager
    def evaluating(self, num_steps: int) -> Iterator[None]:
        """Balance the forward-only steps in this context, Megatron's `evaluate` of so many, where the run does."""
        if self._evaluation is None:
            yield
            return
        self._eval_steps_left = num_steps
        try:
            yield
        finally:
            self._eval_steps_left = 0

    def __call__(self, schedule: Schedule, **arguments: Any) -> Any:
        """Run one step of Megatron's schedule, with what `train_step` or `evaluate` passes it, all by keyword."""
        iteration = self._iteration
        with with_step_context(f"iteration {iteration}"):
            if not arguments.get("forward_only"):
                return self._train(schedule, arguments, iteration=iteration)
            if self._evaluation is None or not self._eval_steps_left or arguments.get("collect_non_loss_data"):
                return schedule(**arguments)
            self._eval_steps_left -= 1
            source, number = self._source(arguments), arguments["num_microbatches"]
            self.last_step = step = self._evaluation.balance(source, num_microbatches=number)
            if self._settings.overlap and self._eval_steps_left:
                name = f"evaluation after iteration {iteration}"
                self._evaluation.prepare(num_microbatches=number, name=name)
            return self._run(schedule, step, arguments)

    def _source(self, arguments: dict[str, Any]) -> Iterator[Any] | None:
        """The iterator of a step, None where this rank loads no data; chunks of a virtual pipeline read one."""
        iterators = arguments["data_iterator"]
        candidates = iterators if isinstance(iterators, list) else [iterators]
        source = next((iterator for iterator in candidates if iterator is not None), None)
        return source if self._builder.loads_data else None

    def _train(self, schedule: Schedule, arguments: dict[str, Any], *, iteration: int) -> Any:
        """Run a training step, while the next one is prepared if there is one."""
        prefetcher, tuner, telemetry = self._training, self._autotuner, self._telemetry
        source, number = self._source(arguments), arguments["num_microbatches"]
        if tuner is not None:
            self._use(tuner.begin(iteration))
        verifies = self._settings.verify and not self._num_steps
        self.last_step = step = prefetcher.balance(source, num_microbatches=number)
        if verifies:
            verify_step(
                schedule,
                lambda **changed: self._run(schedule, step, changed),
                arguments,
                items=prefetcher.items,
                topology=self._settings.topology,
            )
        self.totals = step.totals
        self.log_scale = number * self._settings.topology.dp_size / max(step.totals.microbatches, 1)
        telemetry.begin(step, iteration=iteration)
        tunes = tuner is not None and tuner.measures(iteration)
        # A run that ends before (by --exit-interval, time or a signal) has prepared one more, on every rank.
        is_last = self._settings.num_steps is not None and iteration >= self._settings.num_steps
        if self._settings.overlap and not is_last and not tunes:  # it is planned by what this step shows
            prefetcher.prepare(num_microbatches=number, name=f"iteration {iteration + 1}")
        seconds = None
        try:
            losses = self._run(schedule, step, arguments, timed=telemetry.timed)
        finally:
            seconds = telemetry.end(waits=tunes)
        if tuner is not None and tunes:
            allowed = telemetry.allowed_tokens()
            self._use(tuner.end(step, iteration=iteration, seconds=seconds, allowed_tokens=allowed))
        self._num_steps += 1
        return losses

    def _use(self, settings: Settings) -> None:
        """Plan later steps by these settings."""
        if settings == self._settings:
            return
        self._settings = self._builder.settings = settings
        self._telemetry.use(settings)

    def _run(
        self,
        schedule: Schedule,
        step: BalancedStep,
        arguments: dict[str, Any],
        *,
        timed: Callable[[int | None], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Any:
        """Megatron's schedule on the micro-batches of a step; its forward and backward passes come back by hooks."""
        model, iterators = arguments["model"], arguments["data_iterator"]
        arguments |= {"num_microbatches": step.num_microbatches, "micro_batch_size": 1}
        running = RunningStep(
            step,
            settings=self._settings,
            coords=self._coords,
            cp_groups=self.cp_groups,
            args=self._args,
            model=model,
            timed=timed,
        )
        # Every chunk of a virtual pipeline reads the micro-batch that it runs.
        arguments["data_iterator"] = [running] * len(iterators) if isinstance(iterators, list) else running
        with patched_attrs(self, running=running), running.modules():
            try:
                return schedule(**arguments)
            except torch.OutOfMemoryError as error:
                if self._autotuner is None or "cap" not in self._settings.tuned:
                    raise
                raise self._autotuner.out_of_memory() from error
            finally:
                if self.cp_groups is not None:
                    self.cp_groups.restore_engine_attention(model)


class StepPrefetcher:
    """Turns the items of the data loader into balanced micro-batches as a step begins, or in a thread before it.

    The thread pulls and makes the next step once the same iterator was passed twice in a row on every data-parallel
    rank. What it made is used if its items are the same objects as those that the step pulls. Otherwise, and if making
    it failed on any rank (its iterator has ended), the step is made as it begins.

    `replica` are the ranks of its model replica, None for this one alone.
    That of evaluation works in the `training_thread`, which meets the same ranks.
    """

    def __init__(
        self,
        builder: StepBuilder,
        *,
        replica: dist.ProcessGroup | None = None,
        training_thread: ThreadPoolExecutor | None = None,
    ) -> None:
        self.thread, self._evaluates = training_thread or step_thread(), training_thread is not None
        self._builder = builder
        self._replica = replica
        self._iterators: list[PullAhead] = []  # the newest first, then those with items pulled ahead
        self._prepared: Future[Prepared | None] | None = None
        self.items: list[Any] | None = None  # of the newest step
        self._last: BalancedStep | None = None
        self._num_steps = 0

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep:
        """Pull one step's items and balance them; the iterator is None where this rank loads no data.

        Raises:
            BalanceError: on every rank of the data-parallel group and of the model replica; the data loader's own
                error is its cause on the rank where it was raised.
        """
        started = time.perf_counter()
        if data_iterator is None:
            step = self._receive()
        elif self._last is not None and getattr(data_iterator, "replaying", False):
            step = self._send(self._last)
        else:
            step = self._send(attempt(self._make, data_iterator, num_microbatches=num_microbatches))
        self._last = replace(step, exposed_seconds=time.perf_counter() - started)
        return self._last

    def prepare(self, *, num_microbatches: int, name: str) -> None:
        """Have the thread make the next step's data; `balance` uses it if the step pulls the same items.

        It warns at once of peers that do not answer or make another step, with the name of that step: training may be
        in a collective whose watchdog ends the process.
        """
        if self._prepared is not None or not self._iterators or self._last is None or self._last.new_iterator:
            return
        ahead, number = self._iterators[0], self._num_steps

        def work() -> Prepared | None:
            items = ahead.fetch(num_microbatches)
            try:
                return items, self._builder.build(items, number=number, evaluates=self._evaluates)
            except (PeerError, OutOfStepError) as error:
                warn_once(f"prepares {name}: {error}", every_rank=True)
                raise
            except BalanceError:
                return None  # on every data-parallel rank: `balance` makes the step again, and raises if that fails too

        self._prepared = submit(self.thread, work)

    def _make(self, data_iterator: Iterator[Any], *, num_microbatches: int) -> BalancedStep:
        """The step, from the thread or made now."""
        # No other thread may pull or meet the other ranks meanwhile. What failed there failed on every one of them.
        self.thread.submit(int).result()
        prepared = None if self._prepared is None else self._prepared.result()
        self._prepared = None
        iterator, is_new = self._wrap(data_iterator)
        self.items, number = pull(iterator, num_microbatches), self._num_steps
        self._num_steps += 1
        # A batch size that grows pulls more.
        if prepared is not None and [*map(id, prepared[0])] == [*map(id, self.items)]:
            return prepared[1]
        return self._builder.build(self.items, number=number, new_iterator=is_new, evaluates=self._evaluates)

    def _wrap(self, iterator: Any) -> tuple[Iterator[Any], bool]:
        """The iterator to ask for a step's items, and whether it is another than before. No fetch may be running.

        A `PullAhead` takes the place of the source in Megatron's RerunDataIterator, for good. Iterators over one source
        share it; one without queued items is dropped when another iterator is passed.
        """
        replays = hasattr(iterator, "replaying") and hasattr(iterator, "iterable")
        source, former = iterator.iterable if replays else iterator, self._iterators
        known = (
            source
            if isinstance(source, PullAhead)
            else next((cached for cached in former if cached.source is source), None)
        )
        ahead = known or PullAhead(source)
        others = [cached for cached in former if cached is not ahead and cached.num_queued]
        self._iterators = [ahead, *others]
        if others:
            warn_once(
                f"the iterator changed with {others[0].num_queued} prefetched items unused: they are handed out when "
                "the old one comes again. If the new one reads the same loader through a wrapper of its own, it "
                "continues after them: wrap the loader once, or set --no-balance-overlap.",
                topic="another iterator",
            )
        if replays:
            iterator.iterable = ahead
        return (iterator if replays else ahead), former[:1] != [ahead]

    def _receive(self) -> BalancedStep:
        """The step of the ranks of the replica that load data."""
        builder = self._builder
        step = BalancedStep.from_text(broadcast_step(group=self._replica), cp_rank=builder.cp_rank)
        if not builder.loads_data:  # the first of its tensor-parallel group reads for it
            return step
        starts = pack(step.sizes, settings=builder.settings)
        return replace(step, microbatches=starts)

    def _send(self, step: BalancedStep | Failure) -> BalancedStep:
        """Give the replica's other ranks the step, or the error, and raise it."""
        if isinstance(step, Failure):
            # Other ranks notice lost peers themselves, or are the lost ones.
            if not isinstance(step.error, PeerError):
                with contextlib.suppress(BalanceError):
                    broadcast_step(group=self._replica, error=step.text)
            raise step.error
        # Megatron has its writers on the last rank, which may load no data.
        broadcast_step(lambda: step.to_text(figures_of(step)), group=self._replica, digest=step.fingerprint)
        return step
