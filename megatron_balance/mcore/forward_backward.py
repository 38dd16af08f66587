"""Megatron's forward-backward schedules, fed with balanced micro-batches.

The wrapper pulls the items that the step would have read, balances them, and calls Megatron's schedule with another
iterator and another number of micro-batches. `get_num_microbatches()` is unchanged: the learning rate, consumed samples
and resuming depend on what was loaded.

Invariants: Megatron's state that is changed for a step is restored after it, also when it fails; a forward-only call is
Megatron's own, unless it is a step of an evaluation that is balanced (`evaluation.py`).
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportOptionalMemberAccess=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.calibration.online import OnlineCalibration
from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.checkpoint import restore_state, state_folder
from megatron_balance.mcore.dynamic_cp.engine_attention import prepare_engine_attention, restore_engine_attention
from megatron_balance.mcore.dynamic_cp.groups import make_context_groups
from megatron_balance.mcore.dynamic_cp.microbatch_context import MicrobatchContext
from megatron_balance.mcore.evaluation import BalancedEvaluation, balanced_evaluation
from megatron_balance.mcore.options.table import stock_notice
from megatron_balance.mcore.replica_setup import loads_here, prefetcher_of
from megatron_balance.mcore.setup.groups import (
    data_group,
    dp_ranks_per_node,
    is_first_of_tensor_group,
    split_world,
)
from megatron_balance.mcore.setup.megatron_state import MegatronState
from megatron_balance.mcore.setup.memory_cap import log_cap
from megatron_balance.mcore.setup.run_log import RunLog, warn_of_lost_peers
from megatron_balance.mcore.setup.run_setup import RunSetup, agreed_run
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.device_exchange import DeviceExchange
from megatron_balance.mcore.step.packed_calls import called_with, packed_params_of
from megatron_balance.mcore.step.pipeline_shapes import PipelineShapes, planned_shapes, variable_seq_lengths
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.step.router_padding import RouterPadding, check_takes_mask
from megatron_balance.mcore.step.sample_origin import SampleOrigin
from megatron_balance.mcore.step.sample_pool import SamplePool
from megatron_balance.mcore.telemetry.observer import RunObserver
from megatron_balance.mcore.telemetry.setup import build_watchers
from megatron_balance.runtime.peers import annotate_peer_loss, with_step_context

Schedule = Callable[..., Any]


class BalancedForwardBackward:
    """Replaces the result of `get_forward_backward_func` while a run balances.

    Attributes:
        last_step: the data of the newest step, for logs and tests.
        in_step: whether Megatron's schedule runs balanced micro-batches now.
        observer: watches the run on this rank, or None.
        pipeline_shapes: of the messages of the step that runs, or None where Megatron's stages exchange them.
        evaluation: balances forward-only steps, or None where they are Megatron's own.
        context: switches between context-parallel groups, or None where all micro-batches have the same size.
    """

    def __init__(
        self,
        prefetcher: StepPrefetcher,
        *,
        state: MegatronState,
        loads_data: bool,
        overlap: bool,
        log: RunLog,
        observer: RunObserver | None,
        router_padding: RouterPadding | None = None,
        context: MicrobatchContext | None = None,
        unpads: bool = False,
        evaluation: BalancedEvaluation | None = None,
    ) -> None:
        self.prefetcher = prefetcher
        self.evaluation = evaluation
        self._unpads = unpads
        self.context = context
        self._router_padding = router_padding
        self.observer = observer
        self._loads_data = loads_data
        self._overlap = overlap
        self.last_step: BalancedStep | None = None
        self.in_step = False
        self.pipeline_shapes: PipelineShapes | None = None
        self._state = state
        self._sft = state.is_sft
        self._log = log

    def __call__(self, schedule: Schedule, **arguments: Any) -> Any:
        """Run one step.

        Args:
            schedule: Megatron's, for this run's pipeline.
            arguments: what `train_step` or `evaluate` passes it, all by keyword.
        """
        with annotate_peer_loss(f"iteration {self._state.iteration}"):
            if not arguments.get("forward_only"):
                return self._step(schedule, **arguments)
            if self.evaluation is None or not self.evaluation.balances(arguments):
                return schedule(**arguments)
            with self._state.sft_as(self._sft):
                return self._evaluation_step(schedule, self.evaluation, **arguments)

    def _step(self, schedule: Schedule, **arguments: Any) -> Any:
        iterators = arguments["data_iterator"]
        source = _first_iterator(iterators) if self._loads_data else None
        with with_step_context(f"iteration {self._state.iteration}"):
            step = self.prefetcher.balance(source, num_microbatches=arguments["num_microbatches"])
        if step.num_left:
            self._log.warn_once(
                f"another iterator came while {step.num_left} items pulled ahead from the last one waited: they are "
                "handed out when that one comes again. If the new one reads the same loader through a wrapper of its "
                "own, it continues after them: wrap the loader once, or set --no-balance-overlap.",
                topic="another iterator",
            )
        self.last_step = step
        if step.schedule is not None:
            self._log.warn_of_oversized(step.schedule)
        if self.observer is not None:
            self.observer.begin(step, iteration=self._state.iteration)
        if self._overlap and self._state.has_next_step:
            on_lost = functools.partial(warn_of_lost_peers, rank=dist.get_rank(), iteration=self._state.iteration + 1)
            self.prefetcher.prepare(source, num_microbatches=arguments["num_microbatches"], on_lost=on_lost)
        try:
            return self._run(schedule, step, arguments, observer=self.observer)
        finally:
            if self.observer is not None:
                self.observer.end()

    def _evaluation_step(self, schedule: Schedule, evaluation: BalancedEvaluation, **arguments: Any) -> Any:
        source = _first_iterator(arguments["data_iterator"]) if self._loads_data else None
        on_lost = functools.partial(warn_of_lost_peers, rank=dist.get_rank(), iteration=self._state.iteration)
        with with_step_context(f"evaluation after iteration {self._state.iteration}"):
            step = evaluation.step(source, num_microbatches=arguments["num_microbatches"], on_lost=on_lost)
        losses = self._run(schedule, step, arguments, observer=None)
        evaluation.check_sums(losses)
        return losses

    def _run(
        self, schedule: Schedule, step: BalancedStep, arguments: dict[str, Any], *, observer: RunObserver | None
    ) -> Any:
        """Megatron's schedule on the micro-batches of a step."""
        forward_step = self._for_each_microbatch(
            arguments["forward_step_func"], step, model=arguments["model"], observer=observer
        )
        arguments |= {
            "data_iterator": _hand_out(arguments["data_iterator"], lambda: map(copy.copy, step.microbatches or ())),
            "num_microbatches": step.num_microbatches,
            "micro_batch_size": 1,
            "forward_step_func": forward_step,
        }
        self.pipeline_shapes = planned_shapes(
            step.microbatch_tokens,
            topology=self.prefetcher.planner.topology,
            arguments=arguments,
            cp_sizes=step.cp_sizes,
        )
        self.in_step = True
        try:
            with variable_seq_lengths(arguments["model"]):
                return schedule(**arguments)
        finally:
            self.in_step = False
            self.pipeline_shapes = None
            if self.context is not None:
                restore_engine_attention(arguments["model"], groups=self.context.groups)

    def logged(self) -> None:
        """Called after Megatron has logged a step."""
        if self.observer is not None:
            with with_step_context(f"iteration {self._state.iteration}"):
                self.observer.logged(self._state.iteration)
                if not self._state.has_next_step:
                    self.observer.flush()  # before Megatron closes its writers

    def _for_each_microbatch(
        self, forward_step_func: Schedule, step: BalancedStep, *, model: Any, observer: RunObserver | None
    ) -> Schedule:
        """Megatron's forward step with the shape, the padding mask and the timer of each micro-batch."""
        padding = self._router_padding
        masks: list[Tensor] = []
        if padding is not None:
            check_takes_mask(model)
            masks = padding.masks(step)
        starts = packed_params_of(step, topology=self.prefetcher.planner.topology) if self._unpads else []
        slots: Counter[int] = Counter()  # of each model chunk; a schedule runs a chunk's micro-batches in order

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *rest: Any, **keywords: Any) -> Any:
            slot = slots[id(model)]
            slots[id(model)] += 1
            cp_size = None if step.cp_sizes is None else step.cp_sizes[slot]
            run = forward_step_func
            if self.context is not None and cp_size is not None:
                run = functools.partial(self.context.forward_step, forward_step_func, size=cp_size)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._state.microbatch_of(step.microbatch_tokens[slot], cp_size=cp_size))
                if padding is not None:
                    stack.enter_context(padding.given(masks[slot], model=model))
                if starts:
                    stack.enter_context(called_with(starts[slot], model=model))
                if observer is not None:
                    stack.enter_context(observer.forward(slot))
                return run(data_iterator, model, *rest, **keywords)

        return forward_step


