"""AReaL adapter: `install()` hooks it, in the controller and in the processes that train.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`: a
trainer, or a worker of the single controller.

The single controller deals trajectories out to its workers; each worker packs what it gets. Trainers with one process a
rank, which AReaL means to remove, move trajectories between their ranks: only data-parallel heads roll out and
redistribute; the other ranks of a replica wait for them in a barrier. As in AReaL every head gets the trajectories of
all and keeps its share; here heads may have different numbers, and none at all.

With `single_rank_load` the first data-parallel rank has the whole data loader, all of `consumer_batch_size` and
`max_concurrent_rollouts`; the redistribution divides its trajectories. A rollout may take longer than the time-out of a
process group, so ranks wait for it in another, over gloo, for a week.

Invariants: signatures and results are AReaL's; an error on one rank raises, quoted, on all; every trajectory goes to
one rank, with equal bits; evaluation stays on every rank, and nothing changes on one data-parallel rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_balance.adapters.areal_batches import (
    Batch,
    balance_batch,
    divide,
    item_lengths,
    sequence_lengths,
    trimmed,
)
from megatron_balance.adapters.kit import Function, Hook, Installation, agreed_microbatches, launch
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.planner import Forest, build_data_schedule
from megatron_balance.runtime.failure import Failure, attempt
from megatron_balance.runtime.gather import gather_lengths
from megatron_balance.samples.sample import Samples
from megatron_balance.samples.shared_prefixes import chains_of_rows
from megatron_balance.topology import Limits, Topology

__all__ = ["balance_batch", "install", "is_installed"]

Outcome = TypeVar("Outcome")

MAX_WAIT = timedelta(weeks=1)
"""Longer than any rollout; a rank that dies ends the wait at once, since its connection breaks."""

_COORDINATOR = "areal.infra.dist_rollout:DistRolloutCoordinator"
_TRAINER = "areal.trainer.rl_trainer:PPOTrainer"


@dataclass(frozen=True)
class ArealOptions:
    """The arguments of `install`, with the cost model of a sequence."""

    cost_model: CostModel
    single_rank_load: bool


installation: Installation[ArealOptions] = Installation(
    "areal", versions=("1.0.4",), remedy="pip install areal==1.0.4, or train without balancing"
)
is_installed = installation.is_installed


def install(
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    single_rank_load: bool = False,
) -> Installation[ArealOptions]:
    """Hook AReaL in this process: in every rank and in the controller. Installing twice installs once.

    Args:
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        single_rank_load: the first data-parallel rank rolls out the whole batch and the others receive their share
            (trainers that run as one process a rank; a single controller does it anyway).

    Raises:
        BalanceError: AReaL is missing, of another version, or a target has moved; or the adapter is installed with
            other options. Nothing is changed then.
    """
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    options = ArealOptions(cost_model, single_rank_load)
    return installation.install(options, lambda: _hooks(options))


def _hooks(options: ArealOptions) -> list[Hook]:
    """The table: the controller's dispatch, the micro-batches of each worker, and what ranks move among themselves."""
    cost_model = options.cost_model
    rows = [
        Hook.around(
            "areal.infra.controller.train_controller:_dispatch_tensors",
            _dispatch_tensors,
            cost_model,
            reason="balances by our cost, accepts a number of items that is no multiple of the ranks",
        ),
        Hook.around(
            "areal.utils.data:allocate_balanced_mbs_synced",
            _allocate_balanced_mbs_synced,
            cost_model,
            reason="packs by our cost under the cap; an error of one rank raises on all, instead of a hang",
        ),
        Hook.around(
            "areal.models.tree_attn.tree:_greedy_build_tries",
            _build_tries,
            cost_model,
            reason="enable_tree_training: the fewest trees under the cap, in place of those of first fit",
        ),
        Hook.around(
            "areal.experimental.training_service.controller.controller:GatewayTrainController.__init__",
            _refuse,
            reason="the proxy that deals trajectories out and the workers run a fixed command, without hooks",
            # Until their command can be chosen.
        ),
        # What follows can go once AReaL removes the launchers that start a process a rank.
        Hook.around(
            "areal.infra.dist_rollout:redistribute_trajectories",
            redistribute,
            cost_model,
            reason="balances by our cost, accepts any number of trajectories a rank",
        ),
        Hook.around(
            f"{_COORDINATOR}._broadcast_and_redistribute_trajectories",
            _raised_on_all,
            cost_model,
            reason="an error of a data-parallel head raises on the ranks that wait for it too",
        ),
    ]
    if options.single_rank_load:
        reason = "single_rank_load: one rank rolls out, with the data loader and capacity of all; the others wait"
        rows += [
            Hook.around(target, balanced, reason=reason)
            for target, balanced in (
                (f"{_COORDINATOR}.rollout_batch", _rolled_out_by_one),
                (f"{_COORDINATOR}.prepare_batch", _rolled_out_by_one),
                (f"{_TRAINER}._create_dataloader", _loaded_by_one),
                (f"{_TRAINER}._init_rollout", _with_whole_capacity),
            )
        ]
    return rows


