"""Builds the balanced run of this rank: process groups, planner, prefetcher and watchers.

Invariant: every rank of the world makes the same groups in the same order, those of other ranks among them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_balance.mcore.dynamic_cp import MicrobatchContext, connect, make_context_groups
from megatron_balance.mcore.evaluation import BalancedEvaluation
from megatron_balance.mcore.forward_backward import BalancedForwardBackward
from megatron_balance.mcore.model_keywords import RouterPadding
from megatron_balance.mcore.setup.layout import Layout
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.setup.settings import Settings, settings_of_args, timeout_of
from megatron_balance.mcore.setup.start import agreed_settings
from megatron_balance.mcore.setup.state import LoopState, MegatronState
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.watch import Watch


def balanced_forward_backward(args: Namespace) -> BalancedForwardBackward | None:
    """The balanced run of Megatron's training loop, or None where it stays stock; arguments validated.

    Raises:
        BalanceError: on every rank: ranks were started differently, or one cannot start.
    """
    if not hasattr(args, "balance_data"):  # a script that parses no Megatron arguments
        return None
    return build_run(
        vars(args), read=lambda: settings_of_args(args), timeout=timeout_of(args), state=MegatronState(args)
    )


def build_run(
    options: Mapping[str, Any],
    *,
    read: Callable[[], Settings],
    timeout: timedelta,
    state: LoopState,
) -> BalancedForwardBackward | None:
    """The balanced run of any loop; arguments as for `agreed_settings`. All ranks of the world take part."""
    log = RunLog(enabled=dist.is_initialized() and dist.get_rank() == 0)
    settings = agreed_settings(options, read=read, timeout=timeout, log=log)
    if settings is None:
        return None
    topology = settings.topology
    layout = Layout.of_world(
        timeout=settings.timeout,
        on_every_stage=settings.loads_on_every_stage,
        on_every_tensor_rank=settings.loads_on_every_tensor_rank,
    )
    planner = StepPlanner(
        settings,
        dp_group=layout.data_group(timeout=settings.timeout),
        dp_rank=layout.own.dp,
        cp_rank=layout.own.cp,
        ranks_per_node=layout.ranks_per_node,
    )
    prefetcher = StepPrefetcher(
        planner,
        replica=layout.replica(timeout=settings.timeout),
        reads_starts=not layout.loads_data and (layout.on_every_tensor_rank or layout.is_first_of_tensor_group),
    )
    context = None
    if topology.dynamic_cp:
        groups = make_context_groups(
            topology.dynamic_cp_sizes,
            layout=layout,
            timeout=settings.timeout,
            for_routers=settings.counts_router_tokens,
        )
        taken = connect(groups)
        if taken:
            log.say(f"connecting context-parallel groups took {taken / 2**20:.0f} MiB of device memory on rank 0.")
        context = MicrobatchContext(groups)
    evaluation = None
    if settings.eval_limits is not None:
        evaluation = BalancedEvaluation(prefetcher, limits=settings.eval_limits, state=state)
    return BalancedForwardBackward(
        prefetcher,
        state=state,
        loads_data=layout.loads_data,
        overlap=settings.overlap,
        log=log,
        observer=Watch(settings, layout=layout, planner=planner, log=log) if layout.loads_data else None,
        router_padding=RouterPadding.of_this_rank(topology) if settings.counts_router_tokens else None,
        context=context,
        unpads=settings.unpad is not None,
        evaluation=evaluation,
    )
