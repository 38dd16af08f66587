"""Lets one rank load for all: the others wait for it, load nothing and raise if it fails. `single_rank_load` of AReaL.

Trainers that run as one process a rank roll out on every data-parallel rank, so that all wait for the rank with the
longest prompts, or time out. With `single_rank_load` the first data-parallel rank has the whole data loader, all of
`consumer_batch_size` and `max_concurrent_rollouts`, and the redistribution divides its trajectories among the ranks.

A rollout may take longer than the time-out of a process group, so ranks do not wait in the group that moves data but in
one of their own, over gloo, whose time-out is a parameter.

Invariants: `load` runs on one rank. Where it fails every rank raises: that rank its own error, the others one that
quotes it. Evaluation stays on every rank, and nothing changes where there is one data-parallel rank.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_balance.adapters.kit import Function, Hook
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import gather_lengths

Item = TypeVar("Item")

MAX_WAIT_HOURS = 168.0
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""

_TRAINER = "areal.trainer.rl_trainer:PPOTrainer"
_COORDINATOR = "areal.infra.dist_rollout:DistRolloutCoordinator"


class SingleRankLoad:
    """Ranks of which one loads. Every rank of the world constructs it, in the same order as its process groups.

    Args:
        loads: True on the rank that loads.
        max_wait_hours: time-out of the others for one load.
    """

    def __init__(self, *, loads: bool, max_wait_hours: float = MAX_WAIT_HOURS) -> None:
        self.loads = loads
        group = dist.new_group(backend="gloo", timeout=timedelta(hours=max_wait_hours))
        assert isinstance(group, dist.ProcessGroup), "every rank of the world is a member"
        self._waiting_group = group

    def run(self, load: Callable[[], list[Item]]) -> list[Item]:
        """The result of `load` on the rank that loads; an empty list on the others, once that has finished.

        Raises:
            BalanceError: on the ranks that wait, where `load` failed; the rank that loads raises what `load` did.
        """
        if not self.loads:
            gather_lengths([], group=self._waiting_group)
            return []
        problem = None
        try:
            return load()
        except BaseException as error:  # an interrupt as well: the others wait
            problem = f"it loads for all, and failed: {type(error).__name__}: {error}"
            raise
        finally:
            with contextlib.suppress(BalanceError):  # its own error is the one to raise
                gather_lengths([], group=self._waiting_group, problem=problem)


@dataclass(frozen=True)
class IdleDataLoader:
    """Replaces the data loader on ranks that load nothing: trainers count steps by its length, and it has no data."""

    num_batches: int
    batch_size: int

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        raise BalanceError("this rank loads nothing under single_rank_load: only the rank that loads has batches.")

    def state_dict(self) -> dict[str, Any]:
        """An empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accepts an empty state."""


def endless(loader: Iterable[Item]) -> Iterator[Item]:
    """The batches of a loader, epoch after epoch: every `next` gives one, also where an epoch has just ended.

    Raises:
        BalanceError: an epoch without batches.
    """
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise BalanceError("the data loader gives no batches: its data set is smaller than one batch.")


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


def single_rank_hooks(max_wait_hours: float) -> list[Hook]:
    """The hooks of `single_rank_load`; `max_wait_hours` is the time-out of the ranks that wait."""

    def rolled_out_by_one(method: Function) -> Function:
        name = method.__name__

        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            engine, rollout_engine = self.train_engine, self.rollout_engine
            if engine.data_parallel_world_size == 1:
                return method(self, *args, **kwargs)
            if not hasattr(self, "_balance_load"):
                self._balance_load = SingleRankLoad(loads=_is_first(engine), max_wait_hours=max_wait_hours)
            load = self._balance_load
            if not engine.is_data_parallel_head():
                # It has no trajectories to redistribute, so it waits here and not in AReaL's barrier.
                load.run(list)
                return method(self, *args, **kwargs)

            def roll_out(*of_engine: Any, **by_name: Any) -> list[Any]:
                return load.run(lambda: getattr(rollout_engine, name)(*of_engine, **by_name))

            stand_in = copy.copy(self)
            stand_in.rollout_engine = SimpleNamespace(**{name: roll_out})
            return method(stand_in, *args, **kwargs)

        return wrapper

    rows: dict[str, tuple[Callable[[Function], Function], str]] = {
        f"{_COORDINATOR}.rollout_batch": (rolled_out_by_one, "self workflow group_size"),
        f"{_COORDINATOR}.prepare_batch": (rolled_out_by_one, "self workflow group_size"),
        f"{_TRAINER}._create_dataloader": (_loaded_by_one, "self dataset dataset_config rank world_size"),
        f"{_TRAINER}._init_rollout": (_with_whole_capacity, "self rollout_config is_eval"),
    }
    why = "single_rank_load: one rank rolls out, with the data loader and the capacity of all; the others wait for it"
    return [
        Hook(
            target=target, wrap=wrap, parameters=tuple(parameters.split()), why=why, until="AReaL has single_rank_load"
        )
        for target, (wrap, parameters) in rows.items()
    ]


def _is_first(engine: Any) -> bool:
    return engine.is_data_parallel_head() and engine.data_parallel_rank == 0


def _loaded_by_one(create: Function) -> Function:
    @functools.wraps(create)
    def wrapper(self: Any, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        from areal.api.cli_args import ValidDatasetConfig

        if world_size == 1 or isinstance(dataset_config, ValidDatasetConfig):
            return create(self, dataset, dataset_config, rank=rank, world_size=world_size)
        whole = create(self, dataset, dataset_config, rank=0, world_size=1)
        if _is_first(self.actor):
            return whole
        # Only its length is needed; it reads nothing until it is iterated.
        return IdleDataLoader(len(whole), dataset_config.batch_size)

    return wrapper


def _with_whole_capacity(init: Function) -> Function:
    @functools.wraps(init)
    def wrapper(self: Any, rollout_config: Any, is_eval: bool = False, **kwargs: Any) -> Any:
        dp_size = self.actor.data_parallel_world_size
        if dp_size > 1 and not is_eval and _is_first(self.actor):
            rollout_config = scaled_for_one_rank(rollout_config, dp_size=dp_size)
        return init(self, rollout_config, is_eval, **kwargs)

    return wrapper
