"""Packs filled up to a size: real tokens as they were, the filler masked and in sequences of its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.samples import Sample, SampleSchema, dummy_microbatch, pack_microbatch

FILLER_TOKENS = 128
MAX_FILLERS = 4
"""A few sequences fill a pack up, of this length or more where it takes more: attention over them costs little."""


def build(length: int, *, mask: bool = True) -> Sample:
    per_token = {"tokens": torch.arange(1, 1 + length), "labels": torch.arange(2, 2 + length)}
    if mask:
        per_token["loss_mask"] = torch.ones(length)
    return Sample(per_token, per_sample={"reward": torch.tensor(float(length))})


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=8),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (16, 4)]),
    st.sampled_from([16, 48, 128, 1024]),
)
def test_a_filled_pack_is_the_pack_with_a_masked_tail(lengths, parallel, bucket):
    token_multiple, cp_size = parallel
    samples = [build(length) for length in lengths]
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
    dummy = dummy_microbatch(SampleSchema.of(build(3)), token_multiple=4, cp_size=2, pad_token_id=3, num_tokens=300)
    assert dummy["cu_seqlens"].tolist() == dummy["cu_seqlens_padded"].tolist() == [[0, 128, 256, 300]]
    assert not dummy["loss_mask"].any()
    assert dummy["tokens"].tolist() == [[3] * 300]
    assert dummy["position_ids"][0].tolist() == [*range(128), *range(128), *range(44)]


def test_what_cannot_be_masked_or_split_is_refused():
    with pytest.raises(BalanceError, match=r"Samples have no loss_mask .* padding to 64 tokens"):
        pack_microbatch([build(10, mask=False)], num_tokens=64)
    for num_tokens, least in ((10, 12), (14, 12), (8, 12)):
        with pytest.raises(BalanceError, match=f"num_tokens is {num_tokens}: .* multiple of 4, .* least {least}"):
            pack_microbatch([build(10)], token_multiple=4, num_tokens=num_tokens)
    with pytest.raises(BalanceError, match=r"num_tokens is 0: .* multiple of 4, .* least 4"):
        dummy_microbatch(SampleSchema.of(build(3)), token_multiple=4, num_tokens=0)
