"""verl's `rearrange_micro_batches` with the adapter in it: alone, and on two gloo ranks that need the same count."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from verl.utils import seqlen_balancing
from verl_batches import installed, nested_batch, padded_batch

from megatron_balance import BalanceError

FAR_APART = ([90, 10, 40, 60, 30, 70, 80, 20], [5, 6, 7, 8, 9, 10])
"""Rows of rank 0 need four micro-batches of 100 tokens, those of rank 1 one."""


def pack(lengths, max_token_len, **arguments):
    """The rows of each micro-batch, which hold the tokens that they should."""
    with installed():
        micro_batches, indices = seqlen_balancing.rearrange_micro_batches(
            nested_batch(lengths), max_token_len=max_token_len, **arguments
        )
    assert sorted(chain.from_iterable(indices)) == list(range(len(lengths)))
    for micro_batch, rows in zip(micro_batches, indices, strict=True):
        assert micro_batch["row"].tolist() == rows
        assert micro_batch["input_ids"].offsets().diff().tolist() == [lengths[row] for row in rows]
    joined = torch.cat([micro_batch["row"] for micro_batch in micro_batches])
    assert seqlen_balancing.restore_dynamic_batch(joined, indices).tolist() == list(range(len(lengths)))
    return indices


def tokens(lengths, indices):
    return [sum(lengths[row] for row in rows) for rows in indices]


@pytest.mark.parametrize(
    ("arguments", "count"),
    [({}, 2), ({"num_batches_divided_by": 4, "min_num_micro_batch": 5}, 8), ({"force_group_size": 4}, 3)],
    ids=["fewest", "a multiple of a least count", "forced groups"],
)
def test_the_number_of_micro_batches(arguments, count):
    assert len(pack([5] * 12, 30, **arguments)) == count


def test_the_width_of_the_padding_is_not_a_length():
    """Stock verl asserts on 60 columns of padding under a cap of 60 and three rows of 120 tokens."""
    data = padded_batch([50, 10, 60])
    with installed():
        assert len(seqlen_balancing.rearrange_micro_batches(data.batch, max_token_len=60)[0]) == 2
        parts, indices = seqlen_balancing.prepare_dynamic_batch(data, max_token_len=60)
    assert [part.batch["row"].tolist() for part in parts] == indices
    names = [part.non_tensor_batch["name"].tolist() for part in parts]
    assert names == [[f"row {row}" for row in rows] for rows in indices]


def pack_on_rank(lengths, **arguments):
    """The rows of each micro-batch of this rank, or what is raised."""
    try:
        return pack(lengths[dist.get_rank()], max_token_len=100, dp_group=dist.group.WORLD, **arguments)
    except BalanceError as error:
        return str(error)


def on_two_ranks(lengths, **arguments):
    return run_ranks(2, "test_verl_micro_batches:pack_on_rank", lengths=lengths, **arguments)


@pytest.mark.parametrize(("arguments", "counts"), [({}, [4, 4]), ({"same_micro_num_in_dp": False}, [4, 1])])
def test_two_ranks_have_the_same_count(arguments, counts):
    slots_by_rank = on_two_ranks(FAR_APART, **arguments)
    assert [len(indices) for indices in slots_by_rank] == counts
    for lengths, indices in zip(FAR_APART, slots_by_rank, strict=True):
        assert all(indices)
        assert max(tokens(lengths, indices)) <= 100


def test_what_one_rank_cannot_do_both_ranks_say():
    first, second = on_two_ranks(([10, 20], [10, 200]))
    assert first == second
    assert "samples are over max_token_len 100, the longest has 200 tokens" in first