def _first_iterator(iterators: Any) -> Iterator[Any] | None:
    """The iterator to pull from: chunks of a virtual pipeline all read the same rows."""
    candidates = iterators if isinstance(iterators, list) else [iterators]
    return next((iterator for iterator in candidates if iterator is not None), None)


def _hand_out(iterators: Any, make: Callable[[], Iterator[Any]]) -> Any:
    """As many new iterators as there were; every chunk of a virtual pipeline reads its own."""
    if isinstance(iterators, list):
        return [make() for _ in iterators]
    return make()


def balanced_forward_backward(args: Any) -> BalancedForwardBackward | None:
    """The balanced run, or None where the run stays stock. All ranks of the world take part.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BalanceError: on every rank: ranks were started differently, or one cannot start.
    """
    if not hasattr(args, "balance_data"):  # a script that parses no Megatron arguments
        return None
    run = agreed_run(args)
    log = RunLog(enabled=dist.is_initialized() and dist.get_rank() == 0)
    if run.stock_because:
        log.warn_once(stock_notice(args, reason=run.stock_because))
    if run.setup is None:
        return None
    if getattr(args, "balance_choices", None):
        log.say(f"--balance chose {'; '.join(args.balance_choices)}")
    for caution in run.cautions:
        log.warn_once(caution)
    setup = run.setup
    config = setup.config
    if setup.cap is not None:
        assert config.max_tokens_per_gpu is not None, "the cap is derived"
        log_cap(
            log,
            cap=setup.cap,
            tokens=config.max_tokens_per_gpu,
            seq_length=setup.seq_length,
            cp_size=setup.topology.dynamic_cp_sizes[-1],
        )
    if setup.exchange_source is not None:
        log.say(f"receiving a token's keys and values from context-parallel ranks: {setup.exchange_source}.")
    padding = RouterPadding.of_this_rank(setup.topology) if setup.counts_router_tokens else None
    state = MegatronState(args)
    prefetcher = _prefetcher(setup)
    if setup.resumed_from is not None:
        folder = state_folder(*setup.resumed_from)
        restore_state(prefetcher, folder=folder, lookahead=config.lookahead, timeout=setup.timeout)
    context = None
    if config.dynamic_cp:
        groups = make_context_groups(
            setup.topology.dynamic_cp_sizes, timeout=setup.timeout, for_routers=setup.counts_router_tokens
        )
        context = MicrobatchContext(groups)
        prepare_engine_attention()
    observer = build_watchers(setup, planner=prefetcher.planner, log=log)
    evaluation = None
    if setup.stock_evaluation:
        log.say(f"evaluation is Megatron's own: {setup.stock_evaluation}.")
    if setup.balances_evaluation:
        evaluation = balanced_evaluation(setup, training=prefetcher.planner, state=state)
    return BalancedForwardBackward(
        prefetcher,
        state=state,
        loads_data=loads_here(setup),
        overlap=config.overlap,
        log=log,
        observer=observer,
        router_padding=padding,
        context=context,
        unpads=config.unpad is not None,
        evaluation=evaluation,
    )


