"""All ranks prepare the same ahead and raise the same: real processes, one loop on each."""

from __future__ import annotations

from typing import Any

import pytest
from iterator_cases import length_of


def steps(first: int, *, num_steps: int) -> list[list[int]]:
    return [[first + 2 * step, first + 2 * step + 1] for step in range(num_steps)]


@pytest.mark.parametrize("loop", ["nnnn", "aaaa", "annn", "eenn"])
def test_a_loop_with_new_iterators_is_one_with_one_iterator(world2: Any, loop: str) -> None:
    outcomes = world2.run("steps_of_loop", loops=[loop, loop])
    assert outcomes == [(steps(1000 * rank, num_steps=4), []) for rank in range(2)]


def test_what_was_prepared_and_is_not_asked_for_waits(world2: Any) -> None:
    expected = [[0, 1], [2, 3], [500, 501], [4, 5], [6, 7], [8, 9]]
    outcomes = world2.run("steps_of_loop", loops=["aabaaa"] * 2)
    assert outcomes == [([[1000 * rank + n for n in step] for step in expected], []) for rank in range(2)]


def test_the_data_of_one_rank_may_begin_anew_while_that_of_others_goes_on(world2: Any) -> None:
    ours, theirs = world2.run("steps_of_loop", loops=["eebbbb", "aaaaaa"])
    assert ours == ([*steps(0, num_steps=2), *steps(500, num_steps=4)], [])
    assert theirs == (steps(1000, num_steps=6), [])


def test_ranks_that_disagree_get_the_same_error(world2: Any) -> None:
    (ours, ours_told), (theirs, theirs_told) = world2.run("steps_of_loop", loops=["aabb", "aaaa"])
    assert (ours[:-1], theirs[:-1]) == (steps(0, num_steps=2), steps(1000, num_steps=3))
    assert ours[-1] == theirs[-1]
    assert "2 on rank 0; 3 on rank 1" in ours[-1]
    assert "Pass a new iterator on every rank or on none, or set --no-balance-overlap." in ours[-1]
    assert not ours_told
    assert [f"OutOfStepError: {said}" for said in theirs_told] == theirs[-1:]  # at once, and not when its step begins


def test_ranks_that_disagree_do_not_wait_in_an_exchange_between_gpus(world2: Any) -> None:
    (ours, _), (theirs, _) = world2.run("steps_of_loop", loops=["aabb", "aaaa"], on_device=True)
    assert (ours[:-1], theirs[:-1]) == (steps(0, num_steps=2), steps(1000, num_steps=2))
    assert ours[-1] == theirs[-1]
    assert ours[-1].startswith("OutOfStepError: rank 0 pulled other items for this step than were prepared")


@pytest.mark.parametrize(
    ("loops", "item"),
    [pytest.param(["fff", "aaa"], 0, id="in-the-thread"), pytest.param(["nnx", "nnn"], 1, id="when-the-step-begins")],
)
def test_what_a_loader_raises_ends_every_rank(world2: Any, loops: list[str], item: int) -> None:
    (ours, ours_told), (theirs, theirs_told) = world2.run("steps_of_loop", loops=loops)
    assert ours == [*steps(0, num_steps=2), "OSError: [Errno 5] the disk is gone"]
    error = f"fetching item {item} of this step: OSError: [Errno 5] the disk is gone"
    assert theirs == [*steps(1000, num_steps=2), f"BalanceError: rank 0 cannot go on. rank 0: {error}"]
    assert not ours_told + theirs_told


