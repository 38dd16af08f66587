"""Number of meetings of ranks a step, and the error where their plans differ."""

from __future__ import annotations

import pytest

from benchmarks.scale.meeting_rank import NUM_STEPS
from benchmarks.scale.meetings import problems_of
from megatron_balance.runtime.gather import HEADER_FIELDS, INLINE_LENGTHS

STEP = ["all_gather_into_tensor"]
STEP_OF_MORE = ["all_gather_into_tensor", *STEP]


def test_a_step_is_one_collective_and_messages_between_ranks(world4) -> None:
    for outcomes in world4.run("gathers_of_steps", counts=[[5, 2, 7, 3]] * 3):
        assert outcomes == [STEP] * 3


def test_the_second_gather_is_needed_where_a_rank_s_samples_outgrow_the_row(world4) -> None:
    counts = [[300, 9, 9, 9], [9, 9, 330, 9], [9, 40, 9, 9], [200, 9, 9, 9], [9, 220, 9, 9]]
    for outcomes in world4.run("gathers_of_steps", counts=counts):
        assert outcomes == [STEP_OF_MORE, STEP, STEP, STEP_OF_MORE, STEP]


def test_a_step_that_failed_on_one_rank_leaves_the_row_as_it_was_on_all(world2) -> None:
    counts = [[300, 9], [310, 0], [320, 9], [9, 30], [0, 300], [300, 9]]
    first, second = world2.run("gathers_of_steps", counts=counts)
    assert first == second
    failed = [index for index, outcome in enumerate(first) if isinstance(outcome, str)]
    assert failed == [1, 4]
    assert "rank 1 cannot go on. rank 1: item 0 of this step: " in first[1]
    assert [first[0], first[2], first[3], first[5]] == [STEP_OF_MORE, STEP, STEP, STEP_OF_MORE]


def test_a_gather_advises_room_for_a_quarter_more(world2) -> None:
    num_samples = [8, 95, INLINE_LENGTHS, 500, 625, 100, 101]
    for outcomes in world2.run("rows_of_gathers", num_samples=num_samples, ranks_with=1):
        assert [row for _, row in outcomes[:2]] == [INLINE_LENGTHS] * 2
        assert [count for count, _ in outcomes] == [1, 1, 1, 2, 1, 1, 1]
        for num, (_, row) in zip(num_samples, outcomes, strict=True):
            assert row >= max(num * 5 // 4, INLINE_LENGTHS)
            assert (row + HEADER_FIELDS) % 64 == 0
            assert row < max(num * 5 // 4 + 64, INLINE_LENGTHS + 1)


@pytest.mark.parametrize("how", ["slots", "short", "long"])
def test_ranks_with_other_plans_agree_on_no_step(world2, how: str) -> None:
    for message in world2.run("plans_differ", how=how):
        assert message.startswith("rank 1 planned another schedule than rank 0: ")


@pytest.mark.parametrize("replica_size", [1, 2])
def test_what_is_counted_is_what_the_formulas_say(world4, replica_size: int) -> None:
    """Calls, messages, bytes and sockets; on the training thread, at a log interval of one step, one number at most."""
    for rank, counted in enumerate(world4.run("counted_and_expected", replica_size=replica_size)):
        assert not list(problems_of(counted))
        of_readers = {"all_gather_into_tensor", "isend", "irecv", "gather", "broadcast"}
        assert set(counted["calls"]) <= of_readers
        assert (set(counted["calls"]) == of_readers) == (rank % replica_size == 0)
        assert counted["in_training"] == ({} if replica_size == 1 else {"broadcast": NUM_STEPS - 2})
        assert counted["traffic"]["received_nbytes"] > 0
