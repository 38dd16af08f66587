"""R9, R10, R12, R14, R15: a DataProto in balanced parts; calls of four real Ray workers, and results back in order."""

import numpy as np
import pytest
import ray
import torch
from verl.protocol import DataProto
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils
from verl_batches import HEAVY_TAIL, nested_batch, padded_batch
from verl_workers import EchoWorker

from megatron_balance import BalanceError
from megatron_balance.adapters import verl

NUM_RANKS = 4
LENGTHS = np.clip(np.random.default_rng(3).lognormal(5, 1, 32), 1, 1500).astype(np.int64)


@pytest.mark.parametrize(("num_rows", "of_part"), [(10, 3), (62, 16)])
def test_rows_that_ranks_do_not_divide_come_back_in_order(num_rows, of_part):
    """R9, R12. Padding is not at the end of a balanced order: trimmed before the order is undone, it loses a row."""
    lengths = HEAVY_TAIL if num_rows == 10 else np.random.default_rng(0).integers(1, 200, num_rows)
    balanced, rows = verl.balance_data_proto(padded_batch(lengths), 4), list(range(num_rows))
    parts, back = list(balanced.parts), balanced.restore(list(balanced.parts))
    assert [len(part) for part in parts] == [of_part] * 4
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


def test_what_cannot_be_split_or_restored_is_named():
    with pytest.raises(BalanceError, match="attention_mask or nested input_ids"):
        verl.balance_data_proto(DataProto.from_dict({"a": torch.zeros(4)}), 2)
    balanced = verl.balance_data_proto(padded_batch(HEAVY_TAIL), 4)
    with pytest.raises(BalanceError, match="returned 9 rows for 12"):
        balanced.restore(list(balanced.parts[:3]))


@pytest.fixture(scope="module")
def workers():
    """A worker group that is made while the adapter is installed, as the trainer's is."""
    adapter = verl.install(dispatch=True)
    ray.init(num_cpus=4 * NUM_RANKS, include_dashboard=False, logging_level="warning")
    pool = RayResourcePool(process_on_nodes=[NUM_RANKS], use_gpu=False, max_colocate_count=1)
    yield RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=EchoWorker))
    ray.shutdown()
    adapter.undo()


def loads_of(lengths, ranks):
    work = np.asarray(lengths) ** 2 + 24576 * np.asarray(lengths)
    return np.bincount(ranks, weights=work, minlength=NUM_RANKS)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_ten_rows_over_four_ranks_with_auto_padding(workers, as_keyword):
    data = padded_batch(HEAVY_TAIL, auto_padding=True)
    output = workers.echo(data=data) if as_keyword else workers.echo(data)
    assert output.batch["row"].tolist() == list(range(10))
    assert output.non_tensor_batch["name"].tolist() == [f"row {row}" for row in range(10)]
    assert output.batch["attention_mask"].sum(dim=1).tolist() == list(HEAVY_TAIL)
    # verl's cut gives rows 0 and 1, the longest two, to one rank.
    stock = loads_of(HEAVY_TAIL, np.arange(10) // 3)
    assert loads_of(HEAVY_TAIL, output.batch["rank"].numpy()).max() < 0.6 * stock.max()


@pytest.mark.parametrize("num_rows", [1, 5, 62])
def test_any_number_of_rows_comes_back(workers, num_rows):
    output = workers.echo(padded_batch(range(1, num_rows + 1), auto_padding=True))
    assert output.batch["row"].tolist() == list(range(num_rows))


def test_all_arguments_have_one_order(workers):
    left, right = padded_batch(HEAVY_TAIL, auto_padding=True), padded_batch([5] * 10, auto_padding=True)
    output = workers.join(left, right=right)
    assert output.batch["row"].tolist() == output.batch["row_of_right"].tolist() == list(range(10))


def test_a_result_for_each_rank_is_left_alone(workers):
    tokens = workers.count_tokens(padded_batch(LENGTHS))
    assert len(tokens) == NUM_RANKS
    assert sum(tokens) == LENGTHS.sum()
    assert max(tokens) < 1.2 * LENGTHS.sum() / NUM_RANKS


def test_rows_that_went_missing_are_named(workers):
    with pytest.raises(BalanceError, match="halve returned 28 rows for 32"):
        workers.halve(padded_batch(LENGTHS))


def test_tensordicts_come_back_in_order_when_they_arrive(workers):
    output = workers.echo_tensors(nested_batch(LENGTHS)).get()
    assert output["row"].tolist() == list(range(32))
    assert output["input_ids"].offsets().diff().tolist() == LENGTHS.tolist()
    loads = loads_of(LENGTHS, output["rank"].numpy())
    assert loads.max() <= 1.01 * loads.mean()


def test_a_future_passed_on_is_in_order(workers):
    """The parts of a future are taken from the rows in order, on the worker that asks for them."""
    output = workers.echo_again(workers.echo_tensors(nested_batch(LENGTHS))).get()
    assert output["row"].tolist() == list(range(32))


def test_mini_batches_hold_the_rows_they_would_have_held(workers):
    batch = nested_batch(LENGTHS)
    tensordict_utils.assign_non_tensor(batch, mini_batch_size=16)
    output = workers.echo_tensors(batch).get()
    assert output["row"].tolist() == list(range(32))
    minibatch = output["place"].numpy() // (16 // NUM_RANKS)
    # verl's parts are rows 0..7, 8..15, ...: of each, the first four are in the first mini-batch.
    assert minibatch.tolist() == [row % 8 // 4 for row in range(32)]
    assert (np.diff(output["rank"].numpy()) != 0).sum() > NUM_RANKS  # and they did move


def test_rows_without_a_length_go_as_they_are(workers):
    data = padded_batch(LENGTHS)
    data.batch.pop("attention_mask")
    assert workers.echo(data).batch["rank"].tolist() == [row // 8 for row in range(32)]


def test_after_undo_calls_are_verls_own(workers):
    verl.install(dispatch=True).undo()
    try:
        assert workers.echo(padded_batch(LENGTHS)).batch["rank"].tolist() == [row // 8 for row in range(32)]
    finally:
        verl.install(dispatch=True)