def _prefetcher(setup: RunSetup) -> StepPrefetcher:
    """This rank's prefetcher, with process groups of its own."""
    from megatron.core import parallel_state

    config, topology, timeout = setup.config, setup.topology, setup.timeout
    loads = loads_here(setup)
    dp_group = data_group(timeout=timeout, loads=loads)
    dp_rank = parallel_state.get_data_parallel_rank()
    device_exchange = None
    if config.exchange == "nccl":
        group = data_group(timeout=timeout, loads=loads, backend="nccl")
        if group is not None:
            device_exchange = DeviceExchange(group, device=torch.device("cuda", torch.cuda.current_device()))
    calibration = None
    if config.calibrate_online:
        calibration = _online_calibration(setup.cost_model, timeout=timeout)
    pool = None
    if config.lookahead > 1 and loads:
        pool = SamplePool(
            config.lookahead,
            global_batch_size=setup.global_batch_size,
            topology=topology,
            cost_model=setup.cost_model,
            rank=dp_rank,
            micro_batch_size=setup.micro_batch_size,
        )
    origin = None
    if setup.first_sample is not None:
        origin = SampleOrigin(setup.first_sample, setup.micro_batch_size, dp_rank=dp_rank, dp_size=topology.dp_size)
    planner = StepPlanner(
        config,
        topology=topology,
        limits=setup.limits,
        cost_model=setup.cost_model,
        dp_group=dp_group,
        dp_rank=dp_rank,
        cp_rank=parallel_state.get_context_parallel_rank(),
        calibration=calibration,
        origin=origin,
        ranks_per_node=dp_ranks_per_node(timeout=timeout),
        pin_memory=torch.cuda.is_available(),
        timeout=timeout,
        device_exchange=device_exchange,
    )
    return prefetcher_of(planner, setup=setup, pool=pool)


def _online_calibration(prior: CostModel, *, timeout: timedelta) -> OnlineCalibration | None:
    """The calibration shared by all ranks that load data; None on the others."""
    group = split_world(0 if is_first_of_tensor_group() else None, timeout=timeout)
    return None if group is None else OnlineCalibration(prior, group=group)
