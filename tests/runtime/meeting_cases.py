"""Steps of a StepPlanner on each rank of a test world, whose collectives are counted."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from exchange_cases import small_sample

from benchmarks.scale.counted import counted_collectives
from benchmarks.scale.meeting_rank import World, meet
from megatron_balance import BalanceError, CostModel, Limits, Topology
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.pull_ahead import Fetched
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.runtime.gather import GatheredLengths, gather_lengths
from megatron_balance.samples.sample import SampleSchema

CAP = 64


def _planner() -> StepPlanner:
    group = dist.group.WORLD
    assert group is not None
    config = BalanceConfig(
        use_dynamic_batch_size=True, max_tokens_per_gpu=CAP, balance_data=True, balance_by_flops=True
    )
    costs = CostModel(linear=10, quadratic=1)
    return StepPlanner(config, topology=Topology(group.size()), limits=Limits(CAP), cost_model=costs, dp_group=group)


def _row(lengths: list[int]) -> dict[str, torch.Tensor]:
    stops = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(int(stops[-1])).unsqueeze(0)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(1, tokens.numel()),
        "cu_seqlens": stops.to(torch.int32).unsqueeze(0),
        "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32),
    }


def gathers_of_steps(*, counts: list[list[int]]) -> list[list[str] | str]:
    """The collectives of every step but for messages between two ranks, or its error.

    Args:
        counts: `[num_steps][num_ranks]` sequences of a rank's row; 0 for a row that cannot be split.
    """
    planner, rank = _planner(), dist.get_rank()
    outcomes: list[list[str] | str] = []
    for step, of_ranks in enumerate(counts):
        row = _row([1 + index % 3 for index in range(of_ranks[rank])] or [1])
        if of_ranks[rank] == 0:
            row["labels"] = row["labels"][:, :0]
        with counted_collectives() as calls:
            try:
                planner.make(Fetched([row]), num_items=1, pool=None, step=step)
            except BalanceError as error:
                outcomes.append(str(error))
            else:
                outcomes.append([call.kind for call in calls if call.kind not in ("isend", "irecv")])
    return outcomes


def rows_of_gathers(*, num_samples: list[int], ranks_with: int) -> list[tuple[int, int]]:
    """All-gathers of each gather, where each has the row that the one before advises; and the advice that follows."""
    group = dist.group.WORLD
    assert group is not None
    schema = SampleSchema.of(small_sample(1, np.random.default_rng(0)))
    outcomes: list[tuple[int, int]] = []
    row: dict[str, Any] = {}
    for count in num_samples:
        own = count if group.rank() < ranks_with else 1
        with counted_collectives() as calls:
            gathered = gather_lengths(range(1, own + 1), group=group, schema=schema, **row)
        expected = [n for rank in range(group.size()) for n in range(1, (count if rank < ranks_with else 1) + 1)]
        assert gathered.lengths.tolist() == expected
        row = {"row_values": gathered.next_row_values}
        outcomes.append((len(calls), gathered.next_row_values))
    return outcomes


def plans_differ(*, how: str) -> str:
    """The error where rank 1 follows another plan than rank 0.

    Args:
        how: `slots`: the same samples in other micro-batches; `short`: rank 1 expects a sample that rank 0 keeps;
            `long`: it does not expect one that rank 0 sends.
    """
    planner, rank = _planner(), dist.get_rank()
    if rank == 1:
        planner._plan = functools.partial(_other_plan, planner._plan, how=how)  # type: ignore[method-assign]
    try:
        planner.make(Fetched([_row([[30, 20, 21, 10, 25, 33], [9, 8]][rank])]), num_items=1, pool=None)
    except BalanceError as error:
        return str(error)
    raise AssertionError("a step was made")


def _other_plan(plan: Callable[[GatheredLengths], DataSchedule], gathered: GatheredLengths, *, how: str) -> Any:
    schedule = plan(gathered)
    slots = schedule.num_microbatches
    rank, slot = np.divmod(schedule.slot_of, slots)
    if how == "slots":
        assert slots > 1
        return replace(schedule, slot_of=rank * slots + (slot + 1) % slots)
    sample = np.flatnonzero((gathered.home_ranks == 0) & (rank == (0 if how == "short" else 1)))[0]
    rank[sample] = 1 - rank[sample]
    return replace(schedule, slot_of=rank * slots + slot)


def counted_and_expected(*, replica_size: int) -> dict[str, Any]:
    """Meetings of a run on this world, and what the formulas say of them."""
    return meet(World(dist.get_world_size(), replica_size))
