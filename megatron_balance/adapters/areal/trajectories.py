"""Measures AReaL's batches, divides them among data-parallel ranks, and moves them.

A batch is a dict with `attention_mask` `[num_rows, padded_seq_len]`. A tensor whose first two axes are those of the
mask has an entry a token. A tensor that shares only the first axis has an entry a row, and so has a list of `num_rows`
items. Anything else belongs to the batch as a whole. A trajectory is a batch of one prompt's rows.

Invariants: only whole columns that no row uses are cut, and only along the token axis, so that a hidden tensor
`[num_rows, padded_seq_len, hidden]` keeps its last axis; padding that is put back is 0, which is what AReaL pads with;
every item goes to one rank, with equal bits and in memory of its own; every rank has one; no rank raises alone.

Between ranks, each packs its trajectories into bytes; lengths, keys and problems of all are gathered; every rank
computes the same plan; one exchange moves the bytes. They are written by `torch.save` and read with `weights_only`:
whatever their rows, paddings and keys, and without running code of another rank, as unpickling could. Ranks may hold
different numbers of trajectories, and none at all: a scatter from one rank is the same call.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.serialization import safe_globals
from torch.utils._pytree import tree_map_only

from megatron_balance.adapters.kit import even_parts, row_costs
from megatron_balance.adapters.kit.ranks import move_rows, moving_row
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.runtime import gather_lengths
from megatron_balance.samples import KeySpec, SampleSchema

MASK = "attention_mask"

Batch = dict[str, Any]
TOKENS = CostModel.tokens()


def divide(
    rows: Sequence[Sequence[int]], *, dp_size: int, cost_model: CostModel, equal_count: bool, unit_size: int = 1
) -> list[list[int]]:
    """Gives every rank items of nearly the same cost. Attention stays within a row, so an item costs what its rows do.

    `rows` are the tokens of each row of each item; `unit_size` consecutive items stay together, such as the two answers
    of a reward pair. With `equal_count` every rank gets as many units as the others, or one fewer, else one at least.
    Returns `[dp_size]` ids of the items, ascending.
    """
    if unit_size < 1 or len(rows) % unit_size:
        raise BalanceError(
            f"the number of items ({len(rows)}) must be divisible by group_size ({unit_size}), which stay together."
        )
    num_units = len(rows) // unit_size
    if num_units < dp_size:
        raise BalanceError(
            f"{num_units} trajectories (or groups of them) for {dp_size} data-parallel ranks: their number must be >= "
            "that of the ranks, so that every rank has one. Raise the batch size, or use fewer ranks."
        )
    of_items = [int(row_costs(np.array(of_item, dtype=np.int64), cost_model=cost_model).sum()) for of_item in rows]
    costs = [sum(of_items[start : start + unit_size]) for start in range(0, len(rows), unit_size)]
    parts = even_parts(costs, num_parts=dp_size, equal_count=equal_count)
    return [(part[:, None] * unit_size + np.arange(unit_size)).reshape(-1).tolist() for part in parts]


def balance_batch(
    batches: Sequence[Mapping[str, Any]],
    dp_num: int,
    *,
    cost_model: CostModel = TOKENS,
    equal_count: bool = True,
) -> list[Batch]:
    """Divides the rows of padded batches among ranks and pads each rank's to its own longest.

    Args:
        batches: one or more dicts of tensors `[num_rows, padded_seq_len, ...]` with `attention_mask`; each may have
            its own number of rows and its own padding.
        dp_num: data-parallel ranks. The one argument that AReaL's callers pass by position.
        cost_model: what a row costs; by default its tokens.
        equal_count: as many rows on every rank, or one fewer; False for any number, which balances better where a
            rank has two or three.

    Returns:
        `[dp_num]` batches.

    Raises:
        BalanceError: a batch has no mask, keys differ, or there are fewer rows than ranks.

    Example:
        >>> import torch
        >>> lengths = [8, 1, 2, 7]
        >>> batch = {"attention_mask": torch.arange(8) < torch.tensor(lengths)[:, None]}
        >>> [part["attention_mask"].sum(1).tolist() for part in balance_batch([batch], 2)]
        [[8, 1], [2, 7]]
    """
    lengths = [[length] for batch in batches for length in row_lengths(batch)]
    rows = [row for batch in batches for row in split_rows(batch)]
    parts = divide(lengths, dp_size=dp_num, cost_model=cost_model, equal_count=equal_count)
    return [join_rows([rows[index] for index in part]) for part in parts]


def make_dispatch(cost_model: CostModel) -> Callable[..., tuple[list[list[dict[str, Any]]], list[list[int]]]]:
    """A function in place of the controller's `_dispatch_tensors`, with its signature."""

    def dispatch_tensors(item_list: list[dict[str, Any]], dp_size: int, group_size: int = 1) -> Any:
        rows = [_item_row_lengths(item) for item in item_list]
        parts = divide(rows, dp_size=dp_size, cost_model=cost_model, equal_count=True, unit_size=group_size)
        return [[item_list[index] for index in part] for part in parts], parts

    return dispatch_tensors


