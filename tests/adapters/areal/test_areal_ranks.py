"""Trajectories moved, rows packed and one rank waited for, between real gloo processes; bodies in areal_cases.py."""

from itertools import pairwise

import numpy as np
import pytest
from areal_trajectories import digest, make_trajectory, random_lengths, row_digests

from megatron_balance.adapters.areal.trajectories import trimmed


def check_moved(results, lengths):
    """Every trajectory on one rank, with the bits it had, less the columns that none of its rows uses."""
    flat = [rows for of_rank in lengths for rows in of_rank]
    expected = [digest(trimmed(make_trajectory(number, rows))) for number, rows in enumerate(flat)]
    ids_per_rank = results[0]["ids_per_rank"]
    assert sorted(index for ids in ids_per_rank for index in ids) == list(range(len(flat)))
    for result, ids in zip(results, ids_per_rank, strict=True):
        assert result["ids_per_rank"] == ids_per_rank
        assert result["digests"] == [expected[index] for index in ids]
    if len(flat) % len(lengths) == 0:
        assert {len(ids) for ids in ids_per_rank} == {len(flat) // len(lengths)}
    assert all(ids_per_rank)
    return [sum(sum(flat[index]) for index in ids) for ids in ids_per_rank]


@pytest.mark.parametrize("counts", [[8, 8], [16, 0], [0, 16], [3, 10], [1, 1]])
def test_two_ranks_hold_any_numbers(world2, counts):
    """R54, R56. AReaL raises where lists differ in length."""
    lengths = [random_lengths(np.random.default_rng(7), num_trajectories=count) for count in counts]
    check_moved(world2.run("areal_cases:move", lengths=lengths), lengths)


@pytest.mark.parametrize("counts", [[4, 4, 4, 4], [4, 4, 4, 3], [15, 0, 0, 0], [0, 2, 0, 2], [9, 1, 7, 11]])
def test_four_ranks_hold_any_numbers(world4, counts):
    """15 trajectories over 4 ranks among them, which raises in AReaL."""
    rng = np.random.default_rng(sum(counts))
    lengths = [random_lengths(rng, num_trajectories=count) for count in counts]
    check_moved(world4.run("areal_cases:move", lengths=lengths), lengths)


def test_tokens_come_out_even(world4):
    """R44. One rank has all long ones: 32 trajectories of 1 to 2048 tokens, 30 times as many tokens on one rank."""
    rng = np.random.default_rng(0)
    lengths = [[[int(length)] for length in rng.integers(low, high, 8)] for low, high in [(1500, 2048), (1, 99)] * 2]
    tokens = check_moved(world4.run("areal_cases:move", lengths=lengths), lengths)
    assert max(tokens) <= 1.02 * min(tokens)


def test_images_come_out_even(world2):
    """Rows of equal length; one rank has all pictures, and then the other no trajectory at all."""
    for patches in ([[64, 64, 32, 32], [0, 0, 0, 0]], [[], [96, 0, 0, 32, 32, 32, 0, 0]]):
        moved = world2.run("areal_cases:move_images", patches=patches)
        assert sorted(moved[0] + moved[1]) == sorted(patches[0] + patches[1])
        assert [(len(of_rank), sum(of_rank)) for of_rank in moved] == [(4, 96), (4, 96)]


def test_everything_on_every_rank_where_asked(world4):
    lengths = [[[3, 5], [2]], [], [[7]], [[1, 1, 1], [4]]]
    results = world4.run("areal_cases:move", lengths=lengths, gather_all=True)
    check_moved(results, lengths)
    flat = [rows for of_rank in lengths for rows in of_rank]
    expected = [digest(trimmed(make_trajectory(number, rows))) for number, rows in enumerate(flat)]
    assert all(result["everything"] == expected for result in results)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("key", "reward_model"),
        ("own key", "reward_model"),
        ("dtype", "float64"),
        ("mask", "attention_mask is a NoneType"),
        ("object", "cannot travel"),
        ("sparse", "sparse"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(world4, fault, text):
    lengths = [[[3], [4]], [[5], [6]], [[2], [7]], [[1], [9]]]
    results = world4.run("areal_cases:refuse", lengths=lengths, fault=fault, at_fault=2)
    assert len(set(results)) == 1
    message, num_ranks = results[0]
    assert text in message
    assert num_ranks == 4


def test_fewer_trajectories_than_ranks_raise_on_all(world4):
    results = world4.run("areal_cases:refuse", lengths=[[[3]], [[4]], [], [[5]]], fault="none", at_fault=0)
    assert len(set(results)) == 1
    assert "3 trajectories" in results[0][0]
    assert "4 data-parallel ranks" in results[0][0]


@pytest.mark.parametrize("source", [0, 3])
def test_scatter_from_the_rank_that_loads(world4, source):
    """R43, R54: exactly n/dp rows each, padded again to the rank's own longest, bits kept."""
    lengths = [[int(length)] for length in np.random.default_rng(3).integers(1, 60, 32)]
    results = world4.run("areal_cases:scatter", lengths=lengths, source=source)
    for result in results:
        assert result["shapes"]["attention_mask"] == (8, result["longest"])
        assert result["shapes"]["hidden"] == (8, result["longest"], 8)
        assert result["shapes"]["rewards"] == (8,)
    loaded = [row for number, rows in enumerate(lengths) for row in row_digests(make_trajectory(number, rows))]
    assert sorted(row for result in results for row in result["rows"]) == sorted(loaded)


def test_micro_batches_are_as_many_on_every_rank(world4):
    rng = np.random.default_rng(5)
    lengths = [rng.integers(1, 100, count).tolist() for count in (40, 8, 25, 60)]
    packed = world4.run("areal_cases:pack_alike", lengths=lengths, max_tokens=512, min_microbatches=2, divisor=2)
    assert len({len(slots) for slots in packed}) == 1
    assert len(packed[0]) % 2 == 0
    for slots, of_rank in zip(packed, lengths, strict=True):
        assert sorted(row for slot in slots for row in slot) == list(range(len(of_rank)))
        assert all(slots)
        assert max(sum(of_rank[row] for row in slot) for slot in slots) <= 512
        costs = [sum(100 * of_rank[row] + of_rank[row] ** 2 for row in slot) for slot in slots]
        assert all(earlier >= later for earlier, later in pairwise(costs))


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        pytest.param(
            [[5, 6], [5, 7], [600], [3, 4]], "600 tokens and max_tokens_per_mb is 512", id="a row over the cap"
        ),
        pytest.param([[500] * 4, [5] * 9, [3, 4], [1] * 4], "2 rows for 4 micro-batches", id="too few rows"),
    ],
)
def test_a_rank_that_cannot_pack_raises_on_all(world4, lengths, text):
    """In AReaL it raises alone, and its peers hang in the collective that follows."""
    results = world4.run("areal_cases:pack_alike", lengths=lengths, max_tokens=512)
    assert len(set(results)) == 1
    message, num_ranks = results[0]
    assert text in message
    assert message.startswith("rank 2 cannot go on")
    assert num_ranks == 4


