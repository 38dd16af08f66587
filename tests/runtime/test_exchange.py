"""Samples moved between real gloo processes; the bodies are in exchange_cases.py."""

import pytest


def test_samples_that_several_ranks_share(run_cases):
    copies, destinations = [0, 0, 0, 0, 1, 3, 3, 4, 4], [0, 1, 2, 3, 1, 2, 3, 0, 3]
    run_cases(4, "reroute", lengths=[[3, 6], [5], [], [0, 7]], copies=copies, destinations=destinations)


@pytest.mark.parametrize("ranks", [[0, 2], [3, 1, 2]])
def test_a_subgroup_speaks_of_ranks_within_it(run_cases, ranks):
    lengths, destinations = [[3, 4], [5], [6, 1]][: len(ranks)], [1, 0, 0, 1, 0][: 3 if len(ranks) == 2 else 5]
    results = run_cases(4, "reroute", ranks=ranks, lengths=lengths, destinations=destinations)
    assert [result is not None for result in results] == [rank in ranks for rank in range(4)]


def test_drawn_exchanges_lose_and_alter_nothing(run_cases):
    assert sum(run_cases(4, "reroute_random", count=40)) > 300


@pytest.mark.parametrize(("num_samples", "num_ragged"), [(3000, 0), (1, 2000), (50, 60)])
def test_lengths_of_any_number_are_gathered(run_cases, num_samples, num_ragged):
    run_cases(2, "gather_many", num_samples=num_samples, num_ragged=num_ragged)


def test_the_collective_of_gpus_exchanges_what_messages_do(run_cases):
    expected = [[other for other in range(3) if other != rank for _ in range(rank + 1)] for rank in range(3)]
    assert all(run_cases(3, "exchanged_parts", collective=collective) == expected for collective in (False, True))


def test_messages_follow_a_timeout_that_is_shortened_later(run_cases):
    (error, soon), _ = run_cases(2, "message_after_a_later_timeout")
    assert soon
    assert "samples from the ranks that loaded them (exchange) among world ranks 0, 1, and not all answered" in error


def same(messages):
    """The message of every rank."""
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("dtype", "ranks 0, 2, 3: on rank 1 'loss_mask' is float64 [original_seq_len]"),
        ("shape", "ranks 0, 2, 3: on rank 1 'loss_mask' is float32 [original_seq_len, 1]"),
        # Rank 0 has no samples here, so that rank 1 is the first to have a schema.
        ("key", "rank 1: on ranks 2, 3 'advantages' is missing"),
        ("problem", "rank 1 failed: the file ended — early"),
        ("settings", "cap is not set on ranks 0, 2, 3 and 8 on rank 1"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_every_rank(run_cases, kind, phrase):
    assert phrase in same(run_cases(4, "one_rank_differs", kind=kind))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["7", "7"], ""),  # nobody needs its text
        (["7", "listens"], "step ——"),
        (["7", "8"], "group of rank 1 other samples were read than in that of rank 0"),
        (["problem", "listens"], "the data ended — early"),
        (["7", "problem"], "the data ended — early"),
        (["problem", "problem"], "the data ended — early"),
    ],
)
def test_ranks_of_a_replica_go_on_alike(run_cases, kinds, expected):
    answer = same(run_cases(2, "share_in_replica", kinds=kinds))
    assert expected in answer
    assert bool(answer) == bool(expected)


def test_samples_must_be_those_that_were_gathered(run_cases):
    for message in run_cases(2, "samples_of_other_lengths"):
        assert "got samples of [5] tokens; those gathered had [4]" in message
