"""Lets one rank load for all: the others wait for it, load nothing and raise if it fails. `single_rank_load` of AReaL.

Trainers that run as one process a rank roll out on every data-parallel rank, so that all wait for the rank with the
longest prompts, or time out. With `single_rank_load` the first data-parallel rank has the whole data loader, all of
`consumer_batch_size` and `max_concurrent_rollouts`, and the redistribution divides its trajectories among the ranks.

A rollout may take longer than the time-out of a process group, so ranks do not wait in the group that moves data but in
one of their own, over gloo, whose time-out is a parameter. They go on together when the rank that loads has finished or
failed.

Invariants: `load` runs on one rank. Where it fails every rank raises: that rank its own error, the others one that
quotes it. Batches never run out because an epoch ended. Evaluation stays on every rank, and nothing changes where there
is one data-parallel rank (or a single controller, which is one).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.adapters.kit import Hook
from megatron_balance.errors import BalanceError

Item = TypeVar("Item")

_MAX_TEXT_NBYTES = 4096
"""Longest error text sent to the ranks that wait; longer ones are cut."""

MAX_WAIT = timedelta(days=7)
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""


class SingleRankLoad:
    """Ranks of which one loads. Every rank of the world constructs it, in the same order as its process groups.

    Args:
        loads: True if this rank loads.
        max_wait: time-out of the others for one load.

    Raises:
        BalanceError: on every rank: not exactly one rank loads.
    """

    def __init__(self, *, loads: bool, max_wait: timedelta = MAX_WAIT) -> None:
        self.loads = loads
        group = dist.new_group(backend="gloo", timeout=max_wait)
        assert isinstance(group, dist.ProcessGroup), "every rank of the world is a member"
        self._waiting_group = group
        answers = [torch.zeros(1, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(answers, torch.tensor([loads], dtype=torch.uint8), group=self._waiting_group)
        loading = [rank for rank, answer in enumerate(answers) if answer]
        if len(loading) != 1:
            raise BalanceError(f"single_rank_load: the ranks that load are {loading}: it must be exactly one.")
        self._source = loading[0]

    def run(self, load: Callable[[], list[Item]]) -> list[Item]:
        """The result of `load` on the rank that loads; an empty list on the others, once that has finished.

        Raises:
            BalanceError: on the ranks that wait, where `load` failed; the rank that loads raises what `load` did.
        """
        if self.loads:
            finished = False
            try:
                loaded = load()
                finished = True
                return loaded
            finally:
                error = sys.exc_info()[1]
                self._broadcast("" if finished else f"{type(error).__name__}: {error}")
        failure = _as_text(self._broadcast(""))
        if failure:
            raise BalanceError(f"rank {self._source}, which loads for all, failed: {failure}")
        return []

    def _broadcast(self, text: str) -> Tensor:
        """The text of the rank that loads, as uint8 `[_MAX_TEXT_NBYTES]` filled up with zeros."""
        message = torch.zeros(_MAX_TEXT_NBYTES, dtype=torch.uint8)
        encoded = text.encode(errors="replace")[:_MAX_TEXT_NBYTES]
        message[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        dist.broadcast(message, src=self._source, group=self._waiting_group)
        return message


def _as_text(message: Tensor) -> str:
    return bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")


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
