"""Which thread pulls, pins, times and waits, and in which order, with a double of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
from device_cases import DEVICE

NUM_STEPS = 5


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def ran(request: pytest.FixtureRequest, run_cases: Any) -> tuple[bool, list[Any], list[Any]]:
    [(steps, packs)] = run_cases(1, "steps_on_device", num_steps=NUM_STEPS, overlap=request.param)
    return request.param, steps, packs


def test_micro_batches_are_pinned_and_typed_as_megatron_reads_them(ran: Any) -> None:
    _, _, packs = ran
    assert packs
    int64, int32 = [True, "torch.int64", 2], [True, "torch.int32", 2]
    for pack in packs:
        assert pack["tokens"] == pack["labels"] == pack["position_ids"] == int64
        assert pack["loss_mask"] == [True, "torch.float32", 2]
        assert pack["cu_seqlens"] == int32
        assert pack["max_seqlen"] == [True, "torch.int32", 1]


def test_a_step_is_pinned_in_one_piece_before_it_runs_beside_training_where_they_overlap(ran: Any) -> None:
    overlap, steps, packs = ran
    assert sum(name == "forward" for events in steps for name, _ in events) == len(packs)
    pinned = 0
    for number, events in enumerate(steps, start=1):
        threads = [thread for name, thread in events if name == "pin"]
        pinned += len(threads)
        assert number <= pinned <= number + overlap
        if number == 1:
            assert threads[0] == "training"  # nothing ran before it
        if number > 2:
            assert set(threads) == ({"beside"} if overlap else {"training"})


def test_the_thread_beside_has_the_device_of_training_and_a_stream_that_follows_it(ran: Any) -> None:
    """An iterator that calls `.cuda()` pulls there; behind the step's own kernels a copy to the host would wait."""
    overlap, steps, _ = ran
    beside = [name for events in steps for name, thread in events if thread == "beside"]
    assert beside[:4] == ([f"device {DEVICE}", "stream", "follow", "pull"] if overlap else [])
    marks = [thread for events in steps for name, thread in events if name == "mark"]
    assert set(marks) == ({"training"} if overlap else set())
    assert 0 <= len(marks) - beside.count("follow") <= 1  # the last may not have begun


def test_passes_are_timed_by_events_around_them_and_nothing_waits_for_the_device(ran: Any) -> None:
    _, steps, _ = ran
    for events in steps:
        assert not any(name == "wait" for name, _ in events)
        passes = [event for event in events if event[0] in ("forward", "event")]
        one = [("event", "training"), ("forward", "training"), ("event", "training")]
        assert passes == one * (len(passes) // 3)
