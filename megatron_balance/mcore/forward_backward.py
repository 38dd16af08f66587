"""Megatron's forward-backward schedules, fed with balanced micro-batches.

The wrapper pulls the items that the step would have read, balances them, and calls Megatron's schedule with another
iterator and another number of micro-batches. `get_num_microbatches()` is unchanged: the learning rate, consumed samples
and resuming depend on what was loaded. A balanced evaluation has Megatron divide sums over tokens in every case: under
`--sft` it averages means of micro-batches, which another packing changes.

Invariants: Megatron's state that is changed for a step is restored after it, also when it fails; a forward-only call is
Megatron's own, unless it is a step of a balanced evaluation; steps of training and of evaluation are made one at a
time.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patched_attrs
from megatron_balance.mcore.microbatch import (
    CpGroups,
    called_with_mask,
    called_with_packs,
    connect,
    packed_params_of,
    router_masks,
)
from megatron_balance.mcore.pipeline_shapes import PipelineShapes, planned_shapes, variable_seq_lengths
from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.loss_weights import router_loss_scale, token_weights, with_weights
from megatron_balance.mcore.step.packs import BalancedStep, Microbatch, StepTotals
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.watch import Watch, warn_of_oversized
from megatron_balance.runtime.comm import with_step_context
from megatron_balance.runtime.log import log_info, warn_once
from megatron_balance.samples.unpacking import DERIVED_KEYS

Schedule = Callable[..., Any]


class BalancedForwardBackward:
    """Replaces the result of `get_forward_backward_func` while a run balances; every rank of the world makes one.

    `args` are those of Megatron's own loop, `num_steps_done` is the count of another loop that may run a step again.
    `pipeline_shapes` is None where Megatron's stages exchange them. `totals` are those of the newest training step;
    `log_scale` the micro-batches of a rank that were loaded for it, over those that it ran with samples, in the mean:
    Megatron's log divides by the first.
    """

    def __init__(
        self, settings: Settings, *, args: Namespace | None, num_steps_done: Callable[[], int] | None = None
    ) -> None:
        topology, timeout = settings.topology, settings.timeout
        self._num_steps = 0
        self._num_steps_done = num_steps_done or (lambda: self._num_steps)
        self._args, self._is_sft = args, bool(getattr(args, "sft", False))
        self.last_step: BalancedStep | None = None
        self.in_step = False
        self.totals: StepTotals | None = None
        self.log_scale = 1.0
        self.pipeline_shapes: PipelineShapes | None = None
        self.packed_params: Any = None  # of the micro-batch that runs forward, where its script names no starts
        self.token_weights: Callable[[], torch.Tensor] | None = None  # of the micro-batch that runs forward
        self._settings = settings
        layout = Layout.from_parallel_state(timeout=timeout)
        # In Megatron's own loop the first rank of a tensor-parallel group reads for all.
        dp_group = layout.data_group(timeout=timeout, on_every_tensor_rank=args is None)
        replica, place = layout.replica_group(timeout=timeout), layout.this_rank
        self._is_last = layout.is_last
        self.observer: Watch | None = None
        if dp_group is not None or layout.is_last:
            self.observer = Watch(settings, layout=layout, loads_data=dp_group is not None, args=args)
        ranks: Any = {"dp_group": dp_group, "dp_rank": place.dp, "cp_rank": place.cp}
        ranks["ranks_per_node"] = layout.ranks_per_node
        report: Any = {} if self.observer is None else {"report": self.observer.report}
        self._training = training = StepPrefetcher(StepPlanner(settings, **ranks, **report), replica=replica)
        self._evaluation: StepPrefetcher | None = None
        self._eval_steps_left = 0
        if settings.eval_limits is not None:
            planner = StepPlanner(settings, **ranks, evaluation_plans=training.planner.plans)
            self._evaluation = StepPrefetcher(planner, replica=replica, thread=training.thread)
        self.context: CpGroups | None = None
        if topology.dynamic_cp:
            self.context = CpGroups(topology, layout=layout, timeout=timeout, for_routers=settings.counts_router_tokens)
            if taken := connect(self.context.by_size):
                log_info(f"connecting context-parallel groups took {taken / 2**20:.0f} MiB of device memory on rank 0.")
        self._layout: Any = {"topology": topology, "place": place}

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

    def _with_args(self, **values: Any) -> AbstractContextManager[None]:
        """Have Megatron's arguments hold these values in this context; other loops do not read them."""
        return contextlib.nullcontext() if self._args is None else patched_attrs(self._args, **values)

    @contextlib.contextmanager
    def evaluating(self, num_steps: int) -> Iterator[None]:
        """Balance the forward-only steps in this context, Megatron's `evaluate` of so many, where the run does."""
        if self._evaluation is None:
            yield
            return
        self._eval_steps_left = num_steps
        try:
            with self._with_args(sft=False):
                yield
        finally:
            self._eval_steps_left = 0

    def __call__(self, schedule: Schedule, **arguments: Any) -> Any:
        """Run one step of Megatron's schedule, with what `train_step` or `evaluate` passes it, all by keyword."""
        iteration = self._iteration
        with with_step_context(f"iteration {iteration}"):
            if not arguments.get("forward_only"):
                # A run that ends before (by --exit-interval, time or a signal) has prepared one more, on every rank.
                last = self._settings.num_steps is not None and iteration >= self._settings.num_steps
                following = None if last else f"iteration {iteration + 1}"
                losses = self._step(self._training, schedule, arguments, following=following)
                self._num_steps += 1
                if self._is_last:
                    _warn_of_means(losses)
                return losses
            if self._evaluation is None or not self._eval_steps_left or arguments.get("collect_non_loss_data"):
                with self._with_args(sft=self._is_sft):
                    return schedule(**arguments)
            self._eval_steps_left -= 1
            following = f"evaluation after iteration {iteration}" if self._eval_steps_left else None
            with self._with_args(sft=self._is_sft):
                losses = self._step(self._evaluation, schedule, arguments, following=following)
            # A mean depends on packing: a schedule must return a sum and its tokens.
            for loss, value in (losses[0] if losses else {}).items():
                if value.numel() != 2:
                    raise BalanceError(
                        f"The loss function reports {loss!r} as {value.numel()} numbers in evaluation: a balanced one "
                        "needs the sum over tokens and their number. Return both, or set --no-balance-evaluation."
                    )
            return losses

    def _step(
        self,
        prefetcher: StepPrefetcher,
        schedule: Schedule,
        arguments: dict[str, Any],
        *,
        following: str | None,
    ) -> Any:
        """Run a step, while the next one is prepared if there is one."""
        source, number = self._source(arguments), arguments["num_microbatches"]
        observer = self.observer if prefetcher is self._training else None
        step = prefetcher.balance(source, num_microbatches=number)
        if num_left := prefetcher.num_left:
            warn_once(
                f"another iterator came while {num_left} items pulled ahead from the last one waited: they are "
                "handed out when that one comes again. If the new one reads the same loader through a wrapper of its "
                "own, it continues after them: wrap the loader once, or set --no-balance-overlap.",
                topic="another iterator",
            )
        self.last_step = step
        if prefetcher is self._training:
            self.totals = step.totals
            self.log_scale = number * self._settings.topology.dp_size / max(step.totals.microbatches, 1)
        if step.schedule is not None:
            warn_of_oversized(step.schedule)
        if observer is not None:
            observer.begin(step, iteration=self._iteration)
        if self._settings.overlap and following is not None:
            prefetcher.prepare(source, num_microbatches=number, name=following)
        try:
            return self._run(schedule, step, arguments, observer=observer)
        finally:
            if observer is not None:
                observer.end()

    def _source(self, arguments: dict[str, Any]) -> Iterator[Any] | None:
        """The iterator to pull from: chunks of a virtual pipeline all read the same rows."""
        iterators = arguments["data_iterator"]
        candidates = iterators if isinstance(iterators, list) else [iterators]
        return next((it for it in candidates if it is not None), None) if self._training.planner.loads_data else None

    def _run(self, schedule: Schedule, step: BalancedStep, arguments: dict[str, Any], *, observer: Watch | None) -> Any:
        """Megatron's schedule on the micro-batches of a step."""
        model, iterators = arguments["model"], arguments["data_iterator"]
        # A script for padded rows tells only some of its ranks of starts of sequences, and counts FLOPs by them.
        left_out = DERIVED_KEYS if self._settings.unpad is not None else ()

        # Every chunk of a virtual pipeline reads its own.
        chunks = model if isinstance(model, list) else [model]
        handed_out = {_identity(chunk): HandedOut(step.microbatches or (), left_out=left_out) for chunk in chunks}
        first, *_ = readers = list(handed_out.values())
        arguments |= {
            "data_iterator": readers if isinstance(iterators, list) else first,
            "num_microbatches": step.num_microbatches,
            "micro_batch_size": 1,
            "forward_step_func": self._forward_step(
                arguments["forward_step_func"], step, model=model, observer=observer, handed_out=handed_out
            ),
        }
        self.pipeline_shapes = planned_shapes(step.slots, topology=self._settings.topology, arguments=arguments)
        self.in_step = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(variable_seq_lengths(model))
                if step.slots.loss_weights is not None:
                    totals = step.totals
                    stack.enter_context(router_loss_scale(totals.learned, num_tokens=totals.tokens, model=model))
                return schedule(**arguments)
        finally:
            self.in_step = False
            self.pipeline_shapes = None
            if self.context is not None:
                self.context.restore_engine_attention(model)

    def _forward_step(
        self,
        forward_step_func: Schedule,
        step: BalancedStep,
        *,
        model: Any,
        observer: Watch | None,
        handed_out: Mapping[int, HandedOut],
    ) -> Schedule:
        """Megatron's forward step with the shape, the padding mask and the timer of each micro-batch.

        `handed_out`: what each chunk reads, by its id. A schedule may wrap it, so that a call brings another iterator.
        """
        settings, slots = self._settings, step.slots
        masks = router_masks(slots, model=model, **self._layout) if settings.counts_router_tokens else []
        names_starts = settings.unpad is not None or settings.overlaps_experts
        starts = packed_params_of(slots, settings=settings) if names_starts else []

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *rest: Any, **keywords: Any) -> Any:
            slot = handed_out[_identity(model)].begin_next()
            cp_size = slots.cp_sizes[slot]
            run = forward_step_func
            if self.context is not None:
                run = functools.partial(
                    self.context.forward_step, forward_step_func, size=cp_size, num_tokens=slots.num_tokens[slot]
                )
            with contextlib.ExitStack() as stack:
                # Tensor-parallel ranks allocate receive buffers by these, and MoE layers view activations by them.
                shape = {"seq_length": slots.num_tokens[slot], "micro_batch_size": 1, "context_parallel_size": cp_size}
                stack.enter_context(self._with_args(**shape))
                if masks:
                    stack.enter_context(called_with_mask(masks[slot], model=model, **self._layout))
                if starts:
                    stack.enter_context(called_with_packs(starts[slot], model=model))
                    stack.enter_context(patched_attrs(self, packed_params=starts[slot]))
                if observer is not None:
                    stack.enter_context(observer.timed(slot))
                if slots.loss_weights is None:
                    return run(data_iterator, model, *rest, **keywords)
                weights = functools.cache(functools.partial(token_weights, slots, slot, topology=settings.topology))
                stack.enter_context(patched_attrs(self, token_weights=weights))
                output, loss_func = run(data_iterator, model, *rest, **keywords)
                return output, loss_func and with_weights(loss_func, weights)

        return forward_step