@pytest.mark.parametrize("source", [0, 1])
def test_a_load_may_take_longer_than_the_group_waits(world2, source):
    """R43, R56: the other rank loads nothing and does not time out."""
    results = world2.run("areal_cases:wait_longer_than_the_group", seconds=2.5, group_seconds=1, source=source)
    assert results[source] == ([source], 4)
    assert results[1 - source] == ([], 4)


def test_waiting_in_the_group_itself_times_out(world2):
    """The test above, without a group of its own to wait in."""
    results = world2.run("areal_cases:wait_in_the_group", seconds=2.5, group_seconds=1, source=0)
    assert results[0] == "loaded"
    assert results[1] not in ("loaded", "waited")


def test_a_load_that_fails_raises_on_all_and_the_next_one_works(world4):
    results = world4.run("areal_cases:load_that_fails", source=1)
    for rank, (first, second, third) in enumerate(results):
        if rank == 1:
            assert first == ("KeyError", "'prompt 0'")
            assert third == ["later"]
        else:
            assert first == ("BalanceError", "rank 1, which loads for all, failed: KeyError: 'prompt 0'")
            assert second[0] == "BalanceError"
            assert third == []


@pytest.mark.parametrize("ranks", [[], [0, 2]])
def test_exactly_one_rank_loads(world4, ranks):
    results = world4.run("areal_cases:ranks_that_all_load", ranks=ranks)
    assert len(set(results)) == 1
    assert f"the ranks that load are {ranks}" in results[0]
