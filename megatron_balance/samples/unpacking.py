"""Splits a batch of a Megatron data loader into samples: the inverse of packing.

Each sequence of a packed (thd) row becomes a sample, without its trailing padding. A row of a padded (bshd) batch
becomes a sample of its true length: attention is causal, so that no real token attends to the padding behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import Kind, Samples, lengths_key

Ints = NDArray[np.int64]

DERIVED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Not part of a Sample: they describe the batch, and are made again with each pack."""

_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def split_packed(batch: Mapping[str, Any]) -> Samples:
    """One Sample for each sequence of a batch, row after row.

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
            of the next, with NAME_lengths int `[num_sequences]`.
            Another key is per token where its shape begins like that of tokens, else per sample, with one entry a row
            or one a sequence. Keys that are None are dropped.

    Returns:
        Samples whose tensors are views of the batch, which is on the CPU. A row without tokens makes none.

    Raises:
        BalanceError: naming the key: labels of another length than tokens; a value that is not a tensor, or of a shape
            that fits neither rows nor sequences; NAME_lengths that do not sum to the entries, or are not one for each
            sequence. Naming the row too: cu_seqlens that does not begin at 0, falls or passes the row's end;
            a negative token; NaN or infinity in loss_mask. Sequences that leave out tokens with a loss.
    """
    tensors = _checked_tensors(batch)
    tokens = tensors["tokens"]
    rows, starts, stops = _segments(tensors)
    num_samples = len(rows)
    ragged = [name for name in tensors if lengths_key(name) in tensors]
    if "loss_mask" in tensors:
        has_loss = (tensors["loss_mask"] != 0).reshape(*tokens.shape, -1).any(-1).flatten().numpy()
        counts = np.append(0, np.cumsum(has_loss))
        if lost := int(counts[-1] - (counts[stops] - counts[starts]).sum()):
            raise BalanceError(f"{lost} tokens with loss_mask lie outside every sequence of cu_seqlens: they are lost.")
        if not ragged:
            stops = _without_tails(tokens.flatten().numpy(), has_loss, starts=starts, stops=stops)
    bounds = np.column_stack([starts, stops]).ravel()
    sizes = np.diff(bounds, prepend=0, append=tokens.numel())
    pieces = sizes.nonzero()[0]  # a view takes a microsecond: none of the gaps between sequences that follow at once
    piece_sizes: list[int] = sizes[pieces].tolist()
    kinds: dict[str, Kind] = {}
    columns: dict[str, Sequence[Tensor]] = {}
    for name, tensor in tensors.items():
        if name in DERIVED_KEYS or name in map(lengths_key, ragged):
            continue
        kind: Kind = "per_sample"
        if name in ragged:
            kind, columns[name] = "ragged", _entries(name, tensors, num_sequences=num_samples)
        elif tensor.shape[:2] == tokens.shape:
            kind, columns[name] = "per_token", [*compress(tensor.flatten(0, 1).split(piece_sizes), pieces % 2)]
        elif tensor.dim() and len(tensor) == len(tokens):
            values = tensor.unbind()
            columns[name] = [values[row] for row in rows.tolist()]
        elif tensor.dim() and len(tensor) == num_samples:
            columns[name] = tensor.unbind()
        else:
            raise BalanceError(
                f"{name} has shape {list(tensor.shape)}: it must begin with {list(tokens.shape)} (per token), "
                f"{len(tokens)} (one a row) or {num_samples} (one a sequence), or have its entries counted by "
                f"{lengths_key(name)}."
            )
        kinds[name] = kind
    return Samples.from_columns(columns, kinds=kinds, lengths=stops - starts)


def _entries(name: str, tensors: Mapping[str, Tensor], *, num_sequences: int) -> Sequence[Tensor]:
    """Entries of a ragged key of each sequence."""
    tensor, counts = tensors[name], tensors[lengths_key(name)]
    if counts.is_floating_point() or counts.is_complex() or counts.shape != (num_sequences,):
        raise BalanceError(
            f"{lengths_key(name)} is {counts.dtype} {list(counts.shape)}: it must be integers, [{num_sequences}], one "
            "a sequence."
        )
    sizes: list[int] = counts.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != len(tensor):
        raise BalanceError(
            f"{lengths_key(name)} holds {sizes}: it must be 0 or more and sum to the {len(tensor)} entries of {name}."
        )
    return tensor.split(sizes)


