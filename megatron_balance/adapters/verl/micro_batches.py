"""Packs a rank's rows into micro-batches under a token cap, the same number on every data-parallel rank.

verl's function agrees on the count by one all_reduce a try. Here each rank gathers the lengths of all rows and the
patches of their images, and plans the whole mini-batch with rows that stay on their ranks: one gather, and the same
plan or error on every rank.

Invariants: no micro-batch is over the cap or empty; all ranks of the group have the same number of micro-batches, a
multiple of `num_batches_divided_by` and no fewer than `min_num_micro_batch`; rows of a forced group stay together;
an error is raised on every rank or on none.
"""

from __future__ import annotations

import hashlib
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.verl.plan import balanced_partitions
from megatron_balance.adapters.verl.workload import workloads
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import DataSchedule, Images, Ranks, build_data_schedule, mountain_order
from megatron_balance.topology import Limits, Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class MicroBatchLimits:
    """verl's limits on the micro-batches of one mini-batch.

    Attributes:
        max_token_len: tokens a micro-batch holds at most.
        multiple: the number of micro-batches is a multiple of it (`num_batches_divided_by`).
        min_num_micro_batch: least number of micro-batches.
        force_group_size: rows that stay together, each with its neighbours.
    """

    max_token_len: int
    _: KW_ONLY
    multiple: int = 1
    min_num_micro_batch: int = 1
    force_group_size: int = 1

    def fingerprint(self, cost_model: CostModel) -> int:
        """A 63-bit hash of the limits and costs, to compare among ranks."""
        return _hash((self, cost_model))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of all ranks that plan together; `first` is the first row of this rank."""

    lengths: NDArray[np.int64]
    num_rows_per_rank: NDArray[np.int64]
    rank: int
    images: Images | None

    @property
    def first(self) -> int:
        return int(self.num_rows_per_rank[: self.rank].sum())


def plan_micro_batches(
    lengths: NDArray[np.int64],
    *,
    limits: MicroBatchLimits,
    cost_model: CostModel,
    images: Images | None = None,
    problem: str | None = None,
    mountain: bool = True,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Micro-batches of this rank.

    Args:
        lengths: `[num_rows]` tokens of this rank's rows.
        limits: tokens of a micro-batch, and the number of micro-batches.
        cost_model: what a row costs.
        images: of this rank's rows; None on every rank or on none.
        problem: an error in this rank's rows. It is raised here, on every rank.
        mountain: put cheap micro-batches at both ends, where a pipeline waits for them; else by falling cost.
        group: ranks that need the same number of micro-batches; None where each rank may have its own.
        device: where the gather's buffers live.

    Returns:
        Lists of row indices, ascending in each.

    Raises:
        BalanceError: on every rank of the group: a row or forced group over the cap, fewer rows on some rank
            than another needs micro-batches, or ranks with different limits.
    """
    if problem is None and (lengths.size == 0 or lengths.size % limits.force_group_size):
        problem = (
            f"the batch has {lengths.size} rows: it must have some, a multiple of force_group_size "
            f"{limits.force_group_size}."
        )
    if group is not None:
        fingerprint = limits.fingerprint(cost_model)
        rows = _gather(lengths, images, fingerprint=fingerprint, problem=problem, group=group, device=device)
    elif problem is not None:
        raise BalanceError(problem)
    else:
        rows = _Rows(lengths, np.array([lengths.size]), 0, images)
    ranks = _plan(rows, limits=limits, cost_model=cost_model)
    if group is not None:
        from megatron_balance.runtime.gather import check_same_schedule

        check_same_schedule(_hash(ranks), group=group, device=device)
    in_group = np.arange(limits.force_group_size)
    micro_batches: list[list[int]] = []
    for slot in ranks[rows.rank]:
        of_groups = np.array(slot, dtype=np.int64)[:, None] * in_group.size + in_group
        micro_batches.append((of_groups.reshape(-1) - rows.first).tolist())
    loads = workloads(lengths, cost_model=cost_model, images=images)
    costs = np.array([[loads[own].sum() for own in micro_batches]])
    order = mountain_order(costs)[0] if mountain else np.argsort(-costs[0], kind="stable")
    return [micro_batches[slot] for slot in order]


