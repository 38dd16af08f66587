"""Trajectories moved, one rank waited for and AReaL's real coordinator, on four gloo ranks.

For the coordinator two of them are data-parallel, each with a second rank that holds no data. Arguments and results of
what the ranks run pass through a pipe.
"""

import functools
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from areal.infra import dist_rollout
from areal_trajectories import make_trajectory, random_lengths, trajectory_digest
from gloo_ranks import run_ranks

from megatron_balance import BalanceError
from megatron_balance.adapters import areal

# What the ranks run --------------------------------------------------------------------------------------------------


def error_of(function):
    """The error of this rank, and how many ranks go on: the group works afterwards."""
    try:
        return function()
    except (BalanceError, ConnectionError) as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return {"error": f"{type(error).__name__}: {error}", "ranks": int(everyone)}


@functools.cache
def _groups(seconds=60):
    """Collective: every rank makes every group; those that move data wait for so long."""
    dp_groups = [dist.new_group(ranks, timeout=timedelta(seconds=seconds)) for ranks in ([0, 2], [1, 3])]
    replica_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return dp_groups[dist.get_rank() % 2], replica_groups[dist.get_rank() // 2]


class TrainEngine:
    """The part of AReaL's engines that the coordinator calls."""

    config = None
    data_parallel_world_size = 2

    def __init__(self, group_seconds=60):
        self.data_parallel_group, self.context_and_model_parallel_group = _groups(group_seconds)
        self.cpu_group = dist.group.WORLD
        self.data_parallel_rank = dist.get_rank() // 2

    def is_data_parallel_head(self):
        return dist.get_rank() % 2 == 0

    def current_data_parallel_head(self):
        return dist.get_rank() // 2 * 2


class RolloutEngine:
    """Trajectories of these lengths, whatever the prompts."""

    def __init__(self, lengths, *, fails=False, without_mask=False, no_dict=False, seconds=0):
        self.lengths, self.fails, self.seconds = lengths, fails, seconds
        self.without_mask, self.no_dict = without_mask, no_dict
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
        time.sleep(self.seconds)
        first = 100 * dist.get_rank()
        instance = [make_trajectory(first + number, rows) for number, rows in enumerate(self.lengths)]
        if self.no_dict:
            instance[-1] = [instance[-1]]
        return [{"rewards": trajectory["rewards"]} for trajectory in instance] if self.without_mask else instance


def coordinate(lengths, method, single_rank_load, group_seconds=60, at_fault=None, **faults):
    """Result or error of a rank, and the rollouts that it called for; one rank may be at fault."""
    rank = dist.get_rank()
    engine = RolloutEngine(lengths[rank], **(faults if at_fault in (rank, None) else {}))
    coordinator = dist_rollout.DistRolloutCoordinator(engine, TrainEngine(group_seconds))
    installed = areal.install(single_rank_load=single_rank_load)

    def batch():
        trajectories = getattr(coordinator, method)([["a prompt"]], workflow=None)
        return {
            "ids": [int(trajectory["version"]) for trajectory in trajectories],
            "digests": [trajectory_digest(trajectory) for trajectory in trajectories],
        }

    batches = error_of(batch)
    installed.undo()
    return {"calls": engine.calls, **batches}


def redistribute_as_areal_does(lengths):
    """AReaL's function, hooked, with AReaL's result."""
    installed = areal.install()
    local = lengths[dist.get_rank()]
    result = dist_rollout.redistribute_trajectories(
        [make_trajectory(100 * dist.get_rank() + number, rows) for number, rows in enumerate(local)],
        packing_algorithm="kk",
    )
    installed.undo()
    return {
        "type": type(result).__name__,
        "rank": result.rank,
        "group_indices": result.group_indices,
        "all": [int(trajectory["version"]) for trajectory in result.all_data],
        "ids": [int(trajectory["version"]) for trajectory in result.data],
    }


# What comes of it ----------------------------------------------------------------------------------------------------


def world(case, **arguments):
    """Runs a function of this file on four ranks."""
    return run_ranks(4, f"test_areal_ranks:{case}", **arguments)


def test_a_load_may_take_longer_than_the_group_waits():
    """R43, R56: the other ranks load nothing and do not time out."""
    results = world(
        "coordinate",
        lengths=lengths_of_heads(6, 6),
        method="rollout_batch",
        single_rank_load=True,
        group_seconds=1,
        seconds=2.5,
    )
    assert [result["calls"] for result in results] == [["rollout_batch"], [], [], []]
    assert all(result["ids"] for result in results)


def lengths_of_heads(*counts):
    """Ranks 0 and 2 are the data-parallel heads; the others have no rollouts."""
    rng = np.random.default_rng(1)
    return [random_lengths(rng, num_trajectories=count) for count in (counts[0], 0, counts[1], 0)]


@pytest.mark.parametrize("method", ["rollout_batch", "prepare_batch"])
@pytest.mark.parametrize(("counts", "single"), [((6, 6), False), ((8, 7), False), ((15, 5), True)])
def test_the_coordinator_gives_every_head_its_share(method, counts, single):
    """R43, R44, R56: with single_rank_load rank 0 scatters; the other head has rollouts it could load, and does not.

    Without it numbers may differ among the heads: AReaL raises, and for 15 trajectories as well.
    """
    lengths = lengths_of_heads(*counts)
    results = world("coordinate", lengths=lengths, method=method, single_rank_load=single)
    assert [result["calls"] for result in results] == [[method], [], [] if single else [method], []]
    sources = [0] if single else [0, 2]
    rolled_out = {100 * rank + number: rows for rank in sources for number, rows in enumerate(lengths[rank])}
    for head, follower in ((0, 1), (2, 3)):
        assert results[head]["ids"] == results[follower]["ids"]
        assert results[head]["digests"] == results[follower]["digests"]
    assert sorted(results[0]["ids"] + results[2]["ids"]) == sorted(rolled_out)
    for result in results:
        expected = [trajectory_digest(make_trajectory(number, rolled_out[number])) for number in result["ids"]]
        assert result["digests"] == expected
    tokens = [sum(map(sum, (rolled_out[number] for number in results[head]["ids"]))) for head in (0, 2)]
    assert max(tokens) <= 1.1 * min(tokens)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"at_fault": 0, "fails": True, "single_rank_load": True}, "ConnectionError: the inference server is gone"),
        ({"at_fault": 2, "without_mask": True}, "attention_mask is a NoneType"),
        ({"at_fault": 2, "no_dict": True}, "AttributeError: 'list' object has no attribute"),
        ({"lengths": [[[5]], [], [], []]}, "1 items (or groups of them) for 2 parts"),
    ],
)
def test_what_one_head_meets_raises_on_ranks_without_data_too(arguments, text):
    results = world(
        "coordinate",
        **{"lengths": lengths_of_heads(4, 4), "method": "prepare_batch", "single_rank_load": False, **arguments},
    )
    assert [result["ranks"] for result in results] == [4] * 4
    assert all(text in result["error"] for result in results)


def test_the_result_is_areals():
    """R46: of AReaL's own type, with a list of dicts."""
    lengths = [[[3, 5]], [[2], [9]], [[7]], [[1, 1, 1]]]
    ids = [0, 100, 101, 200, 300]
    results = world("redistribute_as_areal_does", lengths=lengths)
    assert sorted(index for part in results[0]["group_indices"] for index in part) == [0, 1, 2, 3, 4]
    for rank, result in enumerate(results):
        local = results[0]["group_indices"][rank]
        assert (result["type"], result["rank"]) == ("RedistributedData", rank)
        assert result["group_indices"] == results[0]["group_indices"]
        assert result["ids"] == [ids[index] for index in local]
        assert result["all"] == ids
