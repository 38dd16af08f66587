"""Functions that each rank of a test world runs, without AReaL. Arguments and results pass through a pipe."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from areal_trajectories import digest, make_trajectory, row_digests, with_images

from megatron_balance.adapters.areal import SingleRankLoad, distributed_batch, redistribute
from megatron_balance.adapters.areal.plan import plan_agreed_microbatches
from megatron_balance.adapters.areal.trajectories import row_lengths
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape


def own_trajectories(lengths: list[list[list[int]]]) -> list[dict]:
    """Those of this rank, numbered over all ranks."""
    rank = dist.get_rank()
    first = sum(map(len, lengths[:rank]))
    return [make_trajectory(first + index, rows) for index, rows in enumerate(lengths[rank])]


def move(lengths, gather_all=False, cost_model=None):
    moved = redistribute(
        own_trajectories(lengths),
        group=dist.group.WORLD,
        cost_model=cost_model or CostModel.tokens(),
        gather_all=gather_all,
    )
    return {
        "ids_per_rank": moved.ids_per_rank,
        "digests": [digest(trajectory) for trajectory in moved.trajectories],
        "everything": None if moved.everything is None else [digest(trajectory) for trajectory in moved.everything],
    }


def move_images(patches):
    """Patches of each trajectory that this rank has afterwards; `patches[rank]` are those that it loads."""
    rank = dist.get_rank()
    trajectories = [
        with_images(make_trajectory(number, [20]), patches=of_row) for number, of_row in enumerate(patches[rank])
    ]
    encoder = ModelShape.preset("Qwen2.5-VL-7B").vision
    cost_model = CostModel(linear=1, image_linear=1)
    moved = redistribute(trajectories, group=dist.group.WORLD, cost_model=cost_model, encoder=encoder)
    return [
        sum(len(row.get("pixel_values", ())) for row in trajectory["multi_modal_input"])
        for trajectory in moved.trajectories
    ]


def refuse(lengths, fault, at_fault):
    """The error of each rank where one has a fault; the group works afterwards."""
    trajectories = own_trajectories(lengths)
    if dist.get_rank() == at_fault:
        last = trajectories[-1] if trajectories else {}
        if fault == "key":
            last["reward_model"] = torch.ones(1)
        elif fault == "own key":
            trajectories[0]["reward_model"] = torch.ones(1)
        elif fault == "dtype":
            last["logprobs"] = last["logprobs"].double()
        elif fault == "mask":
            del last["attention_mask"]
        elif fault == "object":
            last["name"] = lambda: None
        elif fault == "sparse":
            last["rewards"] = last["rewards"].to_sparse()
    try:
        redistribute(trajectories, group=dist.group.WORLD, cost_model=CostModel.tokens())
    except BalanceError as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return str(error), int(everyone)
    return None


def scatter(lengths, source):
    batches = None
    if dist.get_rank() == source:
        batches = [make_trajectory(number, rows) for number, rows in enumerate(lengths)]
    batch = distributed_batch(batches, group=dist.group.WORLD)
    return {
        "shapes": {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)},
        "longest": max(row_lengths(batch)),
        "rows": row_digests(batch),
    }


def pack_alike(lengths, max_tokens, min_microbatches=1, divisor=1):
    """Micro-batches of this rank, or what it raises."""
    try:
        return plan_agreed_microbatches(
            lengths[dist.get_rank()],
            max_tokens=max_tokens,
            min_microbatches=min_microbatches,
            divisor=divisor,
            cost_model=CostModel(linear=100, quadratic=1),
            group=dist.group.WORLD,
        )
    except BalanceError as error:
        everyone = torch.ones(1)
        dist.all_reduce(everyone)
        return str(error), int(everyone)


def wait_longer_than_the_group(seconds, group_seconds, source):
    """A load that takes longer than the group that moves the data waits; then the data moves in that group."""
    group = dist.new_group(timeout=timedelta(seconds=group_seconds), backend="gloo")
    single = SingleRankLoad(loads=dist.get_rank() == source)
    calls = []

    def load():
        calls.append(dist.get_rank())
        time.sleep(seconds)
        return [make_trajectory(number, [number + 1]) for number in range(8)]

    batch = distributed_batch(single.run(load), group=group)
    return calls, len(batch["attention_mask"])


def wait_in_the_group(seconds, group_seconds, source):
    """The same without `SingleRankLoad`: what waiting in the group that moves the data comes to."""
    group = dist.new_group(timeout=timedelta(seconds=group_seconds), backend="gloo")
    if dist.get_rank() == source:
        time.sleep(seconds)
        return "loaded"
    try:
        dist.broadcast(torch.zeros(1), src=source, group=group)
    except RuntimeError as error:
        return str(error)
    return "waited"


def load_that_fails(source):
    single = SingleRankLoad(loads=dist.get_rank() == source)
    outcomes = []
    for attempt in range(2):
        try:
            outcomes.append(single.run(lambda attempt=attempt: [{}[f"prompt {attempt}"]]))
        except (KeyError, BalanceError) as error:
            outcomes.append((type(error).__name__, str(error)))
    outcomes.append(single.run(lambda: ["later"]))
    return outcomes


def ranks_that_all_load(ranks):
    try:
        SingleRankLoad(loads=dist.get_rank() in ranks)
    except BalanceError as error:
        return str(error)
    return None
