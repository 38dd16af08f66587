"""Which thread pulls, pins, times and waits, and in which order, with a double of CUDA."""

import numpy as np
import pytest
from device_cases import DEVICE

from megatron_balance.record import read_record

NUM_STEPS = 5


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def ran(request, run_cases):
    [(steps, packs)] = run_cases(1, "steps_on_device", num_steps=NUM_STEPS, overlap=request.param)
    return request.param, steps, packs


def test_micro_batches_are_pinned_and_typed_as_megatron_reads_them(ran):
    _, _, packs = ran
    assert packs
    int64, int32 = [True, "torch.int64", 2], [True, "torch.int32", 2]
    for pack in packs:
        assert pack["tokens"] == pack["labels"] == pack["position_ids"] == int64
        assert pack["loss_mask"] == [True, "torch.float32", 2]
        assert pack["cu_seqlens"] == int32
        assert pack["max_seqlen"] == [True, "torch.int32", 1]


def test_a_step_is_pinned_before_it_runs_beside_training_where_they_overlap(ran):
    overlap, steps, packs = ran
    assert sum(name == "forward" for events in steps for name, _ in events) == len(packs)
    threads = [{thread for name, thread in events if name == "pin"} for events in steps]
    assert "training" in threads[0]  # nothing ran before it
    for names in threads[2:]:  # one that was pinned early leaves its own number without a pin
        assert names <= ({"beside"} if overlap else {"training"})
    assert any(threads[1:])


def test_the_thread_beside_has_the_device_of_training_and_a_stream_that_follows_it(ran):
    """An iterator that calls `.cuda()` pulls there; behind the step's own kernels a copy to the host would wait."""
    overlap, steps, _ = ran
    beside = [name for events in steps for name, thread in events if thread == "beside"]
    assert beside[:4] == [f"device {DEVICE}", "stream", *(["follow", "pull"] if overlap else [])]
    marks = [thread for events in steps for name, thread in events if name == "mark"]
    assert set(marks) == ({"training"} if overlap else set())
    assert 0 <= len(marks) - beside.count("follow") <= 1  # the last may not have begun


def test_passes_are_timed_by_events_around_them_and_nothing_waits_for_the_device(ran):
    _, steps, _ = ran
    for events in steps:
        assert not any(name == "wait" for name, _ in events)
        passes = [event for event in events if event[0] in ("forward", "event")]
        one = [("event", "training"), ("forward", "training"), ("event", "training")]
        assert passes == one * (len(passes) // 3)


def test_steps_are_measured_once_and_counted_as_training_counts_them(run_cases, tmp_path):
    """Evaluations are no steps, a step that runs again is the same one, and its ranks take one and two milliseconds."""
    for steps in run_cases(2, "watched_steps", folder=str(tmp_path)):
        assert ["measured_imbalance" in figures for figures in steps] == [False, False, True, True, True, True]
        for before, figures in zip(steps, steps[2:], strict=False):
            assert figures["measured_imbalance"] == pytest.approx(2 / 1.5)
            assert figures["busiest_rank_seconds"] == pytest.approx(4e-3 * before["num_microbatches"])
    record = read_record(tmp_path)
    assert [step.iteration for step in record.steps] == [1, 2, 3, 4, 5, 6]
    for step in record.steps:
        assert step.seconds == pytest.approx(np.array([[2e-3], [4e-3]]).repeat(step.num_microbatches, axis=1))
    assert len((tmp_path / "plan.jsonl").read_text().splitlines()) == 1 + len(record.steps)