def _dispatch_tensors(
    cost_model: CostModel, _: Function, item_list: list[Batch], dp_size: int, group_size: int = 1
) -> Any:
    """The items of each worker, and their positions."""
    lengths = [item_lengths(item) for item in item_list]
    parts = divide(lengths, dp_size=dp_size, cost_model=cost_model, equal_count=True, unit_size=group_size)
    return [[item_list[index] for index in part] for part in parts], parts


def _allocate_balanced_mbs_synced(
    cost_model: CostModel, _: Function, mb_spec: Any, lens: list[int], group: dist.ProcessGroup | None = None
) -> list[list[int]]:
    """The rows of each micro-batch of this rank."""
    group = group_or_world(group) if dist.is_initialized() else None
    return agreed_microbatches(
        lens,
        max_tokens=mb_spec.max_tokens_per_mb,
        cost_model=cost_model,
        min_count=mb_spec.n_mbs or 1,
        multiple=mb_spec.n_mbs_divisor,
        flag="max_tokens_per_mb",
        group=group,
        device="cpu" if group is None else buffer_device(group),
    )


def _build_tries(
    cost_model: CostModel, stock: Function, data: Batch, max_tokens_per_tree: int
) -> tuple[list[Any], list[int]]:
    """AReaL's trees of this rank's sequences, a tree for each micro-batch of our plan, and their tokens."""
    from areal.models.tree_attn import tree

    sequences = tree._extract_sequences(data)
    lengths = np.array([len(sequence) for sequence in sequences])
    if lengths.max(initial=0) > max_tokens_per_tree:
        return stock(data, max_tokens_per_tree)  # AReaL's error names the sequence
    tokens = np.concatenate([np.zeros(0, np.int64), *sequences])
    # Of tokens alone: AReaL's loss takes labels and other keys from each sequence.
    chains = chains_of_rows(tokens, lengths=lengths, trained=np.zeros(tokens.size, np.bool_), block=1)
    forest = Forest.from_chains(lengths, chains)
    # AReaL fills every tree up to the cap: the fewest trees, as if each were the one micro-batch of a rank.
    cost_model = replace(cost_model, per_microbatch=cost_model(max_tokens_per_tree))
    limits, least = Limits(max_tokens_per_tree), -(-int(forest.node_tokens.sum()) // max_tokens_per_tree)
    for number in range(max(least, 1), max(lengths.size, 1) + 1):
        topology = Topology(number)
        schedule = build_data_schedule(lengths, forest=forest, cost_model=cost_model, topology=topology, limits=limits)
        microbatches = [ids for slots in schedule.ranks for ids in slots if ids]
        if len(microbatches) <= number:
            break
    tries: list[Any] = []
    num_tokens: list[int] = []
    for microbatch in microbatches:
        root, nodes = tree._BuildNode(len(tries), -1, -1), list[Any]()
        for index in microbatch:
            tree._insert_sequence(root, nodes, sequences[index], len(tries), index)
        tries.append(tree._compress_trie(root))
        num_tokens.append(len(nodes))
    return tries, num_tokens


def _refuse(_: Function, *_positional: Any, **_keywords: Any) -> None:
    raise BalanceError(
        "_version is v2: its processes start without hooks, so nothing would be balanced. Set _version: v1 in the "
        "configuration of each engine, or train without balancing."
    )


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
    samples = outcome if isinstance(outcome, Failure) else Samples.joined([])
    gather_lengths(samples, group=group, device=buffer_device(group))
    assert not isinstance(outcome, Failure), "every rank has raised it"
    return outcome


# The redistribution --------------------------------------------------------------------------------------------------


def redistribute(
    cost_model: CostModel,
    stock: Function,
    trajectories: Any,
    group: dist.ProcessGroup | None = None,
    packing_algorithm: str = "ffd",
) -> Any:
    """The trajectories of all heads balanced, as AReaL's RedistributedData; `packing_algorithm` is not asked."""
    from areal.infra.dist_rollout import RedistributedData

    if isinstance(trajectories, RedistributedData):
        return trajectories  # of `_raised_on_all`
    group = group_or_world(group)
    outcome = attempt(_on_host, trajectories)
    outcomes: list[Any] = [None] * group.size()
    dist.all_gather_object(outcomes, outcome.text if isinstance(outcome, Failure) else outcome, group=group)
    # From here on all ranks know the same, so an error raises on every one.
    if errors := [text for text in outcomes if isinstance(text, str)]:
        raise BalanceError(errors[0])
    all_data = [trajectory for of_rank in outcomes for trajectory in of_rank]
    lengths = [sequence_lengths(trajectory) for trajectory in all_data]
    parts = divide(lengths, dp_size=group.size(), cost_model=cost_model, equal_count=False)
    device = buffer_device(group)
    data = [tree_map_only(Tensor, lambda tensor: tensor.to(device), all_data[index]) for index in parts[group.rank()]]
    return RedistributedData(all_data=all_data, data=data, rank=group.rank(), group_indices=parts)


def _on_host(trajectories: Sequence[Batch]) -> list[Batch]:
    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().clone()  # pickle would save all of the storage that a tensor is a part of

    return [tree_map_only(Tensor, copied, trimmed(trajectory)) for trajectory in trajectories]


def _raised_on_all(cost_model: CostModel, stock: Function, self: Any, trajectories: list[Batch] | None) -> list[Batch]:
    moved = None
    if trajectories is not None:
        moved = attempt(redistribute, cost_model, stock, trajectories, self.train_engine.data_parallel_group)
    return stock(self, _agreed(moved, group=group_or_world(self.train_engine.cpu_group)))


# single_rank_load ----------------------------------------------------------------------------------------------------


def _rolled_out_by_one(stock: Function, self: Any, *args: Any, **kwargs: Any) -> list[Batch]:
    engine = self.train_engine
    if engine.data_parallel_world_size == 1:
        return stock(self, *args, **kwargs)
    if not hasattr(self, "_balance_waiting_group"):
        self._balance_waiting_group = dist.new_group(backend="gloo", timeout=MAX_WAIT)
    # Engines have the method with the same parameters.
    roll_out = getattr(self.rollout_engine, stock.__name__)
    rollouts = attempt(roll_out, *args, **kwargs) if _is_first(engine) else []
    waiting_group: Any = self._balance_waiting_group
    trajectories = _agreed(rollouts, group=waiting_group)
    return self._broadcast_and_redistribute_trajectories(trajectories if engine.is_data_parallel_head() else None)


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


def _loaded_by_one(stock: Function, self: Any, dataset: Any, dataset_config: Any, rank: int, world_size: int) -> Any:
    from areal.api.cli_args import ValidDatasetConfig

    if world_size == 1 or isinstance(dataset_config, ValidDatasetConfig):
        return stock(self, dataset, dataset_config, rank=rank, world_size=world_size)
    whole = stock(self, dataset, dataset_config, rank=0, world_size=1)
    # Of another rank only the length is needed; it reads nothing until it is iterated.
    return whole if _is_first(self.actor) else IdleDataLoader(len(whole), dataset_config.batch_size)


def _with_whole_capacity(stock: Function, self: Any, rollout_config: Any, is_eval: bool = False, **kwargs: Any) -> Any:
    dp_size = self.actor.data_parallel_world_size
    if dp_size > 1 and not is_eval and _is_first(self.actor):
        # AReaL divides both by the number of data-parallel ranks.
        rollout_config = copy.deepcopy(rollout_config)
        rollout_config.consumer_batch_size *= dp_size
        if rollout_config.max_concurrent_rollouts is not None:  # None means consumer_batch_size
            rollout_config.max_concurrent_rollouts *= dp_size
    return stock(self, rollout_config, is_eval, **kwargs)


if __name__ == "__main__":
    launch("megatron_balance.adapters.areal")
