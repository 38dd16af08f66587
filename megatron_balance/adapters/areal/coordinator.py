"""Replaces AReaL's redistribution after a rollout: the function, and the coordinator method that calls it.

Only data-parallel heads redistribute; the other ranks of a replica wait for them in a barrier. So errors of the heads
are gathered on all ranks before that barrier.

Invariants: signatures and results are AReaL's; an error on one rank, head or not, raises on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.adapters.areal.transport import redistribute
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Hook
from megatron_balance.model.vision import VisionEncoder
from megatron_balance.runtime.gather import gather_lengths

_MODULE = "areal.infra.dist_rollout"


class _Moved(list[Any]):
    """Marks trajectories that were redistributed already, and holds the result to return for them."""

    result: Any


def redistribution_hooks(
    *, cost_model: CostModel, ep_size: int, encoder: VisionEncoder | None, gather_all: bool
) -> tuple[Hook, ...]:
    """The hooks of the redistribution; arguments as in `ArealOptions`."""

    def redistribute_trajectories(
        trajectories: list[dict[str, Any]], group: dist.ProcessGroup | None = None, packing_algorithm: str = "ffd"
    ) -> Any:
        # packing_algorithm names one of AReaL's algorithms, which the planner replaces.
        from areal.infra.dist_rollout import RedistributedData

        if isinstance(trajectories, _Moved):
            return trajectories.result
        group = group_or_world(group)
        moved = redistribute(
            trajectories,
            group=group,
            cost_model=cost_model,
            ep_size=ep_size,
            encoder=encoder,
            gather_all=gather_all,
            device=buffer_device(group),
        )
        all_data: list[Any] | None = moved.everything
        if all_data is None:
            all_data = [None] * sum(map(len, moved.ids_per_rank))
            for index, trajectory in zip(moved.ids_per_rank[group.rank()], moved.trajectories, strict=True):
                all_data[index] = trajectory
        return RedistributedData(
            all_data=all_data, data=moved.trajectories, rank=group.rank(), group_indices=moved.ids_per_rank
        )

    def with_failures_shared(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, trajectories: list[dict[str, Any]] | None) -> Any:
            problem = None
            if trajectories is not None:
                moved = _Moved()
                try:
                    moved.result = redistribute_trajectories(trajectories, self.train_engine.data_parallel_group)
                except BalanceError as error:
                    problem = str(error)
                trajectories = moved
            gather_lengths([], group=group_or_world(self.train_engine.cpu_group), problem=problem)
            return method(self, trajectories)

        return wrapper

    return (
        Hook(
            target=f"{_MODULE}:redistribute_trajectories",
            bound_in=(_MODULE,),
            parameters=("trajectories", "group", "packing_algorithm"),
            wrap=lambda _: redistribute_trajectories,
            why="balances by our cost, moves each trajectory once, accepts any number of trajectories a rank",
            until="AReaL's redistribution takes an allocation function and lists of different lengths",
        ),
        Hook(
            target=f"{_MODULE}:DistRolloutCoordinator._broadcast_and_redistribute_trajectories",
            bound_in=(f"{_MODULE}:DistRolloutCoordinator",),
            parameters=("self", "trajectories"),
            wrap=with_failures_shared,
            why="an error of a data-parallel head raises on the ranks that wait for it too",
            until="AReaL's ranks agree on failure before one raises",
        ),
    )


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or all ranks, which AReaL means by None."""
    found = dist.group.WORLD if group is None else group
    assert found is not None
    return found


def buffer_device(group: dist.ProcessGroup) -> torch.device | str:
    """The device of the buffers of the group's collectives."""
    from areal.infra.platforms import current_platform

    return "cpu" if "gloo" in dist.get_backend(group) else current_platform.current_device()
