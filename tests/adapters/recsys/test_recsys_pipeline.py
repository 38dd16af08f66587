"""R22: every training pipeline of recsys-examples shuffles a batch after it has copied it to the device.

On upstream's own classes: `scripts/check upstream CHECKOUT` runs this on two ranks, with the adapter installed.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.pipeline import train_pipeline  # noqa: F401  # registers the pipelines
from commons.pipeline.train_pipeline_factory import TrainPipelineFactory
from commons.sequence_batch.batch import BaseBatch
from megatron.core import parallel_state
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

pytestmark = pytest.mark.checkout

NUM_STEPS = 5
BATCH_SIZE = 64


@pytest.fixture(scope="module", autouse=True)
def ranks():
    dist.init_process_group()
    parallel_state.initialize_model_parallel()
    yield
    dist.destroy_process_group()


def batches(rank):
    """Upstream's batches, which remember whether they were copied; the items of a row are its number."""

    @dataclass
    class Batch(BaseBatch):
        item_feature_name: str = "item"
        copied: bool = False

        def to(self, device, non_blocking=False):
            batch = super().to(device, non_blocking)
            batch.copied = True
            return batch

        def record_stream(self, stream):
            """The CPU has none."""

    rng = np.random.default_rng(rank)
    for step in range(NUM_STEPS):
        lengths = torch.from_numpy(rng.lognormal(3, 1, BATCH_SIZE).astype(int) + 1)
        numbers = torch.arange(BATCH_SIZE) + BATCH_SIZE * (rank + dist.get_world_size() * step)
        features = KeyedJaggedTensor(keys=["item"], values=numbers.repeat_interleave(lengths), lengths=lengths)
        yield Batch(features, batch_size=BATCH_SIZE, feature_to_max_seqlen={"item": 10_000})


class Model(torch.nn.Module):
    """Remembers the items that it was given; `module` is what a wrapper for data parallelism has."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(1, 1)
        self.items = []

    def forward(self, batch):
        items = batch.features.values()
        self.items.append(items.tolist())
        return self.module(items[:, None].float()), None


@pytest.mark.parametrize("name", ["jagged_none", "jagged_sparse_dist", "jagged_prefetch_sparse_dist"])
def test_rows_move_after_the_copy(name, monkeypatch):
    shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=4, head_dim=64)
    workloads_of, were_copied = shuffler.get_workloads, []

    def get_workloads(batch):
        were_copied.append(batch.copied)
        return workloads_of(batch)

    monkeypatch.setattr(shuffler, "get_workloads", get_workloads)
    # One pipeline waits for a stream of CUDA whatever its device.
    monkeypatch.setattr(torch.cuda, "current_stream", torch.cpu.current_stream)
    model = Model()
    pipeline = TrainPipelineFactory.create(
        name,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        device=torch.device("cpu"),
        batch_shuffler=shuffler,
    )
    own_batches = batches(dist.get_rank())
    for _ in range(NUM_STEPS):
        pipeline.progress(own_batches)
    assert were_copied == [True] * NUM_STEPS

    rank_items = [None] * dist.get_world_size()
    dist.all_gather_object(rank_items, model.items)
    for step in range(NUM_STEPS):
        rows = [set(items[step]) for items in rank_items]
        first = BATCH_SIZE * len(rank_items) * step
        assert sorted(number for row in rows for number in row) == list(range(first, first + BATCH_SIZE * len(rows)))
        assert {len(row) for row in rows} == {BATCH_SIZE}
    assert all(row != set(range(min(row), min(row) + BATCH_SIZE)) for row in rows), "no row has moved"