def _checked_tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch without None, checked key by key."""
    tensors = {name: value for name, value in batch.items() if value is not None}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise BalanceError(f"{name} is a {type(value).__name__}: only tensors move between ranks; drop the key.")
    if "tokens" not in tensors or tensors["tokens"].dim() != 2:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise BalanceError(f"A batch needs tokens of shape [micro_batch_size, padded_seq_len]; it has {shapes}.")
    tokens, positions = tensors["tokens"], tensors.get("position_ids")
    if positions is not None and positions.dim() == 3:
        # Of several dimensions (mRoPE). The place of the dimension of size 1 tells `pack_microbatch` the layout.
        if positions.shape[::2] == tokens.shape:
            tensors["position_ids"] = positions.movedim(1, -1).unsqueeze(-2)
        elif positions.shape[1:] == tokens.shape:
            tensors["position_ids"] = positions.movedim(0, -1).unsqueeze(-1)
    for name in _TOKEN_KEYS:
        if name in tensors and tensors[name].shape[:2] != tokens.shape:
            raise BalanceError(
                f"{name} has shape {list(tensors[name].shape)} and tokens {list(tokens.shape)}: the two must be of one "
                "length."
            )
    if (row := _first_row(tokens < 0)) is not None:
        raise BalanceError(f"Row {row}: tokens holds {int(tokens[row].min())}; a token id is 0 or above.")
    if "loss_mask" in tensors and (row := _first_row(~tensors["loss_mask"].isfinite())) is not None:
        raise BalanceError(f"Row {row}: loss_mask holds NaN or infinity; it must be 0 or a weight.")
    return tensors


def _first_row(wrong: Tensor | NDArray[np.bool_]) -> int | None:
    """The first row with any entry set, of bool `[num_rows, ...]`."""
    if not wrong.any():
        return None
    return int(np.asarray(wrong).reshape(len(wrong), -1).any(1).argmax())


def _segments(tensors: Mapping[str, Tensor]) -> tuple[Ints, Ints, Ints]:
    """Row of every sequence that has tokens, and its start and stop among the tokens of all rows."""
    num_rows, num_tokens = tensors["tokens"].shape
    if "cu_seqlens" not in tensors:
        rows = np.arange(num_rows if num_tokens else 0)
        return rows, rows * num_tokens, (rows + 1) * num_tokens
    real = _checked_cu_seqlens("cu_seqlens", tensors)
    padded = _checked_cu_seqlens("cu_seqlens_padded", tensors) if "cu_seqlens_padded" in tensors else real
    if padded.shape != real.shape:
        raise BalanceError(
            f"cu_seqlens_padded has shape {list(padded.shape)} and cu_seqlens {list(real.shape)}: they must be equal."
        )
    # Loaders fill rows up to one entry a token: behind the last value that differs from a row's last one is nothing.
    width = 2 + max(int((bounds != bounds[:, -1:]).sum(1).max(initial=0)) for bounds in (real, padded))
    real, padded = (bounds[:, :width].astype(np.int64) for bounds in (real, padded))
    starts, lengths, room = padded[:, :-1], np.diff(real), np.diff(padded)
    # No room: the right padding of cu_seqlens_padded, whatever cu_seqlens itself is padded with.
    present = (lengths > 0) & (room > 0)
    if (row := _first_row(present & (lengths > room))) is not None:
        raise BalanceError(
            f"Row {row}: its sequences have {lengths[row].tolist()} tokens by cu_seqlens and room for "
            f"{room[row].tolist()} by cu_seqlens_padded."
        )
    rows = present.nonzero()[0]
    first = starts[present] + rows * num_tokens
    return rows, first, first + lengths[present]


def _checked_cu_seqlens(name: str, tensors: Mapping[str, Tensor]) -> NDArray[Any]:
    """`[micro_batch_size, k]`, each row rising from 0 and not past its end."""
    num_rows, num_tokens = tensors["tokens"].shape
    starts: NDArray[Any] = tensors[name].numpy()
    if starts.ndim != 2 or len(starts) != num_rows or starts.shape[1] == 0:
        raise BalanceError(f"{name} has shape {list(starts.shape)}: it must be [{num_rows}, num_sequences + 1].")
    wrong = np.column_stack([starts[:, :1] != 0, starts[:, 1:] < starts[:, :-1], starts[:, -1:] > num_tokens])
    if (row := _first_row(wrong)) is not None:
        raise BalanceError(
            f"Row {row}: {name} is {starts[row].tolist()}: it must begin at 0, not fall, and end in the row's "
            f"{num_tokens} tokens."
        )
    return starts


def _without_tails(tokens: NDArray[Any], has_loss: NDArray[np.bool_], *, starts: Ints, stops: Ints) -> Ints:
    """The ends of the sequences without their masked, constant tails; at least one token stays."""
    # Places behind a token that has a loss or differs from the next one of its sequence.
    is_end = np.append(True, has_loss)
    is_end[1:-1] |= tokens[1:] != tokens[:-1]
    is_end[stops] = has_loss[stops - 1]
    ends = is_end.nonzero()[0]
    return np.maximum(ends[np.searchsorted(ends, stops, side="right") - 1], starts + 1)


_BRIDGE_KEYS = (
    *("cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "max_seqlen", "padding_mask"),
    *("total_tokens", "token_count"),
)
"""Keys that follow from the others, and are made again with each pack or read by nobody."""


def with_cu_seqlens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of Megatron-Bridge with `cu_seqlens` and `cu_seqlens_padded`; another batch unchanged.

    Its data sets and forward steps (`megatron/bridge/training/gpt_step.py`, 0.6.2) name the arguments of attention.
    """
    batch = {name: value for name, value in batch.items() if value is not None}
    for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
        key_name = name.replace("_q", "_kv")
        if name in batch and key_name in batch and not torch.equal(batch[key_name], batch[name]):
            raise BalanceError(
                f"{name} and {key_name} differ: sequences that attend to other sequences are not moved between ranks; "
                "train without balancing."
            )
    if "cu_seqlens_q" not in batch:
        return batch
    starts = {"cu_seqlens": batch.pop("cu_seqlens_q"), "cu_seqlens_padded": batch.pop("cu_seqlens_q_padded", None)}
    batch = {name: value for name, value in batch.items() if name not in _BRIDGE_KEYS}
    return batch | {name: value.view(-1, value.shape[-1]) for name, value in starts.items() if value is not None}


