"""Hooks of AReaL's trainers with one process a rank: the redistribution among ranks, and `single_rank_load`.

Only data-parallel heads roll out and redistribute; the other ranks of a replica wait for them in a barrier. Each head
pickles its trajectories, as AReaL does; lengths, keys and problems of all are gathered; every head makes the same plan;
one exchange moves the bytes. Heads may have different numbers of trajectories, and none at all.

With `single_rank_load` the first data-parallel rank has the whole data loader, all of `consumer_batch_size` and
`max_concurrent_rollouts`; the redistribution divides its trajectories. A rollout may take longer than the time-out of a
process group, so ranks wait for it in another, over gloo, whose time-out is an option.

Invariants: every trajectory goes to one rank, with equal bits; whatever error one rank has, every rank raises one that
quotes it; evaluation stays on every rank, and nothing changes on one data-parallel rank.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_balance.adapters.areal.batches import Batch, divide, sequence_lengths, trimmed
from megatron_balance.adapters.kit import Function, Hook
from megatron_balance.adapters.kit.ranks import move_samples, moving_sample
from megatron_balance.errors import BalanceError
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.gather import gather_lengths
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema

if TYPE_CHECKING:
    from megatron_balance.adapters.areal import ArealOptions

Outcome = TypeVar("Outcome")

MAX_WAIT_HOURS = 168.0
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""

_COORDINATOR = "areal.infra.dist_rollout:DistRolloutCoordinator"
_TRAINER = "areal.trainer.rl_trainer:PPOTrainer"


def spmd_hooks(options: ArealOptions) -> list[Hook]:
    """The rows of the redistribution, and of `single_rank_load` where that is asked for."""

    def row(target: str, parameters: str, wrap: Callable[..., Function], reason: str) -> Hook:
        return Hook(
            target=target,
            wrap=functools.partial(wrap, options),
            parameters=tuple(parameters.split()),
            reason=reason,
            until="AReaL removes the launchers that start a process a rank",
        )

    rows = [
        row(
            "areal.infra.dist_rollout:redistribute_trajectories",
            "trajectories group packing_algorithm",
            lambda options, _: functools.partial(redistribute, options),
            "balances by our cost, moves each trajectory once, accepts any number of trajectories a rank",
        ),
        row(
            f"{_COORDINATOR}._broadcast_and_redistribute_trajectories",
            "self trajectories",
            _raised_on_all,
            "an error of a data-parallel head raises on the ranks that wait for it too",
        ),
    ]
    if options.single_rank_load:
        reason = "single_rank_load: one rank rolls out, with the data loader and capacity of all; the others wait"
        rows += [
            row(f"{_COORDINATOR}.rollout_batch", "self workflow group_size", _rolled_out_by_one, reason),
            row(f"{_COORDINATOR}.prepare_batch", "self workflow group_size", _rolled_out_by_one, reason),
            row(
                f"{_TRAINER}._create_dataloader", "self dataset dataset_config rank world_size", _loaded_by_one, reason
            ),
            row(f"{_TRAINER}._init_rollout", "self rollout_config is_eval", _with_whole_capacity, reason),
        ]
    return rows


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or all ranks, which AReaL means by None."""
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen


def buffer_device(group: dist.ProcessGroup) -> torch.device | str:
    """The device of the buffers of the group's collectives."""
    from areal.infra.platforms import current_platform

    return "cpu" if "gloo" in dist.get_backend(group) else current_platform.current_device()


def _agreed(outcome: Outcome | Failure, *, group: dist.ProcessGroup) -> Outcome:
    """The outcome, once every rank of the group has one; a BalanceError on all of them where one has failed."""
    problem = outcome.text if isinstance(outcome, Failure) else None
    try:
        gather_lengths([], group=group, error=problem)
    except BalanceError as error:
        raise error from (outcome.error if isinstance(outcome, Failure) else None)
    assert not isinstance(outcome, Failure), "a problem raises"
    return outcome


# The redistribution --------------------------------------------------------------------------------------------------


def redistribute(
    options: ArealOptions, trajectories: Any, group: dist.ProcessGroup | None = None, packing_algorithm: str = "ffd"
) -> Any:
    """The trajectories of all heads balanced, as AReaL's RedistributedData; the planner replaces `packing_algorithm`.

    Nothing in AReaL reads what other ranks have, and it takes as much memory as the trajectories of all ranks: those
    are None in `all_data`.
    """
    from areal.infra.dist_rollout import RedistributedData

    if isinstance(trajectories, RedistributedData):
        return trajectories  # of `_raised_on_all`
    group = group_or_world(group)
    device = buffer_device(group)
    packed = attempt(_pack, trajectories, device)
    samples, lengths, schema = ([], [], None) if isinstance(packed, Failure) else packed
    gathered = gather_lengths(
        [length for sequences in lengths for length in sequences],
        num_segments=[len(sequences) for sequences in lengths],
        ragged_lengths=[sample.ragged_lengths for sample in samples],
        group=group,
        schema=schema,
        error=packed.text if isinstance(packed, Failure) else None,
        device=device,
    )
    # From here on all ranks know the same, so an error raises on every one.
    all_lengths = gathered.segments_of(np.arange(gathered.lengths.size))
    parts = divide(all_lengths, dp_size=group.size(), cost_model=options.cost_model, equal_count=False)
    ranks = np.zeros(len(all_lengths), dtype=np.int64)
    for rank, part in enumerate(parts):
        ranks[part] = rank
    arrived = move_samples(samples, ranks=ranks, gathered=gathered, group=group, schema=_MOVING, device=device)
    data = [_unpickled(sample) for sample in arrived]
    all_data: list[Batch | None] = [None] * len(all_lengths)
    for index, trajectory in zip(parts[group.rank()], data, strict=True):
        all_data[index] = trajectory
    return RedistributedData(all_data=all_data, data=data, rank=group.rank(), group_indices=parts)


