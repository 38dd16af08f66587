"""Splits a batch of a Megatron data loader into samples: the inverse of packing.

A row of a batch holds one or more sequences. Each becomes one Sample, without its trailing padding, or the row stays
together as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.packing import DERIVED_KEYS
from megatron_balance.samples.sample import Sample, lengths_key

UNITS = ("segment", "sample")

_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_INTEGER_KEYS = ("tokens", "labels", "position_ids", "cu_seqlens", "cu_seqlens_padded")


class RowError(BalanceError):
    """An error in one row of a batch.

    Attributes:
        row: of the batch.
    """

    def __init__(self, row: int, what: str) -> None:
        super().__init__(f"Row {row}: {what}")
        self.row = row


def split_packed(batch: Mapping[str, Any], *, unit: str = "segment") -> list[Sample]:
    """One Sample for each sequence of a batch, row after row; or one for each row.

    Trailing padding is stripped: the constant run of token ids at the end of a sequence whose loss_mask is 0. Attention
    is causal, so that stripping changes no loss (Megatron 0.19's SFTDataset counts it into the last sequence of
    a row, where it costs attention). One token always stays. Nothing is stripped where there is no loss_mask,
    nor where there are ragged keys: what stands for an image may end a sequence, masked and constant.

    Args:
        batch: `tokens` `[micro_batch_size, padded_seq_len]`; `cu_seqlens` `[micro_batch_size, k]`, rising from 0 and
            right-padded with copies of the last value (without it a row is one sequence); `cu_seqlens_padded`,
            of the same shape, where sequences start when `cu_seqlens` counts real tokens; `max_seqlen`, ignored.
            `position_ids` like tokens; for mRoPE `[micro_batch_size, num_dimensions, padded_seq_len]`, as a loader puts
            rows together, or `[num_dimensions, micro_batch_size, padded_seq_len]`.
            A key NAME beside NAME_lengths is ragged: `[num_entries, *trailing]`, entries of the first sequence, then
            of the next, with NAME_lengths int `[num_sequences]`; with unit `sample` of the first row, then of the next,
            with NAME_lengths `[micro_batch_size]`.
            Another key is per token where its shape begins like that of tokens, else per sample, with one entry a row
            or one a sequence. Keys that are None are dropped.
        unit: `segment`, one Sample a sequence, or `sample`, one a row: its sequences follow one another without their
            padding, as `segment_lengths` says. A row without tokens makes no Sample.

    Returns:
        Samples whose tensors are views of the batch, or copies where a row of several sequences had padding between.

    Raises:
        BalanceError: naming the key: labels of another length than tokens; tokens or labels that are not integers; a
            value that is not a tensor, or of a shape that fits neither rows nor sequences; NAME_lengths that do not sum
            to the entries, or are not one for each sequence or row that stays together; an unknown unit, or `sample`
            where a key has one entry a sequence. RowError: naming the row too: ragged entries of a row without a
            sequence; cu_seqlens that does not begin at 0, falls or passes the row's end; sequences that leave out
            tokens with a loss; a negative token; NaN or infinity in loss_mask.
    """
    if unit not in UNITS:
        raise BalanceError(f"unit is {unit!r}: it must be one of {', '.join(UNITS)}.")
    tensors = _checked_tensors(batch)
    tokens = tensors["tokens"]
    segments = _segments(tensors)
    rows: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    per_token: dict[str, Tensor] = {}
    ragged = {name: tensors[name] for name in tensors if lengths_key(name) in tensors}
    for name, tensor in tensors.items():
        if name in DERIVED_KEYS or name in ragged or name in map(lengths_key, ragged):
            continue
        if tensor.shape[:2] == tokens.shape:
            per_token[name] = tensor
        elif tensor.dim() and len(tensor) == len(tokens):
            rows[name] = tensor
        elif tensor.dim() and len(tensor) == len(segments):
            sequences[name] = tensor
        else:
            raise BalanceError(
                f"{name} has shape {list(tensor.shape)}: it must begin with {list(tokens.shape)} (per token), "
                f"{len(tokens)} (one a row) or {len(segments)} (one a sequence), or have its entries counted by "
                f"{lengths_key(name)}."
            )
    if unit == "sample" and sequences:
        raise BalanceError(
            f"{', '.join(sequences)} has one entry a sequence ({len(segments)}): a row that stays whole cannot carry "
            "it. Give one entry a row or a token, or split into segments."
        )
    real = segments
    if not ragged:
        real = [
            (row, start, _without_padding(tensors, row=row, start=start, stop=stop)) for row, start, stop in segments
        ]
    _check_loss_kept(tensors, segments=real)
    owners = list(_by_row(real)) if unit == "sample" else list(range(len(real)))
    entries = {name: _entries(name, tensors, owners=owners, unit=unit) for name in ragged}
    if unit == "sample":
        return [
            Sample(
                {name: _joined(tensor[row], of_row) for name, tensor in per_token.items()},
                per_sample={name: tensor[row] for name, tensor in rows.items()},
                ragged={name: of_owner[row] for name, of_owner in entries.items()},
                segment_lengths=tuple(stop - start for start, stop in of_row),
            )
            for row, of_row in _by_row(real).items()
        ]
    return [
        Sample(
            {name: tensor[row, start:stop] for name, tensor in per_token.items()},
            per_sample={name: tensor[row] for name, tensor in rows.items()}
            | {name: tensor[index] for name, tensor in sequences.items()},
            ragged={name: of_owner[index] for name, of_owner in entries.items()},
        )
        for index, (row, start, stop) in enumerate(real)
    ]


def _entries(name: str, tensors: Mapping[str, Tensor], *, owners: Sequence[int], unit: str) -> dict[int, Tensor]:
    """Entries of a ragged key of each owner: each sequence, or each row where rows stay whole.

    Args:
        owners: those that become samples, rising; of a split into segments all there are.
    """
    tensor, counts = tensors[name], tensors[lengths_key(name)]
    num_owners = len(tensors["tokens"]) if unit == "sample" else len(owners)
    if counts.is_floating_point() or counts.is_complex() or counts.shape != (num_owners,):
        one, remedy = (
            ("row", "one a sequence needs --balance-unit segment")
            if unit == "sample"
            else ("sequence", "one a row needs --balance-unit sample")
        )
        raise BalanceError(
            f"{lengths_key(name)} is {counts.dtype} {list(counts.shape)}: it must be integers, [{num_owners}], one a "
            f"{one}; {remedy}."
        )
    sizes: list[int] = counts.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != len(tensor):
        raise BalanceError(
            f"{lengths_key(name)} holds {sizes}: it must be 0 or more and sum to the {len(tensor)} entries of {name}."
        )
    entries = dict(enumerate(tensor.split(sizes)))
    for row in entries.keys() - set(owners):
        if sizes[row]:
            raise RowError(row, f"it has entries of {name} and no sequence; they would be lost.")
    return entries


def _by_row(segments: Sequence[tuple[int, int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Row → start and stop of its sequences."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for row, start, stop in segments:
        rows.setdefault(row, []).append((start, stop))
    return rows


def _joined(tensor: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """`[padded_seq_len, *trailing]` of a row → its sequences one after the other; a view where they already are."""
    if all(stop == start for (_, stop), (start, _) in pairwise(segments)):
        return tensor[segments[0][0] : segments[-1][1]]
    return torch.cat([tensor[start:stop] for start, stop in segments])


def _checked_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch without None, checked key by key."""
    tensors: dict[str, Tensor] = {}
    for name, value in batch.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise BalanceError(f"{name} is a {type(value).__name__}: only tensors move between ranks; drop the key.")
        tensors[name] = value
    if "tokens" not in tensors or tensors["tokens"].dim() != 2:
        raise BalanceError(
            f"A batch needs tokens of shape [micro_batch_size, padded_seq_len]; it has "
            f"{ {name: list(tensor.shape) for name, tensor in tensors.items()} }."
        )
    shape = tensors["tokens"].shape
    positions = tensors.get("position_ids")
    if positions is not None and positions.dim() == 3:
        # Of several dimensions (mRoPE). The place of the dimension of size 1 tells `pack_microbatch` the layout.
        if positions.shape[::2] == shape:
            tensors["position_ids"] = positions.movedim(1, -1).unsqueeze(-2)
        elif positions.shape[1:] == shape:
            tensors["position_ids"] = positions.movedim(0, -1).unsqueeze(-1)
    for name in _TOKEN_KEYS:
        if name in tensors and tensors[name].shape[:2] != shape:
            raise BalanceError(
                f"{name} has shape {list(tensors[name].shape)} and tokens {list(shape)}: the two must be of one length."
            )
    for name in _INTEGER_KEYS:
        if name in tensors and (tensors[name].is_floating_point() or tensors[name].is_complex()):
            raise BalanceError(f"{name} is {tensors[name].dtype}: it must be of an integer dtype.")
    row = _first_row(tensors["tokens"] < 0)
    if row is not None:
        raise RowError(row, f"tokens holds {int(tensors['tokens'][row].min())}; a token id is 0 or above.")
    if "loss_mask" in tensors and torch.is_floating_point(tensors["loss_mask"]):
        row = _first_row(~tensors["loss_mask"].isfinite())
        if row is not None:
            raise RowError(row, "loss_mask holds NaN or infinity; it must be 0 or a weight.")
    return tensors


