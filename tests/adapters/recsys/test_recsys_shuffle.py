"""Rows of the real torchrec moved between real gloo processes; the bodies are in recsys_cases.py."""

from collections import Counter

import numpy as np
import pytest

HSTU_4_HEADS_OF_256 = (30 * 1024**2 + 6 * 1024, 7 * 1024)
"""Linear and quadratic FLOPs of a token: 4 projections and one back, 2 FLOPs a weight, 3 passes; 2 FLOPs a head's
channel in causal attention, 3.5 passes; an output layer of one row."""


def check_everything_is_kept(outcomes, *, batch_size):
    """All rows once, in the order that the indices say, the same whichever way they travelled."""
    before = [row for outcome in outcomes for row in outcome["before"]]
    after = [row for outcome in outcomes for row in outcome["all_gather"]["rows"]]
    assert Counter(after) == Counter(before)
    by_position = {}
    for rank, outcome in enumerate(outcomes):
        by_position |= {rank * batch_size + local: row for local, row in enumerate(outcome["before"])}
    for outcome in outcomes:
        assert outcome["all_gather"] == outcome["all_to_all"]
        new = outcome["all_gather"]
        real, padding = new["indices"][: new["actual_batch_size"]], new["indices"][new["actual_batch_size"] :]
        assert [by_position[position] for position in real] == new["rows"]
        assert real == sorted(real)
        assert padding == sorted(padding)
        assert not by_position.keys() & set(padding)
        assert new["batch_size"] == batch_size
    everywhere = sorted(position for outcome in outcomes for position in outcome["all_gather"]["indices"])
    assert everywhere == list(range(len(outcomes) * batch_size))


@pytest.mark.parametrize("item_lengths", [[[5, 0, 2, 9], [1, 1, 30, 4]], [[5, 0, 2], [1]]])
def test_r29_dense_tensors_hold_real_rows_alone_and_keys_all(ranks, item_lengths):
    """R20, R21: one batch type; labels are a KeyedJaggedTensor, scores a tensor of several entries a row."""
    outcomes = ranks(2, "shuffle", item_lengths=item_lengths, batch_size=4)
    check_everything_is_kept(outcomes, batch_size=4)
    for outcome in outcomes:
        new = outcome["all_to_all"]
        assert new["user"] == (new["actual_batch_size"], 3)
        assert new["scores"] == ((2 * new["actual_batch_size"],), "torch.bfloat16")
        assert new["lengths"] == (12, "torch.int32")
        assert new["names"] == ["kept"]


@pytest.mark.parametrize(
    "item_lengths",
    [
        pytest.param([[5, 1, 2, 9, 4], [3, 3, 3], [], [7, 8]], id="ten rows, four ranks (R27)"),
        pytest.param([[5, 0, 2, 9, 4], [0, 3, 3], [1], [7, 0]], id="real rows without tokens (R26)"),
        pytest.param([[], [6], [], []], id="fewer rows than ranks"),
        pytest.param([[], [], [], []], id="no row at all"),
        pytest.param([[0] * 5, [0] * 5, [0] * 5, [0] * 4], id="no tokens at all"),
        pytest.param([[9000], [1] * 5, [1] * 5, [1] * 5], id="one row outweighs all"),
    ],
)
def test_batches_of_any_filling(ranks, item_lengths):
    outcomes = ranks(4, "shuffle", item_lengths=item_lengths, batch_size=5)
    check_everything_is_kept(outcomes, batch_size=5)
    num_rows = sum(map(len, item_lengths))
    assert sum(outcome["all_gather"]["actual_batch_size"] for outcome in outcomes) == num_rows


def test_r28_padding_costs_nothing(ranks):
    outcomes = ranks(2, "shuffle", item_lengths=[[10] * 6, [10] * 2], batch_size=8)
    assert [outcome["all_gather"]["actual_batch_size"] for outcome in outcomes] == [4, 4]
    assert [sum(outcome["all_gather"]["workloads"][4:]) for outcome in outcomes] == [0, 0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_r19_loads_of_hstu_within_a_thousandth(ranks, num_ranks):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, (num_ranks, 128)), 0, 4096).astype(int).tolist()
    outcomes = ranks(num_ranks, "shuffle", item_lengths=lengths, batch_size=128)
    check_everything_is_kept(outcomes, batch_size=128)
    linear, quadratic = HSTU_4_HEADS_OF_256

    def load(of_rank):
        return sum(linear * 2 * items + quadratic * (2 * items) ** 2 for items in of_rank)

    loads = [load([len(row[0]) for row in outcome["all_gather"]["rows"]]) for outcome in outcomes]
    assert max(loads) <= 1.001 * sum(loads) / num_ranks
    before = list(map(load, lengths))
    assert max(before) > 1.01 * sum(before) / num_ranks


def test_r25_int32_lengths_do_not_wrap(ranks):
    """HSTU: four projections (QKVU), and one back."""
    outcomes = ranks(2, "shuffle", item_lengths=[[2048, 4096], [1, 2]], batch_size=2)
    linear, quadratic = HSTU_4_HEADS_OF_256
    expected = sorted(linear * tokens + quadratic * tokens**2 for tokens in (4096, 8192, 2, 4))
    assert sorted(cost for outcome in outcomes for cost in outcome["all_gather"]["workloads"]) == expected


def test_in_two_halves_with_two_batches_under_way(ranks):
    lengths = np.random.default_rng(3).integers(0, 50, (2, 16)).tolist()
    outcomes = ranks(2, "shuffle", item_lengths=lengths, batch_size=16, asynchronous=True)
    check_everything_is_kept(outcomes, batch_size=16)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dense", "rank 1 cannot go on: user has shape [3, 3]"),
        ("float", "rank 1 cannot go on: get_workloads gave torch.float32"),
        ("rows", "'rows of a batch' is float32 [5, 0] where the other has float32 [4, 0]"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, how, message):
    lengths = [[1, 2, 3, 4]] * 3
    errors = ranks(3, "shuffle_what_one_rank_spoils", item_lengths=lengths, batch_size=4, how=how)
    assert all(message in error for error in errors), errors


def test_r25_shufflers_of_upstream_are_driven_and_given_back(ranks):
    """SID-GR: three projections, one back, and an MLP of four times the width."""
    outcomes = ranks(2, "shuffle_by_upstreams_own_class", item_lengths=[[4096, 8192], [1, 2]], batch_size=2)
    linear, quadratic = 72 * 1024**2 + 6 * 1024, 7 * 1024
    expected = sorted(linear * tokens + quadratic * tokens**2 for tokens in (4096, 8192, 1, 2))
    assert sorted(cost for workloads, _ in outcomes for cost in workloads) == expected
    assert [error for _, error in outcomes] == ["upstream's shuffle"] * 2
