"""Steps of a hand-written loop on real ranks: what runs, what is pulled ahead, and the errors that all ranks get."""

from __future__ import annotations

import random
from typing import Any

import pytest
from loop_cases import length_of


def steps(first: int, *, num_steps: int) -> list[list[int]]:
    return [[first + 2 * step, first + 2 * step + 1] for step in range(num_steps)]


@pytest.mark.parametrize("loop", ["nnnn", "aaaa", "annn", "eenn"])
def test_a_loop_with_new_iterators_is_one_with_one_iterator(world2: Any, loop: str) -> None:
    outcomes = world2.run("steps_of_loop", loops=[loop, loop])
    assert [ran for ran, _, _ in outcomes] == [steps(1000 * rank, num_steps=4) for rank in range(2)]


@pytest.mark.parametrize(("flags", "ahead"), [([], 2), (["--no-balance-overlap"], 0)])
def test_one_step_is_pulled_ahead_by_another_thread(world1: Any, flags: list[str], ahead: int) -> None:
    [(ran, pulled, threads)] = world1.run("steps_of_loop", loops=["aaaa"], flags=flags)
    assert ran == steps(0, num_steps=4)
    assert 8 <= pulled <= 8 + ahead  # the thread may not have ended
    assert (len(threads) > 1) == bool(ahead)


def test_what_was_prepared_and_is_not_asked_for_waits(world2: Any) -> None:
    expected = [[0, 1], [2, 3], [500, 501], [4, 5], [6, 7], [8, 9]]
    for rank, (ran, _, _) in enumerate(world2.run("steps_of_loop", loops=["aabaaa"] * 2)):
        assert ran == [[1000 * rank + number for number in step] for step in expected]


def test_iterators_that_come_in_any_order_hand_out_their_items_in_order(world2: Any) -> None:
    for seed in range(5):
        loop = "".join(random.Random(seed).choices("aab", k=12))
        for rank, (ran, _, _) in enumerate(world2.run("steps_of_loop", loops=[loop, loop])):
            first = {"a": 1000 * rank, "b": 1000 * rank + 500}
            assert ran == [steps(first[name], num_steps=12)[loop[:step].count(name)] for step, name in enumerate(loop)]


def test_a_step_that_runs_again_pulls_nothing(world2: Any) -> None:
    for rank, (ran, _, _) in enumerate(world2.run("steps_of_loop", loops=["aarra"] * 2)):
        first, second, third = steps(1000 * rank, num_steps=3)
        assert ran == [first, second, second, second, third]


def test_the_data_of_one_rank_may_begin_anew_while_that_of_others_goes_on(world2: Any) -> None:
    (ours, _, _), (theirs, _, _) = world2.run("steps_of_loop", loops=["eebbbb", "aaaaaa"])
    assert ours == [*steps(0, num_steps=2), *steps(500, num_steps=4)]
    assert theirs == steps(1000, num_steps=6)


def test_ranks_that_disagree_get_the_same_error(world2: Any) -> None:
    (ours, _, _), (theirs, _, _) = world2.run("steps_of_loop", loops=["aabb", "aaaa"])
    assert (ours[:-1], theirs[:-1]) == (steps(0, num_steps=2), steps(1000, num_steps=3))
    assert all("Pass a new iterator on every rank or on none" in ran[-1] for ran in (ours, theirs))


@pytest.mark.parametrize(
    ("loops", "says"),
    [
        pytest.param(["fff", "aaa"], "fetching item 0 of this step: OSError: [Errno 5] the disk is gone", id="ahead"),
        pytest.param(["nnx", "nnn"], "fetching item 1 of this step: OSError: [Errno 5] the disk is gone", id="begun"),
        pytest.param(["mm", "aa"], "item 0 of this step: Row 0: loss_mask holds NaN", id="cannot-be-split"),
        pytest.param(["eee", "aaa"], "its data ended after 0 of 2 items of this step", id="ended"),
    ],
)
def test_an_error_of_one_rank_s_data_ends_every_rank(world2: Any, loops: list[str], says: str) -> None:
    (ours, _, _), (theirs, _, _) = world2.run("steps_of_loop", loops=loops)
    before = len(loops[0]) - 1
    assert (ours[:-1], theirs[:-1]) == (steps(0, num_steps=before), steps(1000, num_steps=before))
    assert ours[-1] == theirs[-1]
    assert f"rank 0 cannot go on. rank 0: {says}" in ours[-1]


