"""One training step's data: what each rank loaded → what each rank runs.

    pull num_microbatches items → split into samples → gather lengths → plan → compare plans → reroute → pack

All of it happens on the ranks that read data: the first of every tensor-parallel group, in every pipeline
stage and context-parallel rank alike, over their own data-parallel group. The other ranks of a model
replica learn the number of micro-batches and their lengths by one broadcast.

It happens on the CPU and over process groups of its own, so that the next step can be prepared by a thread
while this one runs: what a step then waits for is what is not ready yet.

Invariants: every rank of a step gets the same num_microbatches; what one rank finds wrong with its data
is raised on every rank of its group; the plan depends on gathered lengths and flags alone; every rank
prepares the same steps in the same order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

import megatron_balance
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.arguments import BalanceConfig
from megatron_balance.mcore.pull_ahead import pull_ahead_of
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

_ENDED = object()


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank, of which nothing else makes use. Their tensors live on the CPU (gloo).

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
        exchange_seconds: spent splitting, gathering, comparing, rerouting and packing.
        exposed_seconds: spent waiting for all that when the step began; the rest ran during the step before.
    """

    num_microbatches: int
    microbatch_tokens: list[int]
    microbatches: list[Microbatch] | None = None
    schedule: DataSchedule | None = None
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0


class StepBalancer:
    """Turns what the data loader yields into balanced micro-batches.

    Args:
        config: the flags.
        topology: the ranks.
        limits: what a micro-batch may hold.
        cost_model: tokens or FLOPs.
        groups: process groups of this rank.
    """

    def __init__(
        self,
        config: BalanceConfig,
        *,
        topology: Topology,
        limits: Limits,
        cost_model: CostModel,
        groups: Groups,
    ) -> None:
        self.config = config
        self.topology = topology
        self.limits = limits
        self.cost_model = cost_model
        self.groups = groups
        # Ranks that were started with different flags or versions would plan differently: they find out here.
        text = f"{megatron_balance.__version__} {config} {topology} {limits} {cost_model}"
        self._fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        self._prepared: _Preparation | None = None
        self._thread = ThreadPool(1)  # its thread does not keep the process alive

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
        started = time.perf_counter()
        if data_iterator is None:
            counts = self._broadcast_counts(None)
            return [] if counts[0] == AS_LOADED else BalancedStep(counts[0], counts[1:])
        iterator, _ = pull_ahead_of(data_iterator)
        # Megatron's iterators have no __iter__; what ends them early is said to every rank below.
        pulled = [next(iterator, _ENDED) for _ in range(num_microbatches)]
        items = [item for item in pulled if item is not _ENDED]
        prepared, self._prepared = self._prepared, None
        # In a replayed step, or under a growing batch size, other items come than those prepared; on every rank.
        if prepared is not None and prepared.is_of(items):
            step = prepared.result()
        else:
            step = self._balance_items(items, num_items=num_microbatches)
        self._broadcast_counts([AS_LOADED] if step is None else [step.num_microbatches, *step.microbatch_tokens])
        return items if step is None else replace(step, exposed_seconds=time.perf_counter() - started)

    def prepare(self, data_iterator: Iterator[Any] | None, *, num_microbatches: int) -> None:
        """Begin the next step's data in a thread; `balance` will use it if the step asks for just that.

        Args:
            data_iterator: as in `balance`.
            num_microbatches: items that the next step is expected to pull.
        """
        if data_iterator is None:
            return
        _, ahead = pull_ahead_of(data_iterator)
        ahead.begin_fetch()

        def work() -> tuple[list[Any], BalancedStep | None]:
            items = ahead.fetch(num_microbatches)
            return items, self._balance_items(items, num_items=num_microbatches)

        self._prepared = _Preparation(self._thread.apply_async(work))

    def _balance_items(self, items: Sequence[Any], *, num_items: int) -> BalancedStep | None:
        started = time.perf_counter()
        packed = all(isinstance(item, Mapping) and item.get("cu_seqlens") is not None for item in items)
        samples, problem = _split(items) if packed else ([], None)
        if len(items) < num_items:
            problem = f"its data ended after {len(items)} of {num_items} items of this step."
        gathered = gather_sample_lengths(
            samples,
            group=self.groups.dp_group,
            # Whether items are packed must be the same everywhere: it goes into what ranks compare.
            fingerprint=self._fingerprint ^ packed,
            problem=problem,
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
        check_same_schedule(schedule.digest(), group=self.groups.dp_group)
        mine = reroute_samples(
            samples, destinations=_destinations(schedule), gathered=gathered, group=self.groups.dp_group
        )
        microbatches = [
            self._pack([mine[sample] for sample in slot])
            if slot
            else dummy_microbatch(
                gathered.schema, token_multiple=self.topology.token_multiple, cp_size=self.topology.cp_size
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
        known = torch.tensor(counts or [AS_LOADED], dtype=torch.int64)
        size = torch.tensor([known.numel()], dtype=torch.int64)
        dist.broadcast(size, source, group=group)
        sent = known.clone() if group.rank() == 0 else torch.empty(int(size), dtype=torch.int64)
        dist.broadcast(sent, source, group=group)
        if counts is not None and sent.tolist() != counts:
            raise BalanceError(
                f"pipeline stages planned differently: this one {counts}, the first {sent.tolist()} (num_microbatches, "
                "then tokens of each). Every stage must read the same data."
            )
        return sent.tolist()


class _Preparation:
    """A step's data in the making, by a thread."""

    def __init__(self, made: AsyncResult[tuple[list[Any], BalancedStep | None]]) -> None:
        self._made = made

    def is_of(self, items: Sequence[Any]) -> bool:
        """Whether it was made from these very items. Waits for it to end.

        Raises:
            BalanceError: what went wrong in making it; the step that asks is the one it was for.
        """
        made_of, _ = self._made.get()
        return len(items) == len(made_of) and all(item is other for item, other in zip(items, made_of, strict=True))

    def result(self) -> BalancedStep | None:
        """The step's data; None where there is nothing to balance."""
        return self._made.get()[1]


def _split(items: Sequence[Mapping[str, Any]]) -> tuple[list[Sample], str | None]:
    """The samples of all items on the CPU, or what is wrong with them, which travels to every rank."""
    samples: list[Sample] = []
    for index, item in enumerate(items):
        on_cpu = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in item.items()}
        try:
            samples.extend(split_packed(on_cpu))
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
