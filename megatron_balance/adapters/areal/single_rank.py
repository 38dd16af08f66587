"""Lets one rank load for all: the others wait for it, load nothing and raise if it fails. `single_rank_load` of AReaL.

Trainers that run as one process a rank roll out on every data-parallel rank, so that all wait for the rank with the
longest prompts, or time out. With `single_rank_load` the first data-parallel rank has the whole data loader, all of
`consumer_batch_size` and `max_concurrent_rollouts`, and the redistribution divides its trajectories among the ranks.

A rollout may take longer than the time-out of a process group, so ranks do not wait in the group that moves data but in
one of their own, over gloo, whose time-out is a parameter.

Invariants: `load` runs on one rank. Where it fails every rank raises: that rank its own error, the others one that
quotes it. Batches never run out because an epoch ended. Evaluation stays on every rank, and nothing changes where there
is one data-parallel rank (or a single controller, which is one).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_balance.adapters.kit import Function, Hook
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import gather_lengths

Item = TypeVar("Item")

MAX_WAIT = timedelta(days=7)
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""

_TRAINER = "areal.trainer.rl_trainer:PPOTrainer"
_COORDINATOR = "areal.infra.dist_rollout:DistRolloutCoordinator"


class SingleRankLoad:
    """Ranks of which one loads. Every rank of the world constructs it, in the same order as its process groups.

    Args:
        loads: True on the rank that loads.
        max_wait: time-out of the others for one load.
    """

    def __init__(self, *, loads: bool, max_wait: timedelta = MAX_WAIT) -> None:
        self.loads = loads
        group = dist.new_group(backend="gloo", timeout=max_wait)
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
        problem: str | None = "it loads for all, and was stopped"
        try:
            loaded = load()
            problem = None
            return loaded
        finally:
            error = sys.exc_info()[1]
            if problem and error:
                problem = f"it loads for all, and failed: {type(error).__name__}: {error}"
            with contextlib.suppress(BalanceError):  # its own error is the one to raise
                gather_lengths([], group=self._waiting_group, problem=problem)


class IdleDataLoader:
    """Replaces the data loader on ranks that load nothing: it has a length and no data.

    Args:
        num_batches: batches of an epoch, from which trainers count steps.
        batch_size: samples of a batch.
    """

    def __init__(self, *, num_batches: int, batch_size: int) -> None:
        self._num_batches = num_batches
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self._num_batches

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


def single_rank_hooks(max_wait: timedelta) -> tuple[Hook, ...]:
    """The hooks of `single_rank_load`; `max_wait` is the time-out of the ranks that wait."""
    loads: WeakKeyDictionary[Any, SingleRankLoad] = WeakKeyDictionary()

    def rolled_out_by_one(method: Function) -> Function:
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

    def row(owner: str, name: str, parameters: str, *, wrap: Callable[[Function], Function], why: str) -> Hook:
        return Hook(
            target=f"{owner}.{name}",
            bound_in=(owner,),
            parameters=("self", *parameters.split()),
            wrap=wrap,
            why=f"single_rank_load: {why}",
            until="AReaL has single_rank_load",
        )

    waits = "one rank rolls out, and NCCL's time-out does not end the wait of the others"
    return (
        row(_COORDINATOR, "rollout_batch", "workflow group_size", wrap=rolled_out_by_one, why=waits),
        row(_COORDINATOR, "prepare_batch", "workflow group_size", wrap=rolled_out_by_one, why=waits),
        row(
            _TRAINER,
            "_create_dataloader",
            "dataset dataset_config rank world_size",
            wrap=_loaded_by_one,
            why="the rank that rolls out has the whole data loader, the others an idle one",
        ),
        row(
            _TRAINER,
            "_init_rollout",
            "rollout_config is_eval",
            wrap=_with_whole_capacity,
            why="the rank that rolls out has the capacity of all",
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
        return IdleDataLoader(num_batches=len(whole), batch_size=dataset_config.batch_size)

    return wrapper


def _with_whole_capacity(init: Function) -> Function:
    @functools.wraps(init)
    def wrapper(self: Any, rollout_config: Any, is_eval: bool = False, **kwargs: Any) -> Any:
        dp_size = self.actor.data_parallel_world_size
        if dp_size > 1 and not is_eval and _is_first(self.actor):
            rollout_config = scaled_for_one_rank(rollout_config, dp_size=dp_size)
        return init(self, rollout_config, is_eval, **kwargs)

    return wrapper
