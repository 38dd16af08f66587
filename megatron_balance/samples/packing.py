"""Packs samples into one `thd` micro-batch, as Megatron 0.19's `get_batch` expects it from a data iterator.

Every tensor has a leading batch dimension of 1. Each sample is a sequence, padded to a multiple of `token_multiple`:

- Without context parallelism the padding counts into the sequence: `cu_seqlens` are the cumulative padded lengths.
  Megatron's `get_batch_on_this_tp_rank` sends `cu_seqlens_padded` to the other tensor-parallel ranks only when
  cp_size > 1, so they would read a pack that needs it differently.
- With context parallelism `cu_seqlens` are the cumulative real lengths and `cu_seqlens_padded` says where sequences
  start.

A pack may be filled up with masked tokens to a given size (`num_tokens`), because FP8 and FP4 layers require
multiples of a number of tokens, or so that few sizes occur. The filler is sequences of its own, which no real token
attends to: a few short ones, whose attention costs next to nothing. A dummy is all filler.

`max_seqlen` is the longest padded length in both cases. Under context parallelism too: the unfused thd RoPE makes
`max_seqlen` rows of angles and slices them by `cu_seqlens_padded`, and a context-parallel rank may hold more than
real length / cp_size real tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema, lengths_key

FILLER_TOKENS = 128
"""Longest sequence that a pack is filled up with, unless more than MAX_FILLERS were needed."""

MAX_FILLERS = 4
"""cuDNN builds a graph for each number of sequences where there are many (Transformer Engine 2.9, from 512 on)."""

_POSITIONS = KeySpec("position_ids", dtype=torch.int64)


def pack_microbatch(
    samples: Sequence[Sample],
    *,
    schema: SampleSchema | None = None,
    token_multiple: int = 1,
    cp_size: int = 1,
    num_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Pack samples into one thd micro-batch; none make a masked dummy, for a rank with fewer samples than slots.

    Padding has loss_mask 0, the position within its sequence as position_ids (so that they stay below the padded
    length) and 0 under every other key. A sequence of length 0 occupies nothing and is left out, since kernels want
    cu_seqlens to rise. A dummy has the keys, shapes and dtypes of any other pack: per-sample keys are one zero, ragged
    ones have no entry.

    Args:
        samples: of one schema, on one device.
        schema: of all samples of the run; where there may be none.
        token_multiple: `Topology.token_multiple`, tokens.
        cp_size: context-parallel ranks.
        num_tokens: size of the pack, a multiple of token_multiple; None for the least that holds the samples.

    Returns:
        Per-token keys `[1, total_padded_tokens, *trailing]`, with position_ids counted from zero in each sequence
        where the samples have none, and in the layout that `split_packed` got where they have several dimensions;
        per-sample keys `[num_samples, *shape]`, without samples of length 0; ragged keys
        `[num_entries, *trailing]`, sample after sample, each with its lengths, int64 `[num_samples]`, as NAME_lengths;
        `cu_seqlens` int32 `[1, num_sequences + 1]`; where cp_size > 1 `cu_seqlens_padded` too; `max_seqlen` int32
        `[1]`.

    Raises:
        BalanceError: neither samples nor a schema, padding in samples without loss_mask (it would be trained on), or
            num_tokens that are too few or no multiple of token_multiple.
    """
    if schema is None:
        if not samples:
            raise BalanceError("pack_microbatch got neither samples nor a schema: give the schema of a dummy.")
        schema = SampleSchema.of(samples[0])
    device = samples[0].device if samples else torch.device("cpu")
    samples = [sample for sample in samples if sample.length]
    lengths = [sample.length for sample in samples]
    batch = sequence_starts(
        lengths, num_tokens=num_tokens, token_multiple=token_multiple, cp_size=cp_size, device=device
    )
    starts = batch.get("cu_seqlens_padded", batch["cu_seqlens"])[0].long()
    total = int(starts[-1])
    if total > sum(lengths):
        check_loss_mask(schema)
    real = torch.from_numpy(~padding_mask(lengths, num_tokens=total, token_multiple=token_multiple)).to(device)
    positions = torch.arange(total, device=device) - starts[:-1].repeat_interleave(starts.diff())
    keys = schema.keys if any(key.name == "position_ids" for key in schema.keys) else (*schema.keys, _POSITIONS)
    for key in keys:
        own = [held[key.name] for held in (sample.of_kind(key) for sample in samples) if key.name in held]
        if key.kind == "per_token":
            packed = torch.zeros(total, *key.shape, dtype=key.dtype, device=device)
            if key.name == "position_ids":
                packed += positions.view(-1, *(1 for _ in key.shape))
            if own:
                packed[real] = torch.cat(own)
            several = key.name == "position_ids" and packed.dim() == 3  # dimensions: `[t, 1, d]` or `[t, d, 1]`
            batch[key.name] = packed.movedim(0, -1) if several else packed.unsqueeze(0)
        elif key.kind == "ragged":
            own = own or [torch.empty(0, *key.shape, dtype=key.dtype, device=device)]
            batch[key.name] = torch.cat(own)
            batch[lengths_key(key.name)] = torch.tensor([*map(len, own)], device=device)
        else:
            batch[key.name] = torch.stack(own or [torch.zeros(key.shape, dtype=key.dtype, device=device)])
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
    lengths: Sequence[int],
    *,
    num_tokens: int | None = None,
    token_multiple: int = 1,
    cp_size: int = 1,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """`cu_seqlens`, with cp_size > 1 `cu_seqlens_padded`, and `max_seqlen` of a pack of sequences; none for a dummy."""
    widths = [-(-length // token_multiple) * token_multiple for length in lengths]
    least = sum(widths) or token_multiple
    num_tokens = least if num_tokens is None else num_tokens
    if num_tokens < least or num_tokens % token_multiple:
        raise BalanceError(
            f"num_tokens is {num_tokens}: it must be a multiple of {token_multiple}, as sequences are padded, and at "
            f"least {least}, which the pack holds."
        )
    missing = num_tokens - sum(widths)
    longest = -(-max(FILLER_TOKENS, -(-missing // MAX_FILLERS)) // token_multiple) * token_multiple
    widths += [min(longest, missing - filled) for filled in range(0, missing, longest)]
    # Kernels want cu_seqlens to rise, so the filler's tokens count as real; only the loss mask excludes them.
    real = widths if cp_size == 1 else [*lengths, *widths[len(lengths) :]]
    batch = {
        name: torch.tensor([[0, *accumulate(of_sequences)]], dtype=torch.int32, device=device)
        for name, of_sequences in (("cu_seqlens", real), ("cu_seqlens_padded", widths))[: 1 if cp_size == 1 else 2]
    }
    return batch | {"max_seqlen": torch.tensor([max(widths)], dtype=torch.int32, device=device)}


def padding_mask(
    lengths: Sequence[int], *, num_tokens: int, token_multiple: int = 1, cp_size: int = 1, cp_rank: int = 0
) -> NDArray[np.bool_]:
    """`[num_tokens / cp_size]`, True where a token is padding; ranks that read no data make it too.

    A context-parallel rank holds the chunks cp_rank and 2*cp_size-1-cp_rank of each sequence. `lengths` are tokens
    of the micro-batch's samples, without empty ones, none for a dummy; `num_tokens` counts padding.
    """
    real = np.asarray(lengths, dtype=np.int64).reshape(-1, 1)
    num_chunks, mine = (1, [0]) if cp_size == 1 else (2 * cp_size, [cp_rank, 2 * cp_size - 1 - cp_rank])
    chunk = -(-real // token_multiple) * token_multiple // num_chunks
    real_of_chunk = np.clip(real - chunk * np.array(mine), 0, chunk)  # [num_sequences, chunks of this rank]
    runs = np.stack([real_of_chunk, chunk - real_of_chunk], axis=-1).ravel()
    filler = num_tokens // cp_size - int(runs.sum())
    assert filler >= 0, f"{len(lengths)} sequences need {int(runs.sum()) * cp_size} tokens, and there are {num_tokens}"
    is_padding = np.tile([False, True], runs.size // 2)
    return np.append(np.repeat(is_padding, runs), np.ones(filler, dtype=np.bool_))


def with_attention_keys(pack: Mapping[str, Any]) -> dict[str, Any]:
    """A pack of `pack_microbatch` as Megatron-Bridge's forward steps read it; the inverse of `with_cu_seqlens`.

    `cu_seqlens_q` and `cu_seqlens_kv` are in place of `cu_seqlens`, and so for `cu_seqlens_padded` and `max_seqlen`.
    """
    renamed: dict[str, Any] = {}
    for name, value in pack.items():
        if name in ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"):
            stem, padded = name.removesuffix("_padded"), "_padded" if name.endswith("_padded") else ""
            renamed |= {f"{stem}_q{padded}": value, f"{stem}_kv{padded}": value}
        else:
            renamed[name] = value
    return renamed