def _item_row_lengths(item: Mapping[str, Any]) -> list[int]:
    """From the mask, else the shape of the first tensor or handle with two axes or more, else one row of one token.

    A handle of a remote tensor (`RTensor`) knows only its shape: its rows count with their padded length.
    """
    mask = item.get(MASK)
    if isinstance(mask, Tensor):
        return row_lengths(item)
    for value in (mask, *item.values()):
        tensor = value if isinstance(value, Tensor) else getattr(value, "data", None)
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and len(tensor):
            return [int(tensor.shape[1])] * len(tensor)
    return [1]


def row_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each row, `[num_rows]`: up to the last one that the mask includes."""
    mask = batch.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not len(mask):
        seen = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise BalanceError(
            f"a trajectory's {MASK} is {seen}: it must be a tensor [num_rows, padded_seq_len] of one row or more."
        )
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask != 0, positions, 0).amax(dim=1).tolist() if mask.shape[1] else [0] * len(mask)


def has_entry_a_token(value: object, *, mask: Tensor) -> bool:
    """True if a value of a batch is a tensor `[num_rows, padded_seq_len, ...]`."""
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == mask.shape


def trimmed(batch: Mapping[str, Any]) -> Batch:
    """The batch without the columns of padding that none of its rows uses; other values are the same objects."""
    mask, longest = batch[MASK], max(row_lengths(batch))
    return {name: value[:, :longest] if has_entry_a_token(value, mask=mask) else value for name, value in batch.items()}


def split_rows(batch: Mapping[str, Any]) -> list[Batch]:
    """One batch of a single row, without padding, for each row."""
    mask = batch[MASK]

    def of_row(value: Any, row: int, length: int) -> Any:
        if has_entry_a_token(value, mask=mask):
            return value[row : row + 1, :length]
        is_tensor = isinstance(value, Tensor) and value.dim() > 0
        if (is_tensor or isinstance(value, list)) and len(value) == len(mask):
            return value[row : row + 1]
        return value

    return [
        {name: of_row(value, row, length) for name, value in batch.items()}
        for row, length in enumerate(row_lengths(batch))
    ]


def join_rows(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """One batch of all their rows, in order, padded with 0 at the end of every axis but the first."""
    first = batches[0]
    for index, batch in enumerate(batches):
        if batch.keys() != first.keys():
            raise BalanceError(
                f"batch {index} has the keys {sorted(batch)} and batch 0 has {sorted(first)}: they must be the same."
            )
    joined: Batch = {}
    for name, value in first.items():
        values = [batch[name] for batch in batches]
        if isinstance(value, Tensor) and value.dim():
            joined[name] = _padded_together(values, name=name)
        elif isinstance(value, list):
            joined[name] = [entry for entries in values for entry in entries]
        else:
            joined[name] = value
    return joined


def _padded_together(tensors: Sequence[Tensor], *, name: str) -> Tensor:
    """`[num_rows_i, *axes_i]` → `[sum of num_rows_i, *largest axes]`."""
    num_axes = {tensor.dim() for tensor in tensors}
    if len(num_axes) != 1:
        raise BalanceError(f"{name!r} has {sorted(num_axes)} axes in different batches: it must have the same in all.")
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded: list[Tensor] = []
    for tensor in tensors:
        missing = [size - here for size, here in zip(largest, tensor.shape[1:], strict=True)]
        # functional.pad counts axes from the last one.
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(functional.pad(tensor, widths) if any(missing) else tensor)
    return torch.cat(padded)


_ONE = np.zeros(1)
NUMPY_TYPES: list[Any] = [
    *(_ONE.__reduce__()[0], _ONE[0].__reduce__()[0], np.ndarray, np.dtype),
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"},
]
"""Of numpy's numbers and arrays, for torch's reader, which knows torch's and Python's own types."""


_BYTES = KeySpec("(bytes)", dtype=torch.uint8, kind="ragged")
"""A trajectory as it moves."""

_ROW_SCHEMA = SampleSchema.of(moving_row({_BYTES.name: torch.empty(0, dtype=torch.uint8)}))


@dataclass(frozen=True)
class Redistribution:
    """Trajectories after the move. Ids count those of rank 0 before it, then of rank 1, and so on."""

    trajectories: list[Batch]  # this rank's, by ascending id
    ids_per_rank: list[list[int]]  # `[dp_size]` ids that each rank has, ascending


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
    problem, schema, lengths, packed = None, None, [], []
    try:
        lengths = [row_lengths(trajectory) for trajectory in trajectories]
        schema = SampleSchema.shared_by(map(_schema_of, trajectories))
        packed = [_pack(trimmed(trajectory)).to(device) for trajectory in trajectories]
    except BalanceError as error:
        problem = str(error)
    gathered = gather_lengths(
        [length for rows in lengths for length in rows],
        num_segments=[len(rows) for rows in lengths],
        ragged_lengths=[[len(parcel)] for parcel in packed],
        group=group,
        schema=schema,
        problem=problem,
        device=device,
    )
    # From here on all ranks know the same, so an error raises on every one.
    of_all = gathered.segments_of(np.arange(gathered.lengths.size))
    parts = divide(of_all, dp_size=group.size(), cost_model=cost_model, equal_count=equal_count)
    ranks = np.zeros(len(of_all), dtype=np.int64)
    for rank, part in enumerate(parts):
        ranks[part] = rank
    rows = [moving_row({_BYTES.name: parcel}) for parcel in packed]
    arrived = move_rows(rows, ranks=ranks, gathered=gathered, group=group, schema=_ROW_SCHEMA, device=device)
    return Redistribution([_unpack(row.ragged[_BYTES.name].cpu(), device=device) for row in arrived], parts)


def distributed_batch(
    batches: Sequence[Mapping[str, Any]] | None,
    *,
    group: dist.ProcessGroup,
    cost_model: CostModel = TOKENS,
    device: torch.device | str = "cpu",
) -> Batch:
    """Divides what one rank loaded among all ranks, as many batches each or one fewer, and pads each share together.

    A batch of several rows, such as the answers to one prompt, stays on one rank.

    Args:
        batches: on the rank that loaded them; None or nothing on the others.
        group: the data-parallel ranks.
        cost_model: what a row costs; by default its tokens.
        device: where buffers and arriving tensors live; NCCL needs `cuda`.

    Returns:
        This rank's share as one batch.

    Raises:
        BalanceError: as `redistribute`.
    """
    shared = redistribute(batches or [], group=group, cost_model=cost_model, equal_count=True, device=device)
    return join_rows(shared.trajectories)


def _pack(content: Batch) -> Tensor:
    """The bytes of a trajectory, uint8 on the CPU. What does not read back is refused here, before it is sent."""
    file = io.BytesIO()
    # A view would be saved with all of the memory that it is a view of.
    own = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), content)
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


def _unpack(packed: Tensor, *, device: torch.device | str) -> Any:
    with safe_globals(NUMPY_TYPES):
        return torch.load(io.BytesIO(packed.numpy().data), weights_only=True, map_location=device)


def _schema_of(trajectory: Mapping[str, Any]) -> SampleSchema:
    """What all trajectories must share to be padded together later; sizes of further axes may differ."""
    keys = [
        KeySpec(
            name,
            dtype=value.dtype,
            kind="per_token" if has_entry_a_token(value, mask=trajectory[MASK]) else "per_sample",
        )
        if isinstance(value, Tensor)
        else KeySpec(f"{name} (no tensor)", dtype=torch.uint8, kind="per_sample")
        for name, value in trajectory.items()
    ]
    return SampleSchema((_BYTES, *keys))
