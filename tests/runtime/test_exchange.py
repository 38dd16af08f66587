"""Samples moved between real gloo processes; the bodies are in exchange_cases.py."""

import pytest

from megatron_balance.runtime.gather import INLINE_LENGTHS


def test_every_dtype_arrives_with_equal_bits(world4):
    lengths = [[3, 0, 7], [1, 64], [5], [2, 2, 9, 0]]
    world4.run("reroute", lengths=lengths, destinations=[1, 2, 3, 0, 3, 0, 3, 1, 1, 2], builder="every_dtype")


def test_ragged_keys_arrive_with_their_lengths(world4):
    lengths = [[3, 0, [7, 2]], [1, 64], [], [2, [2, 2], 9, 0]]
    for seed in range(3):
        world4.run("reroute", lengths=lengths, destinations=[1, 2, 3, 0, 3, 0, 3, 1, 1], builder="ragged", seed=seed)


def test_ragged_lengths_travel_with_the_gather(world2):
    for result in world2.run("reroute", lengths=[[1, 2], [3]], destinations=[1, 0, 0], builder="ragged"):
        assert result["gather"] == {"all_gather_into_tensor": 1}
    # Four values a sample: its length and the entries of three keys.
    many = INLINE_LENGTHS // 4 + 1
    results = world2.run("reroute", lengths=[[1] * many, [3]], destinations=[1] * many + [0], builder="ragged")
    assert all(result["gather"] == {"all_gather_into_tensor": 2} for result in results)


@pytest.mark.parametrize(
    ("lengths", "destinations"),
    [
        pytest.param([[4, 5], []], [0, 1], id="a rank without samples receives"),
        pytest.param([[4, 5], []], [0, 0], id="a rank without samples, nothing moves"),
        pytest.param([[4, 5], [6]], [0, 0, 0], id="a rank receives nothing"),
        pytest.param([[4, 5], [6]], [1, 1, 0], id="all change places"),
        pytest.param([[4, 5], [6]], [0, 0, 1], id="all stay"),
        pytest.param([[0], [0, 0]], [1, 0, 1], id="no tokens at all"),
        pytest.param([[], [7]], [0], id="one sample, elsewhere"),
        pytest.param([[[3, 4], 5], [6]], [1, 0, 0], id="sequences that stay together, on one rank only"),
        pytest.param([[[0, 4], [1]], [[2, 0, 2]]], [1, 1, 0], id="sequences without tokens"),
        pytest.param([[[3, 4]], []], [0], id="sequences that stay together, nothing moves"),
    ],
)
def test_two_ranks(world2, lengths, destinations):
    world2.run("reroute", lengths=lengths, destinations=destinations)


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param([[0, 1, 2, 3], [1], [], [2, 3], [0, 3]], id="to several, to one, to none"),
        pytest.param([[], [], [], [], []], id="nothing goes anywhere"),
        pytest.param([[0], [0], [1], [3], [3]], id="all stay"),
        pytest.param([[0, 1, 2, 3]] * 5, id="all to all"),
    ],
)
def test_samples_that_several_ranks_share(world4, copies):
    arrived = world4.run("send_to_several", lengths=[[3, [4, 2]], [5], [], [0, 7]], copies=copies)
    for rank, ids in enumerate(arrived):
        assert ids == [sample for sample, ranks in enumerate(copies) if rank in ranks]


def test_buffers_are_used_again_until_a_step_needs_more(world2):
    steps = [[[30, 4], [20]], [[5], [7, 8]], [[3000], [2000]], [[40], [1]]]
    for first, second, third, fourth in world2.run("exchange_in_kept_buffers", steps=steps):
        assert first == second
        assert third == fourth != first


def test_all_to_one_rank(world4):
    results = world4.run("reroute", lengths=[[3, 1], [4], [1, 5], [9]], destinations=[2] * 6)
    assert [result["ids"] for result in results] == [[], [], [0, 1, 2, 3, 4, 5], []]


def test_group_of_one(world1):
    world1.run("reroute", lengths=[[3, 0, 8]], destinations=[0, 0, 0], builder="every_dtype")


def test_what_stays_goes_to_the_device_asked_for(world1):
    assert world1.run("stay_on_another_device") == [[("meta", (2, 3)), ("meta", (4,))]]


@pytest.mark.parametrize("ranks", [[0, 2], [1, 3], [3, 1, 2]])
def test_subgroup_speaks_of_ranks_within_it(world4, ranks):
    lengths, destinations = [[3, 4], [5], [6, 1]][: len(ranks)], [1, 0, 0, 1, 0][: 3 if len(ranks) == 2 else 5]
    results = world4.run("reroute_in_subgroup", ranks=ranks, lengths=lengths, destinations=destinations)
    assert [result is not None for result in results] == [rank in ranks for rank in range(4)]


def test_random_schedules_and_exchanges_lose_and_alter_nothing(world4):
    tallies = world4.run("fuzz_exchanges", count=300, seed=7, seconds=300)
    for name in ("samples", "moved", "ragged", "sequences", "zero_length", "over_long", "empty_ranks"):
        assert all(tally[name] > 10 for tally in tallies), name
    assert sum(tally["samples"] for tally in tallies) > 3000
    assert len(tallies[0]["kinds"]) == 9


def test_one_bit_that_changes_on_the_way_is_seen(world2):
    said = world2.run("fuzz_with_a_flipped_bit", count=10)
    assert said[0] == []
    assert len(said[1]) > 3
    assert all("was altered" in error for error in said[1])


