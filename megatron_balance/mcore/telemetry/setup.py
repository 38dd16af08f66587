"""Builds this rank's watchers from the flags and its place in the parallel layout.

Invariant: an error with the record's folder on one rank is raised on every rank that watches, before training.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import atexit
import contextlib
import functools
from pathlib import Path

import torch.distributed as dist

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.groups import is_first_of_replica, is_first_of_tensor_group, split_world
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.setup.run_setup import RunSetup
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.telemetry.device_memory import DeviceMemory
from megatron_balance.mcore.telemetry.observer import RunObserver, Watcher
from megatron_balance.mcore.telemetry.recording import RunRecording
from megatron_balance.mcore.telemetry.run_metrics import RunMetrics
from megatron_balance.mcore.telemetry.scalars import flush_scalars
from megatron_balance.planner import resolve_objective
from megatron_balance.record.run_record import RunInfo
from megatron_balance.runtime.environment import device_kind, environment
from megatron_balance.runtime.failure import Failure, raise_together
from megatron_balance.runtime.peers import PeerError
from megatron_balance.runtime.rank_seconds import NOT_MEASURING
from megatron_balance.runtime.resources import close_on_undo


def build_watchers(setup: RunSetup, *, planner: StepPlanner, log: RunLog) -> RunObserver | None:
    """The watchers of this rank; None where it takes no part. Every rank calls it, in the same order.

    Args:
        setup: the run's settings.
        planner: plans this rank's steps.
        log: prints.

    Raises:
        BalanceError: the record's folder cannot be written to; on every rank that watches.
    """
    measures = is_first_of_tensor_group()
    writes = dist.get_rank() == dist.get_world_size() - 1  # Megatron's writers are on the last rank
    config = setup.config
    group = split_world(0 if measures or writes else None, timeout=setup.timeout)
    if group is None:
        return None
    dp_rank, dp_size = planner.dp_rank, planner.topology.dp_size
    if planner.topology.dynamic_cp:  # ranks of a model replica run different micro-batches: each represents itself
        dp_rank, dp_size = planner.leaf, planner.topology.num_leaves
    metrics = RunMetrics(
        log,
        log_interval=setup.log_interval,
        group=group,
        dp_rank=dp_rank if measures else NOT_MEASURING,
        dp_size=dp_size,
        num_cp_sizes=len(planner.topology.dynamic_cp_sizes) if planner.topology.dynamic_cp else 0,
    )
    watchers: list[Watcher] = [metrics]
    if config.record is not None:
        resume = setup.resumed_from is not None
        recording = _recording(
            config, folder=Path(config.record), planner=planner, dp_rank=dp_rank, resume=resume, group=group
        )
        if recording is not None:
            watchers.append(recording)
    if planner.loads_data:
        watchers.append(DeviceMemory(planner, log=log))
    times_passes = measures and not setup.overlaps_passes
    observer = RunObserver(watchers, times_passes=times_passes, on_gpu=device_kind() == "cuda")
    flush = functools.partial(_flush_at_exit, observer)
    atexit.register(flush)
    close_on_undo(functools.partial(atexit.unregister, flush))
    close_on_undo(flush)
    return observer


def _flush_at_exit(observer: RunObserver) -> None:
    with contextlib.suppress(PeerError):  # the run has ended; if by an error, by that of the lost peer
        observer.flush()
    flush_scalars()


def _recording(
    config: BalanceConfig,
    *,
    folder: Path,
    planner: StepPlanner,
    dp_rank: int,
    resume: bool,
    group: dist.ProcessGroup,
) -> RunRecording | None:
    """This rank's part of the record, None where it has none."""
    recording, failure = None, None
    if is_first_of_replica(of_leaf=planner.topology.dynamic_cp):
        try:
            recording = RunRecording(
                folder,
                info=_run_info(config, planner=planner) if group.rank() == 0 else None,
                dp_rank=dp_rank,
                resume=resume,
            )
        except OSError as error:
            failure = Failure(
                BalanceError(f"--balance-record {folder}: {error}. Name a folder that every node can write to.")
            )
    raise_together(failure, group=group, what="that all ranks have opened the record")
    return recording


def _run_info(config: BalanceConfig, *, planner: StepPlanner) -> RunInfo:
    return RunInfo(
        topology=planner.topology,
        limits=planner.limits,
        cost_model=planner.cost_model,
        cost_name=config.cost_name,
        objective=resolve_objective(config.objective, topology=planner.topology),
        policy=config.policy,
        origin=environment(device_kind()),
    )
