"""Measures AReaL's batches and divides them among data-parallel ranks.

A batch is a dict with `attention_mask` `[num_sequences, padded_seq_len]`. A tensor whose first two axes are the mask's
has an entry a token. A tensor that shares only the first axis has an entry a sequence, and so has a list of
`num_sequences` items. Anything else belongs to the batch as a whole. A trajectory is a batch of one prompt's sequences.

Invariants: only whole columns that no sequence uses are cut, and only along the token axis, so that a hidden tensor
`[num_sequences, padded_seq_len, hidden]` keeps its last axis; padding that is put back is 0, which is what AReaL pads
with; every rank has an item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_balance.adapters.kit import even_parts, sample_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError

MASK = "attention_mask"

Batch = dict[str, Any]
TOKENS = CostModel.tokens()


def divide(
    lengths: Sequence[Sequence[int]], *, dp_size: int, cost_model: CostModel, equal_count: bool, unit_size: int = 1
) -> list[list[int]]:
    """Gives every rank items of nearly the same cost. Attention stays within a sequence: an item costs what those do.

    `lengths` are the tokens of each sequence of each item; `unit_size` consecutive items stay together, such as the two
    answers of a reward pair. With `equal_count` every rank gets as many units as the others, or one fewer, else one at
    least. Returns `[dp_size]` ids of the items, ascending.
    """
    if unit_size < 1 or len(lengths) % unit_size:
        raise BalanceError(
            f"the number of items ({len(lengths)}) must be divisible by group_size ({unit_size}), which stay together."
        )
    costs = np.array([sample_costs(np.array(item), cost_model=cost_model).sum() for item in lengths], dtype=np.int64)
    units = np.arange(costs.size).reshape(-1, unit_size)
    parts = even_parts(costs[units].sum(axis=1), num_parts=dp_size, equal_count=equal_count)
    return [units[part].reshape(-1).tolist() for part in parts]


def balance_batch(
    batches: Sequence[Mapping[str, Any]],
    dp_num: int,
    *,
    cost_model: CostModel = TOKENS,
    equal_count: bool = True,
) -> list[Batch]:
    """Divides the sequences of padded batches among ranks and pads each rank's to its own longest.

    Args:
        batches: one or more dicts of tensors `[num_sequences, padded_seq_len, ...]` with `attention_mask`; each may
            have its own number of sequences and its own padding.
        dp_num: data-parallel ranks. The one argument that AReaL's callers pass by position.
        cost_model: what a sequence costs; by default its tokens.
        equal_count: as many sequences on every rank, or one fewer; False for any number, which balances better where
            a rank has two or three.

    Returns:
        `[dp_num]` batches.

    Raises:
        BalanceError: a batch has no mask, keys differ, or there are fewer sequences than ranks.

    Examples:
        >>> import torch
        >>> lengths = [8, 1, 2, 7]
        >>> batch = {"attention_mask": torch.arange(8) < torch.tensor(lengths)[:, None]}
        >>> [part["attention_mask"].sum(1).tolist() for part in balance_batch([batch], 2)]
        [[8, 1], [2, 7]]
    """
    lengths = [[length] for batch in batches for length in sequence_lengths(batch)]
    sequences = [sequence for batch in batches for sequence in _split(batch)]
    parts = divide(lengths, dp_size=dp_num, cost_model=cost_model, equal_count=equal_count)
    return [_join([sequences[index] for index in part]) for part in parts]


def item_lengths(item: Mapping[str, Any]) -> list[int]:
    """From the mask, else the shape of the first tensor or handle with two axes or more, else a sequence of one token.

    A handle of a remote tensor (`RTensor`) knows only its shape: its sequences count with their padded length.
    """
    mask = item.get(MASK)
    if isinstance(mask, Tensor):
        return sequence_lengths(item)
    for value in (mask, *item.values()):
        tensor = getattr(value, "data", None)  # of a tensor itself
        if isinstance(tensor, Tensor) and tensor.dim() >= 2 and len(tensor):
            return [int(tensor.shape[1])] * len(tensor)
    return [1]


def sequence_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each sequence: up to the last one that the mask includes."""
    mask = batch.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not len(mask):
        kind = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise BalanceError(
            f"a trajectory's {MASK} is {kind}: it must be a tensor [num_sequences, padded_seq_len] of one or more."
        )
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask != 0, positions, 0).amax(dim=1).tolist() if mask.shape[1] else [0] * len(mask)


def trimmed(batch: Mapping[str, Any]) -> Batch:
    """The batch without the columns of padding that none of its sequences uses."""
    return _cut(batch, slice(None), max(sequence_lengths(batch)))


def _split(batch: Mapping[str, Any]) -> list[Batch]:
    """One batch of a single sequence, without padding, for each."""
    return [_cut(batch, slice(index, index + 1), length) for index, length in enumerate(sequence_lengths(batch))]


def _cut(batch: Mapping[str, Any], sequences: slice, length: int) -> Batch:
    mask = batch[MASK]

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == mask.shape:
            return value[sequences, :length]
        has_axis = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
        return value[sequences] if has_axis and len(value) == len(mask) else value

    return {name: cut(value) for name, value in batch.items()}


def _join(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """One batch of all their sequences, in order, padded with 0 to the longest."""
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
            sequences = [sequence for tensor in values for sequence in tensor]
            joined[name] = pad_sequence(sequences, batch_first=True) if value.dim() > 1 else torch.stack(sequences)
        elif isinstance(value, list):
            joined[name] = [entry for entries in values for entry in entries]
        else:
            joined[name] = value
    return joined
