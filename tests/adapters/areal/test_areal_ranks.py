"""Trajectories moved, one rank waited for and AReaL's coordinator, on four gloo ranks; bodies in areal_cases.py."""

import numpy as np
import pytest
from areal_trajectories import make_trajectory, random_lengths, row_digests, trajectory_digest


def check_moved(results, lengths):
    """Every trajectory on one rank, with the bits it had, less the columns that none of its rows uses."""
    flat = [rows for of_rank in lengths for rows in of_rank]
    expected = [trajectory_digest(make_trajectory(number, rows)) for number, rows in enumerate(flat)]
    ids_per_rank = results[0]["ids_per_rank"]
    assert sorted(index for ids in ids_per_rank for index in ids) == list(range(len(flat)))
    for result, ids in zip(results, ids_per_rank, strict=True):
        assert result["ids_per_rank"] == ids_per_rank
        assert result["digests"] == [expected[index] for index in ids]
    assert all(ids_per_rank)
    return [sum(sum(flat[index]) for index in ids) for ids in ids_per_rank]


@pytest.mark.parametrize("counts", [[4, 4, 4, 3], [15, 0, 0, 0], [9, 1, 7, 11]])
def test_four_ranks_hold_any_numbers(world, counts):
    """R54, R56. AReaL raises where lists differ in length, and for 15 trajectories."""
    rng = np.random.default_rng(sum(counts))
    lengths = [random_lengths(rng, num_trajectories=count) for count in counts]
    check_moved(world("move", lengths=lengths), lengths)


@pytest.mark.parametrize(
    ("fault", "counts", "text"),
    [
        ("dtype", (2, 2, 2, 2), "float64"),
        ("object", (2, 2, 2, 2), "cannot travel between ranks"),
        ("none", (1, 1, 0, 1), "3 trajectories (or groups of them) for 4 data-parallel ranks"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(world, fault, counts, text):
    results = world("refuse", lengths=[[[5]] * count for count in counts], fault=fault, at_fault=2)
    (message,) = {result["error"] for result in results}
    assert text in message
    assert [result["ranks"] for result in results] == [4] * 4


@pytest.mark.parametrize("source", [0, 3])
def test_scatter_from_the_rank_that_loads(world, source):
    """R43, R54: exactly n/dp rows each, padded again to the rank's own longest, bits kept."""
    lengths = [[int(length)] for length in np.random.default_rng(3).integers(1, 60, 32)]
    results = world("scatter", lengths=lengths, source=source)
    for result in results:
        assert result["shapes"]["attention_mask"] == (8, result["longest"])
        assert result["shapes"]["hidden"] == (8, result["longest"], 8)
        assert result["shapes"]["rewards"] == (8,)
    loaded = [row for number, rows in enumerate(lengths) for row in row_digests(make_trajectory(number, rows))]
    assert sorted(row for result in results for row in result["rows"]) == sorted(loaded)


def test_a_load_may_take_longer_than_the_group_waits(world):
    """R43, R56: the other ranks load nothing and do not time out."""
    results = world("wait_longer_than_the_group", seconds=2.5, group_seconds=1, source=1)
    assert results == [([], 2), ([1], 2), ([], 2), ([], 2)]


def test_a_load_that_fails_raises_on_all_and_the_next_one_works(world):
    results = world("load_that_fails", source=1)
    for rank, (first, second, third) in enumerate(results):
        if rank == 1:
            assert first == ("KeyError", "'prompt 0'")
            assert third == ["later"]
        else:
            assert first == (
                "BalanceError",
                "rank 1 cannot go on: it loads for all, and failed: KeyError: 'prompt 0'",
            )
            assert second[0] == "BalanceError"
            assert third == []


def lengths_of_heads(*counts):
    """Ranks 0 and 2 are the data-parallel heads; the others have no rollouts."""
    rng = np.random.default_rng(1)
    return [random_lengths(rng, num_trajectories=count) for count in (counts[0], 0, counts[1], 0)]


@pytest.mark.parametrize("method", ["rollout_batch", "prepare_batch"])
@pytest.mark.parametrize(("counts", "single"), [((6, 6), False), ((8, 7), False), ((15, 5), True)])
def test_the_coordinator_gives_every_head_its_share(world, method, counts, single):
    """R43, R56: with single_rank_load rank 0 scatters; the other head has rollouts it could load, and does not.

    Without it numbers may differ among the heads: AReaL raises.
    """
    lengths = lengths_of_heads(*counts)
    results = world("coordinate", lengths=lengths, method=method, single_rank_load=single)
    assert [result["calls"] for result in results] == [[method], [], [] if single else [method], []]
    sources = [0] if single else [0, 2]
    rolled_out = {100 * rank + number: rows for rank in sources for number, rows in enumerate(lengths[rank])}
    for head, follower in ((0, 1), (2, 3)):
        assert results[head]["ids"] == results[follower]["ids"]
        assert results[head]["digests"] == results[follower]["digests"]
    assert sorted(results[0]["ids"] + results[2]["ids"]) == sorted(rolled_out)
    for result in results:
        expected = [trajectory_digest(make_trajectory(number, rolled_out[number])) for number in result["ids"]]
        assert result["digests"] == expected
    tokens = [sum(map(sum, (rolled_out[number] for number in results[head]["ids"]))) for head in (0, 2)]
    assert max(tokens) <= 1.1 * min(tokens)


@pytest.mark.parametrize(
    ("fault", "single", "text"),
    [
        ({"fails_on": 0}, True, "ConnectionError: the inference server is gone"),
        ({"without_mask_on": 2}, False, "attention_mask is a NoneType"),
    ],
)
def test_what_one_head_meets_raises_on_ranks_without_data_too(world, fault, single, text):
    results = world(
        "coordinate", lengths=lengths_of_heads(4, 4), method="prepare_batch", single_rank_load=single, **fault
    )
    assert [result["ranks"] for result in results] == [4] * 4
    assert all(text in result["error"] for result in results)


def test_the_result_is_areals_without_what_other_ranks_have(world):
    """R46: of AReaL's own type, with a list of dicts."""
    lengths = [[[3, 5]], [[2], [9]], [[7]], [[1, 1, 1]]]
    ids = [0, 100, 101, 200, 300]
    results = world("redistribute_as_areal_does", lengths=lengths)
    assert sorted(index for part in results[0]["group_indices"] for index in part) == [0, 1, 2, 3, 4]
    for rank, result in enumerate(results):
        own = results[0]["group_indices"][rank]
        assert (result["type"], result["rank"]) == ("RedistributedData", rank)
        assert result["group_indices"] == results[0]["group_indices"]
        assert result["ids"] == [ids[index] for index in own]
        assert result["all"] == [ids[index] if index in own else None for index in range(5)]


def test_a_padded_batch_is_split_alike_on_every_rank(world):
    rng = np.random.default_rng(2)
    lengths = [rng.integers(1, 100, count).tolist() for count in (30, 12, 21, 16)]
    results = world("micro_batches", lengths=lengths, max_tokens=400, n_mbs_divisor=2)
    assert len({len(slots) for slots, _ in results}) == 1
    for (slots, tokens), of_rank in zip(results, lengths, strict=True):
        assert sorted(row for slot in slots for row in slot) == list(range(len(of_rank)))
        assert tokens == [sum(of_rank[row] for row in slot) for slot in slots]
        assert max(tokens) <= 400
        assert len(slots) % 2 == 0
