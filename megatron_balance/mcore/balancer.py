"""One training step's data: what each rank loaded → what each rank runs.

    pull num_microbatches items → split into samples → gather lengths → plan → compare plans → reroute → pack

All of it happens on the ranks that read data: the first of every tensor-parallel group, in every pipeline
stage and context-parallel rank alike, over their own data-parallel group. The other ranks of a model
replica learn the number of micro-batches and their lengths by one broadcast.

Invariants: every rank of a step gets the same num_microbatches; what one rank finds wrong with its data
is raised on every rank of its group; the plan depends on gathered lengths and flags alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import megatron_balance
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.arguments import BalanceConfig
from megatron_balance.planner.cost import CostModel
from megatron_balance.planner.schedule import DataSchedule, build_data_schedule
from megatron_balance.planner.topology import Limits, Topology
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import check_same_schedule, gather_sample_lengths
from megatron_balance.runtime.packing import dummy_microbatch, pack_microbatch
from megatron_balance.runtime.sample import Sample
from megatron_balance.runtime.unpacking import split_packed

Microbatch = dict[str, Tensor]

AS_LOADED = 0
"""Broadcast in place of num_microbatches where there is nothing to balance."""


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank.

    Attributes:
        dp_group: ranks that load different samples and are otherwise alike (no context parallelism).
        model_group: tensor- and pipeline-parallel ranks of one model replica, or None where it is one rank.
    """

    dp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank.

    Attributes:
        num_microbatches: the same on every rank.
        microbatch_tokens: `[num_microbatches]`, padded tokens of this replica's micro-batches.
        microbatches: packed, or None on a rank that reads no data.
        schedule: the plan, or None on a rank that reads no data.
        plan_seconds: spent planning.
        exchange_seconds: spent gathering, comparing and rerouting.
    """

    num_microbatches: int
    microbatch_tokens: list[int]
    microbatches: list[Microbatch] | None
    schedule: DataSchedule | None
    plan_seconds: float
    exchange_seconds: float


class StepBalancer:
    """Turns what the data loader yields into balanced micro-batches.

    Args:
        config: the flags.
        topology: the ranks.
        limits: what a micro-batch may hold.
        cost_model: tokens or FLOPs.
        groups: process groups of this rank.
        device: where collectives' buffers live: `cuda` for NCCL.
    """

    def __init__(
        self,
        config: BalanceConfig,
        *,
        topology: Topology,
        limits: Limits,
        cost_model: CostModel,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.config = config
        self.topology = topology
        self.limits = limits
        self.cost_model = cost_model
        self.groups = groups
        self.device = device
        # Ranks that were started with different flags or versions would plan differently: they find out here.
        text = f"{megatron_balance.__version__} {config} {topology} {limits} {cost_model}"
        self._fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def balance(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> BalancedStep | list[Any]:
        """Pull one step's items and balance them.

        Args:
            data_iterator: of this rank, None where it reads no data.
            num_microbatches: items to pull.

        Returns:
            The balanced step; or the pulled items as they are where they hold no packed sequences (empty on a
            rank that reads no data), the same choice on every rank.

        Raises:
            BalanceError: on every rank of the data-parallel group alike.
        """
        if data_iterator is None:
            counts = self._broadcast_counts(None)
            if counts[0] == AS_LOADED:
                return []
            return BalancedStep(counts[0], counts[1:], None, None, 0.0, 0.0)
        items = [next(data_iterator) for _ in range(num_microbatches)]
        step = self._balance_items(items)
        self._broadcast_counts([AS_LOADED] if step is None else [step.num_microbatches, *step.microbatch_tokens])
        return items if step is None else step

    def _balance_items(self, items: Sequence[Any]) -> BalancedStep | None:
        started = time.perf_counter()
        packed = all(isinstance(item, Mapping) and item.get("cu_seqlens") is not None for item in items)
        samples, problem = _split(items, device=self.device) if packed else ([], None)
        gathered = gather_sample_lengths(
            samples,
            group=self.groups.dp_group,
            # Whether items are packed must be the same everywhere: it goes into what ranks compare.
            fingerprint=self._fingerprint ^ packed,
            problem=problem,
            device=self.device,
        )
        if not packed:
            return None
        if gathered.schema is None:
            raise BalanceError("The data iterators of all ranks yielded no tokens for this step: check the data set.")
        plan_started = time.perf_counter()
        schedule = build_data_schedule(
            gathered.lengths,
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=self.config.objective,
            algorithm=self.config.partition_algorithm,
            home_ranks=gathered.home_ranks,
            move_samples=self.config.balance_data,
        )
        planned = time.perf_counter()
        check_same_schedule(schedule.digest(), group=self.groups.dp_group, device=self.device)
        mine = reroute_samples(
            samples,
            destinations=_destinations(schedule),
            gathered=gathered,
            group=self.groups.dp_group,
            device=self.device,
        )
        microbatches = [
            self._pack([mine[sample] for sample in slot])
            if slot
            else dummy_microbatch(
                gathered.schema,
                token_multiple=self.topology.token_multiple,
                cp_size=self.topology.cp_size,
                device=self.device,
            )
            for slot in schedule.ranks[self.groups.dp_group.rank()]
        ]
        exchanged = time.perf_counter()
        return BalancedStep(
            num_microbatches=schedule.num_microbatches,
            microbatch_tokens=[microbatch["tokens"].shape[1] for microbatch in microbatches],
            microbatches=microbatches,
            schedule=schedule,
            plan_seconds=planned - plan_started,
            exchange_seconds=exchanged - planned + plan_started - started,
        )

    def _pack(self, samples: list[Sample]) -> Microbatch:
        return pack_microbatch(samples, token_multiple=self.topology.token_multiple, cp_size=self.topology.cp_size)

    def _broadcast_counts(self, counts: list[int] | None) -> list[int]:
        """`[num_microbatches, tokens of each]` from the first rank of a model replica to its other ranks.

        Ranks that read data know them already, and compare: stages that planned differently would hang later.
        """
        group = self.groups.model_group
        if group is None:
            assert counts is not None, "a rank that is a whole replica reads data"
            return counts
        source = dist.get_global_rank(group, 0)
        known = torch.tensor(counts or [AS_LOADED], dtype=torch.int64, device=self.device)
        size = torch.tensor([known.numel()], dtype=torch.int64, device=self.device)
        dist.broadcast(size, source, group=group)
        sent = known.clone() if group.rank() == 0 else torch.empty(int(size), dtype=torch.int64, device=self.device)
        dist.broadcast(sent, source, group=group)
        if counts is not None and sent.tolist() != counts:
            raise BalanceError(
                f"pipeline stages planned differently: this one {counts}, the first {sent.tolist()} (num_microbatches, "
                "then tokens of each). Every stage must read the same data."
            )
        return sent.tolist()


def _split(items: Sequence[Mapping[str, Any]], *, device: torch.device) -> tuple[list[Sample], str | None]:
    """The samples of all items on `device`, or what is wrong with them, which travels to every rank."""
    samples: list[Sample] = []
    for index, item in enumerate(items):
        on_device = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in item.items()}
        try:
            samples.extend(split_packed(on_device))
        except BalanceError as error:
            return [], f"item {index} of this step: {error}"
    return samples, None


def _destinations(schedule: DataSchedule) -> NDArray[np.int64]:
    """The rank of every sample, `[num_samples]`."""
    destinations = np.empty(len(schedule.lengths), dtype=np.int64)
    for rank, slots in enumerate(schedule.ranks):
        for slot in slots:
            destinations[list(slot)] = rank
    return destinations