def _raised_on_all(options: ArealOptions, method: Function) -> Function:
    @functools.wraps(method)
    def wrapper(self: Any, trajectories: list[Batch] | None) -> list[Batch]:
        moved = None
        if trajectories is not None:
            moved = attempt(redistribute, options, trajectories, self.train_engine.data_parallel_group)
        return method(self, _agreed(moved, group=group_or_world(self.train_engine.cpu_group)))

    return wrapper


def _pack(
    trajectories: Sequence[Batch], device: torch.device | str
) -> tuple[list[Sample], list[list[int]], SampleSchema | None]:
    """Trajectories as samples that can move, the lengths of their sequences, and what all of them must share."""
    lengths = [sequence_lengths(trajectory) for trajectory in trajectories]
    schema = SampleSchema.shared_by(map(_schema_of, trajectories))
    return [_pickled(trajectory, device=device) for trajectory in trajectories], lengths, schema


def _pickled(trajectory: Batch, *, device: torch.device | str) -> Sample:
    # A copy: pickle would save all of the storage that a tensor is a part of.
    content = pickle.dumps(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), trimmed(trajectory)))
    return moving_sample({"(bytes)": torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)})


def _unpickled(sample: Sample) -> Batch:
    content = sample.ragged["(bytes)"]
    # Of a rank of this run, whose objects AReaL unpickles as well (all_gather_object).
    trajectory = pickle.loads(content.cpu().numpy().tobytes())  # noqa: S301
    return tree_map_only(Tensor, lambda tensor: tensor.to(content.device), trajectory)


_MOVING = SampleSchema.of(moving_sample({"(bytes)": torch.empty(0, dtype=torch.uint8)}))


def _schema_of(trajectory: Mapping[str, Any]) -> SampleSchema:
    """What all trajectories must share to be padded together later: keys and dtypes."""
    dtypes = {name: value.dtype for name, value in trajectory.items() if isinstance(value, Tensor)}
    keys = [KeySpec(name, dtype=dtypes.get(name, torch.uint8), kind="per_sample") for name in trajectory]
    return SampleSchema((*keys, *(key for key in _MOVING.keys if key.kind == "ragged")))


# single_rank_load ----------------------------------------------------------------------------------------------------


def _rolled_out_by_one(options: ArealOptions, method: Function) -> Function:
    name = method.__name__

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> list[Batch]:
        engine, rollout_engine = self.train_engine, self.rollout_engine
        if engine.data_parallel_world_size == 1:
            return method(self, *args, **kwargs)
        if not hasattr(self, "_balance_waiting_group"):
            timeout = timedelta(hours=options.max_wait_hours)
            self._balance_waiting_group = dist.new_group(backend="gloo", timeout=timeout)
        waiting_group: Any = self._balance_waiting_group
        wait = functools.partial(_agreed, group=waiting_group)
        if not engine.is_data_parallel_head():
            # It has no trajectories to redistribute, so it waits here and not in AReaL's barrier.
            wait(None)
            return method(self, *args, **kwargs)

        def roll_out(*positional: Any, **keywords: Any) -> list[Any]:
            return wait(attempt(getattr(rollout_engine, name), *positional, **keywords) if _is_first(engine) else [])

        stand_in = copy.copy(self)
        stand_in.rollout_engine = SimpleNamespace(**{name: roll_out})
        return method(stand_in, *args, **kwargs)

    return wrapper


def _is_first(engine: Any) -> bool:
    return engine.is_data_parallel_head() and engine.data_parallel_rank == 0


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


def _loaded_by_one(_: ArealOptions, create: Function) -> Function:
    @functools.wraps(create)
    def wrapper(self: Any, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
        from areal.api.cli_args import ValidDatasetConfig

        if world_size == 1 or isinstance(dataset_config, ValidDatasetConfig):
            return create(self, dataset, dataset_config, rank=rank, world_size=world_size)
        whole = create(self, dataset, dataset_config, rank=0, world_size=1)
        # Of another rank only the length is needed; it reads nothing until it is iterated.
        return whole if _is_first(self.actor) else IdleDataLoader(len(whole), dataset_config.batch_size)

    return wrapper


def _with_whole_capacity(_: ArealOptions, init: Function) -> Function:
    @functools.wraps(init)
    def wrapper(self: Any, rollout_config: Any, is_eval: bool = False, **kwargs: Any) -> Any:
        dp_size = self.actor.data_parallel_world_size
        if dp_size > 1 and not is_eval and _is_first(self.actor):
            # AReaL divides both by the number of data-parallel ranks.
            rollout_config = copy.deepcopy(rollout_config)
            rollout_config.consumer_batch_size *= dp_size
            if rollout_config.max_concurrent_rollouts is not None:  # None means consumer_batch_size
                rollout_config.max_concurrent_rollouts *= dp_size
        return init(self, rollout_config, is_eval, **kwargs)

    return wrapper