def test_no_samples_anywhere(world2):
    assert world2.run("no_rank_has_samples") == [True, True]


@pytest.mark.parametrize("ranks", [[1], [0, 3], [0, 1, 3], [0, 1, 2, 3]])
def test_every_rank_gets_the_largest_numbers_of_all(world4, ranks):
    for rank, largest in enumerate(world4.run("largest_in_subgroup", ranks=ranks)):
        assert largest == ([10 + index for index in range(len(ranks))] if rank in ranks else None)


def test_messages_follow_a_timeout_that_is_shortened_later(world2):
    error, _ = world2.run("message_after_a_later_timeout")
    assert "waited for numbers among world ranks 0, 1, and not all answered (Timed out waiting 1000ms" in error


def test_one_collective_gathers(world2):
    for result in world2.run("reroute", lengths=[[1, 2], [3]], destinations=[1, 0, 0]):
        assert result["gather"] == {"all_gather_into_tensor": 1}


def test_a_second_collective_only_for_a_rank_without_samples(world2):
    for result in world2.run("reroute", lengths=[[1, 2], []], destinations=[1, 0]):
        assert result["gather"] == {"all_gather_into_tensor": 2}


@pytest.mark.parametrize("excess", [-1, 0, 1, 400])
def test_a_second_collective_only_for_many_samples(world2, excess):
    for counts in world2.run("gather_many", num_samples=INLINE_LENGTHS + excess):
        assert counts == {"all_gather_into_tensor": 2 if excess > 0 else 1}


def test_several_sequences_of_every_dtype(world4):
    lengths = [[[3, 1], 0, 7], [[1, 2, 3], [64]], [[5, 0]], [2, [2, 2], 9]]
    results = world4.run("reroute", lengths=lengths, destinations=[1, 2, 3, 0, 3, 0, 3, 1, 1], builder="every_dtype")
    assert all(result["gather"] == {"all_gather_into_tensor": 1} for result in results)


@pytest.mark.parametrize("excess", [-1, 0, 1, 400])
def test_a_second_collective_only_for_many_sequences(world2, excess):
    # The number of sequences of its one sample takes a place as well.
    for counts in world2.run("gather_segments", num_segments=INLINE_LENGTHS - 1 + excess):
        assert counts == {"all_gather_into_tensor": 2 if excess > 0 else 1}


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("dtype", "rank 0: on rank 1 'loss_mask' is float64 [original_seq_len]"),
        ("shape", "rank 0: on rank 1 'loss_mask' is float32 [original_seq_len, 1]"),
        # Rank 0 has no samples here, so that rank 1 is the first to have a schema.
        ("key", "rank 1: on ranks 2, 3 'advantages' is missing"),
    ],
)
def test_different_schemas_raise_on_every_rank(world4, kind, phrase):
    messages = world4.run("schemas_differ", kind=kind)
    assert len(set(messages)) == 1
    assert phrase in messages[0]


def test_different_fingerprints_raise_on_every_rank(world4):
    messages = world4.run("fingerprints_differ")
    assert len(set(messages)) == 1
    assert "0x7fffffffffffffff on ranks 0, 2, 3; 0xbeef on rank 1" in messages[0]


@pytest.mark.parametrize(
    ("kind", "phrase"),
    [
        ("problem", "the file ended — early"),
        ("mixed", "Sample 1 differs from sample 0"),
        ("negative", "length is -4"),
        ("no schema", "no schema"),
        ("segments", "num_segments is [1, 2]: it must be at least 1 and sum to the 2 lengths"),
        ("no segments", "num_segments is [0, 1]"),
    ],
)
def test_a_problem_on_one_rank_raises_on_every_rank(world2, kind, phrase):
    messages = world2.run("one_rank_has_a_problem", kind=kind)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 1 cannot go on. rank 1: ")
    assert phrase in messages[0]


def test_rows_that_are_packed_on_some_ranks_only_raise_on_every_rank(world4):
    messages = world4.run("some_rows_are_not_packed")
    assert len(set(messages)) == 1
    assert messages[0].startswith("Rows of rank 1 have no cu_seqlens, and those of ranks 0, 2, 3 have")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["A", "A"], [2, 30, 40]),
        (["A", "listens"], [2, 30, 40]),
        (["A", "B"], "group of rank 1 other samples were read than in that of rank 0"),
        (["A", "C"], "group of rank 1 other samples were read than in that of rank 0"),
        (["problem", "listens"], "the data ended — early"),
        (["A", "problem"], "the data ended — early"),
        (["problem", "problem"], "the data ended — early"),
    ],
)
def test_ranks_of_a_replica_go_on_alike(world2, kinds, expected):
    results = world2.run("share_in_replica", kinds=kinds)
    assert results[0] == results[1]
    assert results[0] == expected if isinstance(expected, list) else expected in results[0]


def test_different_schedules_raise_on_every_rank(world4):
    messages = world4.run("schedules_differ")
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks 1, 3 planned another schedule")


def test_wrong_arguments(world2):
    for messages in world2.run("wrong_arguments"):
        for message, phrase in zip(
            messages,
            ["shape (1,)", "is 2", "is -1", "[5] tokens", "'flag' is missing", "sequences of (1, 3)"],
            strict=True,
        ):
            assert phrase in message
