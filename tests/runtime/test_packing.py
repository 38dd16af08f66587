"""Samples → micro-batch → samples: what Megatron makes of it, how it is filled up, and which tokens are padding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.samples import (
    Sample,
    SampleSchema,
    pack_microbatch,
    padding_mask,
    sequence_lengths,
)


def build(length, *, first_token=1, positions=True, pad_id=0):
    """A sample whose last token has a loss, so that no tail of it looks like padding.

    The per-sample vector is longer than any pack here: one as long as the row is read as per token.
    """
    tokens = torch.arange(first_token, first_token + length)
    loss_mask = (tokens % 3 != 0).float()
    loss_mask[-1:] = 1.0
    per_token = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": loss_mask,
        "advantages": torch.stack([tokens, -tokens], dim=1).to(torch.bfloat16),
    }
    if positions:
        per_token["position_ids"] = torch.arange(length)
    return Sample(
        per_token, per_sample={"reward": torch.tensor(float(first_token)), "ids": torch.arange(length, length + 400)}
    )


lengths_of_samples = st.lists(st.integers(0, 40), min_size=1, max_size=8)
parallelism = st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (16, 4)])  # token_multiple, cp_size


@given(lengths_of_samples, parallelism)
def test_layout_is_legal(lengths, parallel):
    token_multiple, cp_size = parallel
    batch = pack_microbatch([build(length) for length in lengths], token_multiple=token_multiple, cp_size=cp_size)
    total_tokens = batch["tokens"].shape[1]
    assert batch["tokens"].shape[0] == 1
    for name in ("labels", "loss_mask", "position_ids"):
        assert batch[name].shape == batch["tokens"].shape
    assert batch["advantages"].shape == (1, total_tokens, 2)
    starts = batch["cu_seqlens_padded" if cp_size > 1 else "cu_seqlens"]
    assert ("cu_seqlens_padded" in batch) == (cp_size > 1)
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in batch:
            assert batch[name].dtype == torch.int32
            assert batch[name].shape == (1, starts.shape[1])
            assert batch[name][0, 0] == 0
            assert (batch[name].diff() > 0).all()
    real = [length for length in lengths if length]
    assert cp_size == 1 or batch["cu_seqlens"][0].diff()[: len(real)].tolist() == real
    padded_lengths = starts.diff()
    assert starts[0, -1] == total_tokens
    assert (padded_lengths % token_multiple == 0).all()
    assert batch["max_seqlen"].dtype == torch.int32
    assert batch["max_seqlen"].tolist() == [padded_lengths.max()]
    assert batch["reward"].shape == (starts.shape[1] - 1,)
    assert batch["loss_mask"].sum() == sum(build(length).per_token["loss_mask"].sum() for length in lengths)
    for start, length in zip(starts[0], padded_lengths[0], strict=False):
        assert torch.equal(batch["position_ids"][0, start : start + length], torch.arange(int(length)))


def test_padding_of_each_key():
    batch = pack_microbatch([build(3), build(4, first_token=9)], token_multiple=4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 9, 10, 11, 12]]
    assert batch["labels"].tolist() == [[2, 3, 4, 0, 10, 11, 12, 13]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["advantages"][0, 3].tolist() == [0, 0]
    assert batch["cu_seqlens"].tolist() == [[0, 4, 8]]
    assert batch["reward"].tolist() == [1, 9]


def test_each_sequence_of_a_sample_is_padded():
    whole = build(7)
    sample = Sample(whole.per_token, per_sample=whole.per_sample, segment_lengths=(3, 0, 4))
    batch = pack_microbatch([sample, build(1, first_token=9)], token_multiple=4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 4, 5, 6, 7, 9, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [[0, 4, 8, 12]]
    assert batch["max_seqlen"].tolist() == [4]
    assert batch["reward"].tolist() == [1, 9]
    batch = pack_microbatch([sample], token_multiple=4, cp_size=2)
    assert batch["cu_seqlens"].tolist() == [[0, 3, 7]]
    assert batch["cu_seqlens_padded"].tolist() == [[0, 4, 8]]


def test_positions_of_each_sequence_begin_at_zero():
    whole = build(7, positions=False)
    sample = Sample(whole.per_token, segment_lengths=(3, 4))
    assert pack_microbatch([sample], token_multiple=2)["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


@pytest.mark.parametrize(("token_multiple", "cp_size"), [(1, 1), (8, 1), (4, 2)])
def test_dummy_has_the_form_of_any_other_pack(token_multiple, cp_size):
    sample = build(5)
    dummy = pack_microbatch([], schema=SampleSchema.of(sample), token_multiple=token_multiple, cp_size=cp_size)
    real = pack_microbatch([sample], token_multiple=token_multiple, cp_size=cp_size)
    assert dummy.keys() == real.keys()
    for name in real:
        assert dummy[name].dtype == real[name].dtype
        assert dummy[name].dim() == real[name].dim()
    assert dummy["tokens"].tolist() == [[0] * token_multiple]
    assert dummy["position_ids"].tolist() == [list(range(token_multiple))]
    assert dummy["loss_mask"].sum() == 0
    assert dummy["cu_seqlens"].tolist() == [[0, token_multiple]]
    assert dummy["max_seqlen"].tolist() == [token_multiple]


def test_only_empty_samples_make_a_dummy():
    batch = pack_microbatch([build(0), build(0)], token_multiple=4)
    assert batch["tokens"].shape == (1, 4)
    assert batch["loss_mask"].sum() == 0


def test_what_cannot_be_packed():
    no_mask = Sample({"tokens": torch.arange(3)})
    assert pack_microbatch([no_mask])["tokens"].shape == (1, 3)
    with pytest.raises(BalanceError, match="no loss_mask"):
        pack_microbatch([no_mask], token_multiple=2)
    with pytest.raises(BalanceError, match="no loss_mask"):
        pack_microbatch([], schema=SampleSchema.of(no_mask))
    with pytest.raises(BalanceError, match="neither samples nor a schema"):
        pack_microbatch([])


@given(lengths_of_samples, parallelism)
def test_megatron_keeps_the_pack_as_it_is(lengths, parallel):
    flatten = pytest.importorskip("megatron.core.utils").flatten_batch_for_packed_sequences
    token_multiple, cp_size = parallel
    batch = pack_microbatch([build(length) for length in lengths], token_multiple=token_multiple, cp_size=cp_size)
    flat = flatten(dict(batch))
    for name in batch:
        assert torch.equal(flat[name], batch[name]), name


FILLER_TOKENS, MAX_FILLERS = 128, 4
"""A few sequences fill a pack up, of this length or more where it takes more: attention over them costs little."""


def small(length: int) -> Sample:
    per_token = {"tokens": torch.arange(1, 1 + length), "labels": torch.arange(2, 2 + length)}
    per_token["loss_mask"] = torch.ones(length)
    return Sample(per_token, per_sample={"reward": torch.tensor(float(length))})


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=8),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (16, 4)]),
    st.sampled_from([16, 48, 128, 1024]),
)
def test_a_filled_pack_is_the_pack_with_a_masked_tail(lengths, parallel, bucket):
    token_multiple, cp_size = parallel
    samples = [small(length) for length in lengths]
    sizes = {"token_multiple": token_multiple, "cp_size": cp_size}
    plain = pack_microbatch(samples, **sizes)
    num_tokens, num_sequences = plain["tokens"].shape[1], plain["cu_seqlens"].shape[1]
    filled = pack_microbatch(samples, **sizes, num_tokens=-(-num_tokens // bucket) * bucket)
    assert filled["tokens"].shape[1] == -(-num_tokens // bucket) * bucket
    for name in ("tokens", "labels", "loss_mask"):
        assert torch.equal(filled[name][:, :num_tokens], plain[name])
    assert not filled["loss_mask"][:, num_tokens:].any()
    if any(lengths):
        assert torch.equal(filled["position_ids"][:, :num_tokens], plain["position_ids"])
        assert torch.equal(filled["reward"], plain["reward"])
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in plain:
            if any(lengths):
                assert torch.equal(filled[name][:, :num_sequences], plain[name])
            fillers = filled[name][0, num_sequences - 1 if any(lengths) else 0 :].diff()
            assert ((fillers > 0) & (fillers % token_multiple == 0)).all()
            assert len(fillers) <= MAX_FILLERS
            assert fillers.numel() == 0 or fillers.max() < max(FILLER_TOKENS, fillers.sum() / MAX_FILLERS) + 16
    starts = filled.get("cu_seqlens_padded", filled["cu_seqlens"])[0]
    assert int(starts[-1]) == filled["tokens"].shape[1]
    assert torch.equal(filled["position_ids"][0, starts[:-1].long()], torch.zeros(len(starts) - 1, dtype=torch.long))


def test_a_dummy_is_all_filler():
    dummy = pack_microbatch([], schema=SampleSchema.of(small(3)), token_multiple=4, cp_size=2, num_tokens=300)
    assert dummy["cu_seqlens"].tolist() == dummy["cu_seqlens_padded"].tolist() == [[0, 128, 256, 300]]
    assert not dummy["loss_mask"].any()
    assert not dummy["tokens"].any()
    assert dummy["position_ids"][0].tolist() == [*range(128), *range(128), *range(44)]


def test_sizes_that_hold_no_pack_are_refused():
    for num_tokens, least in ((10, 12), (14, 12), (8, 12)):
        with pytest.raises(BalanceError, match=f"num_tokens is {num_tokens}: .* multiple of 4, .* least {least}"):
            pack_microbatch([small(10)], token_multiple=4, num_tokens=num_tokens)
    with pytest.raises(BalanceError, match=r"num_tokens is 0: .* multiple of 4, .* least 4"):
        pack_microbatch([], schema=SampleSchema.of(small(3)), token_multiple=4, num_tokens=0)


REAL = 7
rows_of_lengths = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=6)


def of_sequences(lengths):
    """Of several sequences, every token REAL; the packer pads with 0."""
    total = sum(lengths)
    per_token = {name: torch.full((total,), REAL) for name in ("tokens", "labels", "loss_mask")}
    return Sample(per_token, segment_lengths=tuple(lengths))


def zigzag(bounds, *, cp_size, cp_rank):
    """Tokens of a rank: each sequence is cut into 2 cp_size pieces, of which it holds one from either end."""
    held = []
    for start, end in itertools.pairwise(bounds):
        pieces = torch.arange(start, end).chunk(2 * cp_size) if cp_size > 1 else [torch.arange(start, end)]
        held += [pieces[cp_rank], pieces[-1 - cp_rank]] if cp_size > 1 else pieces
    return torch.cat(held)


@given(rows_of_lengths, parallelism, st.sampled_from([None, 1024, 1040]))
def test_each_rank_finds_the_padding_of_its_tokens(lengths, parallel, num_tokens):
    token_multiple, cp_size = parallel
    samples = [of_sequences(row) for row in lengths]
    pack = pack_microbatch(samples, token_multiple=token_multiple, cp_size=cp_size, num_tokens=num_tokens)
    tokens = pack["tokens"][0]
    bounds = pack.get("cu_seqlens_padded", pack["cu_seqlens"])[0].tolist()
    for cp_rank in range(cp_size):
        held = tokens[zigzag(bounds, cp_size=cp_size, cp_rank=cp_rank)]
        mask = padding_mask(
            sequence_lengths(samples),
            num_tokens=len(tokens),
            token_multiple=token_multiple,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        assert np.array_equal(mask, (held != REAL).numpy())


def test_a_dummy_is_padding_alone():
    assert padding_mask([], num_tokens=8, token_multiple=8, cp_size=2).tolist() == [True] * 4
