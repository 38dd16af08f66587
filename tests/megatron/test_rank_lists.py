"""The contract of the executor of dynamic context parallelism in Megatron's dev branch, on plans of many batches.

The scheduler that has them as a method needs that branch, so that the function below it is called here.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_judge import check_contract

from megatron_balance import BalanceError, CostModel, Limits, Topology, build_data_schedule
from megatron_balance.mcore.rank_lists import RankLists, plan_rank_lists

CAP = 256
COST = CostModel(linear=1000, quadratic=1, cp_exchange=30, per_microbatch=500)
LAYOUTS = {"step": {}, "microbatch": {"ep_size": 2}, "pipeline": {"pp_size": 2}, "both": {"ep_size": 2, "pp_size": 2}}


def plan(lengths: list[int], topology: Topology, **how: int) -> RankLists:
    pairs = [(7 + sample, length) for sample, length in enumerate(lengths)]
    return plan_rank_lists(pairs, cost_model=COST, topology=topology, max_tokens_per_gpu=CAP, **how)


def planned(lengths: list[int], topology: Topology) -> RankLists | None:
    try:
        return plan(lengths, topology)
    except BalanceError:  # test_too_few_samples_for_a_multiple_are_refused
        return None


def padded(lengths: list[int], num_ranks: int) -> list[int]:
    """As Megatron's dev branch pads its samples: for every size."""
    return [length + -length % (2 * num_ranks) for length in lengths]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 6 * CAP), min_size=1, max_size=48),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1), (2, 8), (3, 2), (5, 2), (3, 4), (7, 2)]),
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 3]),
)
def test_the_contract(lengths: list[int], sizes: tuple[int, int], layout: str, multiple: int) -> None:
    num_ranks = sizes[0] * sizes[1]
    lengths = padded(lengths, num_ranks)
    topology = Topology(sizes[0], cp_size=sizes[1], dynamic_cp=True, microbatch_multiple=multiple, **LAYOUTS[layout])
    slots = planned(lengths, topology)
    if slots is None:
        assert len(lengths) % multiple  # else one sample on all ranks in each would do
        return
    check_contract(
        slots,
        lengths={7 + sample: length for sample, length in enumerate(lengths)},
        num_ranks=num_ranks,
        cap=CAP,
        multiple=multiple,
    )


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 6 * CAP), min_size=1, max_size=60),
    st.sampled_from([(8, 2), (8, 4), (8, 8), (12, 2), (12, 4), (6, 2)]),
)
def test_no_group_is_smaller_than_the_least_size(lengths: list[int], ranks: tuple[int, int]) -> None:
    num_ranks, least = ranks
    lengths = padded(lengths, num_ranks)
    slots = plan(lengths, Topology(num_ranks, dynamic_cp=True), min_cp_size=least)
    check_contract(
        slots,
        lengths={7 + sample: length for sample, length in enumerate(lengths)},
        num_ranks=num_ranks,
        cap=CAP,
        least=least,
    )


@pytest.mark.parametrize("least", [3, 16])
def test_a_least_size_that_no_group_has_is_refused(least: int) -> None:
    with pytest.raises(BalanceError, match=f"min_dynamic_context_parallel_size is {least}: .* DP×CP, which is 8"):
        plan([100], Topology(8, dynamic_cp=True), min_cp_size=least)


def test_no_dummies_cost_nothing_where_each_rank_has_several_samples() -> None:
    lengths = [4 * CAP - 32, *(16 + 7 * sample for sample in range(40))]
    topology, cost_model = Topology(8, dynamic_cp=True), CostModel(linear=1000, quadratic=1)
    schedule = build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=Limits(CAP))
    assert (schedule.slot_counts() == 0).any()
    slots = plan_rank_lists(list(enumerate(lengths)), cost_model=cost_model, topology=topology, max_tokens_per_gpu=CAP)
    work = [0] * 8
    for ranks in slots:
        for rank, ids in enumerate(ranks):
            work[rank] += sum(cost_model(lengths[sample]) // ranks.count(ids) for sample in ids)
    assert max(work) <= schedule.predicted_cost


def test_too_few_samples_for_a_multiple_are_refused() -> None:
    with pytest.raises(BalanceError, match="3 samples cannot fill a multiple of 4 micro-batches"):
        plan([100, 100, 100], Topology(2, dynamic_cp=True, microbatch_multiple=4, pp_size=2))


def test_a_sample_too_long_for_half_the_ranks_runs_on_all_where_they_are_no_power_of_two() -> None:
    slots = plan([5 * CAP, 16, 16, 16, 16, 16, 16], Topology(6, dynamic_cp=True))
    assert slots[0] == [[7]] * 6
    assert sorted(ids[0] for ids in slots[1]) == [8, 9, 10, 11, 12, 13]


def test_no_samples_make_no_micro_batches() -> None:
    assert plan([], Topology(4, dynamic_cp=True)) == []


def test_the_checker_finds_what_breaks_the_contract() -> None:
    lengths = {0: 100, 1: 100, 2: 300, 3: 100}
    good = [[[2], [2], [0, 1], [3]]]
    check_contract(good, lengths=lengths, num_ranks=4, cap=CAP)
    broken = {
        "every sample once": [[[2], [2], [0], [3]]],
        "no rank is empty": [[[2], [2], [0, 1, 3], []]],
        "neighbours": [[[2], [0, 1], [2], [3]]],
        "a multiple of its size": [[[0, 1], [2], [2], [3]]],
        "one order": [[[0, 1], [1, 0], [2], [2]], [[3], [3], [3], [3]]],
        "the cap": [[[2], [0, 1], [3], [3]]],
    }
    for says, slots in broken.items():
        with pytest.raises(AssertionError, match=says):
            check_contract(slots, lengths=lengths, num_ranks=4, cap=CAP)
