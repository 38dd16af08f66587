"""R9 to R14: verl's own functions for the work of rows and for partitions, hooked; a DataProto in balanced parts."""

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.utils import seqlen_balancing
from verl_batches import HEAVY_TAIL, installed, padded_batch

from megatron_balance.adapters import verl

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}


def work(seqlens, model=None, **options):
    with installed(model, **options):
        return seqlen_balancing.calculate_workload(seqlens)


def partitions(loads, num_parts):
    with installed():
        return seqlen_balancing.get_seqlen_balanced_partitions(loads, num_parts, True)


@pytest.mark.parametrize(
    "seqlens",
    [torch.tensor([3, 70_000], dtype=torch.int32), torch.tensor([3.0, 70_000.0]), [3, 70_000]],
    ids=["int32", "float32", "list"],
)
def test_every_form_of_lengths_gives_exact_int64(seqlens):
    """R11. 70,000 squared leaves int32, and 70,000² + 24576·70,000 is not a float32."""
    costs = work(seqlens)
    assert costs.dtype == torch.int64
    assert costs.tolist() == [3 * 24576 + 9, 70_000 * 24576 + 70_000**2]


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        ("Qwen3-8B", 43992),
        (QWEN, 19689),
        ({"mlp_workload_factor": 33024}, 33024),
    ],
    ids=["preset", "config.json", "mlp_workload_factor"],
)
def test_the_factor_is_the_models(model, factor):
    """R13, R14."""
    lengths = np.array([5000, 1_000_000])
    costs = work(torch.tensor(lengths), model).numpy()
    np.testing.assert_allclose(costs, lengths**2 + factor * lengths, rtol=1e-4)
    # Every call has the same unit, whatever else it holds.
    assert work(torch.tensor(lengths[:1]), model).item() == costs[0]


def test_62_rows_over_4_ranks():
    """R10: verl asserts."""
    loads = [length**2 + 24576 * length for length in range(1, 63)]
    parts = partitions(loads, 4)
    assert sorted(map(len, parts)) == [15, 15, 16, 16]
    assert partitions(torch.tensor(loads), 4) == partitions([torch.tensor(load) for load in loads], 4) == parts


@pytest.mark.parametrize(("num_rows", "part_rows"), [(10, 3), (62, 16)])
def test_rows_that_ranks_do_not_divide_come_back_in_order(num_rows, part_rows):
    """R9, R12. Padding is not at the end of a balanced order: trimmed before the order is undone, it loses a row."""
    lengths = HEAVY_TAIL if num_rows == 10 else np.random.default_rng(0).integers(1, 200, num_rows)
    balanced, rows = verl.balance_data_proto(padded_batch(lengths), 4), list(range(num_rows))
    parts, back = list(balanced.parts), balanced.restore(list(balanced.parts))
    assert [len(part) for part in parts] == [part_rows] * 4
    assert back.batch["row"].tolist() == rows
    assert back.batch["attention_mask"].sum(dim=1).tolist() == list(lengths)
    assert back.non_tensor_batch["name"].tolist() == [f"row {row}" for row in rows]
    trimmed_first = DataProto.concat(parts)[:num_rows]
    assert sorted(trimmed_first.batch["row"].tolist()) != rows


@pytest.mark.parametrize(("model", "factor"), [(None, 24576), ({"mlp_workload_factor": 100}, 100)])
def test_parts_have_equal_work_by_the_model_config(model, factor):
    """R10, R14."""
    lengths = np.random.default_rng(1).integers(1, 2000, 64)
    work = lengths**2 + factor * lengths
    parts = verl.balance_data_proto(padded_batch(lengths), 8, model_config=model).parts
    loads = [int(work[part.batch["row"].numpy()].sum()) for part in parts]
    assert max(loads) * 8 / sum(loads) < 1.002
    assert work.reshape(8, 8).sum(axis=1).max() * 8 / work.sum() > 1.1
