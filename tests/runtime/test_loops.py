"""Steps of a hand-written loop on real ranks: what runs, what is pulled ahead, and the errors that all ranks get."""

import random

import pytest
from loop_cases import NUM_ITEMS, length_of


def expected(loops, *, layout):
    """Of every rank, the next items of each step's iterator; lengths of the first rank's where none are loaded."""
    of_ranks = []
    for rank, loop in enumerate(loops):
        first, ran = 1000 * (rank % 2) * (layout != "pp4"), list[list[int]]()
        for step, name in enumerate(loop):
            before = step if name == "n" else loop[:step].count(name)
            start = first + 500 * (name == "b") + NUM_ITEMS * before
            ran.append(ran[-1] if name == "r" else [*range(start, start + NUM_ITEMS)])
        if "-" in loop:
            ran = [sorted(map(length_of, numbers)) for numbers in of_ranks[0][: len(loop)]]
        of_ranks.append(ran)
    return of_ranks


DRAWN = ["".join(random.Random(seed).choices("aab", k=12)) for seed in range(5)]


@pytest.mark.parametrize(
    ("layout", "loops"),
    [
        *(("dp", f"{loop} {loop}") for loop in ("nnnn", "aaaa", "annn", "eenn", "aabaaa", "aarra", *DRAWN)),
        ("dp", "eebbbb aaaaaa"),
        ("pp", "nnnn nnnn aaaa aaaa"),  # ranks 0 and 1 are the first stages of two pipelines, 2 and 3 the last
        *(("pp4", f"{loop} {'-' * len(loop)} {'-' * len(loop)} {loop}") for loop in ("nnnn", "aabaaa", "aaraa")),
    ],
)
def test_every_step_has_the_next_items_of_its_iterator(run_cases, layout, loops):
    """Also where iterators change, end, come back, or Megatron runs a step again."""
    of_ranks = loops.split()
    outcomes = run_cases(len(of_ranks), "steps_of_loop", loops=of_ranks, layout=layout)
    assert [ran for ran, _, _ in outcomes] == expected(of_ranks, layout=layout)


@pytest.mark.parametrize(
    ("layout", "loops", "says"),
    [
        ("dp", "fff aaa", "rank 0 failed: fetching item 0 of this step: OSError: [Errno 5] the disk"),
        ("dp", "nnx nnn", "rank 0 failed: fetching item 1 of this step: OSError: [Errno 5] the disk"),
        ("dp", "mm aa", "rank 0 failed: item 0 of this step: Row 0: loss_mask holds NaN"),
        ("dp", "eee aaa", "rank 0 failed: its data ended after 0 items of this step"),
        ("dp", "aabb aaaa", "Pass a new iterator on every rank or on none"),
        ("pp", "fff aaa aaa aaa", "the disk is gone"),
        ("pp", "nnx nnn aaa aaa", "the disk is gone"),
        ("pp4", "fff --- --- aaa", "the disk is gone"),
        ("pp4", "aaa --- --- fff", "the disk is gone"),
    ],
)
def test_an_error_of_one_rank_s_data_ends_every_rank(run_cases, layout, loops, says):
    of_ranks = loops.split()
    outcomes = run_cases(len(of_ranks), "steps_of_loop", loops=of_ranks, layout=layout)
    for (ran, _, _), wanted in zip(outcomes, expected(of_ranks, layout=layout), strict=True):
        assert says in ran[-1]
        assert ran[:-1] == wanted[: len(ran) - 1]
    one_more = loops == "aabb aaaa"  # only the first rank's iterator is another
    assert [len(ran) for ran, _, _ in outcomes] == ([3, 4] if one_more else [len(of_ranks[0])] * len(of_ranks))


@pytest.mark.parametrize(("flags", "ahead"), [([], 2), (["--no-balance-overlap"], 0)])
def test_one_step_is_pulled_ahead_by_another_thread(run_cases, flags, ahead):
    [(ran, pulled, threads)] = run_cases(1, "steps_of_loop", loops=["aaaa"], flags=flags)
    assert [ran] == expected(["aaaa"], layout="dp")
    assert 8 <= pulled <= 8 + ahead  # the thread may not have ended
    assert (len(threads) > 1) == bool(ahead)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "says"),
    [
        pytest.param(2, "not packed", "the data has no cu_seqlens", id="not-packed"),
        pytest.param(2, "no tokens", "yielded no tokens for this step", id="no-tokens"),
        pytest.param(1, "read twice", "or as the second one in a call of it", id="read-twice"),
        pytest.param(2, "plans differ", "rank 1 planned another schedule than rank 0: ", id="plans-differ"),
        pytest.param(4, "stages", "the data of this step differs within a model replica", id="stages"),
    ],
)
def test_a_step_that_cannot_be_made_is_refused_on_every_rank(run_cases, num_ranks, kind, says):
    assert all(says in error for error in run_cases(num_ranks, "step_that_fails", kind=kind))


def test_a_dummy_has_as_many_tokens_as_kernels_are_built_for(run_cases):
    """One token would be an edge case of many kernels, and a shape of its own."""
    [dummy] = [dummy for of_rank in run_cases(2, "dummies") for dummy in of_rank]
    assert dummy >= 128


@pytest.mark.parametrize(("tokens", "total"), [([3, 1], 4), ([0, 0], 1)], ids=["some", "a-dummy-on-each"])
def test_routers_count_a_token_at_least_and_ranks_the_same_part(run_cases, tokens, total):
    """No tokens would make an auxiliary loss NaN."""
    assert run_cases(2, "counted_by_routers", tokens=tokens) == [(total / 2, total)] * 2


def test_data_that_are_no_loss_are_collected_from_megatrons_own_micro_batches(run_cases):
    assert run_cases(1, "evaluated", collects=False) == [[length_of(0) + length_of(1)]]
    assert run_cases(1, "evaluated", collects=True) == [[length_of(0), length_of(1)]]


SEQUENCES = [
    (rank, item, 10 * rank + 2 * item + 1 + place, (1 + item, 4 + rank)[place])
    for rank in range(2)
    for item in range(NUM_ITEMS)
    for place in range(2)
]
"""Of `weighted_gradients`: rank, item, number, learned tokens."""


@pytest.mark.parametrize("weighting", ["micro-batch", "sample", "rollout", "weight"])
def test_gradients_are_weighed_by_unit(run_cases, weighting):
    """Those of one unit sum to 1 / number of units, where Megatron has divided them by all learned tokens."""
    units = {}
    for rank, item, number, _ in SEQUENCES:
        place = (number - 1) % 2
        rollout = 7 if place else 100 + number % 3
        units[number] = {"micro-batch": (rank, item), "sample": number, "rollout": rollout}.get(weighting)
    total = sum(tokens for *_, tokens in SEQUENCES)
    expected = {}
    for rank, _, number, _ in SEQUENCES:
        unit_tokens = sum(tokens for *_, other, tokens in SEQUENCES if units[other] == units[number])
        weight = (2.0 + rank) if (number - 1) % 2 else 0.5
        expected[number] = weight if weighting == "weight" else total / (unit_tokens * len({*units.values()}))
    gradients = {}
    for outcome in run_cases(2, "weighted_gradients", weighting=weighting):
        gradients |= outcome
    assert gradients == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("weighting", "num_results", "message"),
    [("prompt", 3, "is 'prompt': it must be token, micro-batch, sample, or a key"), ("sample", 2, "returns 2 results")],
)
def test_what_cannot_be_weighed_is_named(run_cases, weighting, num_results, message):
    for outcome in run_cases(2, "weighted_gradients", weighting=weighting, num_results=num_results):
        assert message in outcome
