"""Loops that hand in other iterators than the last step's: every item is trained on once, in its iterator's order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from prefetcher_setup import Replayed, group_of_one, item, prefetcher

from megatron_balance import BalanceError
from megatron_balance.calibration.online import OnlineCalibration
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.prefetcher import StepPrefetcher


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


def numbered(number: int) -> dict[str, torch.Tensor]:
    """An item of one sample, whose tokens are all its number."""
    made = item(3)
    return {**made, "tokens": torch.full_like(made["tokens"], number)}


def numbers(step: BalancedStep) -> list[int]:
    assert step.microbatches is not None
    found = [microbatch["tokens"][0, start] for microbatch in step.microbatches for start in _starts(microbatch)]
    return sorted(int(number) for number in found)


def _starts(microbatch: dict[str, torch.Tensor]) -> list[int]:
    return microbatch["cu_seqlens"][0, :-1].tolist()


def train(
    ours: StepPrefetcher, iterator: Any, *, num_microbatches: int = 2, expected_next: int | None = None
) -> list[int]:
    """One step; the next one is prepared as training does it."""
    step = ours.balance(iterator, num_microbatches=num_microbatches)
    ours.prepare(iterator, num_microbatches=expected_next or num_microbatches)
    return numbers(step)


def is_preparing(ours: StepPrefetcher) -> bool:
    return ours._prepared is not None


class Loader:
    """A data set for an iterator; the property test knows what it has yielded."""

    def __init__(self, name: int, *, size: int | None) -> None:
        self.name, self.next_expected, self.size = name, 0, size
        self.items = (numbered(1000 * name + index) for index in (itertools.count() if size is None else range(size)))
        self.iterator: Any = Replayed(self.items) if name % 2 else self.items

    def expect(self, num_items: int) -> list[int] | None:
        """The samples that the next step must hold; None where the data has ended."""
        if self.size is not None and self.next_expected + num_items > self.size:
            return None
        first, self.next_expected = self.next_expected, self.next_expected + num_items
        return [1000 * self.name + index for index in range(first, first + num_items)]


@st.composite
def loops(draw: st.DrawFn) -> tuple[list[int | None], list[tuple[int, str, int, int]]]:
    """Sizes of four loaders, and for every step: loader, its iterator, items, items that the next is expected to have.

    Where a loader ends, all steps have as many items: those left over at its end would have filled a smaller step.
    """
    sizes = draw(st.one_of(st.just([None] * 4), st.lists(st.integers(0, 9), min_size=4, max_size=4)))
    all_have = draw(st.integers(1, 3))
    num_items = st.integers(1, 3) if sizes[0] is None else st.just(all_have)
    kinds = st.sampled_from(["the same", "the same", "the same", "wrapped anew"])
    step = st.tuples(st.integers(0, 3), kinds, num_items, num_items)
    return sizes, draw(st.lists(step, min_size=1, max_size=12))


@settings(max_examples=50)
@given(loop=loops())
def test_every_item_comes_once_and_in_order(
    group: dist.ProcessGroup, loop: tuple[list[int | None], list[tuple[int, str, int, int]]]
) -> None:
    sizes, steps = loop
    ours = prefetcher(group, cap=64)
    loaders = [Loader(index + 1, size=size) for index, size in enumerate(sizes)]
    for place, kind, num_items, expected_next in steps:
        loader = loaders[place]
        if isinstance(loader.iterator, Replayed) and kind == "wrapped anew":
            loader.iterator = Replayed(loader.iterator.iterable)
        expected = loader.expect(num_items)
        if expected is None:
            with pytest.raises(BalanceError, match=rf"its data ended after \d of {num_items} items"):
                train(ours, loader.iterator, num_microbatches=num_items)
            return
        got = train(ours, loader.iterator, num_microbatches=num_items, expected_next=expected_next)
        assert got == expected


@settings(max_examples=25)
@given(runs=st.lists(st.integers(1, 4), min_size=1, max_size=6), extra=st.integers(0, 3))
def test_iterators_that_end_may_leave_items_over(group: dist.ProcessGroup, runs: list[int], extra: int) -> None:
    """Epochs of some steps each; `extra` items are too few for a step, or enough for one that is not asked for."""
    ours, first = prefetcher(group, cap=64), 0
    for num_steps in runs:
        epoch = iter([numbered(first + index) for index in range(2 * num_steps + extra)])
        for step in range(num_steps):
            assert train(ours, epoch) == [first + 2 * step, first + 2 * step + 1]
        first += 2 * num_steps + extra


def test_a_new_iterator_each_step_is_not_read_ahead_of(group: dist.ProcessGroup) -> None:
    ours = prefetcher(group)
    for step in range(4):
        one_more_than_it_asks_for = iter([numbered(10 * step + index) for index in range(3)])
        assert train(ours, one_more_than_it_asks_for) == [10 * step, 10 * step + 1]
        assert not is_preparing(ours)
        assert next(one_more_than_it_asks_for)["tokens"][0, 0] == 10 * step + 2


@pytest.mark.parametrize("wrap", [iter, Replayed])
def test_one_iterator_is_read_ahead_of_from_its_second_step_on(group: dist.ProcessGroup, wrap: Any) -> None:
    ours, pulled = prefetcher(group), []
    items = wrap(pulled.append(n) or numbered(n) for n in range(100))
    for step in range(5):
        assert train(ours, items) == [2 * step, 2 * step + 1]
        assert is_preparing(ours) == (step > 0)
        if ours._prepared is not None:
            assert ours._prepared.result() is not None
        assert len(pulled) == 2 * (step + 1) + 2 * (step > 0)


def test_a_wrapper_made_anew_each_step_shares_what_was_pulled_ahead(group: dist.ProcessGroup) -> None:
    ours, items = prefetcher(group), (numbered(n) for n in range(100))
    for step in range(4):
        assert train(ours, Replayed(items)) == [2 * step, 2 * step + 1]
        assert is_preparing(ours) == (step > 0)


def test_items_pulled_ahead_wait_for_their_iterator(group: dist.ProcessGroup) -> None:
    ours = prefetcher(group)
    first, second = (numbered(n) for n in range(100)), (numbered(n) for n in range(100, 200))
    assert [train(ours, first) for _ in range(2)] == [[0, 1], [2, 3]]
    step = ours.balance(second, num_microbatches=2)
    assert (numbers(step), step.num_left) == ([100, 101], 2)
    step = ours.balance(first, num_microbatches=2)
    assert (numbers(step), step.num_left) == ([4, 5], 0)


def test_an_iterator_that_ended_is_forgotten(group: dist.ProcessGroup) -> None:
    ours = prefetcher(group)
    for epoch in range(3):
        items = iter([numbered(n) for n in range(10 * epoch, 10 * epoch + 5)])  # a fifth one too many
        assert [train(ours, items) for _ in range(2)] == [
            [10 * epoch, 10 * epoch + 1],
            [10 * epoch + 2, 10 * epoch + 3],
        ]
    step = ours.balance(iter([numbered(100), numbered(101)]), num_microbatches=2)
    assert step.num_left == 0
    assert len(ours._sources._known) == 1


def test_a_step_made_anew_counts_once_for_calibration(group: dist.ProcessGroup) -> None:
    ours = prefetcher(group)
    ours.planner.calibration = calibration = OnlineCalibration(ours.planner.cost_model, group=group)
    first, second = (numbered(n) for n in itertools.count()), (numbered(n) for n in itertools.count(100))
    for num_steps, iterator in enumerate([first, first, second, first, first, first], start=1):
        step = ours.balance(iterator, num_microbatches=2)
        assert step.calibration is not None
        assert step.calibration.num_steps == num_steps
        ours.prepare(iterator, num_microbatches=2)
        if ours._prepared is not None:
            assert ours._prepared.result() is not None
            assert calibration.state.num_steps == num_steps + 1


def test_look_ahead_over_epochs_loses_nothing(group: dist.ProcessGroup) -> None:
    ours, seen = prefetcher(group, lookahead=2, cap=64), []
    for epoch in range(3):
        items = iter([numbered(n) for n in range(10 * epoch, 10 * epoch + (8 if epoch == 0 else 6))])
        for _ in range(3):
            seen += train(ours, items)
    last = ours.balance(iter([]), num_microbatches=2)
    assert sorted(seen + numbers(last)) == [*range(8), *range(10, 16), *range(20, 26)]


def test_look_ahead_says_what_a_new_iterator_each_step_lacks(group: dist.ProcessGroup) -> None:
    one_step = iter([numbered(0), numbered(1)])
    with pytest.raises(BalanceError, match=r"ended after 2 of 4 items.*set --balance-lookahead 1"):
        prefetcher(group, lookahead=2).balance(one_step, num_microbatches=2)


def failing(*, after: int, error: BaseException) -> Iterator[Any]:
    for number in range(after):
        yield numbered(number)
    raise error


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrap", [lambda items: items, Replayed], ids=["plain", "replayed"])
def test_what_a_loader_raises_is_raised_by_the_step_it_belongs_to(
    group: dist.ProcessGroup, overlap: bool, wrap: Any
) -> None:
    error = OSError(5, "the disk is gone", "data/\udcffshard.bin")  # a name that is no UTF-8
    ours, items = prefetcher(group), wrap(failing(after=5, error=error))
    for step in range(2):
        assert numbers(ours.balance(items, num_microbatches=2)) == [2 * step, 2 * step + 1]
        if overlap:
            ours.prepare(items, num_microbatches=2)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        ours.balance(items, num_microbatches=2)
    assert caught.value is error
    assert any("fetching item 1 of this step" in note for note in error.__notes__)
    assert "failing" in [entry.name for entry in caught.traceback]
    with pytest.raises(BalanceError, match="ended after 0 of 2 items"):  # it comes once, as from the loader itself
        ours.balance(items, num_microbatches=2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_ends_a_process_passes(group: dist.ProcessGroup, overlap: bool, error: BaseException) -> None:
    ours, items = prefetcher(group), failing(after=4, error=error)
    for _ in range(2):
        ours.balance(items, num_microbatches=2)
        if overlap:
            ours.prepare(items, num_microbatches=2)
    with pytest.raises(type(error)):
        ours.balance(items, num_microbatches=2)


def test_an_error_pulled_ahead_is_not_raised_where_nobody_asks_for_it(group: dist.ProcessGroup) -> None:
    ours, items = prefetcher(group), failing(after=4, error=OSError("the disk is gone"))
    for _ in range(2):
        train(ours, items)
    assert train(ours, iter([numbered(7), numbered(8)])) == [7, 8]


@pytest.mark.parametrize("name", ["item_splitter.split_packed", "own_slots.pack_microbatch"])
def test_an_error_of_other_code_in_making_a_step_is_raised_as_it_was(
    group: dist.ProcessGroup, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(f"megatron_balance.mcore.step.{name}", fail)
    with pytest.raises(MemoryError, match="no host memory") as caught:
        prefetcher(group).balance(iter([numbered(0)]), num_microbatches=1)
    assert any("packing" in note or "item 0" in note for note in caught.value.__notes__)