def _identity(chunk: Any) -> int:
    """Of a chunk of the model, which a schedule may pass without its wrappers for data parallelism and precision."""
    from megatron.core.utils import unwrap_model

    return id(unwrap_model(chunk))


def _warn_of_means(losses: Any) -> None:
    """Name each loss that Megatron logs as a mean of micro-batches; other loops return anything."""
    reports = losses[0] if isinstance(losses, list) and losses else None
    for loss, value in reports.items() if isinstance(reports, dict) else ():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            warn_once(
                f"gets {loss!r} as one number from the loss function: Megatron logs its mean over micro-batches, which "
                "have unequal numbers of tokens in a balanced run. Return the sum over tokens and their number.",
                every_rank=True,
            )


class HandedOut(Iterator[Microbatch]):
    """The micro-batches of a step for one chunk of the model, which runs them in order.

    A call of the forward step reads the micro-batch that it runs, or none where the rank needs no data.
    """

    def __init__(self, microbatches: Sequence[Microbatch], *, left_out: Collection[str] = ()) -> None:
        self._microbatches, self._left_out = microbatches, left_out
        self._number, self._is_read = -1, False

    def begin_next(self) -> int:
        """The number of the micro-batch that the forward step is called for."""
        self._number, self._is_read = self._number + 1, False
        return self._number

    def __next__(self) -> Microbatch:
        if self._is_read:
            raise BalanceError(
                f"The forward step reads a second micro-batch in its call for micro-batch {self._number}; each has a "
                "size of its own: read one in a call, and none ahead, or train without balance flags."
            )
        if not self._microbatches:
            raise StopIteration
        self._is_read = True
        return {key: value for key, value in self._microbatches[self._number].items() if key not in self._left_out}
