import pytest
import torch

from megatron_balance import BalanceError
from megatron_balance.samples import Sample, SampleSchema


def sample(length=3, **more):
    return Sample(
        {"tokens": torch.arange(length), "loss_mask": torch.ones(length), **more}, per_sample={"id": torch.tensor(7)}
    )


def test_length_and_device():
    assert sample(5).length == 5
    assert sample(5).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("per_token", "per_sample", "phrase"),
    [
        ({}, {}, "at least one per-token"),
        ({"tokens": torch.tensor(1)}, {}, "'tokens'.* is 0-d"),
        ({"tokens": torch.zeros(3), "labels": torch.zeros(2)}, {}, "'labels'.* has 2 tokens and 'tokens' has 3"),
        ({"tokens": torch.zeros(3)}, {"tokens": torch.zeros(3)}, r"\['tokens'\] are in two of per_token, per_sample"),
    ],
)
def test_a_bad_sample_says_which_key(per_token, per_sample, phrase):
    with pytest.raises(BalanceError, match=phrase):
        Sample(per_token, per_sample=per_sample)


def test_a_sample_is_one_sequence_unless_told():
    assert sample(5).segment_lengths == (5,)
    assert sample(0).segment_lengths == (0,)
    assert Sample({"tokens": torch.arange(5)}, segment_lengths=(2, 0, 3)).segment_lengths == (2, 0, 3)


@pytest.mark.parametrize("segment_lengths", [(2, 2), (6, -1), (5, 5)])
def test_segments_make_up_the_sample(segment_lengths):
    with pytest.raises(BalanceError, match=r"segment_lengths is .* the 5 tokens"):
        Sample({"tokens": torch.arange(5)}, segment_lengths=segment_lengths)


def test_schema_does_not_depend_on_the_order_of_keys():
    one = Sample({"a": torch.zeros(2), "b": torch.ones(2, 3)}, per_sample={"d": torch.ones(2), "c": torch.tensor(True)})
    two = Sample({"b": torch.ones(9, 3), "a": torch.zeros(9)}, per_sample={"c": torch.tensor(True), "d": torch.ones(2)})
    schema = SampleSchema.of(one)
    assert schema == SampleSchema.of(two)
    assert [key.name for key in schema.keys] == ["a", "b", "c", "d"]
    assert schema.hash() == SampleSchema.of(two).hash()
    assert 0 <= schema.hash() < 2**63
    assert SampleSchema.from_bytes(schema.to_bytes()) == schema


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (sample(), None),
        (sample(0), None),
        (Sample({"tokens": torch.arange(3)}, per_sample={"id": torch.tensor(7)}), "'loss_mask' is missing"),
        (sample(more=torch.ones(3)), "'more' is float32 .* no such key"),
        (sample(loss_mask=torch.ones(3, dtype=torch.bool)), "'loss_mask' is bool .* has float32"),
        (sample(tokens=torch.ones(3, 1, dtype=torch.int64)), "'tokens' is int64 .original_seq_len, 1. where"),
    ],
)
def test_samples_share_a_schema_or_say_why_not(other, phrase):
    if phrase is None:
        assert SampleSchema.shared_by([sample(), other]) == SampleSchema.of(sample())
    else:
        with pytest.raises(BalanceError, match=f"Sample 1 differs.*{phrase}"):
            SampleSchema.shared_by([sample(), other])


def test_no_samples_have_no_schema():
    assert SampleSchema.shared_by([]) is None


def test_a_peer_cannot_name_another_object_of_torch():
    with pytest.raises(BalanceError, match="'Tensor'"):
        SampleSchema.from_bytes(b'[["tokens","Tensor",[],"per_token"]]')
