"""Samples → micro-batch → samples: what Megatron makes of it, how it is filled up, and which tokens are padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.utils import flatten_batch_for_packed_sequences
from sample_rows import Sample, samples_of, schema_of
from thd_attention import partitioned_indices

from megatron_balance import BalanceError
from megatron_balance.samples.packing import pack_microbatch, padding_mask


def build(length, *, first_token=1, positions=True):
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
    per_sample = {"reward": torch.tensor(float(first_token)), "ids": torch.arange(length, length + 4000)}
    return Sample(per_token, per_sample=per_sample)


def pack_of(samples, *, schema=None, **sizes):
    return pack_microbatch(samples_of(samples, schema=schema), **sizes)


lengths_of_samples = st.lists(st.integers(0, 40), min_size=1, max_size=8)
parallelism = st.sampled_from([(1, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 4), (16, 4)])  # token_multiple, cp_size


@given(lengths_of_samples, parallelism, st.booleans())
def test_layout_is_legal(lengths, parallel, positions):
    token_multiple, cp_size = parallel
    samples = [build(length, positions=positions) for length in lengths]
    batch = pack_of(samples, token_multiple=token_multiple, cp_size=cp_size)
    total_tokens = batch["tokens"].shape[1]
    assert batch["tokens"].shape[0] == 1
    for name in ("labels", "loss_mask", "position_ids"):
        assert batch[name].shape == batch["tokens"].shape
    assert batch["advantages"].shape == (1, total_tokens, 2)
    starts = batch["cu_seqlens_padded" if cp_size > 1 else "cu_seqlens"]
    assert ("cu_seqlens_padded" in batch) == (cp_size > 1)
    for name in {"cu_seqlens", "cu_seqlens_padded"} & batch.keys():
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
    for start, length, padded in zip(starts[0], real, padded_lengths[0], strict=False):
        counted = length if positions else int(padded)
        assert torch.equal(batch["position_ids"][0, start : start + counted], torch.arange(counted))
        assert not batch["position_ids"][0, start + counted : start + padded].any()
    flat = flatten_batch_for_packed_sequences(dict(batch))
    assert all(torch.equal(flat[name], batch[name]) for name in batch)


def test_padding_of_each_key():
    batch = pack_of([build(3), build(4, first_token=9)], token_multiple=4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 0, 9, 10, 11, 12]]
    assert batch["labels"].tolist() == [[2, 3, 4, 0, 10, 11, 12, 13]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch["advantages"][0, 3].tolist() == [0, 0]
    assert batch["cu_seqlens"].tolist() == [[0, 4, 8]]
    assert batch["reward"].tolist() == [1, 9]


@pytest.mark.parametrize("samples", [[], [build(0), build(0)]])
@pytest.mark.parametrize(
    ("token_multiple", "cp_size", "num_tokens", "fillers"),
    [(1, 1, None, [1]), (8, 1, None, [8]), (4, 2, None, [4]), (4, 2, 300, [300])],
)
def test_dummy_is_all_filler_in_the_form_of_any_other_pack(samples, token_multiple, cp_size, num_tokens, fillers):
    sizes = {"token_multiple": token_multiple, "cp_size": cp_size}
    real = pack_of([build(5)], **sizes)
    dummy = pack_of(samples, schema=schema_of(build(5)), **sizes, num_tokens=num_tokens)
    assert {name: (tensor.dtype, tensor.dim()) for name, tensor in dummy.items()} == {
        name: (tensor.dtype, tensor.dim()) for name, tensor in real.items()
    }
    assert dummy["tokens"].tolist() == dummy["loss_mask"].tolist() == [[0] * sum(fillers)]
    assert not dummy["position_ids"].any()
    for name in {"cu_seqlens", "cu_seqlens_padded"} & dummy.keys():
        assert dummy[name].diff().tolist() == [fillers]
    assert dummy["max_seqlen"].tolist() == [max(fillers)]


def test_what_cannot_be_packed():
    no_mask = Sample({"tokens": torch.arange(3)})
    assert pack_of([no_mask])["tokens"].shape == (1, 3)
    with pytest.raises(BalanceError, match="no loss_mask"):
        pack_of([no_mask], token_multiple=2)
    with pytest.raises(BalanceError, match="no loss_mask"):
        pack_of([], schema=schema_of(no_mask))
    with pytest.raises(BalanceError, match="samples without a schema"):
        pack_of([])
    for samples, num_tokens, least in (([build(10)], 10, 12), ([build(10)], 14, 12), ([build(10)], 8, 12), ([], 0, 4)):
        with pytest.raises(BalanceError, match=f"num_tokens is {num_tokens}: .* multiple of 4, .* least {least}"):
            pack_of(samples, schema=schema_of(build(10)), token_multiple=4, num_tokens=num_tokens)


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=8).filter(any),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (16, 4)]),
    st.sampled_from([16, 48, 128, 1024]),
)
def test_a_filled_pack_is_the_pack_with_a_masked_tail(lengths, parallel, bucket):
    token_multiple, cp_size = parallel
    samples = [build(length) for length in lengths]
    sizes = {"token_multiple": token_multiple, "cp_size": cp_size}
    plain = pack_of(samples, **sizes)
    num_tokens, num_sequences = plain["tokens"].shape[1], plain["cu_seqlens"].shape[1]
    filled = pack_of(samples, **sizes, num_tokens=-(-num_tokens // bucket) * bucket)
    assert filled["tokens"].shape[1] == -(-num_tokens // bucket) * bucket
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(filled[name][:, :num_tokens], plain[name])
    assert not filled["loss_mask"][:, num_tokens:].any()
    assert torch.equal(filled["reward"], plain["reward"])
    for name in {"cu_seqlens", "cu_seqlens_padded"} & plain.keys():
        assert torch.equal(filled[name][:, :num_sequences], plain[name])
        fillers = filled[name][0, num_sequences - 1 :].diff()
        assert ((fillers > 0) & (fillers % token_multiple == 0)).all()
        assert len(fillers) <= 1
    starts = filled.get("cu_seqlens_padded", filled["cu_seqlens"])[0]
    assert int(starts[-1]) == filled["tokens"].shape[1]
    assert torch.equal(filled["position_ids"][0, starts[:-1].long()], torch.zeros(len(starts) - 1, dtype=torch.long))


REAL = 7
"""Every token; the packer pads with 0."""


@given(lengths_of_samples, parallelism, st.sampled_from([None, 1024, 1040]))
def test_each_rank_finds_the_padding_of_its_tokens(lengths, parallel, num_tokens):
    token_multiple, cp_size = parallel
    samples = [Sample({name: torch.full((length,), REAL) for name in ("tokens", "loss_mask")}) for length in lengths]
    pack = pack_of(samples, token_multiple=token_multiple, cp_size=cp_size, num_tokens=num_tokens)
    tokens = pack["tokens"][0]
    bounds = pack.get("cu_seqlens_padded", pack["cu_seqlens"])[0].tolist()
    for cp_rank in range(cp_size):
        held = tokens if cp_size == 1 else tokens[partitioned_indices(bounds, cp_size=cp_size, cp_rank=cp_rank)]
        sizes = {"token_multiple": token_multiple, "cp_size": cp_size, "cp_rank": cp_rank}
        mask = padding_mask([length for length in lengths if length], num_tokens=len(tokens), **sizes)
        assert np.array_equal(mask, (held != REAL).numpy())
    assert padding_mask([], num_tokens=8, token_multiple=8, cp_size=2).tolist() == [True] * 4


@given(lengths_of_samples, parallelism)
def test_few_shapes_add_empty_sequences_in_front_and_no_tokens(lengths, parallel):
    token_multiple, cp_size = parallel
    sizes = {"token_multiple": token_multiple, "cp_size": cp_size}
    samples = [build(length) for length in lengths]
    sizes |= {"schema": schema_of(build(1))}
    exact, few = (pack_of(samples, **sizes, few_shapes=rounds) for rounds in (False, True))
    total = exact["tokens"].shape[1]
    for name in exact.keys() - {"max_seqlen"}:
        if name.startswith("cu_seqlens"):
            empty = few[name].shape[1] - exact[name].shape[1]
            assert torch.equal(few[name][:, empty:], exact[name])
            assert not few[name][:, :empty].any()
            assert few[name].shape[1] - 1 in (32, 64, 128, 256, 512)
        else:
            assert torch.equal(few[name], exact[name])
    # Megatron takes as many angles as tokens for those of the whole pack.
    assert int(few["max_seqlen"]) >= int(exact["max_seqlen"])
    assert int(few["max_seqlen"]) != total
    assert int(few["max_seqlen"]) % 128 == 0