def _first_row(wrong: Tensor) -> int | None:
    """The first row with any entry set, of bool `[num_rows, ...]`."""
    rows = wrong.flatten(1).any(1).nonzero().flatten().tolist()
    return rows[0] if rows else None


def _segments(tensors: Mapping[str, Tensor]) -> list[tuple[int, int, int]]:
    """Row, start and stop of every sequence that has tokens."""
    num_rows, num_tokens = tensors["tokens"].shape
    if "cu_seqlens" not in tensors:
        return [(row, 0, num_tokens) for row in range(num_rows)] if num_tokens else []
    real = _checked_cu_seqlens("cu_seqlens", tensors)
    padded = _checked_cu_seqlens("cu_seqlens_padded", tensors) if "cu_seqlens_padded" in tensors else real
    if padded.shape != real.shape:
        raise BalanceError(
            f"cu_seqlens_padded has shape {list(padded.shape)} and cu_seqlens {list(real.shape)}: they must be equal."
        )
    starts, lengths, room = padded[:, :-1], real.diff(dim=1), padded.diff(dim=1)
    # No room: the right padding of cu_seqlens_padded, whatever cu_seqlens itself is padded with.
    present = (lengths > 0) & (room > 0)
    too_long = ((lengths > room) & present).nonzero().tolist()
    if too_long:
        row, index = too_long[0]
        raise RowError(
            row,
            f"sequence {index} has {int(lengths[row, index])} tokens by cu_seqlens and room for "
            f"{int(room[row, index])} by cu_seqlens_padded.",
        )
    found = torch.stack([present.nonzero()[:, 0], starts[present], (starts + lengths)[present]], dim=1)
    return [(row, start, stop) for row, start, stop in found.tolist()]


