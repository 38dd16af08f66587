"""Moves trajectories from the ranks that hold them to the data-parallel ranks that train on them.

    1. every rank packs its trajectories into parcels
    2. lengths, keys and problems of all ranks are gathered; a problem on one rank raises on every rank
    3. the planner gives every rank the same number of trajectories, of nearly the same cost
    4. one all-to-all moves the parcels

Ranks may hold different numbers of trajectories, and none at all: a scatter from one rank is the same call.

Invariants: every trajectory arrives on one rank, with equal bits, without the columns of padding that none of its rows
uses; no rank raises alone; the same plan on every rank, compared by its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.adapters.areal.parcel import BYTES, pack_parcel, unpack_parcel
from megatron_balance.adapters.areal.plan import ids_per_rank, plan_ranks
from megatron_balance.adapters.areal.trajectories import (
    MASK,
    Batch,
    has_entry_a_token,
    join_rows,
    row_lengths,
    trimmed,
)
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.gather import check_same_schedule, gather_lengths, gather_sample_lengths
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema


@dataclass(frozen=True)
class Redistribution:
    """One rank's trajectories after the move. Ids count the trajectories of rank 0, then of rank 1, and so on.

    Attributes:
        trajectories: this rank's, by ascending id.
        ids_per_rank: `[dp_size]` ids that each rank has, ascending.
        everything: `[num_trajectories]` with `gather_all` all of them; else None.
    """

    trajectories: list[Batch]
    ids_per_rank: list[list[int]]
    everything: list[Batch] | None


def redistribute(
    trajectories: Sequence[Mapping[str, Any]],
    *,
    group: dist.ProcessGroup,
    cost_model: CostModel,
    ep_size: int = 1,
    gather_all: bool = False,
    device: torch.device | str = "cpu",
) -> Redistribution:
    """Balances the trajectories of all ranks; every rank of the group calls it.

    Args:
        trajectories: this rank's, dicts of tensors `[num_rows, padded_seq_len, ...]` with `attention_mask`; may be
            empty.
        group: the data-parallel ranks.
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
        gather_all: give every rank all trajectories as well, at the price of that memory.
        device: where buffers and arriving tensors live; NCCL needs `cuda`.

    Raises:
        BalanceError: on every rank: a trajectory of some rank has no mask, other keys or dtypes than the others,
            or cannot be packed; there are fewer trajectories than ranks.
    """
    problem, schema, parcels, lengths = None, None, [], []
    try:
        lengths = [row_lengths(trajectory) for trajectory in trajectories]
        schema = _shared_schema(trajectories)
        parcels = [pack_parcel(trimmed(trajectory), device=device) for trajectory in trajectories]
    except BalanceError as error:
        problem = str(error)
    rows = gather_lengths(
        [length for of_trajectory in lengths for length in of_trajectory],
        num_segments=[len(of_trajectory) for of_trajectory in lengths],
        group=group,
        schema=schema,
        problem=problem,
        device=device,
    )
    # From here on all ranks know the same, so an error raises on every one.
    schedule = plan_ranks(
        rows.segment_lengths,
        num_rows=rows.num_segments,
        dp_size=group.size(),
        cost_model=cost_model,
        ep_size=ep_size,
        home_ranks=rows.home_ranks,
    )
    check_same_schedule(schedule.digest(), group=group, device=device)
    per_rank = ids_per_rank(schedule)
    if gather_all:
        everything = _gather_parcels(parcels, group=group, device=device)
        return Redistribution([everything[index] for index in per_rank[group.rank()]], per_rank, everything)
    arrived = reroute_samples(
        parcels,
        destinations=schedule.destinations(),
        gathered=gather_sample_lengths(parcels, group=group, device=device),
        group=group,
        device=device,
    )
    return Redistribution([unpack_parcel(arrived[index]) for index in per_rank[group.rank()]], per_rank, None)


def distributed_batch(
    batches: Sequence[Mapping[str, Any]] | None,
    *,
    group: dist.ProcessGroup,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    device: torch.device | str = "cpu",
) -> Batch:
    """Divides the batches that one rank loaded among all ranks of a group, and pads each rank's share together.

    A batch of several rows, such as the answers to one prompt, stays on one rank.

    Args:
        batches: on the rank that loaded them; None or nothing on the others.
        group: the data-parallel ranks.
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.
        device: where buffers and arriving tensors live; NCCL needs `cuda`.

    Returns:
        This rank's share as one batch.

    Raises:
        BalanceError: as `redistribute`.
    """
    cost_model = resolve_cost(cost, model=model, ep_size=ep_size)
    shared = redistribute(batches or [], group=group, cost_model=cost_model, ep_size=ep_size, device=device)
    return join_rows(shared.trajectories)


def _shared_schema(trajectories: Sequence[Mapping[str, Any]]) -> SampleSchema | None:
    """Keys and dtypes that all trajectories share: others could not be padded together later."""
    schemas = [_schema(trajectory) for trajectory in trajectories]
    for index, schema in enumerate(schemas):
        if schema != schemas[0]:
            raise BalanceError(
                f"trajectory {index} differs from trajectory 0 of the same rank: "
                f"{'; '.join(schema.differences(schemas[0]))}."
            )
    return schemas[0] if schemas else None


def _schema(trajectory: Mapping[str, Any]) -> SampleSchema:
    keys: list[KeySpec] = []
    for name, value in trajectory.items():
        if isinstance(value, torch.Tensor):
            # Sizes of further axes may differ, so they are left out.
            per_token = has_entry_a_token(value, mask=trajectory[MASK])
            keys.append(KeySpec(name, dtype=value.dtype, shape=(), per_token=per_token))
        else:
            keys.append(KeySpec(f"{name} (no tensor)", dtype=torch.uint8, shape=(), per_token=False))
    return SampleSchema(tuple(keys))


def _gather_parcels(parcels: Sequence[Sample], *, group: dist.ProcessGroup, device: torch.device | str) -> list[Batch]:
    """The trajectories of all ranks on every rank: one all_gather of bytes, each rank's filled up to the largest."""
    gathered = gather_sample_lengths(parcels, group=group, device=device)
    nbytes = [gathered.lengths[gathered.home_ranks == rank].tolist() for rank in range(group.size())]
    own = torch.zeros(max(map(sum, nbytes)), dtype=torch.uint8, device=device)
    if parcels:
        own[: sum(nbytes[group.rank()])] = torch.cat([parcel.per_token[BYTES] for parcel in parcels])
    of_all = torch.empty(group.size() * own.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(of_all, own, group=group)
    return [
        unpack_parcel(Sample({BYTES: parcel}))
        for of_rank, sizes in zip(of_all.view(group.size(), -1), nbytes, strict=True)
        for parcel in of_rank[: sum(sizes)].split(sizes)
        if sizes
    ]
