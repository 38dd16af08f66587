"""Padded batches balanced without a process group: `balance_batch`."""

import pytest
import torch
from areal_trajectories import make_trajectory, row_digests
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.adapters import areal

rows_of_batches = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(max_examples=60)
@given(lengths=rows_of_batches, dp_size=st.integers(1, 5))
def test_every_row_comes_out_once(lengths, dp_size):
    """R54: padded batches in, `dp_size` padded batches out, every row with the bits it had."""
    batches = [make_trajectory(number, rows) for number, rows in enumerate(lengths)]
    num_rows = sum(map(len, lengths))
    if num_rows < dp_size:
        with pytest.raises(BalanceError, match=f"{num_rows} items.*for {dp_size} parts"):
            areal.balance_batch(batches, dp_size)
        return
    balanced = areal.balance_batch(batches, dp_size)
    assert len(balanced) == dp_size
    before = sorted(row for batch in batches for row in row_digests(batch))
    assert sorted(row for batch in balanced for row in row_digests(batch)) == before
    for batch in balanced:
        mask = batch["attention_mask"]
        assert mask.shape[1] == int(mask.sum(1).max())
        assert batch["hidden"].shape == (*mask.shape, 8)
        assert len(batch["multi_modal_input"]) == len(mask)
        assert not batch["input_ids"][~mask].any()
    counts = {len(batch["attention_mask"]) for batch in balanced}
    assert counts == {num_rows // dp_size} if num_rows % dp_size == 0 else min(counts) >= 1


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([{}], "attention_mask is a NoneType"),
        ([{"attention_mask": torch.ones(3)}], r"shape \[3\]"),
        ([{"attention_mask": torch.ones(0, 3)}], r"shape \[0, 3\]"),
        ([make_trajectory(0, [3]), {"attention_mask": torch.ones(1, 2)}], "keys"),
    ],
)
def test_what_is_no_batch_is_refused(batches, text):
    with pytest.raises(BalanceError, match=text):
        areal.balance_batch(batches, 1)