def _checked_cu_seqlens(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """int64 `[micro_batch_size, k]`, each row rising from 0 and not past its end."""
    num_rows, num_tokens = tensors["tokens"].shape
    cu_seqlens = tensors[name].long()
    if cu_seqlens.dim() != 2 or len(cu_seqlens) != num_rows or cu_seqlens.shape[1] == 0:
        raise BalanceError(f"{name} has shape {list(cu_seqlens.shape)}: it must be [{num_rows}, num_sequences + 1].")
    falls = (cu_seqlens.diff(dim=1) < 0).any(1)
    for row in range(num_rows):
        first, last = int(cu_seqlens[row, 0]), int(cu_seqlens[row, -1])
        if first != 0:
            raise RowError(row, f"{name} begins at {first}; it must begin at 0.")
        if falls[row]:
            raise RowError(row, f"{name} falls somewhere; it must rise.")
        if last > num_tokens:
            raise RowError(row, f"{name} ends at {last}, past the row's {num_tokens} tokens.")
    return cu_seqlens


def _without_padding(tensors: Mapping[str, Tensor], *, row: int, start: int, stop: int) -> int:
    """The end of the sequence without its masked, constant tail; at least one token stays."""
    if "loss_mask" not in tensors:
        return stop
    tokens = tensors["tokens"][row, start:stop]
    needed = (tokens != tokens[-1]) | _has_loss(tensors["loss_mask"][row, start:stop])
    places = needed.nonzero()
    return start + (int(places[-1]) + 1 if len(places) else 1)


def _has_loss(loss_mask: Tensor) -> Tensor:
    """`[num_tokens, *trailing]` → bool `[num_tokens]`."""
    return (loss_mask != 0).flatten(1).any(1) if loss_mask.dim() > 1 else loss_mask != 0


def _check_loss_kept(tensors: Mapping[str, Tensor], *, segments: Sequence[tuple[int, int, int]]) -> None:
    """No token with a loss lies outside every sequence, where it would be lost."""
    if "loss_mask" not in tensors:
        return
    missing = [int((loss_mask != 0).sum()) for loss_mask in tensors["loss_mask"]]
    for row, start, stop in segments:
        missing[row] -= int((tensors["loss_mask"][row, start:stop] != 0).sum())
    for row, num_tokens in enumerate(missing):
        if num_tokens:
            raise RowError(
                row, f"{num_tokens} tokens with loss_mask lie outside every sequence of cu_seqlens, and would be lost."
            )
