"""Packs filled up to a bucket: few lengths, real tokens as they were, the filler masked and in sequences of its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.runtime.packing import FILLER_TOKENS, pack_microbatch
from megatron_balance.runtime.sample import Sample


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
    filled = pack_microbatch(samples, **sizes, bucket_tokens=bucket)
    num_tokens, num_sequences = plain["tokens"].shape[1], plain["cu_seqlens"].shape[1]
    if not any(lengths):
        assert filled["tokens"].shape == plain["tokens"].shape  # a dummy stays small
        return
    assert filled["tokens"].shape[1] == -(-num_tokens // bucket) * bucket
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(filled[name][:, :num_tokens], plain[name])
    assert not filled["loss_mask"][:, num_tokens:].any()
    assert torch.equal(filled["reward"], plain["reward"])
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        if name in plain:
            assert torch.equal(filled[name][:, :num_sequences], plain[name])
            fillers = filled[name][0, num_sequences - 1 :].diff()
            assert ((fillers > 0) & (fillers <= FILLER_TOKENS) & (fillers % token_multiple == 0)).all()
    starts = filled.get("cu_seqlens_padded", filled["cu_seqlens"])[0]
    assert int(starts[-1]) == filled["tokens"].shape[1]
    assert torch.equal(filled["position_ids"][0, starts[:-1].long()], torch.zeros(len(starts) - 1, dtype=torch.long))


def test_what_cannot_be_masked_or_split_is_refused():
    with pytest.raises(BalanceError, match=r"Samples have no loss_mask .* multiple of 64"):
        pack_microbatch([build(10, mask=False)], bucket_tokens=64)
    with pytest.raises(BalanceError, match="bucket_tokens is 10: it must be a multiple of 4"):
        pack_microbatch([build(10)], token_multiple=4, bucket_tokens=10)
