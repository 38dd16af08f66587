"""Which thread pulls, pins, times and waits, and in which order, with a double of CUDA."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import CASES
from device_cases import DEVICE
from gloo_ranks import run_ranks

NUM_STEPS = 5


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def ran(request: pytest.FixtureRequest) -> tuple[bool, list[Any], list[Any]]:
    [(steps, packs)] = run_ranks(1, "steps_on_device", imports=CASES, num_steps=NUM_STEPS, overlap=request.param)
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


def test_a_step_is_pinned_in_one_piece_before_it_runs(ran: Any) -> None:
    overlap, steps, packs = ran
    counts = [Counter(name for name, _ in events) for events in steps]
    assert sum(count["forward"] for count in counts) == len(packs)
    pinned = 0
    for number, count in enumerate(counts, start=1):
        pinned += count["pin"]
        assert number <= pinned <= number + overlap


def test_the_thread_beside_has_the_device_of_training_and_a_stream_that_follows_it(ran: Any) -> None:
    """An iterator that calls `.cuda()` pulls there; behind the step's own kernels a copy to the host would wait."""
    overlap, steps, _ = ran
    beside = [name for events in steps for name, thread in events if thread == "beside"]
    assert beside[:4] == ([f"device {DEVICE}", "stream", "follow", "pull"] if overlap else [])
    marks = [thread for events in steps for name, thread in events if name == "mark"]
    assert set(marks) == ({"training"} if overlap else set())
    assert 0 <= len(marks) - beside.count("follow") <= 1  # the last may not have begun


def test_steps_are_made_beside_training_where_they_overlap(ran: Any) -> None:
    overlap, steps, _ = ran
    for events in steps[2:]:
        threads = {thread for name, thread in events if name == "pin"}
        assert threads == ({"beside"} if overlap else {"training"})
    first = [thread for name, thread in steps[0] if name == "pin"]
    assert set(first) == {"training"}  # nothing ran before it


def test_forward_passes_are_of_the_training_thread(ran: Any) -> None:
    _, steps, _ = ran
    assert {thread for events in steps for name, thread in events if name in ("forward", "event")} == {"training"}


def test_passes_are_timed_by_events_around_them(ran: Any) -> None:
    _, steps, _ = ran
    for events in steps:
        names = [name for name, thread in events if thread == "training" and name in ("forward", "event")]
        num_forward = names.count("forward")
        assert names == ["event", "forward", "event"] * num_forward


def test_nothing_waits_for_the_device(ran: Any) -> None:
    _, steps, _ = ran
    assert not any(name == "wait" for events in steps for name, _ in events)
