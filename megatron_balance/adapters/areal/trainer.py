"""Adds `single_rank_load` to AReaL's trainer: the first data-parallel rank rolls out the whole batch for all.

Trainers that run as one process a rank roll out on every data-parallel rank, so that all wait for the rank whose
prompts take longest, or time out. Here one rank has the whole data loader, all of `consumer_batch_size` and
`max_concurrent_rollouts`, and the redistribution divides its trajectories among the ranks.

Invariants: one rank calls the rollout engine; the others iterate no data loader; evaluation stays on every rank, and
nothing changes where there is one data-parallel rank (or a single controller, which is one).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from megatron_balance.adapters.areal.single_rank import IdleDataLoader, SingleRankLoad
from megatron_balance.hooking.patches import Hook

_TRAINER = "areal.trainer.rl_trainer"
_COORDINATOR = "areal.infra.dist_rollout"


def scaled_for_one_rank(config: Any, *, dp_size: int) -> Any:
    """A copy of AReaL's rollout configuration with the capacity of all ranks on one.

    AReaL divides both sizes by the number of data-parallel ranks, so both are multiplied by it.

    Args:
        config: an `InferenceEngineConfig`.
        dp_size: data-parallel ranks.
    """
    scaled = copy.deepcopy(config)
    scaled.consumer_batch_size *= dp_size
    # None means consumer_batch_size.
    if scaled.max_concurrent_rollouts is not None:
        scaled.max_concurrent_rollouts *= dp_size
    return scaled


def single_rank_hooks(*, max_wait: timedelta) -> tuple[Hook, ...]:
    """The hooks of `single_rank_load`; `max_wait` is the time-out of the ranks that wait."""
    loads: WeakKeyDictionary[Any, SingleRankLoad] = WeakKeyDictionary()

    def rolled_out_by_one(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            engine = self.train_engine
            if engine.data_parallel_world_size == 1:
                return method(self, *args, **kwargs)
            if self not in loads:
                loads[self] = SingleRankLoad(loads=_is_first(engine), max_wait=max_wait)
            if not engine.is_data_parallel_head():
                # It has no trajectories to redistribute, so it waits here and not in AReaL's barrier.
                loads[self].run(list)
                return method(self, *args, **kwargs)
            stand_in = copy.copy(self)
            stand_in.rollout_engine = _RolledOutByOne(self.rollout_engine, load=loads[self])
            return method(stand_in, *args, **kwargs)

        return wrapper

    return (
        *(
            Hook(
                target=f"{_COORDINATOR}:DistRolloutCoordinator.{name}",
                bound_in=(f"{_COORDINATOR}:DistRolloutCoordinator",),
                parameters=("self", "workflow", "group_size"),
                wrap=rolled_out_by_one,
                why="single_rank_load: one rank rolls out, and NCCL's time-out does not end the wait of the others",
                until="AReaL has single_rank_load",
            )
            for name in ("rollout_batch", "prepare_batch")
        ),
        Hook(
            target=f"{_TRAINER}:PPOTrainer._create_dataloader",
            bound_in=(f"{_TRAINER}:PPOTrainer",),
            parameters=("self", "dataset", "dataset_config", "rank", "world_size"),
            wrap=_loaded_by_one,
            why="single_rank_load: the rank that rolls out has the whole data loader, the others an idle one",
            until="AReaL has single_rank_load",
        ),
        Hook(
            target=f"{_TRAINER}:PPOTrainer._init_rollout",
            bound_in=(f"{_TRAINER}:PPOTrainer",),
            parameters=("self", "rollout_config", "is_eval"),
            wrap=_with_whole_capacity,
            why="single_rank_load: the rank that rolls out has the capacity of all",
            until="AReaL has single_rank_load",
        ),
    )


class _RolledOutByOne:
    """Rolls out on one rank; on the others it waits and returns no trajectories."""

    def __init__(self, engine: Any, *, load: SingleRankLoad) -> None:
        self._engine = engine
        self._load = load

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def rollout_batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._load.run(lambda: self._engine.rollout_batch(*args, **kwargs))

    def prepare_batch(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._load.run(lambda: self._engine.prepare_batch(*args, **kwargs))


def _is_first(engine: Any) -> bool:
    return engine.is_data_parallel_head() and engine.data_parallel_rank == 0


def _loaded_by_one(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapper(self: Any, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        from areal.api.cli_args import ValidDatasetConfig

        if world_size == 1 or isinstance(dataset_config, ValidDatasetConfig):
            return create(self, dataset, dataset_config, rank=rank, world_size=world_size)
        whole = create(self, dataset, dataset_config, rank=0, world_size=1)
        if _is_first(self.actor):
            return whole
        # Only its length is needed; it reads nothing until it is iterated.
        return IdleDataLoader(num_batches=len(whole), batch_size=dataset_config.batch_size)

    return wrapper


def _with_whole_capacity(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def wrapper(self: Any, rollout_config: Any, is_eval: bool = False, **kwargs: Any) -> Any:
        dp_size = self.actor.data_parallel_world_size
        if dp_size > 1 and not is_eval and _is_first(self.actor):
            rollout_config = scaled_for_one_rank(rollout_config, dp_size=dp_size)
        return init(self, rollout_config, is_eval, **kwargs)

    return wrapper
