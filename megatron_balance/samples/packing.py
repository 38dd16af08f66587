"""Packs samples into one `thd` micro-batch, as Megatron 0.19's `get_batch` expects it from a data iterator.

Each sample is a sequence, padded to a multiple of `token_multiple`. Without context parallelism the padding counts into
`cu_seqlens`: Megatron's `get_batch_on_this_tp_rank` sends `cu_seqlens_padded` to other ranks only when cp_size > 1.
With it `cu_seqlens` count real tokens. `max_seqlen` is at least the longest padded length: the unfused thd RoPE makes
so many rows of angles and slices them by `cu_seqlens_padded`.

A pack is filled up to `num_tokens` with a masked sequence, which no real token attends to and whose attention costs
next to nothing. A dummy is all filler.

Attention libraries build or choose a kernel anew for each number of sequences and each `max_seqlen` (Transformer Engine
2.18 with cuDNN 9.24: `b` in `FADescriptor_v1`). With `few_shapes` both take few values by sequences of length 0 in
front: Megatron's get_batch cuts off copies of the last entry. Kernels look for the last entry not above a token's place
(`binary_search`, common/fused_attn/context_parallel.cu); those of gated delta nets count otherwise, and get none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import Samples, SampleSchema, lengths_key

LEAST_MAX_SEQLEN = 1152
MAX_SEQLEN_PART = 8
"""max_seqlen is at least an eighth of the pack's tokens: attention skips blocks behind a sequence's end quickly."""


def pack_microbatch(
    samples: Samples,
    *,
    token_multiple: int = 1,
    cp_size: int = 1,
    num_tokens: int | None = None,
    few_shapes: bool = False,
) -> dict[str, Tensor]:
    """Pack samples into one thd micro-batch; none make a masked dummy, for a rank with fewer samples than slots.

    Padding is 0 under every key. A sample of length 0 is left out. A dummy has the keys, shapes and dtypes of any other
    pack: per-sample keys are one zero, ragged ones have no entry.

    Args:
        samples: on the CPU, with the schema of all samples of the run.
        token_multiple: `Topology.token_multiple`, tokens.
        cp_size: context-parallel ranks.
        num_tokens: size of the pack, a multiple of token_multiple; None for the least that holds the samples.
        few_shapes: round the number of sequences and max_seqlen up to few values.

    Returns:
        Per-token keys `[1, total_padded_tokens, *trailing]`, with position_ids counted from zero in each sequence
        where the samples have none, and in the layout that `split_packed` got where they have several dimensions;
        per-sample keys `[num_samples, *shape]`, without samples of length 0; ragged keys
        `[num_entries, *trailing]`, sample after sample, each with its lengths, int64 `[num_samples]`, as NAME_lengths;
        `cu_seqlens` int32 `[1, num_sequences + 1]`; where cp_size > 1 `cu_seqlens_padded` too; `max_seqlen` int32
        `[1]`.

    Raises:
        BalanceError: no schema, padding in samples without loss_mask (it would be trained on), or
            num_tokens that are too few or no multiple of token_multiple.
    """
    schema = samples.schema
    if schema is None:
        raise BalanceError("pack_microbatch got samples without a schema: give a dummy that of the run.")
    samples = samples.select(samples.lengths.nonzero()[0])
    batch = sequence_starts(
        samples.lengths, num_tokens=num_tokens, token_multiple=token_multiple, cp_size=cp_size, few_shapes=few_shapes
    )
    starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"])[0].numpy()
    total = int(starts[-1])
    pads = -samples.lengths % token_multiple
    num_pads: list[int] = [*pads.tolist(), total - int((samples.lengths + pads).sum())]  # the last one is the filler
    if has_padding := any(num_pads):
        check_loss_mask(schema)
    if all(key.name != "position_ids" for key in schema.keys):
        positions = np.arange(total) - np.repeat(starts[:-1], np.diff(starts))
        batch["position_ids"] = torch.from_numpy(positions).unsqueeze(0)
    for key in schema.keys:
        column = samples.columns.get(key.name, ())
        if key.kind == "per_token":
            padding = torch.zeros(sum(num_pads), *key.shape, dtype=key.dtype)
            *tails, filler = padding.split(num_pads)
            values = torch.cat([*chain(*zip(column, tails, strict=True)), filler] if has_padding else [*column])
            several = key.name == "position_ids" and values.dim() == 3  # dimensions: `[t, 1, d]` or `[t, d, 1]`
            batch[key.name] = values.movedim(0, -1) if several else values.unsqueeze(0)
        elif key.kind == "ragged":
            column = column or [torch.empty(0, *key.shape, dtype=key.dtype)]
            batch[key.name] = torch.cat([*column])
            batch[lengths_key(key.name)] = torch.tensor([*map(len, column)])
        else:
            batch[key.name] = torch.stack([*column] or [torch.zeros(key.shape, dtype=key.dtype)])
    return batch


def check_loss_mask(schema: SampleSchema) -> None:
    """Refuse padding of samples that could not mask it."""
    names = [key.name for key in schema.keys if key.kind == "per_token"]
    if "loss_mask" not in names:
        raise BalanceError(
            f"Samples have no loss_mask (they have {names}), and padding needs one: without it the padding would be "
            "trained on. A dummy, for a rank with fewer samples than slots, is padding alone."
        )


def sequence_starts(
    lengths: ArrayLike,
    *,
    num_tokens: int | None = None,
    token_multiple: int = 1,
    cp_size: int = 1,
    few_shapes: bool = False,
) -> dict[str, Tensor]:
    """`cu_seqlens`, with cp_size > 1 `cu_seqlens_padded`, and `max_seqlen` of a pack of sequences; none for a dummy."""
    real = np.asarray(lengths, dtype=np.int64).reshape(-1)
    widths = -(-real // token_multiple) * token_multiple
    min_tokens = int(widths.sum()) or token_multiple
    num_tokens = min_tokens if num_tokens is None else num_tokens
    if num_tokens < min_tokens or num_tokens % token_multiple:
        raise BalanceError(
            f"num_tokens is {num_tokens}: it must be a multiple of {token_multiple}, as sequences are padded, and at "
            f"least {min_tokens}, which the pack holds."
        )
    missing = num_tokens - int(widths.sum())
    filler = [missing] if missing else []
    widths = np.append(widths, filler)
    # Kernels take the filler's tokens as real; only the loss mask excludes them.
    real = widths if cp_size == 1 else np.append(real, filler)
    max_seqlen, num_empty = int(widths.max()), 0
    if few_shapes:
        max_seqlen, num_empty = _few_longest(max_seqlen, num_tokens), _few_counts(len(widths)) - len(widths)
    batch: dict[str, Tensor] = {}
    for name, sizes in (("cu_seqlens", real), ("cu_seqlens_padded", widths))[: 1 if cp_size == 1 else 2]:
        starts = np.append(np.zeros(num_empty + 1), np.cumsum(sizes))
        batch[name] = torch.from_numpy(starts).to(torch.int32).unsqueeze(0)
    return batch | {"max_seqlen": torch.tensor([max_seqlen], dtype=torch.int32)}


def _few_counts(num_sequences: int) -> int:
    """The steps in which Transformer Engine's backward pass counts sequences: 32, 64 ... 512, 1024, 1536 ..."""
    doubled = max(32, 1 << (num_sequences - 1).bit_length())
    return doubled if doubled <= 512 else -(-num_sequences // 512) * 512


def _few_longest(longest: int, num_tokens: int) -> int:
    """9/8 of a power of two, so that few packs have as many tokens, and context-parallel chunks of it are whole.

    Megatron 0.19's unfused rotary embedding takes as many angles as a pack has tokens for those of the pack.
    """
    steps = (LEAST_MAX_SEQLEN << doublings for doublings in count())
    return next(step for step in steps if longest <= step != num_tokens and step * MAX_SEQLEN_PART >= num_tokens)


def padding_mask(
    lengths: ArrayLike, *, num_tokens: int, token_multiple: int = 1, cp_size: int = 1, cp_rank: int = 0
) -> NDArray[np.bool_]:
    """`[num_tokens / cp_size]`, True where a token is padding; ranks that read no data make it too.

    A context-parallel rank holds the chunks cp_rank and 2*cp_size-1-cp_rank of each sequence. `lengths` are tokens
    of the micro-batch's samples, without empty ones, none for a dummy; `num_tokens` counts padding.
    """
    real = np.asarray(lengths, dtype=np.int64).reshape(-1, 1)
    num_chunks, chunks = (1, [0]) if cp_size == 1 else (2 * cp_size, [cp_rank, 2 * cp_size - 1 - cp_rank])
    chunk = -(-real // token_multiple) * token_multiple // num_chunks
    real_of_chunk = np.clip(real - chunk * np.array(chunks), 0, chunk)  # [num_sequences, chunks of this rank]
    runs = np.stack([real_of_chunk, chunk - real_of_chunk], axis=-1).ravel()
    filler = num_tokens // cp_size - int(runs.sum())
    assert filler >= 0, f"{len(real)} sequences need {int(runs.sum()) * cp_size} tokens, and there are {num_tokens}"
    is_padding = np.tile([False, True], runs.size // 2)
    return np.append(np.repeat(is_padding, runs), np.ones(filler, dtype=np.bool_))


def with_attention_keys(pack: Mapping[str, Any]) -> dict[str, Any]:
    """A pack of `pack_microbatch` under the keys that Megatron-Bridge's forward steps read; see `with_cu_seqlens`."""
    renamed = dict(pack)
    for name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
        if name in pack:
            stem, padded, _ = name.partition("_padded")
            renamed[f"{stem}_q{padded}"] = renamed[f"{stem}_kv{padded}"] = renamed.pop(name)
    return renamed
