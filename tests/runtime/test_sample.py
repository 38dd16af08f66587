"""What a sample may carry, and the schema by which samples are compared."""

import pytest
import torch

from megatron_balance import BalanceError
from megatron_balance.samples.sample import Sample, SampleSchema


def sample(length=3, *, entries=2, **more):
    per_token = {"tokens": torch.arange(length), "loss_mask": torch.ones(length), **more}
    ragged = {"pixels": torch.zeros(2 * entries, 4), "grids": torch.zeros(entries, 3)}
    return Sample(per_token, per_sample={"id": torch.tensor(7)}, ragged=ragged if length else {})


@pytest.mark.parametrize(
    ("per_token", "phrase"),
    [
        ({}, "at least one per-token"),
        ({"tokens": torch.zeros(3), "labels": torch.zeros(2)}, "'labels'.* has 2 tokens and 'tokens' has 3"),
    ],
)
def test_a_bad_sample_says_which_key(per_token, phrase):
    with pytest.raises(BalanceError, match=phrase):
        Sample(per_token)


def test_schema_depends_neither_on_the_order_of_keys_nor_on_numbers_of_entries():
    one, two = (
        Sample(
            {name: torch.zeros(length, *trailing) for name, *trailing in keys},
            per_sample={name: torch.ones(2) for name in ids},
            ragged={"images": torch.zeros(length, 4)},
        )
        for length, keys, ids in ((2, ("a", ("b", 3)), "dc"), (9, (("b", 3), "a"), "cd"))
    )
    schema = SampleSchema.of(one)
    assert schema == SampleSchema.of(two) == SampleSchema.from_text(schema.to_text())
    assert [key.name for key in schema.keys] == ["a", "b", "c", "d", "images"]


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (sample(), None),
        (sample(5, entries=0), None),
        (Sample({"tokens": torch.arange(3)}, per_sample={"id": torch.tensor(7)}), "'loss_mask' is missing"),
        (sample(more=torch.ones(3)), "'more' is float32 .* no such key"),
        (sample(loss_mask=torch.ones(3, dtype=torch.bool)), "'loss_mask' is bool .* has float32"),
        (sample(tokens=torch.ones(3, 1, dtype=torch.int64)), "'tokens' is int64 .original_seq_len, 1. where"),
        (
            Sample(sample().per_token, per_sample={**sample().per_sample, **sample().ragged}),
            r"'grids' is float32 \[2, 3\] where the other has float32 \[num_entries, 3\]",
        ),
    ],
)
def test_samples_share_a_schema_or_say_why_not(other, phrase):
    if phrase is None:
        assert SampleSchema.shared_by(map(SampleSchema.of, [sample(), other])) == SampleSchema.of(sample())
    else:
        with pytest.raises(BalanceError, match=f"Sample 1 differs.*{phrase}"):
            SampleSchema.shared_by(map(SampleSchema.of, [sample(), other]))
    assert SampleSchema.shared_by([]) is None


def test_a_peer_cannot_name_another_object_of_torch():
    with pytest.raises(BalanceError, match="'Tensor'"):
        SampleSchema.from_text('[["tokens","Tensor",[],"per_token"]]')
