"""Makes the prefetcher of this rank, for training or evaluation, and the groups of its model replica."""

from __future__ import annotations

import functools

import torch

from megatron_balance.mcore.setup.groups import is_first_of_tensor_group, loads_data, replica_groups
from megatron_balance.mcore.setup.run_setup import RunSetup
from megatron_balance.mcore.step.packs import stage_microbatches
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.runtime.replica import Replica


def loads_here(setup: RunSetup) -> bool:
    """True if this rank loads and exchanges samples."""
    return loads_data(on_every_stage=setup.loads_on_every_stage, on_every_tensor_rank=setup.loads_on_every_tensor_rank)


def prefetcher_of(planner: StepPlanner, *, setup: RunSetup, replica: Replica | None = None) -> StepPrefetcher:
    """The prefetcher. Every rank of the world calls it.

    Args:
        planner: of this rank.
        setup: of the run.
        replica: of another prefetcher; made now where there is none yet.
    """
    pack_starts = None
    if not loads_here(setup) and (setup.loads_on_every_tensor_rank or is_first_of_tensor_group()):
        pack_starts = functools.partial(
            stage_microbatches, topology=setup.topology, pin_memory=torch.cuda.is_available()
        )
    some_load_nothing = not setup.loads_on_every_stage and setup.topology.pp_size > 2
    return StepPrefetcher(
        planner,
        replica=replica or replica_groups(timeout=setup.timeout, tensor_ranks_load=setup.loads_on_every_tensor_rank),
        shares_lengths=setup.counts_router_tokens or setup.config.unpad is not None or some_load_nothing,
        pack_starts=pack_starts,
    )
