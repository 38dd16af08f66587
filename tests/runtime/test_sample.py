import pytest
import torch

from megatron_balance import BalanceError
from megatron_balance.samples import KeySpec, Sample, SampleSchema, block_nbytes, read_block, write_block


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
        ({"tokens": torch.zeros(3)}, {"tokens": torch.zeros(3)}, "'tokens' is in per_token and in per_sample"),
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


def test_schema_hash_stays_the_same_between_versions():
    schema = SampleSchema((KeySpec("tokens", dtype=torch.int64, shape=(), per_token=True),))
    assert schema.to_bytes() == b'[["tokens","int64",[],true]]'
    assert schema.hash() == 0x44C3D89A2E13A3A9


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


def test_bad_schemas():
    key = KeySpec("tokens", dtype=torch.int64, shape=(), per_token=True)
    with pytest.raises(BalanceError, match="twice"):
        SampleSchema((key, key))
    with pytest.raises(BalanceError, match="per-token"):
        SampleSchema(())
    with pytest.raises(BalanceError, match="'Tensor'"):
        SampleSchema.from_bytes(b'[["tokens","Tensor",[],true]]')


def test_a_block_has_exactly_the_size_that_its_lengths_say():
    samples = [sample(length, flag=torch.ones(length, dtype=torch.bool)) for length in (3, 0, 5)]
    schema = SampleSchema.of(samples[0])
    nbytes = block_nbytes(schema, lengths=[3, 0, 5])
    # flag 8, loss_mask 32, tokens 64, id 24 bytes, each rounded up to 16.
    assert nbytes == 16 + 32 + 64 + 32
    block = torch.zeros(nbytes, dtype=torch.uint8)
    write_block(block, samples=samples, schema=schema)
    for before, after in zip(samples, read_block(block, lengths=[3, 0, 5], schema=schema), strict=True):
        assert after.length == before.length
        assert all(torch.equal(before.per_token[name], after.per_token[name]) for name in before.per_token)
        assert torch.equal(before.per_sample["id"], after.per_sample["id"])
    assert block_nbytes(schema, lengths=[]) == 0


def test_tensors_that_require_grad_travel():
    weights = Sample({"weights": torch.ones(3, requires_grad=True)})
    schema = SampleSchema.of(weights)
    block = torch.zeros(block_nbytes(schema, lengths=[3]), dtype=torch.uint8)
    write_block(block, samples=[weights], schema=schema)
    assert torch.equal(read_block(block, lengths=[3], schema=schema)[0].per_token["weights"], torch.ones(3))
