"""Every sample leaves once and in bounded time; released windows are similar; a checkpoint changes nothing."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.errors import BalanceError
from megatron_balance.planner.selection.lookahead import LookAhead

costs_of_samples = st.lists(
    st.one_of(st.integers(0, 5), st.integers(0, 10**6), st.just(10**25)), min_size=0, max_size=80
)
settings_of_pool = st.fixed_dictionaries(
    {
        "window": st.integers(1, 5),
        "batch_size": st.integers(1, 9),
        "dp_size": st.integers(1, 6),
        "choice": st.sampled_from(["gather", "spread"]),
    }
)


def all_batches(costs, *, window, **options):
    """Push as needed, pop to the end."""
    ahead, batches, given_so_far = LookAhead(window, **options), [], 0
    while True:
        wanted = ahead.num_missing
        ahead.push(costs[given_so_far : given_so_far + wanted])
        given_so_far += wanted
        if given_so_far >= len(costs):
            ahead.drain()
        if not ahead.num_waiting:
            return ahead, batches
        batches.append(ahead.pop().tolist())


def lengths_with_giants(num_samples, *, seed=0, every=20):
    random = np.random.default_rng(seed)
    costs = random.integers(50, 150, size=num_samples)
    costs[random.random(num_samples) < 1 / every] = 5000
    return costs


@settings(deadline=None)
@given(costs_of_samples, settings_of_pool)
def test_every_sample_leaves_once_and_in_time(costs, options):
    window, batch_size = options["window"], options["batch_size"]
    ahead, batches = all_batches(costs, **options)
    assert sorted(sample for batch in batches for sample in batch) == list(range(len(costs)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    delays = [step - sample // batch_size for step, batch in enumerate(batches) for sample in batch]
    assert all(abs(delay) < window for delay in delays)
    metrics = ahead.metrics()
    assert metrics.num_steps == len(batches) == -(-len(costs) // batch_size)
    assert metrics.max_delay_steps == max([0, *delays])
    assert metrics.mean_delay_steps == sum(delay for delay in delays if delay > 0) / max(len(costs), 1)
    if batches and sum(costs):
        mean = sum(costs[sample] for sample in batches[-1]) / len(batches[-1])
        assert metrics.drift == pytest.approx(mean / (sum(costs) / len(costs)))


@settings(deadline=None)
@given(costs_of_samples, settings_of_pool)
def test_a_window_of_one_is_arrival_order(costs, options):
    _, batches = all_batches(costs, **{**options, "window": 1})
    assert [sample for batch in batches for sample in batch] == list(range(len(costs)))


@settings(deadline=None)
@given(costs_of_samples, settings_of_pool, st.integers(0, 8))
def test_a_resume_at_any_step_gives_the_same_rest(costs, options, step):
    _, batches = all_batches(costs, **options)
    ahead = LookAhead(options["window"], **{k: v for k, v in options.items() if k != "window"})
    # All data pushed at once here: what is pushed early must not change the choice.
    ahead.push(costs)
    ahead.drain()
    for batch in batches[:step]:
        assert ahead.pop().tolist() == batch
    saved = json.loads(json.dumps(ahead.state()))
    resumed = LookAhead.from_state(saved)
    assert resumed.state() == saved
    for batch in batches[step:]:
        assert resumed.pop().tolist() == batch
        ahead.pop()
    assert resumed.num_waiting == 0
    assert resumed.metrics() == ahead.metrics()


def test_a_pool_does_not_remember_who_took_its_state():
    ahead = LookAhead(2, batch_size=2)
    ahead.push([1, 2, 3, 4])
    saved = ahead.state()
    ahead.pop()
    assert saved["arrivals"] == [0, 1, 2, 3]
    assert saved["num_steps"] == 0


@pytest.mark.parametrize("window", [2, 4])
def test_steps_are_more_alike_than_in_arrival_order(window):
    costs = np.random.default_rng(3).lognormal(7, 1, size=64 * 60).astype(np.int64)

    def spread_of_steps(window):
        _, batches = all_batches(costs, window=window, batch_size=64)
        totals = np.array([costs[batch].sum() for batch in batches])
        longest = np.array([np.sort(costs[batch])[-8:].sum() for batch in batches])
        return totals.std() / totals.mean(), longest.std() / longest.mean()

    in_order, ahead = spread_of_steps(1), spread_of_steps(window)
    assert ahead[0] < in_order[0] * (0.75 if window == 2 else 0.6)
    assert ahead[1] < in_order[1]


def test_gathered_giants_meet_in_fewer_steps():
    costs, options = lengths_with_giants(32 * 40, every=40), {"window": 4, "batch_size": 32, "dp_size": 8}

    def steps_with_giants(choice):
        _, batches = all_batches(costs, choice=choice, **options)
        return sum(bool((costs[batch] == 5000).any()) for batch in batches)

    def waiting(choice):
        """Sum of step times over the sum of even shares, where a step lasts as long as its largest sample or share."""
        _, batches = all_batches(costs, choice=choice, **options)
        times = [max(costs[batch].sum() / 8, costs[batch].max()) for batch in batches]
        return sum(times) / (costs.sum() / 8)

    in_order = sum(bool((costs[start : start + 32] == 5000).any()) for start in range(0, len(costs), 32))
    assert steps_with_giants("gather") < in_order / 1.5
    assert steps_with_giants("spread") >= in_order
    assert waiting("gather") < waiting("spread") / 1.5


def test_giants_wait_for_the_first_that_must_leave():
    costs = [10] * 32
    for arrival in (0, 5, 9):
        costs[arrival] = 100
    _, batches = all_batches(costs, window=3, batch_size=4, dp_size=4)
    assert [sorted({0, 5, 9} & set(batch)) for batch in batches[:4]] == [[], [], [0, 5, 9], []]


def test_the_batch_costs_what_the_pool_costs_on_average():
    costs = list(range(64))
    _, batches = all_batches(costs, window=2, batch_size=32)
    assert sum(batches[0]) == sum(costs) / 2
    assert all(batches[0].count(2 * pair) + batches[0].count(2 * pair + 1) == 1 for pair in range(32))


def test_without_giants_the_two_are_the_same():
    costs = np.random.default_rng(5).integers(90, 110, size=16 * 12)
    options = {"window": 3, "batch_size": 16, "dp_size": 4}
    assert all_batches(costs, choice="gather", **options)[1] == all_batches(costs, choice="spread", **options)[1]


def test_more_giants_than_a_batch_all_leave_in_time():
    costs = [1] * 2 + [1000] * 14 + [1] * 500
    _, batches = all_batches(costs, window=2, batch_size=4, dp_size=4)
    assert sorted(sample for batch in batches for sample in batch) == list(range(len(costs)))


def test_costs_beyond_int64_are_exact():
    costs = [2**80 + 1, 2**80, 2**80 + 1, 2**80]
    assert sum(costs[sample] for sample in all_batches(costs, window=2, batch_size=2)[1][0]) == 2**81 + 1


def test_pop_says_what_is_missing():
    ahead = LookAhead(2, batch_size=3)
    ahead.push(np.array([1, 2], dtype=np.int32))
    assert ahead.num_missing == 4
    with pytest.raises(BalanceError, match="push 4 more samples"):
        ahead.pop()
    ahead.drain()
    assert ahead.pop().tolist() == [0, 1]
    with pytest.raises(BalanceError, match="data has ended"):
        ahead.pop()
    with pytest.raises(BalanceError, match="after drain"):
        ahead.push([1])


@pytest.mark.parametrize("cost", [-1, 1.5, True, "3", None])
def test_costs_that_are_no_costs(cost):
    ahead = LookAhead(1, batch_size=1)
    with pytest.raises(BalanceError, match=r"costs\[1\]"):
        ahead.push([1, cost])
    assert ahead.num_waiting == 0


@pytest.mark.parametrize("options", [{"window": 0}, {"batch_size": 0}, {"dp_size": -1}, {"choice": "hide"}])
def test_arguments_that_cannot_be(options):
    with pytest.raises(BalanceError, match=next(iter(options))):
        LookAhead(options.pop("window", 1), **{"batch_size": 1, **options})


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda state: state.pop("costs"), "costs missing or unknown"),
        (lambda state: state.update(colour=1), "colour missing or unknown"),
        (lambda state: state["arrivals"].pop(), "3 arrivals, 4 costs"),
        (lambda state: state.update(num_left=1), "do not make 4"),
    ],
)
def test_a_state_that_is_none(change, phrase):
    ahead = LookAhead(2, batch_size=2)
    ahead.push([1, 2, 3, 4])
    state = ahead.state()
    change(state)
    with pytest.raises(BalanceError, match=phrase):
        LookAhead.from_state(state)
