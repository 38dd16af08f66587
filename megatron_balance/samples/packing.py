"""Packs samples into one `thd` micro-batch, as Megatron 0.19's `get_batch` expects it from a data iterator.

Every tensor has a leading batch dimension of 1. Each sequence, and a sample may have several, is padded to a multiple
of `token_multiple`:

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

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.samples.padding import sequence_lengths
from megatron_balance.samples.sample import KeySpec, Sample, SampleSchema, lengths_key

# Not part of a Sample: they describe the pack and are made again with each.
DERIVED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

FILLER_TOKENS = 128
"""Longest sequence that a pack is filled up with, unless more than MAX_FILLERS were needed."""

MAX_FILLERS = 4
"""cuDNN builds a graph for each number of sequences where there are many (Transformer Engine 2.9, from 512 on)."""


def pack_microbatch(
    samples: Sequence[Sample],
    *,
    token_multiple: int = 1,
    cp_size: int = 1,
    pad_token_id: int = 0,
    num_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Pack samples into one thd micro-batch.

    Padding has loss_mask 0, `pad_token_id` as token and label, the position within its sequence as position_ids (so
    that they stay below the padded length) and 0 under every other key. A sequence of length 0 occupies nothing and is
    left out, since kernels want cu_seqlens to rise; where all samples are such, the pack is a masked dummy.

    Args:
        samples: at least one; all of one schema, on one device.
        token_multiple: `Topology.token_multiple`, tokens.
        cp_size: context-parallel ranks.
        pad_token_id: a token id that the model has.
        num_tokens: size of the pack, a multiple of token_multiple; None for the least that holds the samples.

    Returns:
        Per-token keys `[1, total_padded_tokens, *trailing]`, with position_ids counted from zero in each sequence
        where the samples have none, and in the layout that `split_packed` got where they have several dimensions;
        per-sample keys `[num_samples, *shape]`, without samples of length 0; ragged keys
        `[num_entries, *trailing]`, sample after sample, each with its lengths, int64 `[num_samples]`, as NAME_lengths;
        `cu_seqlens` int32 `[1, num_sequences + 1]`; where cp_size > 1 `cu_seqlens_padded` too; `max_seqlen` int32
        `[1]`.

    Raises:
        BalanceError: no samples, padding in samples without loss_mask (it would be trained on), or num_tokens that are
            too few or no multiple of token_multiple.
    """
    if not samples:
        raise BalanceError("pack_microbatch got no samples: use dummy_microbatch for a slot without any.")
    present = [sample for sample in samples if sample.length]
    if not present:
        return dummy_microbatch(
            SampleSchema.of(samples[0]),
            token_multiple=token_multiple,
            cp_size=cp_size,
            pad_token_id=pad_token_id,
            num_tokens=num_tokens,
            device=samples[0].device,
        )

    lengths = sequence_lengths(present)
    padded_lengths = [-(-length // token_multiple) * token_multiple for length in lengths]
    held = sum(padded_lengths)
    filler = _filler_lengths(held if num_tokens is None else num_tokens, held=held, token_multiple=token_multiple)
    device = present[0].device
    widths = padded_lengths + filler
    batch: dict[str, Tensor] = {}
    for name in present[0].per_token:
        pieces = [piece for sample in present for piece in _sequences(sample, name)]
        pieces += [pieces[0][:0]] * len(filler)
        batch[name] = _padded(name, pieces, padded_lengths=widths, pad_token_id=pad_token_id).unsqueeze(0)
    if (filler or lengths != padded_lengths) and "loss_mask" not in batch:
        raise BalanceError(
            f"Samples have no loss_mask (they have {sorted(batch)}), and padding to {sum(widths)} tokens needs "
            "one: without it the padding would be trained on."
        )
    if "position_ids" not in batch:
        counting = torch.arange(max(widths), device=device)
        batch["position_ids"] = torch.cat([counting[:length] for length in widths]).unsqueeze(0)
    if batch["position_ids"].dim() == 4:  # of several dimensions, `[1, t, 1, d]` or `[1, t, d, 1]`
        batch["position_ids"] = batch["position_ids"].squeeze(0).movedim(0, -1)
    for name in present[0].per_sample:
        batch[name] = torch.stack([sample.per_sample[name] for sample in present])
    for name in present[0].ragged:
        entries = [sample.ragged[name] for sample in present]
        batch[name] = torch.cat(entries)
        batch[lengths_key(name)] = torch.tensor([len(of_sample) for of_sample in entries], device=device)

    return batch | sequence_starts(lengths, as_packed=widths, cp_size=cp_size, device=device)


def sequence_starts(
    lengths: Sequence[int], *, as_packed: Sequence[int], cp_size: int = 1, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The keys of a pack that say where its sequences start.

    Args:
        lengths: of its sequences, without padding and filler; none for a dummy.
        as_packed: `lengths_as_packed`.
        cp_size: context-parallel ranks.
        device: where they live.

    Returns:
        `cu_seqlens`, with cp_size > 1 `cu_seqlens_padded`, and `max_seqlen`, as `pack_microbatch` returns them.
    """
    # Kernels want cu_seqlens to rise, so the filler's tokens count as real; only the loss mask excludes them.
    real = as_packed if cp_size == 1 else [*lengths, *as_packed[len(lengths) :]]
    starts = {"cu_seqlens": _cu_seqlens(real, device=device)}
    if cp_size > 1:
        starts["cu_seqlens_padded"] = _cu_seqlens(as_packed, device=device)
    return starts | {"max_seqlen": torch.tensor([max(as_packed)], dtype=torch.int32, device=device)}


def dummy_microbatch(
    schema: SampleSchema,
    *,
    token_multiple: int = 1,
    cp_size: int = 1,
    pad_token_id: int = 0,
    num_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """A masked micro-batch, for a rank with fewer samples than slots.

    `num_tokens`, or `token_multiple`, the fewest that are legal; all with loss_mask 0. Per-sample keys are zeros,
    ragged ones have no entry. Its keys, shapes and dtypes are those of `pack_microbatch` with samples of this schema.

    Raises:
        BalanceError: the schema has no loss_mask, so that nothing could be masked, or as `pack_microbatch`.
    """
    if not any(key.name == "loss_mask" and key.per_token for key in schema.keys):
        raise BalanceError(
            f"Samples have no loss_mask (they have {[key.name for key in schema.keys]}): a dummy micro-batch, for a "
            "rank with fewer samples than slots, cannot be masked without."
        )
    lengths = _filler_lengths(token_multiple if num_tokens is None else num_tokens, token_multiple=token_multiple)

    def filled(key: KeySpec) -> Tensor:
        if not key.per_token:
            return torch.zeros(key.shape, dtype=key.dtype, device=device)
        nothing = [torch.empty(0, *key.shape, dtype=key.dtype, device=device)] * len(lengths)
        return _padded(key.name, nothing, padded_lengths=lengths, pad_token_id=pad_token_id)

    sample = Sample(
        {key.name: filled(key) for key in schema.keys if key.per_token},
        per_sample={key.name: filled(key) for key in schema.keys if not (key.per_token or key.ragged)},
        ragged={
            key.name: torch.empty(0, *key.shape, dtype=key.dtype, device=device) for key in schema.keys if key.ragged
        },
        segment_lengths=tuple(lengths),
    )
    return pack_microbatch([sample], token_multiple=token_multiple, cp_size=cp_size)


def lengths_as_packed(lengths: Sequence[int], *, num_tokens: int, token_multiple: int) -> list[int]:
    """Padded lengths of all sequences of a pack, filler included, in order; they sum to num_tokens.

    Args:
        lengths: of its sequences, without padding and filler; none for a dummy.
        num_tokens: of the pack.
        token_multiple: as it was packed.
    """
    padded = [-(-length // token_multiple) * token_multiple for length in lengths]
    return padded + _filler_lengths(num_tokens, held=sum(padded), token_multiple=token_multiple)


def _filler_lengths(num_tokens: int, *, held: int = 0, token_multiple: int) -> list[int]:
    """Lengths of the sequences that fill a pack up from `held` tokens, each a multiple of `token_multiple`."""
    missing = num_tokens - held
    if missing < 0 or missing % token_multiple or not num_tokens:
        raise BalanceError(
            f"num_tokens is {num_tokens}: it must be a multiple of {token_multiple}, as sequences are padded, and at "
            f"least {max(held, token_multiple)}, which the pack holds."
        )
    longest = -(-max(FILLER_TOKENS, -(-missing // MAX_FILLERS)) // token_multiple) * token_multiple
    return [longest] * (missing // longest) + ([missing % longest] if missing % longest else [])


def _padded(name: str, pieces: Sequence[Tensor], *, padded_lengths: Sequence[int], pad_token_id: int) -> Tensor:
    """`[length, *trailing]` of every sequence → `[total_padded_tokens, *trailing]`, in one copy."""
    first = pieces[0]
    gaps = [padded - len(piece) for piece, padded in zip(pieces, padded_lengths, strict=True)]
    if not any(gaps):
        return torch.cat(list(pieces))
    trailing = first.shape[1:]
    if name == "position_ids":
        counting = torch.arange(max(padded_lengths), dtype=first.dtype, device=first.device)
        counting = counting.view(-1, *(1 for _ in trailing)).expand(-1, *trailing)
        pads = [counting[padded - gap : padded] for gap, padded in zip(gaps, padded_lengths, strict=True)]
    else:
        value = pad_token_id if name in ("tokens", "labels") else 0
        constant = torch.full((max(gaps), *trailing), value, dtype=first.dtype, device=first.device)
        pads = [constant[:gap] for gap in gaps]
    return torch.cat([part for pair in zip(pieces, pads, strict=True) for part in pair])


def _sequences(sample: Sample, name: str) -> Sequence[Tensor]:
    """A per-token key of each sequence of the sample that has tokens."""
    tensor = sample.per_token[name]
    if len(sample.segment_lengths) == 1:
        return [tensor]
    return [piece for piece in tensor.split(sample.segment_lengths) if len(piece)]


def _cu_seqlens(lengths: Sequence[int], *, device: torch.device | str) -> Tensor:
    """Cumulative sums from 0: int32 `[1, num_sequences + 1]`."""
    return torch.tensor([[0, *accumulate(lengths)]], dtype=torch.int32, device=device)
