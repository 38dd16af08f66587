"""The schema by which samples are compared, and their joining."""

import pytest
import torch
from sample_rows import Sample, samples_of, schema_of

from megatron_balance import BalanceError
from megatron_balance.samples.sample import Samples, SampleSchema


def sample(length=3, *, entries=2, **more):
    per_token = {"tokens": torch.arange(length), "loss_mask": torch.ones(length), **more}
    ragged = {"pixels": torch.zeros(2 * entries, 4), "grids": torch.zeros(entries, 3)}
    return Sample(per_token, per_sample={"id": torch.tensor(7)}, ragged=ragged)


def test_schema_depends_neither_on_the_order_of_keys_nor_on_numbers_of_entries():
    one, two = (
        Sample(
            {name: torch.zeros(length, *trailing) for name, *trailing in keys},
            per_sample={name: torch.ones(2) for name in ids},
            ragged={"images": torch.zeros(length, 4)},
        )
        for length, keys, ids in ((2, ("a", ("b", 3)), "dc"), (9, (("b", 3), "a"), "cd"))
    )
    schema = schema_of(one)
    assert schema == schema_of(two) == SampleSchema.from_text(schema.to_text())
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
def test_items_share_a_schema_or_say_why_not(other, phrase):
    parts = [samples_of([]), samples_of([sample()]), samples_of([other])]
    if phrase is None:
        assert Samples.joined(parts).schema == schema_of(sample())
    else:
        with pytest.raises(BalanceError, match=f"Item 2 differs from item 1.*{phrase}"):
            Samples.joined(parts)
    assert Samples.joined([]).schema is None


def test_a_peer_cannot_name_another_object_of_torch():
    with pytest.raises(BalanceError, match="'Tensor'"):
        SampleSchema.from_text('[["tokens","Tensor",[],"per_token"]]')
