"""verl's `rearrange_micro_batches` with the adapter in it: alone, and on two gloo ranks that need the same count."""

from datetime import timedelta

import pytest

pytest.importorskip("verl.protocol")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from verl.utils import seqlen_balancing
from verl_batches import nested_batch, padded_batch

from megatron_balance import BalanceError
from megatron_balance.adapters.verl import install

FAR_APART = ([90, 10, 40, 60, 30, 70, 80, 20], [5, 6, 7, 8, 9, 10])
"""Rows of rank 0 need four micro-batches of 100 tokens, those of rank 1 one."""


@pytest.fixture
def installed():
    adapter = install()
    yield
    adapter.undo()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("batch", [nested_batch([7] * 8), padded_batch([7] * 8).batch], ids=["nested", "padded"])
def test_eight_sevens_under_a_cap_of_eight(batch):
    micro_batches, indices = seqlen_balancing.rearrange_micro_batches(batch, max_token_len=8)
    assert len(micro_batches) == 8
    assert [micro_batch["row"].tolist() for micro_batch in micro_batches] == indices


@pytest.mark.usefixtures("installed")
def test_rows_and_results_go_with_their_indices():
    lengths = [50, 80, 20, 99, 10, 60, 40, 30]
    micro_batches, indices = seqlen_balancing.rearrange_micro_batches(nested_batch(lengths), max_token_len=100)
    for micro_batch, rows in zip(micro_batches, indices, strict=True):
        sizes = micro_batch["input_ids"].offsets().diff().tolist()
        assert sizes == [lengths[row] for row in rows]
        assert sum(sizes) <= 100
    joined = torch.cat([micro_batch["row"] for micro_batch in micro_batches])
    assert seqlen_balancing.restore_dynamic_batch(joined, indices).tolist() == list(range(8))


@pytest.mark.usefixtures("installed")
def test_the_width_of_the_padding_is_not_a_length():
    # Stock verl asserts on 100 columns of padding under a cap of 60.
    micro_batches, _ = seqlen_balancing.rearrange_micro_batches(padded_batch([50, 10, 60]).batch, max_token_len=60)
    assert len(micro_batches) == 2


@pytest.mark.usefixtures("installed")
def test_dynamic_batches_of_a_data_proto():
    data = padded_batch([50, 80, 20, 99])
    parts, indices = seqlen_balancing.prepare_dynamic_batch(data, max_token_len=100)
    assert [part.batch["row"].tolist() for part in parts] == indices
    assert [part.non_tensor_batch["name"].tolist() for part in parts] == [
        [f"row {row}" for row in rows] for rows in indices
    ]


def _rank_main(rank, init_file, results):
    """Results of three calls on two data-parallel ranks; rank 1 cannot follow the second."""
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", world_size=2, rank=rank, timeout=timedelta(seconds=60)
    )
    install()

    def call(lengths, **arguments):
        try:
            _, indices = seqlen_balancing.rearrange_micro_batches(
                nested_batch(lengths[rank]), dp_group=dist.group.WORLD, **arguments
            )
        except BalanceError as error:
            return str(error)
        return indices

    torch.save(
        [
            call(FAR_APART, max_token_len=100),
            # Rank 1 has two rows, rank 0 needs four micro-batches.
            call((FAR_APART[0], [5, 6]), max_token_len=100),
            # A row of rank 1 is over the cap: rank 0 must not wait for it.
            call(([10, 20], [10, 200]), max_token_len=100),
            call(([10, 20], [10, 20, 30]), max_token_len=100, force_group_size=2),
            call(([10, 20], [10, 20]), max_token_len=100 + rank),
            call(FAR_APART, max_token_len=100, num_batches_divided_by=3),
            call(FAR_APART, max_token_len=100, same_micro_num_in_dp=False),
        ],
        f"{results}.{rank}",
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """For each call `(what rank 0 got, what rank 1 got)`."""
    folder = tmp_path_factory.mktemp("gloo")
    ranks = mp.spawn(_rank_main, args=(str(folder / "init"), str(folder / "results")), nprocs=2, join=False)
    try:
        while not ranks.join(timeout=120):
            pass
    finally:
        for process in ranks.processes:
            process.kill()
    return list(zip(*(torch.load(f"{folder}/results.{rank}") for rank in range(2)), strict=True))


def test_two_ranks_have_the_same_count(calls):
    for rank, indices in enumerate(calls[0]):
        assert len(indices) == 4
        assert all(indices)
        assert sorted(row for rows in indices for row in rows) == list(range(len(FAR_APART[rank])))
        assert max(sum(FAR_APART[rank][row] for row in rows) for rows in indices) <= 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (1, "4 micro-batches are needed under max_token_len 100, and rank 1 has 2 rows"),
        (2, "1 rows or forced groups are over max_token_len 100, the longest of 200 tokens"),
        (3, "rank 1 cannot go on. rank 1: the batch has 3 rows"),
        (4, "Ranks were started with different"),
    ],
    ids=["too few rows", "row over the cap", "half a group", "different caps"],
)
def test_what_one_rank_cannot_do_both_ranks_say(calls, call, message):
    assert calls[call][0] == calls[call][1]
    assert message in calls[call][0]


def test_a_pipeline_gets_its_multiple(calls):
    assert [len(indices) for indices in calls[5]] == [6, 6]


def test_ranks_that_need_not_agree_do_not(calls):
    assert [len(indices) for indices in calls[6]] == [4, 1]
