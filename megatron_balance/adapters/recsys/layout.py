"""Treats a batch as columns: values and weights of each key of each KeyedJaggedTensor, and dense fields.

A row is one sample. In a jagged column it has an entry for each value of the key; in a dense column it has one entry,
its share of the tensor, of whatever shape. So rows of every kind are cut, moved and joined in the same way.

Upstream's convention for an incomplete batch: rows from `actual_batch_size` on are padding, at the end, with no values
in any key; after a shuffle, dense tensors hold the real rows alone and keys hold all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import KeySpec, SampleSchema

DENSE = -1
"""Stands for the number of a key in a column that has one entry a row."""


@dataclass(frozen=True)
class BatchLayout:
    """The columns of a batch; equal on all ranks.

    Attributes:
        columns: in order; `per_token` where the column is jagged.
        keys: `[num_columns]` number of the key that says how many entries a row has, or `DENSE`.
        num_keys: keys of all KeyedJaggedTensors together.
        batch_size: rows, padding included.
    """

    columns: tuple[KeySpec, ...]
    keys: tuple[int, ...]
    num_keys: int
    batch_size: int

    @classmethod
    def of(cls, batch: Any) -> BatchLayout:
        """The layout of a batch.

        Raises:
            BalanceError: a KeyedJaggedTensor or a dense tensor does not have the batch's rows.
        """
        size = batch.batch_size
        columns: list[KeySpec] = []
        keys: list[int] = []
        num_keys = 0
        for name, value in _fields(batch):
            if not isinstance(value, KeyedJaggedTensor):
                if value.dim() == 0 or value.shape[0] % size:
                    raise BalanceError(
                        f"{name} has shape {list(value.shape)}: its first dimension must be a multiple of the "
                        f"batch_size, {size}."
                    )
                shape = (value.shape[0] // size, *value.shape[1:])
                columns.append(KeySpec(name, dtype=value.dtype, shape=shape, per_token=False))
                keys.append(DENSE)
                continue
            if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
                raise BalanceError(f"{name} has keys of different batch sizes: a shuffle needs one row a sample.")
            if value.stride() != size:
                raise BalanceError(f"{name} has {value.stride()} rows: it must have batch_size, {size}.")
            for key in value.keys():  # noqa: SIM118  # not a mapping
                for suffix, tensor in _jagged_parts(value):
                    shape = tuple(tensor.shape[1:])
                    columns.append(KeySpec(f"{name}/{key}{suffix}", dtype=tensor.dtype, shape=shape, per_token=True))
                    keys.append(num_keys)
                num_keys += 1
        return cls(tuple(columns), tuple(keys), num_keys, size)

    def schema(self) -> SampleSchema:
        """The layout as the runtime compares it: an error names the columns in which ranks differ."""
        rows = KeySpec("rows of a batch", dtype=torch.int64, shape=(self.batch_size,), per_token=False)
        return SampleSchema((*self.columns, rows))

    def num_entries(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries of rows in every column.

        Args:
            lengths: `[num_keys, num_rows]`.

        Returns:
            `[num_columns, num_rows]` int64.
        """
        ones = np.ones((1, lengths.shape[1]), dtype=np.int64)
        # DENSE, -1, is the row of ones.
        return np.concatenate([lengths, ones])[list(self.keys)]

    def row_nbytes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of rows over all columns, `[num_rows]` int64, for `[num_keys, num_rows]` lengths."""
        return np.array([column.nbytes for column in self.columns], dtype=np.int64) @ self.num_entries(lengths)


def lengths_on_host(batch: Any, *, workloads: torch.Tensor) -> NDArray[np.int64]:
    """Copies the workloads and lengths to the host, in one transfer.

    Args:
        batch: on any device.
        workloads: `[batch_size]` integers, there as well.

    Returns:
        `[1 + num_keys, batch_size]` int64: the workloads, then the lengths of every key.
    """
    jagged = [value.lengths() for _, value in _fields(batch) if isinstance(value, KeyedJaggedTensor)]
    rows = torch.cat([part.to(torch.int64).reshape(-1) for part in (workloads, *jagged)])
    return rows.cpu().numpy().reshape(-1, batch.batch_size)


def split_columns(batch: Any, *, layout: BatchLayout, lengths: NDArray[np.int64]) -> list[torch.Tensor]:
    """The columns of the real rows, as views.

    Args:
        batch: of this layout.
        layout: of the batch.
        lengths: `[num_keys, batch_size]`.

    Returns:
        `[num_columns]` tensors `[num_entries, *trailing]`.
    """
    num_rows = batch.actual_batch_size
    totals = lengths.sum(axis=1).tolist()
    real = lengths[:, :num_rows].sum(axis=1).tolist()
    columns: list[torch.Tensor] = []
    num_keys = 0
    for _, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            entries = value.shape[0] // layout.batch_size
            columns.append(value.reshape(layout.batch_size, entries, *value.shape[1:])[:num_rows])
            continue
        keys = range(num_keys, num_keys + len(value.keys()))
        parts = [tensor.split([totals[key] for key in keys]) for _, tensor in _jagged_parts(value)]
        # A key's values and its weights, then the next key's.
        for key, pieces in zip(keys, zip(*parts, strict=True), strict=True):
            columns += [piece[: real[key]] for piece in pieces]
        num_keys += len(keys)
    return columns


def join_columns(
    batch: Any, columns: Sequence[torch.Tensor], *, layout: BatchLayout, lengths: NDArray[np.int64]
) -> Any:
    """A batch like another one, with other rows.

    Args:
        batch: fields that are neither keys nor tensors are taken from it.
        columns: `[num_columns]` tensors `[num_entries, *trailing]`.
        layout: of the batch.
        lengths: `[num_keys, num_rows]` of the rows in the columns; padding fills the batch up.

    Returns:
        A batch of the same class, with `num_rows` real rows.
    """
    num_rows = lengths.shape[1]
    padded = np.zeros((layout.num_keys, layout.batch_size), dtype=np.int64)
    padded[:, :num_rows] = lengths
    remaining = list(columns)
    num_keys = 0
    replaced: dict[str, Any] = {}
    for name, value in _fields(batch):
        if not isinstance(value, KeyedJaggedTensor):
            replaced[name] = remaining.pop(0).flatten(0, 1)
            continue
        keys, num_parts = list(value.keys()), len(_jagged_parts(value))
        taken, remaining = remaining[: len(keys) * num_parts], remaining[len(keys) * num_parts :]
        of_keys = torch.from_numpy(padded[num_keys : num_keys + len(keys)].reshape(-1))
        replaced[name] = KeyedJaggedTensor.from_lengths_sync(
            keys=keys,
            values=torch.cat(taken[::num_parts]),
            weights=torch.cat(taken[1::2]) if num_parts == 2 else None,
            lengths=of_keys.to(value.lengths()),
        )
        num_keys += len(keys)
    return dataclasses.replace(batch, batch_size=layout.batch_size, actual_batch_size=num_rows, **replaced)


def _fields(batch: Any) -> list[tuple[str, Any]]:
    """The fields that hold rows, by name."""
    named = [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    return [(name, value) for name, value in named if isinstance(value, (torch.Tensor, KeyedJaggedTensor))]


def _jagged_parts(value: KeyedJaggedTensor) -> list[tuple[str, torch.Tensor]]:
    """The values, and the weights where there are any, with the suffixes of their columns."""
    weights = value.weights_or_none()
    return [("", value.values())] + ([] if weights is None else [("/weights", weights)])
