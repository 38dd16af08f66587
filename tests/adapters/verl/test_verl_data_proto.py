"""R9, R10, R12, R14: a DataProto in parts of equal size and work, and back in order without its padding."""

import pytest

pytest.importorskip("verl.protocol")

import numpy as np
import torch
from verl.protocol import DataProto
from verl_batches import HEAVY_TAIL, nested_batch, padded_batch

from megatron_balance import BalanceError
from megatron_balance.adapters.verl import balance_data_proto
from megatron_balance.adapters.verl.data_proto import row_lengths, select_rows


def test_ten_rows_over_four_ranks_come_back_in_order():
    data = padded_batch(HEAVY_TAIL)
    balanced = balance_data_proto(data, 4)
    assert [len(part) for part in balanced.parts] == [3, 3, 3, 3]
    assert len(data) == 10
    back = balanced.restore(list(balanced.parts))
    assert back.batch["row"].tolist() == list(range(10))
    assert back.non_tensor_batch["name"].tolist() == [f"row {row}" for row in range(10)]
    assert torch.equal(back.batch["attention_mask"], data.batch["attention_mask"])


def test_trimming_before_the_order_is_undone_would_lose_a_row():
    """The fault of the pull request: the padding is not at the end of a balanced order."""
    balanced = balance_data_proto(padded_batch(HEAVY_TAIL), 4)
    trimmed_first = DataProto.concat(list(balanced.parts))[:10]
    assert sorted(trimmed_first.batch["row"].tolist()) != list(range(10))


def test_62_rows_over_4_ranks():
    lengths = np.random.default_rng(0).integers(1, 200, 62)
    balanced = balance_data_proto(padded_batch(lengths), 4)
    assert [len(part) for part in balanced.parts] == [16] * 4
    assert balanced.restore(list(balanced.parts)).batch["row"].tolist() == list(range(62))


@pytest.mark.parametrize(
    ("model", "work"),
    [
        (None, lambda tokens: tokens**2 + 24576 * tokens),
        ({"mlp_workload_factor": 100}, lambda tokens: tokens**2 + 100 * tokens),
    ],
)
def test_parts_have_equal_work_by_the_model_config(model, work):
    lengths = np.random.default_rng(1).integers(1, 2000, 64)
    parts = balance_data_proto(padded_batch(lengths), 8, model_config=model).parts
    loads = [sum(work(int(tokens)) for tokens in row_lengths(part)) for part in parts]
    assert max(loads) * 8 / sum(loads) < 1.002
    consecutive = [sum(work(int(tokens)) for tokens in lengths[start : start + 8]) for start in range(0, 64, 8)]
    assert max(consecutive) * 8 / sum(consecutive) > 1.1


def test_rows_of_a_tensordict_in_another_order():
    batch = nested_batch([3, 1, 2])
    assert row_lengths(batch).tolist() == [3, 1, 2]
    moved = select_rows(batch, np.array([2, 0, 1]))
    assert moved["row"].tolist() == [2, 0, 1]
    assert [row.tolist() for row in moved["input_ids"].unbind()] == [[2, 2], [0, 0, 0], [1]]


def test_a_batch_without_lengths_is_named():
    with pytest.raises(BalanceError, match="attention_mask or nested input_ids"):
        balance_data_proto(DataProto.from_dict({"a": torch.zeros(4)}), 2)


def test_results_of_another_number_of_rows_are_named():
    balanced = balance_data_proto(padded_batch(HEAVY_TAIL), 4)
    with pytest.raises(BalanceError, match="returned 9 rows for 12"):
        balanced.restore(list(balanced.parts[:3]))
