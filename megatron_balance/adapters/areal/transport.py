"""Moves trajectories from the ranks that hold them to the data-parallel ranks that train on them.

    1. every rank packs its trajectories into bytes
    2. lengths, keys and problems of all ranks are gathered; a problem on one rank raises on every rank
    3. the planner gives every rank trajectories of nearly the same cost
    4. one exchange moves them

A trajectory is packed by `torch.save`, and read with `weights_only`: whatever its rows, paddings and keys, and without
running code of another rank, as unpickling could. Ranks may hold different numbers of trajectories, and none at all: a
scatter from one rank is the same call.

Invariants: every trajectory arrives on one rank, with equal bits, in memory of its own, without the columns of padding
that none of its rows uses; no rank raises alone; the same plan on every rank, compared.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.serialization import safe_globals
from torch.utils._pytree import tree_map_only

from megatron_balance.adapters.areal.batches import (
    MASK,
    Batch,
    divide,
    has_entry_a_token,
    join_rows,
    row_lengths,
    trimmed,
)
from megatron_balance.adapters.kit.rows import exchange_rows
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import KeySpec, SampleSchema, gather_lengths

_ONE = np.zeros(1)
NUMPY_TYPES: list[Any] = [
    *(_ONE.__reduce__()[0], _ONE[0].__reduce__()[0], np.ndarray, np.dtype),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"},
]
"""Of numpy's numbers and arrays, for torch's reader, which knows torch's and Python's own types."""


@dataclass(frozen=True)
class Redistribution:
    """One rank's trajectories after the move. Ids count the trajectories of rank 0, then of rank 1, and so on.

    Attributes:
        trajectories: this rank's, by ascending id.
        ids_per_rank: `[dp_size]` ids that each rank has, ascending.
    """

    trajectories: list[Batch]
    ids_per_rank: list[list[int]]


def redistribute(
    trajectories: Sequence[Mapping[str, Any]],
    *,
    group: dist.ProcessGroup,
    cost_model: CostModel,
    equal_count: bool = False,
    device: torch.device | str = "cpu",
) -> Redistribution:
    """Balances the trajectories of all ranks; every rank of the group calls it.

    Args:
        trajectories: this rank's, dicts of tensors `[num_rows, padded_seq_len, ...]` with `attention_mask`; may be
            empty.
        group: the data-parallel ranks.
        cost_model: what a row costs.
        equal_count: as many trajectories on every rank, or one fewer; else one at least.
        device: where buffers and arriving tensors live; NCCL needs `cuda`.

    Raises:
        BalanceError: on every rank: a trajectory of some rank has no mask, other keys or dtypes than the others,
            or cannot be packed; there are fewer trajectories than ranks.
    """
    problem, schema, packed, values = None, None, [], []
    try:
        lengths = [row_lengths(trajectory) for trajectory in trajectories]
        schema = _shared_schema(trajectories)
        packed = [_pack(trimmed(trajectory)) for trajectory in trajectories]
        values = [[parcel.numel(), *rows] for parcel, rows in zip(packed, lengths, strict=True)]
    except BalanceError as error:
        problem = str(error)
    gathered = gather_lengths(
        # A trajectory is a sample of several sequences: its bytes, and its rows.
        [value for of_trajectory in values for value in of_trajectory],
        num_segments=[len(of_trajectory) for of_trajectory in values],
        group=group,
        schema=schema,
        problem=problem,
        device=device,
    )
    # From here on all ranks know the same, so an error raises on every one.
    of_all = gathered.segments_of(np.arange(gathered.lengths.size)) or []
    parts = divide([rows for _, *rows in of_all], dp_size=group.size(), cost_model=cost_model, equal_count=equal_count)
    ranks = np.zeros(len(of_all), dtype=np.int64)
    for rank, part in enumerate(parts):
        ranks[part] = rank
    nothing = torch.empty(0, dtype=torch.uint8)
    (arrived,) = exchange_rows(
        [torch.cat([nothing, *packed]).to(device)],
        num_entries=np.array([[nbytes for nbytes, *_ in of_all]]),
        home_ranks=gathered.home_ranks,
        ranks=ranks,
        group=group,
    )
    parcels = arrived.cpu().split([of_all[index][0] for index in parts[group.rank()]])
    return Redistribution([_unpack(parcel, device=device) for parcel in parcels], parts)


def distributed_batch(
    batches: Sequence[Mapping[str, Any]] | None,
    *,
    group: dist.ProcessGroup,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
    device: torch.device | str = "cpu",
) -> Batch:
    """Divides what one rank loaded among all ranks, as many batches each or one fewer, and pads each share together.

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
    shared = redistribute(batches or [], group=group, cost_model=cost_model, equal_count=True, device=device)
    return join_rows(shared.trajectories)


def _pack(content: Batch) -> torch.Tensor:
    """The bytes of a trajectory, uint8 on the CPU. What does not read back is refused here, before it is sent."""
    file = io.BytesIO()
    # A view would be saved with all of the memory that it is a view of.
    own = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), content)
    try:
        torch.save(own, file)
        packed = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        _unpack(packed, device="cpu")
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise BalanceError(
            f"a trajectory cannot travel between ranks ({str(error).splitlines()[0]}): give tensors, numpy arrays, "
            "numbers, texts, and dicts, lists and tuples of them."
        ) from error
    return packed


def _unpack(packed: torch.Tensor, *, device: torch.device | str) -> Any:
    with safe_globals(NUMPY_TYPES):
        return torch.load(io.BytesIO(packed.numpy().data), weights_only=True, map_location=device)


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
