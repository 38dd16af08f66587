"""TorchSpec, approach B (R4): the controller's loop. Nothing is lost, held back for ever, or miscounted."""

from itertools import count

import numpy as np
import pytest

from megatron_balance.adapters import torchspec
from megatron_balance.adapters.torchspec.dispatch import MAX_IDLE_CALLS


def lengths_of(num_samples, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(7.5, 1.0, num_samples), 16, 16384).astype(int).tolist()


def bytes_in(pool):
    return sum(2 * result.tensor_shapes["input_ids"][-1] for result in pool)


def drain(queue):
    taken = []
    while not queue.empty():
        taken.append(queue.get_nowait())
    return taken


@pytest.mark.parametrize(
    "asked",
    [
        {"approach": "A", "cost": "tokens"},
        {"approach": "A"},
        {"approach": "B", "window": 2},
        {"approach": "B", "window": 4},
        {"approach": "B", "window": 3, "cost": "tokens"},
        {"approach": "C", "window": 1},
        {"approach": "C", "window": 2},
    ],
    ids=lambda asked: "-".join(str(value) for value in asked.values()),
)
def test_a_hundred_dispatches_lose_nothing_and_fill_every_rank_alike(make_controller, results_of, asked):
    torchspec.install(**asked)
    dp_size, micro_batch_size = 4, 2
    controller = make_controller(dp_size=dp_size, micro_batch_size=micro_batch_size)
    results = results_of(lengths_of(100 * dp_size * micro_batch_size + 5))
    controller.prompt_buffer.extend(results)
    num_dispatches = 0
    received = []
    for _ in range(10 * len(results)):
        if controller.prompt_buffer:
            # Inference brings three at a time, so that pools of all sizes are met.
            taken = [controller.prompt_buffer.popleft() for _ in range(min(3, len(controller.prompt_buffer)))]
            controller.push_inference_results(taken)
        if controller.try_dispatch_batch():
            num_dispatches += 1
            ranks = [drain(queue) for queue in controller.train_queues]
            assert [len(rank) for rank in ranks] == [micro_batch_size] * dp_size
            received += [result.data_id for rank in ranks for result in rank]
        assert controller._pool_bytes == bytes_in(controller.sample_pool)
    assert num_dispatches == 100
    left = [result.data_id for result in controller.sample_pool]
    assert len(left) == 5
    assert sorted(received + left) == sorted(result.data_id for result in results)
    assert sorted(controller._sample_bytes) == sorted(result.mooncake_key for result in controller.sample_pool)


def test_it_waits_for_the_window_while_prompts_are_to_come(make_controller, results_of):
    torchspec.install("B", window=3)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.prompt_buffer.append("more")
    for sample, result in enumerate(results_of([100] * 12)):
        assert not controller.try_dispatch_batch(), sample
        controller.push_inference_results([result])
    assert controller.try_dispatch_batch()
    status = controller.get_status()
    assert status["balance_held_calls"] == 8  # with 4 to 11 samples in the pool
    assert status["batches_dispatched"] == 1


def test_all_whole_dispatches_leave_at_the_end_of_data(make_controller, results_of):
    torchspec.install("B", window=4)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.push_inference_results(results_of(lengths_of(11)))
    assert [controller.try_dispatch_batch() for _ in range(4)] == [True, True, False, False]
    assert len(controller.sample_pool) == 3
    # The next epoch goes on with what is left.
    controller.push_inference_results(results_of(lengths_of(5, seed=1), start=11))
    assert [controller.try_dispatch_batch() for _ in range(3)] == [True, True, False]
    assert controller._pool_bytes == 0


@pytest.mark.parametrize("most", [4, 5, 7, 8, 11, 15, 16, 40])
@pytest.mark.parametrize("inference_batch", [1, 3, 8])
def test_a_pool_smaller_than_the_window_does_not_deadlock(make_controller, results_of, most, inference_batch):
    torchspec.install("B", window=4)
    controller = make_controller(dp_size=2, micro_batch_size=2, max_sample_pool_size=most)
    controller.prompt_buffer.extend(results_of(lengths_of(80)))
    calls = num_dispatches = 0
    while num_dispatches < 20:
        # As the inference manager does: it pauses while the pool holds `max_sample_pool_size`.
        if controller.get_pool_size() < most:
            taken = min(inference_batch, len(controller.prompt_buffer))
            controller.push_inference_results([controller.prompt_buffer.popleft() for _ in range(taken)])
        num_dispatches += controller.try_dispatch_batch()
        calls += 1
        assert calls <= 200, f"stuck after {num_dispatches} dispatches with {len(controller.sample_pool)} in the pool"


def test_samples_for_evaluation_count_towards_a_full_pool(make_controller, results_of):
    torchspec.install("B", window=4)
    controller = make_controller(dp_size=2, micro_batch_size=2, max_sample_pool_size=8)
    controller.prompt_buffer.append("never inferred: the pool is full")
    controller.push_inference_results(results_of([10] * 4))
    assert not controller.try_dispatch_batch()
    controller.eval_pool.extend(results_of([10] * 4, start=4))
    assert controller.try_dispatch_batch()


def test_inference_that_stands_still_for_any_reason_ends_the_wait(make_controller, results_of):
    torchspec.install("B", window=4)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.prompt_buffer.append("never inferred: Mooncake is full")
    controller.push_inference_results(results_of([10] * 8))
    calls = next(calls for calls in count(1) if controller.try_dispatch_batch())
    assert calls == MAX_IDLE_CALLS + 1  # the first call sees a new pool
    # The next wait is as long: the dispatch itself is no sign of life.
    assert next(calls for calls in count(1) if controller.try_dispatch_batch()) == MAX_IDLE_CALLS + 1


def test_a_failed_inference_is_told_even_while_the_pool_is_held_back(make_controller, results_of):
    torchspec.install("B", window=4)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.prompt_buffer.append("more")
    controller.push_inference_results(results_of([10] * 4))
    assert not controller.try_dispatch_batch()
    controller._inference_error = "engine died"
    with pytest.raises(RuntimeError, match="engine died"):
        controller.try_dispatch_batch()


def test_a_dispatch_that_fails_half_way_is_not_counted_and_the_next_goes_on(make_controller, results_of):
    torchspec.install("B", window=2)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.push_inference_results(results_of([500, 10, 11, 12, 510, 13, 490, 505]))
    queues, controller.train_queues = controller.train_queues, []
    with pytest.raises(IndexError):
        controller.try_dispatch_batch()
    controller.train_queues = queues
    assert controller.try_dispatch_batch()
    assert controller.get_status()["batches_dispatched"] == 1
    assert not controller.sample_pool


def test_delays_are_reported_with_the_status(make_controller, results_of):
    torchspec.install("B", window=2)
    controller = make_controller(dp_size=2, micro_batch_size=2)
    controller.push_inference_results(results_of([500, 10, 11, 12, 510, 13, 490, 505]))
    assert controller.try_dispatch_batch()
    first = [result.data_id for queue in controller.train_queues for result in drain(queue)]
    assert sorted(first) == ["d0", "d4", "d6", "d7"]
    assert controller.try_dispatch_batch()
    status = controller.get_status()
    # Three of the first dispatch's turn left one dispatch late, of eight samples.
    assert status["balance_max_delay_dispatches"] == 1
    assert status["balance_mean_delay_dispatches"] == 3 / 8
    assert status["balance_delay_limit_dispatches"] == 4
    assert status["sample_pool_size"] == 0
