"""A rollout batch cut into optimiser steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance import BalanceError
from megatron_balance.adapters.rollout import split_rollout


@st.composite
def rollouts(draw):
    """Group ids that need not stand together, and boundaries that no group crosses."""
    groups, boundaries = [], []
    for stretch in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 5), max_size=12))
        groups += [f"{stretch}:{group}" for group in ids]
        boundaries.append(len(groups))
    return groups, boundaries[:-1]


@settings(max_examples=100)
@given(rollouts(), st.integers(1, 4), st.booleans(), st.booleans())
def test_steps_hold_whole_groups_and_every_sample_once(rollout, count, by_steps, drop_last):
    groups, boundaries = rollout
    edges = [0, *boundaries, len(groups)]
    stretches = [groups[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
    if by_steps and any(0 < len(set(stretch)) < count for stretch in stretches):
        with pytest.raises(BalanceError, match="num_steps is"):
            split_rollout(groups, num_steps=count, boundaries=boundaries, drop_last=drop_last)
        return
    amount = {"num_steps": count} if by_steps else {"global_batch_size": count}
    split = split_rollout(groups, boundaries=boundaries, drop_last=drop_last, **amount)

    held = [step.tolist() for step in split.steps]
    assert sorted(np.concatenate([*split.steps, split.dropped]).tolist()) == list(range(len(groups)))
    assert all(step == sorted(step) for step in held)
    of_steps = [{groups[sample] for sample in step} for step in held]
    assert [len(ids) for ids in of_steps] == list(split.num_groups)
    for one, ids in enumerate(of_steps):
        assert ids
        assert not any(ids & other for other in of_steps[one + 1 :])
        assert not ids & {groups[sample] for sample in split.dropped.tolist()}

    # No step reaches over a boundary, and stretches keep their order.
    stretch_of = np.searchsorted(boundaries, np.arange(len(groups)), side="right")
    of_stretch = [set(stretch_of[step].tolist()) for step in held]
    assert all(len(one) == 1 for one in of_stretch)
    assert [min(one) for one in of_stretch] == sorted(min(one) for one in of_stretch)

    for number, stretch in enumerate(stretches):
        counts = [size for size, where in zip(split.num_groups, of_stretch, strict=True) if where == {number}]
        total = len(set(stretch))
        left_out = total - sum(counts)
        if by_steps:
            assert len(counts) == (count if total else 0)
            assert max(counts, default=0) - min(counts, default=0) <= (0 if drop_last else 1)
            assert left_out == (total % count if drop_last else 0)
        else:
            assert all(size == count for size in counts[:-1])
            assert left_out == (total % count if drop_last else 0)


def test_siblings_that_stand_apart_follow_the_first():
    # verl splits groups whose samples are not neighbours.
    split = split_rollout([9, 4, 9, 7, 4, 5], global_batch_size=2)
    assert [step.tolist() for step in split.steps] == [[0, 1, 2, 4], [3, 5]]
    assert split.num_groups == (2, 2)


def test_sixty_two_groups_over_four_steps():
    # 62 % 4 stops verl.
    groups = np.arange(62 * 8) // 8
    assert split_rollout(groups, num_steps=4).num_groups == (16, 16, 15, 15)
    dropped = split_rollout(groups, num_steps=4, drop_last=True)
    assert dropped.num_groups == (15,) * 4
    assert dropped.dropped.tolist() == list(range(60 * 8, 62 * 8))
    assert split_rollout(groups, global_batch_size=16).num_groups == (16, 16, 16, 14)
    assert split_rollout(groups, global_batch_size=16, drop_last=True).num_groups == (16, 16, 16)


def test_boundaries_are_mini_batches_with_one_step_each():
    split = split_rollout(range(6), num_steps=1, boundaries=[2, 4])
    assert [step.tolist() for step in split.steps] == [[0, 1], [2, 3], [4, 5]]


def test_an_empty_rollout_has_no_steps():
    split = split_rollout([], num_steps=2)
    assert split.steps == ()
    assert split.dropped.size == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either num_steps or global_batch_size"),
        ({"num_steps": 1, "global_batch_size": 1}, "either num_steps or global_batch_size"),
        ({"num_steps": 0}, "num_steps is 0"),
        ({"global_batch_size": True}, "global_batch_size is True"),
        ({"num_steps": 4}, "num_steps is 4: 3 groups do not fill as many steps"),
        ({"num_steps": 1, "boundaries": [2, 1]}, r"boundaries are \[2, 1\]: they must ascend from 0 to the 4"),
        ({"num_steps": 1, "boundaries": [5]}, r"boundaries are \[5\]"),
        ({"num_steps": 1, "boundaries": [1]}, "sample 2 belongs to a group that starts before the boundary 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(BalanceError, match=message):
        split_rollout(["a", "b", "a", "c"], **options)
