"""Functions that each rank of the test world runs, and AReaL's real coordinator on it.

Four ranks; for the coordinator two of them data-parallel, each with a second rank that holds no data. Arguments and
results pass through a pipe.
"""

import functools
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from areal.api.cli_args import MicroBatchSpec
from areal.infra import dist_rollout
from areal.utils.data import pad_sequences_to_tensors, split_padded_tensor_dict_into_mb_list
from areal_trajectories import make_trajectory, row_digests, trajectory_digest

from megatron_balance import BalanceError, CostModel
from megatron_balance.adapters import areal


def own_trajectories(lengths: list[list[list[int]]]) -> list[dict]:
    """Those of this rank, numbered over all ranks."""
    rank = dist.get_rank()
    first = sum(map(len, lengths[:rank]))
    return [make_trajectory(first + index, rows) for index, rows in enumerate(lengths[rank])]


def error_of(function):
    """The error of this rank, and how many ranks go on: the group works afterwards."""
    try:
        return function()
    except (BalanceError, ConnectionError) as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return {"error": f"{type(error).__name__}: {error}", "ranks": int(everyone)}


def move(lengths):
    own = own_trajectories(lengths)
    moved = areal.redistribute(own, group=dist.group.WORLD, cost_model=CostModel.tokens())
    return {
        "ids_per_rank": moved.ids_per_rank,
        "digests": [trajectory_digest(trajectory) for trajectory in moved.trajectories],
    }


FAULTS = {
    "dtype": lambda rows: rows[-1].update(logprobs=rows[-1]["logprobs"].double()),
    "object": lambda rows: rows[-1].update(name=lambda: None),
    "none": lambda rows: None,
}


def refuse(lengths, fault, at_fault):
    trajectories = own_trajectories(lengths)
    if dist.get_rank() == at_fault:
        FAULTS[fault](trajectories)
    return error_of(
        lambda: areal.redistribute(trajectories, group=dist.group.WORLD, cost_model=CostModel.tokens()).ids_per_rank
    )


def scatter(lengths, source):
    batches = None
    if dist.get_rank() == source:
        batches = [make_trajectory(number, rows) for number, rows in enumerate(lengths)]
    batch = areal.distributed_batch(batches, group=dist.group.WORLD)
    return {
        "shapes": {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)},
        "longest": int(batch["attention_mask"].sum(1).max()),
        "rows": row_digests(batch),
    }


def wait_longer_than_the_group(seconds, group_seconds, source):
    """A load that takes longer than the group that moves the data waits; then the data moves in that group."""
    group = dist.new_group(timeout=timedelta(seconds=group_seconds), backend="gloo")
    single, calls = areal.SingleRankLoad(loads=dist.get_rank() == source), []

    def load():
        calls.append(dist.get_rank())
        time.sleep(seconds)
        return [make_trajectory(number, [number + 1]) for number in range(8)]

    batch = areal.distributed_batch(single.run(load), group=group)
    return calls, len(batch["attention_mask"])


def load_that_fails(source):
    single = areal.SingleRankLoad(loads=dist.get_rank() == source)
    outcomes = []
    for attempt in range(2):
        try:
            outcomes.append(single.run(lambda attempt=attempt: [{}[f"prompt {attempt}"]]))
        except (KeyError, BalanceError) as error:
            outcomes.append((type(error).__name__, str(error)))
    outcomes.append(single.run(lambda: ["later"]))
    return outcomes


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

    def __init__(self, lengths, *, fails, without_mask):
        self.lengths, self.fails, self.without_mask = lengths, fails, without_mask
        self.calls = []

    def rollout_batch(self, data, workflow, workflow_kwargs=None, group_size=1):
        self.calls.append("rollout_batch")
        return self._trajectories()

    def prepare_batch(self, dataloader, workflow, **kwargs):
        self.calls.append("prepare_batch")
        next(iter(dataloader))
        return self._trajectories()

    def _trajectories(self):
        if self.fails:
            raise ConnectionError("the inference server is gone")
        first = 100 * dist.get_rank()
        made = [make_trajectory(first + number, rows) for number, rows in enumerate(self.lengths)]
        return [{"rewards": one["rewards"]} for one in made] if self.without_mask else made


def coordinate(lengths, method, single_rank_load, fails_on=None, without_mask_on=None):
    """Result or error of a rank, and the rollouts that it called for."""
    rank = dist.get_rank()
    engine = RolloutEngine(lengths[rank], fails=rank == fails_on, without_mask=rank == without_mask_on)
    coordinator = dist_rollout.DistRolloutCoordinator(engine, TrainEngine())
    installed = areal.install(single_rank_load=single_rank_load)

    def batch():
        trajectories = getattr(coordinator, method)([["a prompt"]], workflow=None)
        return {
            "ids": [int(trajectory["version"]) for trajectory in trajectories],
            "digests": [trajectory_digest(trajectory) for trajectory in trajectories],
        }

    found = error_of(batch)
    installed.undo()
    return {"calls": engine.calls, **found}


def redistribute_as_areal_does(lengths):
    """AReaL's function, hooked, with AReaL's result."""
    installed = areal.install()
    own = lengths[dist.get_rank()]
    result = dist_rollout.redistribute_trajectories(
        [make_trajectory(100 * dist.get_rank() + number, rows) for number, rows in enumerate(own)],
        packing_algorithm="kk",
    )
    installed.undo()
    return {
        "type": type(result).__name__,
        "rank": result.rank,
        "group_indices": result.group_indices,
        "all": [None if trajectory is None else int(trajectory["version"]) for trajectory in result.all_data],
        "ids": [int(trajectory["version"]) for trajectory in result.data],
    }


def micro_batches(lengths, max_tokens, n_mbs=1, n_mbs_divisor=1):
    """AReaL's split of a padded batch, hooked: rows of each micro-batch, or what is raised."""
    rows = [{"input_ids": torch.full((length,), row + 1)} for row, length in enumerate(lengths[dist.get_rank()])]
    spec = MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=max_tokens, n_mbs_divisor=n_mbs_divisor)

    def split():
        found = split_padded_tensor_dict_into_mb_list(pad_sequences_to_tensors(rows), spec)
        return [(mb["input_ids"].amax(1) - 1).tolist() for mb in found.mbs], found.group_lens

    installed = areal.install()
    found = error_of(split)
    installed.undo()
    return found
