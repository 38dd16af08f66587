"""Treats a batch as columns: values and weights of each key of each KeyedJaggedTensor, and dense fields.

A row is one sample. In a jagged column it has an entry for each value of the key; in a dense column it has one entry,
its share of the tensor, of whatever shape. So rows of every kind are cut, moved and joined in the same way.

Upstream's convention for an incomplete batch: rows from `actual_batch_size` on are padding, at the end, with no values
in any key; after a shuffle, dense tensors hold the real rows alone and keys hold all. Padding is known from
`actual_batch_size`, never from a workload of 0: a real row may have no tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance.errors import BalanceError
from megatron_balance.runtime import KeySpec, SampleSchema, gather_lengths

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GlobalRows:
    """The real rows of all ranks, rank after rank.

    Attributes:
        batch_size: rows of every rank's batch, padding included.
        own_lengths: `[num_keys, batch_size]` of this rank's batch, padding included.
        lengths: `[num_keys, num_rows]`.
        workloads: `[num_rows]`.
        home_ranks: `[num_rows]` rank that has each row.
        positions: `[num_rows]` where each row is in the batches of all ranks, one after the other, padding counted.
    """

    batch_size: int
    own_lengths: Ints
    lengths: Ints
    workloads: Ints
    home_ranks: Ints
    positions: Ints


def gather_rows(batch: Any, *, workloads: torch.Tensor, group: dist.ProcessGroup) -> GlobalRows:
    """Gathers workloads `[batch_size]` and lengths of all real rows on all ranks, in one gather.

    Raises:
        BalanceError: on every rank: batches differ, or one cannot be cut into rows.
    """
    problem, schema, size = None, None, batch.batch_size
    # The workloads, then the lengths of every key; on the host in one transfer.
    table, num_rows = np.zeros((1, 0), dtype=np.int64), 0
    try:
        schema = _schema(batch, workloads=workloads)
        lengths = [value.lengths() for _, value in _fields(batch) if isinstance(value, KeyedJaggedTensor)]
        flat = torch.cat([part.to(torch.int64).reshape(-1) for part in (workloads, *lengths)])
        table, num_rows = flat.cpu().numpy().reshape(-1, size), batch.actual_batch_size
    except BalanceError as error:
        problem = str(error)
    gathered = gather_lengths(
        # A row is a sample of several sequences: its workload, and the lengths of its keys.
        table[:, :num_rows].T.reshape(-1),
        num_segments=np.full(num_rows, table.shape[0]),
        group=group,
        schema=schema,
        problem=problem,
        device=batch.features.values().device,
    )
    of_all = gathered.segment_lengths.reshape(-1, table.shape[0]).T
    homes, counts = gathered.home_ranks, gathered.num_samples_per_rank
    within_rank = np.arange(homes.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return GlobalRows(size, table[1:], of_all[1:], of_all[0], homes, homes * size + within_rank)


def num_entries(batch: Any, *, lengths: Ints) -> Ints:
    """Entries of rows in every column, `[num_columns, num_rows]`, for `[num_keys, num_rows]` lengths."""
    ones, counts, num_keys = np.ones_like(lengths[0]), [], 0
    for _, value in _fields(batch):
        if isinstance(value, KeyedJaggedTensor):
            for key in range(num_keys, num_keys + len(value.keys())):
                counts += [lengths[key]] * len(_parts(value))
            num_keys += len(value.keys())
        else:
            counts.append(ones)
    return np.stack(counts)


def split_columns(batch: Any, *, lengths: Ints) -> list[torch.Tensor]:
    """The columns of the real rows, `[num_columns]` views `[num_entries, *trailing]`; lengths as `own_lengths`."""
    num_rows = batch.actual_batch_size
    totals, real = lengths.sum(axis=1).tolist(), lengths[:, :num_rows].sum(axis=1).tolist()
    columns: list[torch.Tensor] = []
    num_keys = 0
    for _, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            entries = value.shape[0] // batch.batch_size
            columns.append(value.reshape(batch.batch_size, entries, *value.shape[1:])[:num_rows])
            continue
        keys = range(num_keys, num_keys + len(value.keys()))
        parts = [tensor.split([totals[key] for key in keys]) for _, tensor in _parts(value)]
        # A key's values and its weights, then the next key's.
        for key, pieces in zip(keys, zip(*parts, strict=True), strict=True):
            columns += [piece[: real[key]] for piece in pieces]
        num_keys += len(keys)
    return columns


def join_columns(batch: Any, columns: Sequence[torch.Tensor], *, lengths: Ints) -> Any:
    """A batch of the same class with the rows in the columns, `lengths` `[num_keys, num_rows]`, and then padding."""
    num_rows = lengths.shape[1]
    padded = np.zeros((lengths.shape[0], batch.batch_size), dtype=np.int64)
    padded[:, :num_rows] = lengths
    remaining = list(columns)
    num_keys = 0
    replaced: dict[str, Any] = {}
    for name, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            replaced[name] = remaining.pop(0).flatten(0, 1)
            continue
        keys, num_parts = list(value.keys()), len(_parts(value))
        taken, remaining = remaining[: len(keys) * num_parts], remaining[len(keys) * num_parts :]
        of_keys = torch.from_numpy(padded[num_keys : num_keys + len(keys)].reshape(-1))
        replaced[name] = KeyedJaggedTensor.from_lengths_sync(
            keys=keys,
            values=torch.cat(taken[::num_parts]),
            weights=torch.cat(taken[1::2]) if num_parts == 2 else None,
            lengths=of_keys.to(value.lengths()),
        )
        num_keys += len(keys)
    return dataclasses.replace(batch, actual_batch_size=num_rows, **replaced)


def _schema(batch: Any, *, workloads: torch.Tensor) -> SampleSchema:
    """The columns of a batch, of whatever ranks have to agree on; BalanceError where it cannot be cut into rows."""
    size, num_rows = batch.batch_size, batch.actual_batch_size
    if not 0 <= num_rows <= size:
        raise BalanceError(f"actual_batch_size is {num_rows}: it must be 0 to batch_size, {size}.")
    if workloads.shape != (size,) or workloads.is_floating_point() or workloads.is_complex():
        raise BalanceError(
            f"get_workloads gave {workloads.dtype} {list(workloads.shape)}: it must be integers, [{size}], one a row."
        )
    columns = [KeySpec("rows of a batch", dtype=torch.int64, shape=(size,), per_token=False)]
    for name, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            if value.dim() == 0 or value.shape[0] % size:
                raise BalanceError(
                    f"{name} has shape {list(value.shape)}: its first dimension must be a multiple of the batch_size, "
                    f"{size}."
                )
            shape = (value.shape[0] // size, *value.shape[1:])
            columns.append(KeySpec(name, dtype=value.dtype, shape=shape, per_token=False))
            continue
        if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
            raise BalanceError(f"{name} has keys of different batch sizes: a shuffle needs one row a sample.")
        if value.stride() != size:
            raise BalanceError(f"{name} has {value.stride()} rows: it must have batch_size, {size}.")
        columns += [
            KeySpec(f"{name}/{key}{suffix}", dtype=tensor.dtype, shape=tuple(tensor.shape[1:]), per_token=True)
            for key in value.keys()  # noqa: SIM118  # not a mapping
            for suffix, tensor in _parts(value)
        ]
    return SampleSchema(tuple(columns))


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    """The fields that hold rows, by name."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, (torch.Tensor, KeyedJaggedTensor)):
            yield field.name, value


def _parts(value: KeyedJaggedTensor) -> list[tuple[str, torch.Tensor]]:
    """The values, and the weights where there are any, with the suffixes of their columns."""
    weights = value.weights_or_none()
    return [("", value.values())] + ([] if weights is None else [("/weights", weights)])