ATTENTION_MASK = "attention_mask"
"""The value of `--balance-unpad` for batches whose attention_mask says what is padding."""


def with_row_lengths(batch: Mapping[str, Any], *, padding: int | str) -> dict[str, Any]:
    """The batch with `cu_seqlens`, one sequence a row that ends where padding begins, and without `attention_mask`.

    Padding is a token id, or ATTENTION_MASK, which is nonzero for real tokens. Tokens of that id that carry a loss or
    precede others are real. A row of padding keeps one token. What cannot be read so raises BalanceError.
    """
    mask, loss_mask, tokens = (batch.get(name) for name in (ATTENTION_MASK, "loss_mask", "tokens"))
    batch = {name: value for name, value in batch.items() if name != ATTENTION_MASK}
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        return batch  # refused, or empty
    if mask is not None and mask.shape != tokens.shape:
        raise BalanceError(
            f"attention_mask has shape {list(mask.shape)}: it must be {list(tokens.shape)}, nonzero for real tokens. "
            "One of queries and keys may keep documents of a row apart: give packed rows with cu_seqlens, or no mask."
        )
    if isinstance(padding, int):
        real = tokens != padding if loss_mask is None else (tokens != padding) | (loss_mask != 0)
    elif mask is not None:
        real = mask != 0
    else:
        raise BalanceError(
            "--balance-unpad is attention_mask, and the data has none: give the token id of padding in its place."
        )
    lengths = (real * torch.arange(1, tokens.shape[1] + 1)).amax(1)
    if not isinstance(padding, int) and (row := _first_row(real.sum(1) != lengths)) is not None:
        raise BalanceError(f"Row {row}: attention_mask has padding before its last real token: pad rows at their end.")
    if loss_mask is None and bool((lengths < tokens.shape[1]).any()):
        raise BalanceError(
            "rows are padded and have no loss_mask, so that padding is trained on: add one that is 0 there."
        )
    starts = torch.stack([torch.zeros_like(lengths), lengths.clamp(min=1)], dim=1)
    return batch | {"cu_seqlens": starts.to(torch.int32)}
