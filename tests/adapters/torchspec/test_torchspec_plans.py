"""TorchSpec, approaches A, B and C (R1 to R7): which samples leave together, in which order, and to which rank."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError

drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
"""A controller is started for every example."""


def padded_tokens(lengths, ranks):
    return sum(len(positions) * max(lengths[position] for position in positions) for positions in ranks)


@st.composite
def dispatches(draw, most_ranks=6, most_samples=5):
    """Ranks, and as many lengths for each, two at least: one sample a rank is left to TorchSpec."""
    dp_size = draw(st.integers(2, most_ranks))
    size = dp_size * draw(st.integers(2, most_samples))
    return dp_size, draw(st.lists(st.integers(1, 20_000), min_size=size, max_size=size))


@pytest.mark.parametrize("cost", ["padded", "tokens"])
@drawn
@given(dispatch=dispatches(), turn=st.integers(0, 1000))
def test_every_rank_gets_its_exact_count_and_every_sample_goes_once(host, cost, dispatch, turn):
    """R1, R2. The issue's own snippet under-fills a rank, whose fetcher then waits for ever."""
    host.install("A", cost=cost)
    dp_size, lengths = dispatch
    ranks = host.ranks(lengths, dp_size=dp_size, turn=turn)
    assert [len(positions) for positions in ranks] == [len(lengths) // dp_size] * dp_size
    assert sorted(position for positions in ranks for position in positions) == list(range(len(lengths)))
    assert all(positions == sorted(positions) for positions in ranks)
    if cost == "padded":
        round_robin = [range(rank, len(lengths), dp_size) for rank in range(dp_size)]
        assert padded_tokens(lengths, ranks) <= padded_tokens(lengths, round_robin)


@drawn
@given(dispatch=dispatches(most_ranks=3, most_samples=2))
def test_padded_has_the_least_padding_there_is(host, dispatch):
    """R6: a rank's cost is the padding to its longest sample."""
    host.install("A")
    dp_size, lengths = dispatch
    count = len(lengths) // dp_size
    minimum = min(
        padded_tokens(order, [range(start, start + count) for start in range(0, len(order), count)])
        for order in permutations(lengths)
    )
    assert padded_tokens(lengths, host.ranks(lengths, dp_size=dp_size)) == minimum


def test_no_rank_is_the_slowest_in_every_turn(host):
    host.install("A")
    lengths = [800, 100, 700, 200, 600, 300, 500, 400]
    turns = [host.ranks(lengths, dp_size=4, turn=turn) for turn in range(64)]
    assert {next(rank for rank, rank_ids in enumerate(ranks) if 0 in rank_ids) for ranks in turns} == {0, 1, 2, 3}


def test_longest_first_pairs_the_longest_with_the_shortest(host):
    """R2."""
    host.install("A", cost="tokens")
    assert host.ranks([1000, 800, 200, 100], dp_size=2) == [[0, 3], [1, 2]]
    assert [len(rank) for rank in host.ranks([2000] + [100] * 11, dp_size=4)] == [3, 3, 3, 3]


@pytest.mark.parametrize("cost", ["padded", "tokens"])
def test_one_sample_a_rank_is_left_to_torchspec(host, cost):
    """R3. Evaluation dispatches one sample a rank whatever the micro_batch_size."""
    host.install("A", cost=cost)
    lengths = [100, 900, 200, 800]
    assert host.ranks(lengths, dp_size=4) == [[0], [1], [2], [3]]
    controller = host.controller(dp_size=4, micro_batch_size=3)
    controller.eval_pool.extend(host.results(lengths))
    assert controller.try_dispatch_eval_batch()
    assert [queue.get_nowait().data_id for queue in controller.eval_queues] == ["d0", "d1", "d2", "d3"]
    # Fault: two samples a rank, of two sequence-parallel ranks, were reordered at micro_batch_size 1.
    controller.args.micro_batch_size = 1
    results = host.results([*lengths, *lengths])
    assert controller._partition_results(results) == [results[rank::4] for rank in range(4)]


@pytest.mark.parametrize(
    ("lengths", "leaving"),
    [
        ([500, 10, 9000, 11, 510, 13, 490, 505], [0, 4, 6, 7]),
        ([10, 500, 9000, 11, 510, 13, 490, 12], [0, 3, 5, 7]),  # the shortest is the oldest
        ([9000, 10, 500, 11, 510, 13, 490, 505], [0, 2, 4, 7]),  # the longest is: what is nearest goes with it
        ([0] * 8, [0, 1, 2, 3]),
    ],
)
def test_those_leave_with_the_oldest_that_pad_least(host, lengths, leaving):
    """R4. What is beyond the window waits its turn."""
    host.install("B", window=2)
    controller = host.controller(dp_size=2)
    controller.push_inference_results(host.results([*lengths, lengths[0]]))
    assert controller.try_dispatch_batch()
    dispatched = {f"d{sample}" for sample in range(9)} - {result.data_id for result in controller.sample_pool}
    assert dispatched == {f"d{sample}" for sample in leaving}


def data(lengths):
    return [{"data_id": f"d{i}", "input_ids": np.zeros((1, length))} for i, length in enumerate(lengths)]


@pytest.fixture
def presorting(host):
    """A controller with a data set, approach C."""

    def make(samples, *, micro_batch_size=2, **options):
        host.install("C", **options)
        controller = host.controller(dp_size=4, micro_batch_size=micro_batch_size)
        controller._stored_dataset = samples
        return controller

    return make


def ids(samples):
    return [sample["data_id"] for sample in samples]


@pytest.mark.parametrize("num_samples", [0, 7, 8, 83])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_every_sample_once_an_epoch(presorting, num_samples, micro_batch_size):
    """R5."""
    controller = presorting(data(range(1, num_samples + 1)), micro_batch_size=micro_batch_size)
    assert sorted(ids(controller._prepare_dataset())) == sorted(ids(controller._stored_dataset))


@pytest.mark.parametrize("bucket_batches", [1, 4])
def test_a_dispatch_holds_neighbours_in_length_and_larger_buckets_shuffle_within_them(presorting, bucket_batches):
    """R5."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65)).tolist()
    samples = presorting(data(lengths), bucket_batches=bucket_batches)._prepare_dataset()
    batches = [sorted(s["input_ids"].shape[1] for s in samples[start : start + 8]) for start in range(0, 64, 8)]
    buckets = [{(length - 1) // (8 * bucket_batches) for length in batch} for batch in batches]
    assert all(len(bucket) == 1 for bucket in buckets)
    assert batches != sorted(batches)
    assert (sorted(batches) != [list(range(first, first + 8)) for first in range(1, 65, 8)]) == (bucket_batches > 1)


def test_an_order_of_each_seed_and_epoch_which_a_run_resumes(presorting):
    controller = presorting(data(np.random.default_rng(0).integers(1, 5000, 83).tolist()))
    whole = ids(controller._prepare_dataset())
    assert ids(controller._prepare_dataset(skip=24)) == whole[24:]
    assert ids(controller._prepare_dataset(skip=200)) == []
    controller._dataset_epoch = 1
    second = ids(controller._prepare_dataset())
    controller._dataset_epoch, controller._dataset_seed = 0, 43
    third = ids(controller._prepare_dataset())
    assert whole != second != third != whole


@pytest.mark.parametrize("key", ["input_ids", "seq_len", "formatted_prompt"])
def test_lengths_are_those_that_the_samples_have(presorting, key):
    """R7: tokens, or characters of a prompt where tokenization is deferred."""
    value = {"input_ids": lambda n: [0] * n, "seq_len": lambda n: n, "formatted_prompt": lambda n: "a" * n}[key]
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65)).tolist()
    controller = presorting([{"data_id": f"d{i}", "length": n, key: value(n)} for i, n in enumerate(lengths)])
    order = [sample["length"] for sample in controller._prepare_dataset()]
    assert all(max(batch) - min(batch) == 7 for batch in (order[start : start + 8] for start in range(0, 64, 8)))


def test_samples_without_lengths_are_told(presorting):
    with pytest.raises(BalanceError, match="neither input_ids"):
        presorting(["a prompt"])._prepare_dataset()


def test_an_order_that_is_to_be_kept_is_no_matter_for_c(presorting):
    """Fault: `shuffle_dataset: false` was ignored."""
    controller = presorting(data([3, 1, 2]))
    controller._shuffle_dataset = False
    with pytest.raises(BalanceError, match="shuffle_dataset is false"):
        controller._prepare_dataset()
