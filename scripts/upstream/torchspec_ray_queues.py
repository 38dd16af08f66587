"""The adapter through TorchSpec's real controller in a real Ray actor, its Ray queues and its data fetchers.

Run by check_torchspec.sh with torchspec_plugin, which hooks the class in this process alone: the actor must get the
hooks from here. Inference is played by this process, the tensors' store by `Store`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

DP_SIZE = 4
MICRO_BATCH_SIZE = 2
NUM_DISPATCHES = 100
LEFT_OVER = 5
MAX_POOL = 24
"""Less than a window of 4 dispatches, 32 samples."""


class Store:
    """A tensor store: what is asked for by a key is made of zeros, once."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def get(self, key: str, **_: Any) -> SimpleNamespace:
        assert key not in self.removed
        return SimpleNamespace(to_tensor_dict=lambda: {"input_ids": torch.zeros(1, dtype=torch.long)})

    def remove_eagle3_tensors(self, key: str, **_: Any) -> None:
        self.removed.append(key)


class Inference:
    """Hands prompts in and results back as the inference manager does: paused while the pool is full."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller
        self.num_bytes: dict[str, int] = {}
        self.lengths: dict[str, int] = {}

    def run(self) -> None:
        from torchspec.utils.types import InferenceOutput

        if ray.get(self._controller.get_pool_size.remote()) >= MAX_POOL:
            return
        results = []
        for prompt in ray.get(self._controller.get_prompts.remote(3)):
            key, length = f"key-{prompt.data_id}", int(prompt.input_ids.numel())
            self.lengths[key], self.num_bytes[key] = length, 2 * length * 64
            shapes = {"input_ids": (1, length), "hidden_states": (1, length, 64)}
            dtypes = {"input_ids": torch.int64, "hidden_states": torch.bfloat16}
            self.num_bytes[key] += 8 * length
            results.append(InferenceOutput(prompt.data_id, key, shapes, dtypes))
        if results:
            ray.get(self._controller.push_inference_results.remote(results))


def draw_data(num_samples: int) -> list[dict[str, Any]]:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 1.0, num_samples), 4, 4096).astype(int)
    return [
        {"data_id": f"d{index}", "input_ids": torch.zeros(int(length)), "packed_loss_mask": f"0,{length}"}
        for index, length in enumerate(lengths)
    ]


def round_robin(lengths: list[int]) -> list[list[list[int]]]:
    """As the stock controller dispatches them in this order: lengths of each rank of each dispatch."""
    size = DP_SIZE * MICRO_BATCH_SIZE
    dispatches = [lengths[start : start + size] for start in range(0, NUM_DISPATCHES * size, size)]
    return [[dispatch[rank::DP_SIZE] for rank in range(DP_SIZE)] for dispatch in dispatches]


def padded_figures(dispatches: list[list[list[int]]]) -> tuple[float, float]:
    """The slowest ranks' time over ideal, and padded over real tokens."""
    times = [[len(rank) * max(rank) for rank in dispatch] for dispatch in dispatches]
    num_tokens = sum(sum(rank) for dispatch in dispatches for rank in dispatch)
    return DP_SIZE * sum(map(max, times)) / num_tokens, sum(map(sum, times)) / num_tokens


def test_a_hundred_dispatches_through_ray_lose_nothing(pytestconfig: pytest.Config) -> None:
    from torchspec.controller.training_controller import AsyncTrainingController
    from torchspec.training.data_fetcher import MooncakeDataFetcher

    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)
    args = SimpleNamespace(per_dp_rank_batch_size=MICRO_BATCH_SIZE, max_sample_pool_size=MAX_POOL)
    controller = AsyncTrainingController.options(num_cpus=0).remote(args, DP_SIZE)
    data = draw_data(NUM_DISPATCHES * DP_SIZE * MICRO_BATCH_SIZE + LEFT_OVER)
    ray.get(controller.__ray_call__.remote(lambda self: setattr(self, "_stored_dataset", data)))
    ray.get(controller.submit_training_dataset.remote(epoch=0))

    store, inference = Store(), Inference(controller)
    fetchers = [
        MooncakeDataFetcher(
            queue, store, lambda samples: samples, torch.device("cpu"), batch_size=MICRO_BATCH_SIZE, timeout=60.0
        )
        for queue in ray.get(controller.get_train_queues.remote())
    ]
    iterators = [iter(fetcher) for fetcher in fetchers]
    received: list[list[list[str]]] = []
    for _ in range(20 * len(data)):
        inference.run()
        if ray.get(controller.try_dispatch_batch.remote()):
            # A fetcher blocks until it has its count: that none does is that all ranks got theirs.
            ranks = []
            for iterator in iterators:
                before = len(store.removed)
                assert len(next(iterator)) == MICRO_BATCH_SIZE
                ranks.append(store.removed[before:])
            received.append(ranks)
            in_pool = inference.lengths.keys() - set(store.removed)
            assert ray.get(controller.get_pool_bytes.remote()) == sum(inference.num_bytes[key] for key in in_pool)
        if len(received) == NUM_DISPATCHES:
            break
    else:
        pytest.fail(f"stuck after {len(received)} dispatches")

    status = ray.get(controller.get_full_status.remote())
    while status["prompt_buffer_size"]:
        inference.run()
        status = ray.get(controller.get_full_status.remote())
    assert not ray.get(controller.try_dispatch_batch.remote())
    assert status["sample_pool_size"] == LEFT_OVER
    ray.get(controller.shutdown.remote())
    assert [list(iterator) for iterator in iterators] == [[]] * DP_SIZE

    keys = [key for ranks in received for rank in ranks for key in rank]
    assert len(keys) == len(set(keys)) == NUM_DISPATCHES * DP_SIZE * MICRO_BATCH_SIZE
    assert set(keys) <= {f"key-{sample['data_id']}" for sample in data}
    ranks = [[[inference.lengths[key] for key in rank] for rank in dispatch] for dispatch in received]
    step_time, padded = padded_figures(ranks)
    stock_step_time, stock_padded = padded_figures(round_robin([sample["input_ids"].numel() for sample in data]))
    print(f"step time over ideal {step_time:.2f}, stock {stock_step_time:.2f}")
    print(f"padded over real tokens {padded:.2f}, stock {stock_padded:.2f}")
    print({name: value for name, value in status.items() if name.startswith("balance_")})
    # The actor is balanced, not only this process.
    assert padded < 0.9 * stock_padded
    if pytestconfig.getoption("--balance-approach") != "A":
        assert step_time < 0.75 * stock_step_time
        assert 0 < status["balance_max_delay_dispatches"] <= status["balance_delay_limit_dispatches"]


def test_hooks_that_come_too_late_are_refused() -> None:
    """The controller's class was exported by the test above."""
    from megatron_balance import BalanceError
    from megatron_balance.adapters import torchspec
    from megatron_balance.adapters.torchspec.hooks import installation

    installation.undo()
    with pytest.raises(BalanceError, match="started already"):
        torchspec.install("A")
    assert not torchspec.is_installed()
