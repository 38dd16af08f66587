"""One step's data on one rank, without Megatron: what is pulled, what is handed on, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from prefetcher_setup import Replayed, group_of_one, item, prefetcher, spans

from megatron_balance import BalanceError
from megatron_balance.mcore.step.balanced_step import BalancedStep


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


def test_a_step_is_packed_and_nothing_is_lost(group: dist.ProcessGroup) -> None:
    items = iter([item(7), item(3), item(9, 2), item(4), item(100)])
    step = prefetcher(group).balance(items, num_microbatches=4)
    assert isinstance(step, BalancedStep)
    assert step.num_microbatches == 2
    assert sum(step.microbatch_tokens) == 25
    assert max(step.microbatch_tokens) <= 16
    assert step.microbatches is not None
    spans = [tuple(microbatch["cu_seqlens"].diff()[0].tolist()) for microbatch in step.microbatches]
    assert sorted(length for span in spans for length in span) == [2, 3, 4, 7, 9]
    assert next(items)["tokens"].shape[1] == 100  # only this step's items were pulled


@pytest.mark.parametrize("unit", ["segment", "sample"])
def test_a_row_of_several_sequences_moves_in_pieces_or_whole(group: dist.ProcessGroup, unit: str) -> None:
    rows = [item(9, 2), item(5), item(6, 3, 1)]
    step = prefetcher(group, unit=unit).balance(iter(rows), num_microbatches=3)
    assert spans(step) == [1, 2, 3, 5, 6, 9]
    assert isinstance(step, BalancedStep)
    assert step.schedule is not None
    assert len(step.schedule.lengths) == (6 if unit == "segment" else 3)
    assert step.schedule.check() is step.schedule
    assert step.microbatches is not None
    tokens = sorted(tuple(microbatch["tokens"][0].tolist()) for microbatch in step.microbatches)
    assert sum(map(len, tokens)) == 26
    if unit == "sample":
        held = [tuple(microbatch["cu_seqlens"].diff()[0].tolist()) for microbatch in step.microbatches]
        assert any(spans_of[i : i + 2] == (9, 2) for spans_of in held for i in range(len(spans_of)))


def test_data_without_cu_seqlens_is_refused(group: dist.ProcessGroup) -> None:
    fixed = [{"tokens": torch.ones(1, 8, dtype=torch.int64)} for _ in range(6)]
    for lookahead in (1, 2):
        with pytest.raises(BalanceError, match=r"no cu_seqlens: .*--sft.*drop --use-dynamic-batch-size"):
            prefetcher(group, lookahead=lookahead).balance(iter(fixed), num_microbatches=3)


def test_a_broken_item_is_named(group: dist.ProcessGroup) -> None:
    broken = item(7)
    broken["loss_mask"][0, 3] = float("nan")
    with pytest.raises(BalanceError, match=r"item 1 of this step: Row 0: loss_mask holds NaN"):
        prefetcher(group).balance(iter([item(3), broken]), num_microbatches=2)


def test_a_step_without_tokens_is_refused(group: dist.ProcessGroup) -> None:
    empty = {"tokens": torch.empty(1, 0, dtype=torch.int64), "cu_seqlens": torch.zeros(1, 1, dtype=torch.int32)}
    with pytest.raises(BalanceError, match="yielded no tokens"):
        prefetcher(group).balance(iter([empty]), num_microbatches=1)


def test_a_step_prepared_ahead_is_the_step_that_would_have_been(group: dist.ProcessGroup) -> None:
    lengths = [7, 3, 9, 2, 4, 1]
    ahead, plain = prefetcher(group), prefetcher(group)
    iterator, other = Replayed(iter([item(n) for n in lengths])), iter([item(n) for n in lengths])
    for _ in range(3):
        step = ahead.balance(iterator, num_microbatches=2)
        ahead.prepare(iterator, num_microbatches=2)
        reference = plain.balance(other, num_microbatches=2)
        assert isinstance(step, BalancedStep)
        assert isinstance(reference, BalancedStep)
        assert step.schedule is not None
        assert reference.schedule is not None
        assert step.schedule.digest() == reference.schedule.digest()
        assert step.microbatches is not None
        assert reference.microbatches is not None
        for ours, theirs in zip(step.microbatches, reference.microbatches, strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_what_is_pulled_ahead_is_not_handed_out_before_its_step(group: dist.ProcessGroup) -> None:
    iterator = Replayed(iter([item(n) for n in (7, 3, 9, 2)]))
    ahead = prefetcher(group)
    assert spans(ahead.balance(iterator, num_microbatches=2)) == [3, 7]
    ahead.prepare(iterator, num_microbatches=2)
    ahead._prepared and ahead._prepared.is_of([])  # wait for the thread
    assert len(iterator.saved) == 2
    iterator.replaying = True  # the step is run again: its own items come, not those pulled ahead
    assert spans(ahead.balance(iterator, num_microbatches=2)) == [3, 7]
    iterator.replaying = False
    assert spans(ahead.balance(iterator, num_microbatches=2)) == [2, 9]


def test_a_growing_batch_takes_what_was_pulled_ahead_and_more(group: dist.ProcessGroup) -> None:
    iterator = Replayed(iter([item(n) for n in (7, 3, 9, 2, 4)]))
    ahead = prefetcher(group)
    ahead.balance(iterator, num_microbatches=2)
    ahead.prepare(iterator, num_microbatches=2)
    assert spans(ahead.balance(iterator, num_microbatches=3)) == [2, 4, 9]


def test_data_that_ends_early_is_said_by_the_step_that_asks_for_it(group: dist.ProcessGroup) -> None:
    iterator = Replayed(iter([item(n) for n in (7, 3, 9)]))
    ahead = prefetcher(group)
    ahead.balance(iterator, num_microbatches=2)
    ahead.prepare(iterator, num_microbatches=2)  # does not raise: perhaps no step will ask
    with pytest.raises(BalanceError, match="ended after 1 of 2 items"):
        ahead.balance(iterator, num_microbatches=2)
    with pytest.raises(BalanceError, match="ended after 0 of 2 items"):
        prefetcher(group).balance(iter([]), num_microbatches=2)


def test_look_ahead_hands_out_every_sample_once_and_ends_with_the_data(group: dist.ProcessGroup) -> None:
    lengths = [7, 3, 9, 2, 4, 1, 8, 5]
    for overlap in (False, True):
        iterator, ahead = Replayed(iter([item(n) for n in lengths])), prefetcher(group, lookahead=3)
        seen: list[int] = []
        for _ in range(4):
            seen += spans(ahead.balance(iterator, num_microbatches=2))
            if overlap:
                ahead.prepare(iterator, num_microbatches=2)
        assert sorted(seen) == sorted(lengths)
        assert seen != lengths
        with pytest.raises(BalanceError, match="no sample waits"):
            ahead.balance(iterator, num_microbatches=2)


@pytest.mark.parametrize("saved_after", [1, 2, 3])
def test_a_resumed_run_goes_on_with_the_samples_that_waited(
    group: dist.ProcessGroup, tmp_path: Path, saved_after: int
) -> None:
    lengths = [7, 3, 9, 2, 4, 1, 8, 5, 6, 10]
    items = [item(n) for n in lengths]
    first, iterator = prefetcher(group, lookahead=3), Replayed(iter(items))
    whole = []
    for step in range(5):
        whole.append(spans(first.balance(iterator, num_microbatches=2)))
        first.prepare(iterator, num_microbatches=2)
        if step + 1 == saved_after:
            first.save(tmp_path)  # what was prepared meanwhile is not part of it
    resumed, rest = prefetcher(group, lookahead=3), iter(items[2 * saved_after :])
    resumed.restore(tmp_path)
    assert [spans(resumed.balance(rest, num_microbatches=2)) for _ in range(5 - saved_after)] == whole[saved_after:]


def test_a_pool_is_not_read_by_a_run_with_another_window(group: dist.ProcessGroup, tmp_path: Path) -> None:
    ahead = prefetcher(group, lookahead=3)
    ahead.balance(iter([item(n) for n in (7, 3, 9, 2, 4, 1)]), num_microbatches=2)
    ahead.save(tmp_path)
    with pytest.raises(BalanceError, match="saved with a window of 3, and this run has 2"):
        prefetcher(group, lookahead=2).restore(tmp_path)
    (tmp_path / "pool_rank00000.npz").rename(tmp_path / "pool_rank00001.npz")
    with pytest.raises(BalanceError, match=r"pool_rank00000.npz is missing.*--ckpt-step"):
        prefetcher(group, lookahead=3).restore(tmp_path)
