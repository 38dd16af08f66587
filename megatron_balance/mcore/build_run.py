"""Builds the balanced run of this rank from Megatron's arguments: process groups, planner, prefetcher and watchers.

Invariant: every rank of the world makes the same groups in the same order, those of other ranks among them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.mcore.dynamic_cp import MicrobatchContext, connect, make_context_groups
from megatron_balance.mcore.evaluation import BalancedEvaluation
from megatron_balance.mcore.forward_backward import BalancedForwardBackward
from megatron_balance.mcore.model_keywords import RouterPadding
from megatron_balance.mcore.options import stock_notice
from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.megatron_state import MegatronState
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.setup.run_setup import RunSetup, agreed_run
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.step.source import SampleOrigin
from megatron_balance.mcore.telemetry.watch import build_watch


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
    if setup.extrapolation:
        log.warn_once(setup.extrapolation)
    if setup.exchange_source is not None:
        log.say(f"receiving a token's keys and values from context-parallel ranks: {setup.exchange_source}.")
    if setup.attention_rate is not None:
        rate, reason = setup.attention_rate
        log.say(f"FLOPs count attention at {rate:g} times the rate of all else: {reason}.")
    padding = RouterPadding.of_this_rank(setup.topology) if setup.counts_router_tokens else None
    state = MegatronState(args)
    layout = Layout.of_world(
        timeout=setup.timeout,
        on_every_stage=setup.loads_on_every_stage,
        on_every_tensor_rank=setup.loads_on_every_tensor_rank,
    )
    prefetcher = _prefetcher(setup, layout=layout)
    context = None
    if config.dynamic_cp:
        groups = make_context_groups(
            setup.topology.dynamic_cp_sizes,
            layout=layout,
            timeout=setup.timeout,
            for_routers=setup.counts_router_tokens,
        )
        taken = connect(groups)
        if taken:
            log.say(f"connecting context-parallel groups took {taken / 2**20:.0f} MiB of device memory on rank 0.")
        context = MicrobatchContext(groups)
    observer = build_watch(setup, layout=layout, planner=prefetcher.planner, log=log)
    evaluation = None
    if setup.stock_evaluation:
        log.say(f"evaluation is Megatron's own: {setup.stock_evaluation}.")
    if setup.balances_evaluation:
        limits = config.limits(micro_batch_size=setup.eval_micro_batch_size, topology=setup.topology)
        evaluation = BalancedEvaluation(prefetcher, limits=limits, state=state)
    return BalancedForwardBackward(
        prefetcher,
        state=state,
        loads_data=prefetcher.planner.loads_data,
        overlap=config.overlap,
        log=log,
        observer=observer,
        router_padding=padding,
        context=context,
        unpads=config.unpad is not None,
        evaluation=evaluation,
    )


def _prefetcher(setup: RunSetup, *, layout: Layout) -> StepPrefetcher:
    """This rank's prefetcher, with process groups of its own."""
    config, topology, dp_rank = setup.config, setup.topology, layout.own.dp
    origin = None
    if setup.first_sample is not None:
        origin = SampleOrigin(setup.first_sample, setup.micro_batch_size, dp_rank=dp_rank, dp_size=topology.dp_size)
    planner = StepPlanner(
        config,
        topology=topology,
        limits=setup.limits,
        cost_model=setup.cost_model,
        patch_values=setup.patch_values,
        dp_group=layout.data_group(timeout=setup.timeout),
        dp_rank=dp_rank,
        cp_rank=layout.own.cp,
        origin=origin,
        ranks_per_node=layout.ranks_per_node,
        pin_memory=torch.cuda.is_available(),
        timeout=setup.timeout,
    )
    return StepPrefetcher(
        planner,
        replica=layout.replica(timeout=setup.timeout),
        reads_starts=not layout.loads_data and (layout.on_every_tensor_rank or layout.is_first_of_tensor_group),
    )
