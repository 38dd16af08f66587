"""Plans that several hosts ask for: the steps of a rollout batch, rows on ranks, rows in micro-batches.

All are deterministic: integers, ties by index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import MAX_TOTAL_COST, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.planner import build_data_schedule, mountain_order, number_groups, partition_items
from megatron_balance.topology import Limits, Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RolloutSplit:
    """Optimiser steps of one rollout batch.

    Attributes:
        steps: for every step `[num_samples_of_step]` int64 positions in the rollout batch, ascending.
        num_groups: groups of every step.
    """

    steps: tuple[Ints, ...]
    num_groups: tuple[int, ...]


def split_rollout(groups: Sequence[Hashable] | NDArray[Any], *, global_batch_size: int) -> RolloutSplit:
    """Cuts a rollout batch into steps of whole groups, taken in the order of their first samples.

    Args:
        groups: `[num_samples]` id of the group of each sample, its prompt or rollout; a group need not stand together.
        global_batch_size: groups of a step; the last step may have fewer.

    Raises:
        BalanceError: `global_batch_size` is not a positive integer.

    Example:
        >>> split = split_rollout(["a", "b", "a", "c", "d"], global_batch_size=2)
        >>> [step.tolist() for step in split.steps]
        [[0, 1, 2], [3, 4]]
    """
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise BalanceError(f"global_batch_size is {global_batch_size!r}: it must be an integer of at least 1.")
    numbers = number_groups(groups)
    total = int(numbers.max(initial=-1)) + 1
    starts = range(0, total, global_batch_size)
    ends = [min(start + global_batch_size, total) for start in starts]
    steps = [np.flatnonzero((numbers >= start) & (numbers < end)) for start, end in zip(starts, ends, strict=True)]
    return RolloutSplit(tuple(steps), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def row_costs(lengths: Ints, *, cost_model: CostModel) -> Ints:
    """Cost of rows, int64 of the lengths' shape.

    The unit is the cost of one squared token (of one token where there is no attention) and depends on the model alone,
    so that numbers of two calls can be added and compared. A row that costs anything costs at least 1.
    """
    unit = cost_model.quadratic or sum(coefficient for _, coefficient in cost_model.windows) or cost_model.linear or 1
    unique, inverse = np.unique(lengths, return_inverse=True)
    # Python integers: FLOPs of a long row of a large model approach the limit of int64.
    costs = [cost_model(length) + cost_model.expert_linear * length for length in unique.tolist()]
    in_units = [max((2 * cost + unit) // (2 * unit), 1) if cost else 0 for cost in costs]
    return np.array(in_units, dtype=np.int64)[inverse.reshape(lengths.shape)]


def even_parts(costs: Sequence[int] | Ints, *, num_parts: int, equal_count: bool) -> list[Ints]:
    """Cuts items into parts of nearly equal cost.

    Args:
        costs: `[num_items]` non-negative integers, of any size.
        num_parts: parts to make, 1 to `num_items`.
        equal_count: every part holds the same number of items, or the quotient rounded up at most.

    Returns:
        `[num_parts]` ascending int64 indices, none empty; with `equal_count` larger parts first.

    Raises:
        BalanceError: there are fewer items than parts.
    """
    values = costs.tolist() if isinstance(costs, np.ndarray) else list(costs)
    if not 1 <= num_parts <= len(values):
        raise BalanceError(f"the number of parts is {num_parts}: it must be from 1 to the {len(values)} items.")
    # Divided by one power of two where the sum would leave int64.
    shift = max(0, sum(values).bit_length() - (MAX_TOTAL_COST.bit_length() - 2))
    scaled = np.array([max(value >> shift, 1) if value else 0 for value in values], dtype=np.int64)
    part_of = partition_items(scaled, num_parts=num_parts, equal_count=equal_count)
    parts = [np.flatnonzero(part_of == part) for part in range(num_parts)]
    return sorted(parts, key=lambda items: -items.size) if equal_count else parts


def agreed_microbatches(
    lengths: Sequence[int] | Ints,
    *,
    max_tokens: int,
    cost_model: CostModel,
    least: int = 1,
    multiple: int = 1,
    rows_per_unit: int = 1,
    mountain: bool = False,
    flag: str = "max_tokens_per_gpu",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Packs this rank's rows into the fewest micro-batches under a cap, as many as on every rank of a group.

    Each rank packs its own rows, since ranks that share rows (tensor, context and pipeline parallelism) must cut them
    alike. All ranks then take the largest number, and those that had fewer pack again.

    Args:
        lengths: `[num_rows]` tokens of this rank's rows.
        max_tokens: tokens of a micro-batch at most.
        cost_model: what a row costs.
        least: micro-batches at least.
        multiple: their number is a multiple of it.
        rows_per_unit: neighbouring rows that stay together.
        mountain: cheap micro-batches at both ends, where a pipeline waits; else the costliest first.
        flag: the host's name of `max_tokens`, for messages.
        group: the ranks that need the same number; None for this rank alone.
        device: where the collective's buffers live: `cuda` for NCCL.

    Returns:
        For every micro-batch the positions of its rows, ascending; none is empty.

    Raises:
        BalanceError: on every rank of the group, naming the ranks that cannot go on: a row over the cap, fewer rows
            than micro-batches; or ranks have different limits or costs.
    """
    rows = np.asarray(lengths, dtype=np.int64)
    limits = repr((max_tokens, least, multiple, rows_per_unit, cost_model))
    fingerprint = int.from_bytes(hashlib.sha256(limits.encode()).digest()[:8], "little") >> 1
    while True:
        slots, problem = [], None
        try:
            slots = _pack(rows, max_tokens, least, multiple, rows_per_unit, cost_model, flag)
        except BalanceError as error:
            if group is None:
                raise
            problem = str(error)
        if group is None:
            break
        counts = _gather_counts(len(slots), group=group, fingerprint=fingerprint, problem=problem, device=device)
        least = int(counts.max())
        if (counts == least).all():
            break
    costs = row_costs(rows, cost_model=cost_model)
    of_slots = np.array([[costs[slot].sum() for slot in slots]])
    order = mountain_order(of_slots)[0] if mountain else np.argsort(-of_slots[0], kind="stable")
    return [slots[index].tolist() for index in order]