class TestPipelines:
    """Ranks 0 and 1 are the first stages of two pipelines, ranks 2 and 3 the last."""

    def test_stages_may_have_other_iterators_over_the_same_data(self, world4: Any) -> None:
        outcomes = world4.run("steps_of_loop", loops=["nnnn", "nnnn", "aaaa", "aaaa"], layout="pp")
        assert outcomes == [(steps(1000 * replica, num_steps=4), []) for replica in (0, 1, 0, 1)]

    @pytest.mark.parametrize("loops", [["fff", "aaa", "aaa", "aaa"], ["nnx", "nnn", "aaa", "aaa"]])
    def test_what_a_loader_raises_ends_every_rank(self, world4: Any, loops: list[str]) -> None:
        outcomes = world4.run("steps_of_loop", loops=loops, layout="pp")
        assert outcomes[0][0][-1] == "OSError: [Errno 5] the disk is gone"
        for said, _ in outcomes[1:]:
            assert said[-1].startswith("BalanceError: rank 0 cannot go on. rank 0: fetching item")
            assert said[-1].endswith("of this step: OSError: [Errno 5] the disk is gone")


class TestRanksWithoutData:
    """They run the steps of those that load, whatever iterators come."""

    @pytest.mark.parametrize("loop", ["nnnn", "aaaaa", "aabaaa", "eenn", "aaraa", "aaarra"])
    @pytest.mark.parametrize(
        ("layout", "data_of"),
        [pytest.param("tp", (0, 0, 2, 2), id="TP2-DP2"), pytest.param("pp4", (0, 0, 0, 3), id="PP4")],
    )
    def test_run_the_same_steps(self, world4: Any, layout: str, data_of: tuple[int, ...], loop: str) -> None:
        loops = [loop if rank == loads else "-" * len(loop) for rank, loads in enumerate(data_of)]
        outcomes = world4.run("steps_of_loop", loops=loops, layout=layout)
        for (ran, said), loads in zip(outcomes, data_of, strict=True):
            steps_of_data, _ = outcomes[loads]
            lengths = [sorted(length_of(number) for number in step) for step in steps_of_data]
            assert ran in (steps_of_data, lengths)
            assert len(ran) == len(loop)
            assert not said
        for step in (step for step, name in enumerate(loop) if name == "r"):
            assert outcomes[0][0][step] == outcomes[0][0][step - 1]

    @pytest.mark.parametrize(
        ("layout", "loops"),
        [
            ("tp", ["fff", "---", "aaa", "---"]),
            ("tp", ["nnx", "---", "nnn", "---"]),
            ("pp4", ["fff", "---", "---", "aaa"]),
            ("pp4", ["aaa", "---", "---", "fff"]),
        ],
    )
    def test_end_with_the_error_of_a_loader(self, world4: Any, layout: str, loops: list[str]) -> None:
        outcomes = world4.run("steps_of_loop", loops=loops, layout=layout)
        of_loader = "OSError: [Errno 5] the disk is gone"
        for (ran, said), loop in zip(outcomes, loops, strict=True):
            assert len(ran) == 3
            assert not said
            if loop[-1] in "fx":
                assert ran[-1] == of_loader
            else:
                assert ran[-1].startswith("BalanceError: ")
                assert ran[-1].endswith(f"of this step: {of_loader}")

    @pytest.mark.parametrize("loops", [["aaaaa", "-----", "-----", "aabbb"], ["aabbb", "-----", "-----", "aaaaa"]])
    def test_ends_of_a_pipeline_that_disagree_end_every_rank(self, world4: Any, loops: list[str]) -> None:
        outcomes = world4.run("steps_of_loop", loops=loops, layout="pp4")
        texts = {ran[-1].partition(": ")[2] for ran, _ in outcomes}
        assert len(texts) == 1
        assert "Pass a new iterator on every rank or on none" in texts.pop() or "differs within" in outcomes[0][0][-1]


def test_a_bug_while_samples_are_split_ends_every_rank(world2: Any) -> None:
    (ours, _), (theirs, _) = world2.run("steps_of_loop", loops=["aaa", "aaa"], bug_on=0)
    assert ours[-1] == "MemoryError: no host memory"
    assert theirs[-1].endswith("rank 0: item 0 of this step: MemoryError: no host memory")