def _plan(rows: _Rows, *, limits: MicroBatchLimits, cost_model: CostModel) -> Ranks:
    """Forced groups of all ranks in micro-batches, each group on the rank that has it."""
    size, multiple = limits.force_group_size, limits.multiple
    num_groups = rows.num_rows_per_rank // size
    fewest = -(-limits.min_num_micro_batch // multiple) * multiple
    images = None if rows.images is None else Images(rows.images.sums.reshape(-1, size, 2).sum(axis=1))

    def plan(multiple: int) -> DataSchedule:
        return build_data_schedule(
            rows.lengths,
            cost_model=cost_model,
            topology=Topology(num_groups.size, microbatch_multiple=multiple),
            limits=Limits(limits.max_token_len),
            # Rows stay on their ranks, so the fewest micro-batches are best.
            objective="step",
            num_segments=np.full(num_groups.sum(), size, dtype=np.int64),
            image_patches=images,
            home_ranks=np.repeat(np.arange(num_groups.size), num_groups),
            move_samples=False,
        )

    schedule = plan(multiple)
    if schedule.oversized:
        longest = int(schedule.lengths.max())
        raise BalanceError(
            f"{len(schedule.oversized)} rows or forced groups are over max_token_len {limits.max_token_len}, the "
            f"longest of {longest} tokens: raise max_token_len_per_gpu to that, or cut the rows."
        )
    if schedule.num_microbatches < fewest:
        schedule = plan(fewest)
    tight = _pack_tightly(schedule, fewest=fewest, loads=_group_loads(rows, size=size, cost_model=cost_model))
    num_microbatches = schedule.num_microbatches if tight is None else len(tight[0])
    if num_microbatches > int(num_groups.min()):
        poorest = int(num_groups.argmin())
        raise BalanceError(
            f"{num_microbatches} micro-batches are needed under max_token_len {limits.max_token_len}, and rank "
            f"{poorest} has {int(num_groups[poorest])} rows or forced groups: raise max_token_len_per_gpu, or balance "
            "the batch first (trainer.balance_batch)."
        )
    return schedule.ranks if tight is None else tight


def _pack_tightly(schedule: DataSchedule, *, fewest: int, loads: NDArray[np.int64]) -> Ranks | None:
    """Fewer micro-batches than the schedule's, where partitions into as many keep the cap; else None.

    The schedule packs by target heights, which fail for micro-batches of a few long rows. Of 100 sets of 25 rows that
    fill 6 micro-batches to 90 %, it packed 65 into 6; partitions by work or by tokens packed 99.
    """
    assert schedule.home_ranks is not None
    dp_size, multiple = schedule.topology.dp_size, schedule.topology.microbatch_multiple
    groups_of = [np.flatnonzero(schedule.home_ranks == rank) for rank in range(dp_size)]
    tokens = schedule.lengths
    capacity = schedule.limits.max_tokens_per_microbatch(schedule.topology)
    assert capacity is not None
    fullest = max(int(tokens[groups].sum()) for groups in groups_of)
    floor = max(fewest, max(1, -(-fullest // (capacity * multiple))) * multiple)
    most = min(groups.size for groups in groups_of)

    def pack(groups: NDArray[np.int64], num_microbatches: int) -> list[NDArray[np.int64]] | None:
        for values in (loads, tokens):
            parts = balanced_partitions(values[groups], num_parts=num_microbatches, equal_size=False)
            slots = [groups[part] for part in parts]
            if max(int(tokens[slot].sum()) for slot in slots) <= capacity:
                return slots
        return None

    for num_microbatches in range(floor, min(schedule.num_microbatches, most + 1), multiple):
        ranks: list[tuple[tuple[int, ...], ...]] = []
        for groups in groups_of:
            slots = pack(groups, num_microbatches)
            if slots is None:
                break
            ranks.append(tuple(tuple(slot.tolist()) for slot in slots))
        if len(ranks) == dp_size:
            return tuple(ranks)
    return None


def _group_loads(rows: _Rows, *, size: int, cost_model: CostModel) -> NDArray[np.int64]:
    """Work of each forced group, `[num_groups]`."""
    loads = workloads(rows.lengths, cost_model=cost_model, images=rows.images)
    return loads.reshape(-1, size).sum(axis=1)


def _hash(what: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


def _gather(
    lengths: NDArray[np.int64],
    images: Images | None,
    *,
    fingerprint: int,
    problem: str | None,
    group: dist.ProcessGroup,
    device: torch.device | str,
) -> _Rows:
    """Rows of all ranks of the group; a problem of one rank raises on all."""
    import torch

    from megatron_balance.runtime.gather import gather_lengths
    from megatron_balance.samples.sample import KeySpec, SampleSchema

    gathered = gather_lengths(
        lengths,
        group=group,
        schema=SampleSchema((KeySpec("input_ids", dtype=torch.int64, shape=(), per_token=True),)),
        fingerprint=fingerprint,
        problem=problem,
        image_patches=None if images is None else images.sums,
        device=device,
    )
    of_all = None if gathered.image_patches is None else Images(gathered.image_patches)
    return _Rows(gathered.lengths, gathered.num_samples_per_rank, group.rank(), of_all)