def _pack(
    rows: Ints, max_tokens: int, least: int, multiple: int, size: int, cost_model: CostModel, flag: str
) -> list[Ints]:
    """The rows of each micro-batch: as even in cost as the cap lets them be."""
    if not rows.size or rows.size % size:
        raise BalanceError(f"the batch has {rows.size} rows: it must have some, a multiple of {size}.")
    tokens = rows.reshape(-1, size).sum(axis=1)
    longest = int(tokens.max())
    if longest > max_tokens:
        raise BalanceError(
            f"{int((tokens > max_tokens).sum())} rows or groups of rows are over {flag} {max_tokens}, the longest has "
            f"{longest} tokens: raise it to that, or cut the rows."
        )
    costs = row_costs(rows, cost_model=cost_model).reshape(-1, size).sum(axis=1)
    needed = max(least, -(-int(tokens.sum()) // max_tokens), 1)
    planned: list[Ints] | None = None
    for count in range(-(-needed // multiple) * multiple, tokens.size + 1, multiple):
        # Even costs first; even tokens where those do not keep the cap, which a plan filled bin by bin may still do.
        for values in (costs, tokens):
            slots = even_parts(values, num_parts=count, equal_count=False)
            if max(int(tokens[slot].sum()) for slot in slots) <= max_tokens:
                return _rows_of(slots, size=size)
        if planned is None:
            planned = _planned(tokens, max_tokens=max_tokens, multiple=multiple)
        if len(planned) == count:
            return _rows_of(planned, size=size)
    needed = -(-needed // multiple) * multiple
    raise BalanceError(
        f"{tokens.size} rows (or groups of them) for {needed} micro-batches under {flag} {max_tokens}, a multiple of "
        f"{multiple} and as many as on every rank: none may be empty. Give each rank more rows or raise {flag}."
    )


def _planned(tokens: Ints, *, max_tokens: int, multiple: int) -> list[Ints]:
    topology = Topology(1, microbatch_multiple=multiple)
    schedule = build_data_schedule(
        tokens, cost_model=CostModel.tokens(), topology=topology, limits=Limits(max_tokens), objective="step"
    )
    slots = [np.array(slot, dtype=np.int64) for slot in schedule.ranks[0]]
    return slots if all(slot.size for slot in slots) else []


def _rows_of(slots: list[Ints], *, size: int) -> list[Ints]:
    return [(np.sort(slot)[:, None] * size + np.arange(size)).reshape(-1) for slot in slots]


def _gather_counts(
    count: int, *, group: dist.ProcessGroup, fingerprint: int, problem: str | None, device: torch.device | str
) -> Ints:
    """The number of micro-batches of every rank; a problem of one rank raises on all."""
    import torch  # adapters are imported where torch is not

    from megatron_balance.runtime import Header, KeySpec, SampleSchema, gather_lengths

    schema = SampleSchema((KeySpec("micro-batches and rows", dtype=torch.int64, shape=(), per_token=True),))
    gathered = gather_lengths(
        [count], group=group, schema=schema, problem=problem, header=Header(fingerprint), device=device
    )
    return gathered.lengths
