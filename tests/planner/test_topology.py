"""Ranks and limits: sizes by hand, and what is refused."""

import numpy as np
import pytest

from megatron_balance import BalanceError, Limits, Topology


@pytest.mark.parametrize(
    ("ranks", "multiple"),
    [
        ({}, 1),
        ({"tp_size": 4}, 1),
        ({"tp_size": 4, "sequence_parallel": True}, 4),
        ({"cp_size": 2}, 4),
        ({"cp_size": 4, "tp_size": 2, "sequence_parallel": True}, 16),
    ],
)
def test_sequences_are_padded_to_two_chunks_a_context_parallel_rank(ranks, multiple):
    topology = Topology(2, **ranks)
    assert topology.token_multiple == multiple
    lengths = np.array([0, 1, multiple, multiple + 1])
    assert topology.padded_seq_len(lengths).tolist() == [0, multiple, multiple, 2 * multiple]


def test_a_micro_batch_is_aligned_on_each_gpu_and_holds_whole_chunks():
    assert Topology(8, cp_size=2, tp_size=4, sequence_parallel=True, token_alignment=32).pack_multiple == 32 * 2 * 4
    # Two chunks a rank are 4 tokens; 3 tokens on each of two ranks are 6: both divide 12.
    assert Topology(8, cp_size=2, token_alignment=3).pack_multiple == 12


@pytest.mark.parametrize(
    ("ranks", "span"),
    [({}, 1), ({"ep_size": 4}, 4), ({"ep_size": 4, "tp_size": 4}, 1), ({"ep_size": 4, "cp_size": 2}, 2),
     ({"ep_size": 2, "etp_size": 4, "tp_size": 4}, 2), ({"ep_size": 64}, 8),
     ({"ep_size": 4, "cp_size": 2, "dynamic_cp": True}, 4)],
)  # fmt: skip
def test_expert_groups_reach_over_neighbouring_ranks(ranks, span):
    assert Topology(8, **ranks).ep_dp_size == span


def test_sizes_of_dynamic_context_parallelism_are_powers_of_two_of_all_ranks():
    assert Topology(3, cp_size=4, dynamic_cp=True).dynamic_cp_sizes == (1, 2, 4, 8)
    assert Topology(4, cp_size=4, dynamic_cp=True, max_cp_size=6).dynamic_cp_sizes == (1, 2, 4)
    assert Topology(4, cp_size=4).dynamic_cp_sizes == (4,)
    for wrong in ({}, {"dynamic_cp": True, "max_cp_size": 0}):  # a limit needs sizes to choose from
        with pytest.raises(BalanceError, match="max_cp_size"):
            Topology(2, **{"max_cp_size": 2, **wrong})


def test_the_cap_of_a_micro_batch_is_that_of_its_context_parallel_ranks():
    assert Limits(100).max_tokens_per_microbatch(Topology(2, cp_size=4)) == 400
    assert Limits(micro_batch_size=3).max_tokens_per_microbatch(Topology(2)) is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "neither max_tokens_per_gpu nor micro_batch_size"),
        ({"max_tokens_per_gpu": 0}, "max_tokens_per_gpu is 0"),
        ({"micro_batch_size": True}, "micro_batch_size is True"),
    ],
)
def test_a_limit_that_is_none_is_named(limits, message):
    with pytest.raises(BalanceError, match=message):
        Limits(**limits)
