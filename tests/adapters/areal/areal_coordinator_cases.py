"""AReaL's real coordinator on four ranks: two data-parallel, each with a second rank that holds no data."""

import functools
import time

import torch
import torch.distributed as dist
from areal.infra.dist_rollout import DistRolloutCoordinator
from areal_trajectories import digest, make_trajectory

from megatron_balance.adapters import areal
from megatron_balance.errors import BalanceError


@functools.cache
def _groups():
    """Collective: every rank makes every group."""
    dp_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replica_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return dp_groups[dist.get_rank() % 2], replica_groups[dist.get_rank() // 2]


class TrainEngine:
    """The part of AReaL's engines that the coordinator calls."""

    config = None
    data_parallel_world_size = 2

    def __init__(self):
        self.data_parallel_group, self.context_and_model_parallel_group = _groups()
        self.cpu_group = dist.group.WORLD
        self.data_parallel_rank = dist.get_rank() // 2

    def is_data_parallel_head(self):
        return dist.get_rank() % 2 == 0

    def current_data_parallel_head(self):
        return dist.get_rank() // 2 * 2


class RolloutEngine:
    """Trajectories of these lengths, whatever the prompts."""

    def __init__(self, lengths, *, fails=False, seconds=0.0):
        self.lengths, self.fails, self.seconds = lengths, fails, seconds
        self.calls = []

    def rollout_batch(self, data, workflow, workflow_kwargs=None, group_size=1):
        self.calls.append("rollout_batch")
        return self._trajectories()

    def prepare_batch(self, dataloader, workflow, **kwargs):
        self.calls.append("prepare_batch")
        next(iter(dataloader))
        return self._trajectories()

    def _trajectories(self):
        time.sleep(self.seconds)
        if self.fails:
            raise ConnectionError("the inference server is gone")
        first = 100 * dist.get_rank()
        return [make_trajectory(first + number, rows) for number, rows in enumerate(self.lengths)]


def coordinate(lengths, method, single_rank_load, fails_on=None, without_mask_on=None):
    """Result or error of a rank, and the rollouts that it called for."""
    engine = RolloutEngine(lengths[dist.get_rank()], fails=dist.get_rank() == fails_on)
    if dist.get_rank() == without_mask_on:
        make = engine._trajectories
        engine._trajectories = lambda: [{"rewards": trajectory["rewards"]} for trajectory in make()]
    coordinator = DistRolloutCoordinator(engine, TrainEngine())
    installed = areal.install(single_rank_load=single_rank_load)
    try:
        batch = getattr(coordinator, method)([["a prompt"]], workflow=None)
    except (BalanceError, ConnectionError) as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return {"calls": engine.calls, "error": (type(error).__name__, str(error)), "ranks": int(everyone)}
    finally:
        installed.undo()
    return {
        "calls": engine.calls,
        "ids": [int(trajectory["version"]) for trajectory in batch],
        "digests": [digest(trajectory) for trajectory in batch],
    }


def redistribute_as_areal_does(lengths, gather_all):
    """AReaL's function, hooked, with AReaL's result."""
    with_hooks = areal.install(gather_all=gather_all)
    from areal.infra import dist_rollout

    own = lengths[dist.get_rank()]
    result = dist_rollout.redistribute_trajectories(
        [make_trajectory(100 * dist.get_rank() + number, rows) for number, rows in enumerate(own)],
        packing_algorithm="kk",
    )
    with_hooks.undo()
    return {
        "type": type(result).__name__,
        "rank": result.rank,
        "group_indices": result.group_indices,
        "all": [None if trajectory is None else int(trajectory["version"]) for trajectory in result.all_data],
        "ids": [int(trajectory["version"]) for trajectory in result.data],
    }


def micro_batches(lengths, max_tokens, n_mbs=1, n_mbs_divisor=1):
    """AReaL's split of a padded batch, hooked: rows of each micro-batch, or what is raised."""
    from areal.api.cli_args import MicroBatchSpec
    from areal.utils.data import pad_sequences_to_tensors, split_padded_tensor_dict_into_mb_list

    rows = [{"input_ids": torch.full((length,), row + 1)} for row, length in enumerate(lengths[dist.get_rank()])]
    spec = MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=max_tokens, n_mbs_divisor=n_mbs_divisor)
    with_hooks = areal.install()
    try:
        split = split_padded_tensor_dict_into_mb_list(pad_sequences_to_tensors(rows), spec)
    except BalanceError as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return str(error), int(everyone)
    finally:
        with_hooks.undo()
    return [(mb["input_ids"].amax(1) - 1).tolist() for mb in split.mbs], split.group_lens