class TestPipelines:
    """Ranks 0 and 1 are the first stages of two pipelines, ranks 2 and 3 the last."""

    def test_stages_may_have_other_iterators_over_the_same_data(self, world4: Any) -> None:
        outcomes = world4.run("steps_of_loop", loops=["nnnn", "nnnn", "aaaa", "aaaa"], layout="pp")
        assert [ran for ran, _, _ in outcomes] == [steps(1000 * replica, num_steps=4) for replica in (0, 1, 0, 1)]

    @pytest.mark.parametrize("loops", [["fff", "aaa", "aaa", "aaa"], ["nnx", "nnn", "aaa", "aaa"]])
    def test_what_a_loader_raises_ends_every_rank(self, world4: Any, loops: list[str]) -> None:
        outcomes = [ran for ran, _, _ in world4.run("steps_of_loop", loops=loops, layout="pp")]
        assert all("the disk is gone" in ran[-1] for ran in outcomes)
        assert [len(ran) for ran in outcomes] == [3] * 4

    def test_stages_with_other_data_end_both_pipelines(self, world4: Any) -> None:
        for error in world4.run("stages_that_read_other_lengths"):
            assert "the data of this step differs within a model replica" in error


class TestStagesWithoutData:
    """One pipeline, whose stages 1 and 2 load nothing and run the steps of the others."""

    @pytest.mark.parametrize("loop", ["nnnn", "aaaaa", "aabaaa", "aaraa"])
    def test_run_the_same_steps(self, world4: Any, loop: str) -> None:
        nothing = "-" * len(loop)
        outcomes = [
            ran for ran, _, _ in world4.run("steps_of_loop", loops=[loop, nothing, nothing, loop], layout="pp4")
        ]
        assert outcomes[0] == outcomes[3]
        assert len(outcomes[0]) == len(loop)
        lengths = [sorted(length_of(number) for number in step) for step in outcomes[0]]
        assert outcomes[1] == outcomes[2] == lengths

    @pytest.mark.parametrize("loops", [["fff", "---", "---", "aaa"], ["aaa", "---", "---", "fff"]])
    def test_end_with_the_error_of_a_loader(self, world4: Any, loops: list[str]) -> None:
        outcomes = [ran for ran, _, _ in world4.run("steps_of_loop", loops=loops, layout="pp4")]
        assert all("the disk is gone" in ran[-1] for ran in outcomes)


@pytest.mark.parametrize("unit", ["segment", "sample"])
def test_a_row_of_several_sequences_moves_in_pieces_or_whole(world2: Any, unit: str) -> None:
    for of_step in zip(*world2.run("steps_of_rows", unit=unit, num_steps=3), strict=True):
        packs = [pack for of_rank in of_step for pack in of_rank]
        # Both ranks load a row of 6, 3 and 1 tokens and one of 9 and 2.
        assert sorted(length for pack in packs for length in pack) == [1, 1, 2, 2, 3, 3, 6, 6, 9, 9]
        whole = all((9, 2) in zip(pack, pack[1:], strict=False) for pack in packs if 9 in pack)
        assert all(sum(pack) <= 24 for pack in packs)
        if unit == "sample":
            assert whole


@pytest.mark.parametrize(
    ("kind", "says"),
    [("not packed", "the data has no cu_seqlens"), ("no tokens", "yielded no tokens for this step")],
)
def test_data_that_cannot_be_balanced_is_named(world2: Any, kind: str, says: str) -> None:
    assert all(says in error for error in world2.run("step_of_bad_data", kind=kind))


def test_a_dummy_has_as_many_tokens_as_kernels_are_built_for(world2: Any) -> None:
    """One token would be an edge case of many kernels, and a shape of its own."""
    [dummy] = [dummy for of_rank in world2.run("dummies") for dummy in of_rank]
    assert dummy >= 128


def test_ranks_with_other_costs_do_not_begin(world2: Any) -> None:
    ours, theirs = world2.run("ranks_that_cost_otherwise")
    assert ours == theirs
    assert "cost" in ours
    assert "quadratic" in ours


def test_ranks_with_other_plans_make_no_step(world2: Any) -> None:
    for error in world2.run("plans_differ"):
        assert "rank 1 planned another schedule than rank 0: " in error


@pytest.mark.parametrize("num_items", [2, 80])  # 80 items a rank are planned in a process of their own
def test_samples_that_move_arrive_once(world2: Any, num_items: int) -> None:
    of_ranks = world2.run("plans_of_steps", num_items=num_items, num_steps=3)
    for step in range(3):
        ran = [number for packs in of_ranks for pack in packs[step] for number in pack]
        loaded = range(num_items * step, num_items * (step + 1))
        assert sorted(ran) == [1000 * rank + number for rank in range(2) for number in loaded]
        counts = [sum(length_of(number) for pack in packs[step] for number in pack) for packs in of_ranks]
        assert max(counts) - min(counts) <= 7
