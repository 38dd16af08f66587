"""TorchSpec, approach B (R4): nothing is lost, held back for ever, or miscounted; `benchmarks adapters` has R8.

Also what each approach hooks, checks and undoes.
"""

import numpy as np
import pytest

from megatron_balance import BalanceError
from megatron_balance.adapters import torchspec


def lengths_of(num_samples, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(7.5, 1.0, num_samples), 16, 16384).astype(int).tolist()


def drain(queue):
    count = []
    while not queue.empty():
        count.append(queue.get_nowait())
    return count


@pytest.mark.parametrize(
    "options",
    [
        {"approach": "A", "cost": "tokens"},
        {"approach": "A"},
        {"approach": "B", "window": 2},
        {"approach": "B", "window": 4},
        {"approach": "C", "window": 2},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_a_hundred_dispatches_lose_nothing_and_fill_every_rank_alike(host, options):
    host.install(**options)
    controller, results = host.controller(), host.results(lengths_of(805))
    controller.prompt_buffer.extend(results)
    num_dispatches, received = 0, []
    for _ in range(10 * len(results)):
        if controller.prompt_buffer:
            # Inference brings three at a time, so that pools of all sizes are met.
            count = [controller.prompt_buffer.popleft() for _ in range(min(3, len(controller.prompt_buffer)))]
            controller.push_inference_results(count)
        if controller.try_dispatch_batch():
            num_dispatches += 1
            ranks = [drain(queue) for queue in controller.train_queues]
            assert [len(rank) for rank in ranks] == [2] * 4
            received += [result.data_id for rank in ranks for result in rank]
    assert num_dispatches == 100
    if options.get("window", 1) > 1:
        assert 0 < controller.get_status()["balance_max_delay_dispatches"] <= 8 * (options["window"] + 1)
    remainder = [result.data_id for result in controller.sample_pool]
    assert len(remainder) == 5
    assert sorted(received + remainder) == sorted(result.data_id for result in results)
    assert sorted(controller._sample_bytes) == sorted(result.mooncake_key for result in controller.sample_pool)


def test_it_waits_for_the_window_while_prompts_are_to_come(host):
    controller = host.held_back([100] * 4)
    for result in host.results([100] * 12, start=4):
        assert not controller.try_dispatch_batch()
        controller.push_inference_results([result])
    assert controller.try_dispatch_batch()


def test_none_leaves_later_than_the_bound(host):
    """Each oldest sample comes with seven of its length: the others of the first dispatch leave one at a time."""
    host.install("B", window=2)
    controller = host.controller(dp_size=2, micro_batch_size=4)
    controller.prompt_buffer.append("more")
    evaluation = [2**index for index in range(9)]
    controller.push_inference_results(host.results([*evaluation, *[evaluation[0]] * 7]))
    for turn in range(1, 9):
        assert controller.try_dispatch_batch()
        controller.push_inference_results(host.results([2 ** (turn + 8), *[2**turn] * 7], start=8 + 8 * turn))
    assert controller.get_status()["balance_max_delay_dispatches"] == 7 < 3 * 8


@pytest.mark.parametrize("max_size", [4, 5, 8, 15, 40])
@pytest.mark.parametrize("inference_batch", [1, 8])
def test_a_pool_smaller_than_the_window_does_not_deadlock(host, max_size, inference_batch):
    host.install("B", window=4)
    controller = host.controller(dp_size=2, micro_batch_size=2, max_sample_pool_size=max_size)
    controller.prompt_buffer.extend(host.results(lengths_of(80)))
    calls = num_dispatches = 0
    while num_dispatches < 20:
        # As the inference manager does: it pauses while the pool holds `max_sample_pool_size`.
        if controller.get_pool_size() < max_size:
            count = min(inference_batch, len(controller.prompt_buffer))
            controller.push_inference_results([controller.prompt_buffer.popleft() for _ in range(count)])
        num_dispatches += controller.try_dispatch_batch()
        calls += 1
        assert calls <= 200, f"stuck after {num_dispatches} dispatches with {len(controller.sample_pool)} in the pool"


def test_samples_for_evaluation_count_towards_a_full_pool(host):
    controller = host.held_back([10] * 4, max_sample_pool_size=8)
    controller.eval_pool.extend(host.results([10] * 4, start=4))
    assert controller.try_dispatch_batch()


def test_inference_that_stands_still_for_any_reason_ends_the_wait(host):
    controller = host.held_back([10] * 8)
    first, second = (next(calls for calls in range(1, 10_000) if controller.try_dispatch_batch()) for _ in range(2))
    assert 10 < first + 1 == second  # the dispatch itself is no sign of life


def test_a_failed_inference_is_told_even_while_the_pool_is_held_back(host):
    controller = host.held_back([10] * 4)
    controller._inference_error = "engine died"
    with pytest.raises(RuntimeError, match="engine died"):
        controller.try_dispatch_batch()


# Installing ----------------------------------------------------------------------------------------------------------

IN_WINDOW = {"try_dispatch_batch", "get_status"}


@pytest.mark.parametrize(
    ("approach", "window", "hooked"),
    [("A", 2, set()), ("B", 2, IN_WINDOW), ("C", 2, IN_WINDOW | {"_prepare_dataset"})],
)
def test_each_approach_replaces_its_methods_and_undo_restores_the_very_objects(host, approach, window, hooked):
    before = dict(vars(host.hooked_class))
    patches = host.install(approach, window=window)
    after = vars(host.hooked_class)
    assert {name for name in before if after[name] is not before[name]} == hooked | {"_partition_results"}
    patches.undo()
    assert dict(vars(host.hooked_class)) == before


def test_a_class_that_ray_has_not_decorated_is_hooked_itself(host):
    plain = host.module.AsyncTrainingController = host.hooked_class.__ray_actor_class__
    before = plain._partition_results
    patches = host.install("A")
    assert plain._partition_results is not before
    patches.undo()
    assert plain._partition_results is before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"approach": "D"}, "approach is 'D'"),
        ({"approach": "C", "window": 1}, "window is 1"),
        ({"approach": "B", "window": 5}, "window is 5"),
        ({"approach": "A", "cost": "flops"}, "cost is 'flops'"),
        ({"approach": "B", "cost": "tokens"}, "cost is 'tokens' with approach B"),
        ({"approach": "C", "bucket_batches": 0}, "bucket_batches is 0"),
    ],
)
def test_an_argument_that_cannot_be_is_named(host, arguments, named):
    with pytest.raises(BalanceError, match=named):
        host.install(**arguments)


def test_a_missing_torchspec_is_told():
    with pytest.raises(BalanceError, match="there is no module torchspec"):
        torchspec.install(approach="A")
