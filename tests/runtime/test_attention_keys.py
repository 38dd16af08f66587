"""Packs with the keys of Megatron-Bridge say the same as those with Megatron's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.samples import Sample, pack_microbatch, split_packed, with_attention_keys, with_cu_seqlens

LENGTHS = (5, 2, 7)


def samples(lengths: tuple[int, ...] | list[int]) -> list[Sample]:
    return [
        Sample({"tokens": torch.arange(1, length + 1), "loss_mask": torch.ones(length)}, per_sample={})
        for length in lengths
    ]


def starts(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def lengths_of(batch: dict[str, Any]) -> list[int]:
    return [len(sample.per_token["tokens"]) for sample in split_packed(with_cu_seqlens(batch))]


def bridge_batch(**keys: Any) -> dict[str, Any]:
    """Sequences of 3 and 4 tokens, padded to 4 each, and padding of the row."""
    tokens = torch.tensor([[1, 2, 3, 0, 4, 5, 6, 7, 0, 0]])
    mask = torch.tensor([[1.0, 1, 1, 0, 1, 1, 1, 1, 0, 0]])
    return {"tokens": tokens, "loss_mask": mask, "attention_mask": None, "token_count": [10], **keys}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_renaming_back_and_forth_changes_nothing(lengths: list[int], cp_size: int) -> None:
    pack = pack_microbatch(samples(lengths), token_multiple=2 * cp_size, cp_size=cp_size)
    renamed = with_attention_keys(pack)
    assert not {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"} & set(renamed)
    assert renamed["cu_seqlens_kv"] is renamed["cu_seqlens_q"]
    back = with_cu_seqlens(renamed)
    assert back.keys() == pack.keys() - {"max_seqlen"}
    assert all(torch.equal(back[name], pack[name]) for name in back)


def test_a_batch_without_such_keys_stays_as_it_is() -> None:
    pack: dict[str, Any] = {**pack_microbatch(samples(LENGTHS)), "token_count": [14]}
    assert with_cu_seqlens(pack) == pack


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(
            {"cu_seqlens_q": starts(0, 3, 7, 7), "cu_seqlens_q_padded": starts(0, 4, 8, 10), "max_seqlen_q": starts(4)},
            id="padded",
        ),
        pytest.param(
            {"cu_seqlens_q": starts(0, 3, 7)[0], "cu_seqlens_q_padded": starts(0, 4, 8)[0], "total_tokens": 10},
            id="one-row",
        ),
        pytest.param(
            {
                "cu_seqlens": starts(0, 4, 8, -1, -1),
                "cu_seqlens_unpadded": starts(0, 3, 7, -1, -1),
                "cu_seqlens_argmin": torch.tensor([3]),
            },
            id="filled-up",
        ),
    ],
)
def test_sequences_are_found(keys: dict[str, Any]) -> None:
    assert lengths_of(bridge_batch(**keys)) == [3, 4]


def test_the_rest_of_an_unpadded_row_is_a_sequence_of_one_token() -> None:
    """Bridge ends the last sequence at the end of the row; its padding is stripped, and one token stays."""
    keys = {"cu_seqlens_q": starts(0, 4, 8, 10), "cu_seqlens_kv": starts(0, 4, 8, 10)}
    assert lengths_of(bridge_batch(**keys)) == [3, 4, 1]


def test_cross_attention_is_refused() -> None:
    with pytest.raises(BalanceError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        with_cu_seqlens(bridge_batch(cu_seqlens_q=starts(0, 4, 8), cu_seqlens_kv=starts(0, 2, 8)))
