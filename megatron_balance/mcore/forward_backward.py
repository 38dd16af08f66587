"""Megatron's forward-backward schedules, fed with balanced micro-batches.

The wrapper pulls the items that the step would have read, balances them, and calls Megatron's schedule with another
iterator and another number of micro-batches. `get_num_microbatches()` is unchanged: the learning rate, consumed samples
and resuming depend on what was loaded.

Invariants: Megatron's state that is changed for a step is restored after it, also when it fails; a forward-only call is
Megatron's own, unless it is a step of an evaluation that is balanced (`evaluation.py`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from megatron_balance.mcore.dynamic_cp import MicrobatchContext
from megatron_balance.mcore.evaluation import BalancedEvaluation
from megatron_balance.mcore.model_keywords import RouterPadding, called_with_packs, packed_params_of
from megatron_balance.mcore.pipeline_shapes import PipelineShapes, planned_shapes, variable_seq_lengths
from megatron_balance.mcore.setup.training_loop import LoopState, RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.watch import Watch
from megatron_balance.runtime.comm import annotate_peer_loss, with_step_context

Schedule = Callable[..., Any]


@dataclass(eq=False)
class BalancedForwardBackward:
    """Replaces the result of `get_forward_backward_func` while a run balances.

    Attributes:
        last_step: the data of the newest step, for logs and tests.
        in_step: Megatron's schedule runs balanced micro-batches now.
        pipeline_shapes: of the messages of this step; None where Megatron's stages exchange them.
    """

    prefetcher: StepPrefetcher
    _: KW_ONLY
    state: LoopState
    loads_data: bool
    overlap: bool
    log: RunLog
    observer: Watch | None
    router_padding: RouterPadding | None = None
    context: MicrobatchContext | None = None
    unpads: bool = False
    evaluation: BalancedEvaluation | None = None
    last_step: BalancedStep | None = field(default=None, init=False)
    in_step: bool = field(default=False, init=False)
    pipeline_shapes: PipelineShapes | None = field(default=None, init=False)

    def __call__(self, schedule: Schedule, **arguments: Any) -> Any:
        """Run one step of Megatron's schedule, with what `train_step` or `evaluate` passes it, all by keyword."""
        with annotate_peer_loss(f"iteration {self.state.iteration}"):
            if not arguments.get("forward_only"):
                return self._step(schedule, **arguments)
            if self.evaluation is None or not self.evaluation.balances(arguments):
                return schedule(**arguments)
            with self.state.with_args(sft=self.state.is_sft):
                return self._evaluation_step(schedule, self.evaluation, **arguments)

    def _step(self, schedule: Schedule, **arguments: Any) -> Any:
        source, number = self._source(arguments), arguments["num_microbatches"]
        with with_step_context(f"iteration {self.state.iteration}"):
            step = self.prefetcher.balance(source, num_microbatches=number)
        if num_left := self.prefetcher.num_left:
            self.log.warn_once(
                f"another iterator came while {num_left} items pulled ahead from the last one waited: they are "
                "handed out when that one comes again. If the new one reads the same loader through a wrapper of its "
                "own, it continues after them: wrap the loader once, or set --no-balance-overlap.",
                topic="another iterator",
            )
        self.last_step = step
        if step.schedule is not None:
            self.log.warn_of_oversized(step.schedule)
        if self.observer is not None:
            self.observer.begin(step, iteration=self.state.iteration)
        if self.overlap and self.state.has_next_step:
            self.prefetcher.prepare(source, num_microbatches=number, name=f"iteration {self.state.iteration + 1}")
        try:
            return self._run(schedule, step, arguments, observer=self.observer)
        finally:
            if self.observer is not None:
                self.observer.end()

    def _evaluation_step(self, schedule: Schedule, evaluation: BalancedEvaluation, **arguments: Any) -> Any:
        name = f"evaluation after iteration {self.state.iteration}"
        with with_step_context(name):
            source, number = self._source(arguments), arguments["num_microbatches"]
            step = evaluation.step(source, num_microbatches=number, overlap=self.overlap, name=name)
        losses = self._run(schedule, step, arguments, observer=None)
        evaluation.check_sums(losses)
        return losses

    def _source(self, arguments: dict[str, Any]) -> Iterator[Any] | None:
        """The iterator to pull from: chunks of a virtual pipeline all read the same rows."""
        iterators = arguments["data_iterator"]
        candidates = iterators if isinstance(iterators, list) else [iterators]
        return next((it for it in candidates if it is not None), None) if self.loads_data else None

    def _run(self, schedule: Schedule, step: BalancedStep, arguments: dict[str, Any], *, observer: Watch | None) -> Any:
        """Megatron's schedule on the micro-batches of a step."""
        model, iterators = arguments["model"], arguments["data_iterator"]

        def hand_out() -> Iterator[Any]:
            return map(copy.copy, step.microbatches or ())

        arguments |= {
            # Every chunk of a virtual pipeline reads its own.
            "data_iterator": [hand_out() for _ in iterators] if isinstance(iterators, list) else hand_out(),
            "num_microbatches": step.num_microbatches,
            "micro_batch_size": 1,
            "forward_step_func": self._forward_step(
                arguments["forward_step_func"], step, model=model, observer=observer
            ),
        }
        topology = self.prefetcher.planner.topology
        self.pipeline_shapes = planned_shapes(step.slots, topology=topology, arguments=arguments)
        self.in_step = True
        try:
            with variable_seq_lengths(model):
                return schedule(**arguments)
        finally:
            self.in_step = False
            self.pipeline_shapes = None
            if self.context is not None:
                self.context.restore_engine_attention(model)

    def _forward_step(
        self, forward_step_func: Schedule, step: BalancedStep, *, model: Any, observer: Watch | None
    ) -> Schedule:
        """Megatron's forward step with the shape, the padding mask and the timer of each micro-batch."""
        padding, slots = self.router_padding, step.slots
        masks = [] if padding is None else padding.masks(slots, model=model)
        starts = packed_params_of(slots, topology=self.prefetcher.planner.topology) if self.unpads else []
        slot_of: Counter[int] = Counter()  # of each model chunk; a schedule runs a chunk's micro-batches in order

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *rest: Any, **keywords: Any) -> Any:
            slot = slot_of[id(model)]
            slot_of[id(model)] += 1
            cp_size = slots.cp_sizes[slot]
            run = forward_step_func
            if self.context is not None:
                run = functools.partial(self.context.forward_step, forward_step_func, size=cp_size)
            with contextlib.ExitStack() as stack:
                # Tensor-parallel ranks allocate receive buffers by these, and MoE layers view activations by them.
                shape = {"seq_length": slots.num_tokens[slot], "micro_batch_size": 1, "context_parallel_size": cp_size}
                stack.enter_context(self.state.with_args(**shape))
                if padding is not None:
                    stack.enter_context(padding.given(masks[slot], model=model))
                if starts:
                    stack.enter_context(called_with_packs(starts[slot], model=model))
                if observer is not None:
                    stack.enter_context(observer.timed(slot))
                return run(data_iterator, model, *rest, **keywords)

        return forward_step
