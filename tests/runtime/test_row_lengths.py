"""Padded rows → samples of their true lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.samples.unpacking import split_packed, with_row_lengths

PAD, WIDTH, END = 9, 6, 7
ATTENTION_MASK = "attention_mask"

MASKS = ("none", "marked", "marked_bool", "square", "square_of_each")


def padded(rows: list[list[int]], *, mask: str = "none", width: int = WIDTH) -> dict[str, Any]:
    """Rows of tokens; each is to predict its next token, and END after the last."""
    tokens = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])
    labels = torch.tensor([[*[*row, END][1:], *[PAD] * (width - len(row))] for row in rows])
    real = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
    batch = {"tokens": tokens, "labels": labels, "loss_mask": real.float(), "position_ids": torch.arange(width)}
    batch["position_ids"] = batch["position_ids"].expand(len(rows), -1)
    later = torch.ones(width, width, dtype=torch.bool).triu(1)
    masks = {
        "none": None,
        "marked": real.long(),
        "marked_bool": real,
        "square": later[None, None],
        "square_of_each": later | ~real[:, None, None, :],
    }
    return batch | {ATTENTION_MASK: masks[mask]}


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=WIDTH), min_size=1, max_size=4),
    st.sampled_from(MASKS),
    st.integers(0, 3),
)
def test_every_row_becomes_a_sample_of_its_length(rows: list[list[int]], mask: str, spare: int) -> None:
    batch = padded(rows, mask=mask, width=WIDTH + spare)
    sources = [PAD] + [ATTENTION_MASK] * (mask not in ("none", "square"))
    for padding in sources:
        samples = split_packed(with_row_lengths(batch, padding=padding))
        assert [tokens.tolist() for tokens in samples.columns["tokens"]] == rows
        assert [labels.tolist() for labels in samples.columns["labels"]] == [[*row[1:], END] for row in rows]
        assert all(mask.all() for mask in samples.columns["loss_mask"])
        assert ATTENTION_MASK not in samples.columns


def test_what_looks_like_padding_stays_where_it_is_learned_or_followed_and_one_token_always() -> None:
    full = padded([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], mask="square")
    assert with_row_lengths(full, padding=ATTENTION_MASK)["cu_seqlens"].tolist() == [[0, WIDTH], [0, WIDTH]]
    batch = padded([[PAD, PAD, 2, 3], [PAD]])
    batch["loss_mask"][1] = 0
    assert with_row_lengths(batch, padding=PAD)["cu_seqlens"].tolist() == [[0, 4], [0, 1]]
    batch["loss_mask"][0, 4] = 1
    assert with_row_lengths(batch, padding=PAD)["cu_seqlens"].tolist() == [[0, 5], [0, 1]]


def changed(batch: dict[str, Any], name: str, place: Any, value: float) -> dict[str, Any]:
    batch[name][place] = value
    return batch


OF_DOCUMENTS = changed(padded([[1, 2, 3, 4]], mask="square_of_each"), ATTENTION_MASK, np.s_[0, 0, 2:4, :2], True)
FRONT_MARKED = changed(padded([[1, 2, 3]], mask="marked"), ATTENTION_MASK, (0, 0), 0)
LOSS_ON_PADDING = changed(padded([[1, 2], [1, 2, 3]], mask="marked"), "loss_mask", (1, 4), 1)


@pytest.mark.parametrize(
    ("batch", "padding", "message"),
    [
        (FRONT_MARKED, ATTENTION_MASK, "Row 0: attention_mask has padding before its last real token"),
        (LOSS_ON_PADDING, ATTENTION_MASK, "Row 1: 1 tokens with loss_mask lie outside every sequence"),
        (OF_DOCUMENTS, PAD, "Row 0: attention_mask is not causal over its real tokens"),
        (OF_DOCUMENTS, ATTENTION_MASK, "Row 0: attention_mask is not causal over its real tokens"),
        (padded([[1]]), ATTENTION_MASK, "--balance-unpad is attention_mask, and the data has none"),
        (padded([[1]]) | {ATTENTION_MASK: torch.ones(1, 2)}, ATTENTION_MASK, r"attention_mask has shape \[1, 2\]"),
        ({**padded([[1]]), "loss_mask": None}, PAD, "rows are padded and have no loss_mask"),
    ],
)
def test_what_is_no_padding_at_the_end_is_refused(batch: dict[str, Any], padding: int | str, message: str) -> None:
    with pytest.raises(BalanceError, match=message):
        split_packed(with_row_lengths(batch, padding=padding))
