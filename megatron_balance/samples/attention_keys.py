"""Packed batches whose sequences are described by the arguments of attention, as Megatron-Bridge's are.

Its data sets and forward steps (`megatron/bridge/training/gpt_step.py`, 0.6.2) have `cu_seqlens_q` and `cu_seqlens_kv`,
both with `_padded` where sequences are padded, `max_seqlen_q` and `max_seqlen_kv`, in place of `cu_seqlens`,
`cu_seqlens_padded` and `max_seqlen`. Older data sets have `cu_seqlens` filled up with -1 behind `cu_seqlens_argmin`
entries, and `cu_seqlens_unpadded`. A `cu_seqlens` that is not filled up is cut to nothing by its forward step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError

_DERIVED = (
    *("cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "max_seqlen", "padding_mask"),
    *("cu_seqlens_argmin", "cu_seqlens_unpadded_argmin", "total_tokens", "token_count"),
)
"""Keys that follow from the others, and are made again with each pack or read by nobody."""

_OF_QUERIES = {"cu_seqlens": "cu_seqlens_q", "cu_seqlens_padded": "cu_seqlens_q_padded", "max_seqlen": "max_seqlen_q"}


def with_cu_seqlens(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with `cu_seqlens` and `cu_seqlens_padded`, as `split_packed` takes it; another batch unchanged.

    Args:
        batch: `tokens` `[num_rows, padded_seq_len]`; `cu_seqlens_q`, perhaps `cu_seqlens_q_padded`; or `cu_seqlens` and
            `cu_seqlens_argmin` or `cu_seqlens_unpadded`; of each `[num_rows, k]`, or `[k]` for one row.

    Raises:
        BalanceError: keys begin elsewhere than queries.
    """
    batch = dict(batch)
    if batch.get("cu_seqlens_q") is not None:
        for name in ("cu_seqlens_q", "cu_seqlens_q_padded"):
            of_keys = batch.get(name.replace("_q", "_kv"))
            if of_keys is not None and not torch.equal(of_keys, batch[name]):
                raise BalanceError(
                    f"{name} and {name.replace('_q', '_kv')} differ: sequences that attend to other sequences are not "
                    "moved between ranks; train without balancing."
                )
        starts, padded = batch.pop("cu_seqlens_q"), batch.pop("cu_seqlens_q_padded", None)
    elif batch.get("cu_seqlens_argmin") is not None or batch.get("cu_seqlens_unpadded") is not None:
        starts, padded = batch.pop("cu_seqlens"), None
        if batch.get("cu_seqlens_unpadded") is not None:
            starts, padded = batch.pop("cu_seqlens_unpadded"), starts
    else:
        return batch
    batch = {name: value for name, value in batch.items() if name not in _DERIVED}
    batch["cu_seqlens"] = _rows(starts)
    if padded is not None:
        batch["cu_seqlens_padded"] = _rows(padded)
    return batch


def with_attention_keys(pack: Mapping[str, Any]) -> dict[str, Any]:
    """A pack of `pack_microbatch` with `cu_seqlens_q` and the like; the inverse of `with_cu_seqlens`."""
    renamed: dict[str, Any] = {}
    for name, value in pack.items():
        of_queries = _OF_QUERIES.get(name)
        if of_queries is None:
            renamed[name] = value
        else:
            renamed |= {of_queries: value, of_queries.replace("_q", "_kv"): value}
    return renamed


def _rows(starts: Tensor) -> Tensor:
    """`[num_rows, k]`, filled up with copies of each row's last value."""
    rows = starts.view(1, -1) if starts.dim() == 1 else starts
    return torch.where(rows < 0, rows.amax(1, keepdim=True), rows)
