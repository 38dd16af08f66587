"""Program of a rank in a test: it makes a batch whose values name their origin, and shuffles it."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from commons.distributed.batch_shuffler import BaseTaskBalancedBatchShuffler
from commons.distributed.batch_shuffler_factory import BatchShufflerFactory
from commons.perf_model.task_estimator import SelfAttentionTask
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance import BalanceError
from megatron_balance.adapters import recsys


@dataclass
class SmallBatch:
    """A batch of every kind of field: keys with and without weights, dense ones of one and of several entries a row."""

    features: KeyedJaggedTensor
    batch_size: int
    labels: KeyedJaggedTensor | None = None
    actual_batch_size: int | None = None
    user: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)
    item_feature_name: str = "item"
    history_feature_name: str = "item"


def make_batch(item_lengths, *, rank, batch_size):
    """A batch of real rows with these many items, then padding. Values count up from 10**6 a rank."""
    num_rows = len(item_lengths)
    rng = np.random.default_rng(rank)
    lengths = np.zeros((3, batch_size), dtype=np.int64)
    lengths[0, :num_rows] = lengths[1, :num_rows] = item_lengths
    lengths[2, :num_rows] = rng.integers(0, 3, num_rows)
    label_lengths = np.zeros(batch_size, dtype=np.int64)
    label_lengths[:num_rows] = rng.integers(0, 4, num_rows)
    first = (rank + 1) * 10**6
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "action", "context"],
        values=torch.arange(first, first + lengths.sum()),
        weights=torch.arange(first, first + lengths.sum(), dtype=torch.float64) / 2,
        lengths=torch.from_numpy(lengths.reshape(-1)).to(torch.int32),
    )
    labels = KeyedJaggedTensor.from_lengths_sync(
        keys=["label"],
        values=torch.arange(first, first + label_lengths.sum(), dtype=torch.float32),
        lengths=torch.from_numpy(label_lengths),
    )
    real = torch.arange(batch_size) < num_rows
    return SmallBatch(
        features=features,
        batch_size=batch_size,
        labels=labels,
        actual_batch_size=num_rows,
        user=torch.arange(first, first + 3 * batch_size).view(batch_size, 3) * real[:, None],
        scores=(torch.arange(first, first + 2 * batch_size).view(-1, 2) * real[:, None]).flatten().to(torch.bfloat16),
        names=["kept"],
    )


def rows_of(batch):
    """The real rows as plain tuples: equal where every value, weight and dense entry is."""
    columns = []
    for kjt in (batch.features, batch.labels):
        for key in kjt.keys():  # noqa: SIM118  # it is no mapping
            jagged = kjt[key]
            sizes = jagged.lengths().tolist()
            columns.append([tuple(piece.tolist()) for piece in jagged.values().split(sizes)])
            if jagged.weights_or_none() is not None:
                columns.append([tuple(piece.tolist()) for piece in jagged.weights().split(sizes)])
    columns.append([tuple(row) for row in batch.user.tolist()])
    columns.append([tuple(row) for row in batch.scores.view(-1, 2).tolist()])
    return list(zip(*columns, strict=False))[: batch.actual_batch_size]


def shuffle(item_lengths, *, batch_size, asynchronous=False):
    """Shuffles this rank's batch both ways: rows before and after, with what came with them."""
    rank = dist.get_rank()
    recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    shuffler = BatchShufflerFactory.create("megatron_balance", num_heads=4, head_dim=256)
    outcome = {"before": rows_of(batch)}
    for way in ("all_gather", "all_to_all"):
        options = {"return_indices": True, "return_workloads": True, "use_all2all": way == "all_to_all"}
        shuffled, indices, row_workloads = shuffler.shuffle(batch, dist.group.WORLD, **options)
        if asynchronous:
            # Two under way: the second is finished first.
            handles = [shuffler.start_shuffle_async(batch, dist.group.WORLD) for _ in range(2)]
            second = shuffler.finish_shuffle(batch, handles[1], dist.group.WORLD, way == "all_to_all")
            shuffled = shuffler.finish_shuffle(batch, handles[0], dist.group.WORLD, way == "all_to_all")
            assert rows_of(second) == rows_of(shuffled)
        assert torch.equal(row_workloads, shuffler.get_workloads(shuffled))
        outcome[way] = {
            "rows": rows_of(shuffled),
            "indices": indices.tolist(),
            "workloads": row_workloads.tolist(),
            "batch_size": shuffled.batch_size,
            "actual_batch_size": shuffled.actual_batch_size,
            "user": tuple(shuffled.user.shape),
            "scores": (tuple(shuffled.scores.shape), str(shuffled.scores.dtype)),
            "lengths": (shuffled.features.lengths().numel(), str(shuffled.features.lengths().dtype)),
            "names": shuffled.names,
        }
    return outcome


def shuffle_what_one_rank_spoils(item_lengths, *, batch_size, how):
    """The error of this rank, where rank 1's batch is not fit to be shuffled."""
    rank = dist.get_rank()
    recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    if rank == 1 and how == "dense":
        batch.user = batch.user[:-1]
    elif rank == 1 and how == "rows":
        batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size + 1)
    shuffler = BatchShufflerFactory.create("megatron_balance")
    if rank == 1 and how == "float":
        shuffler.get_workloads = lambda batch: torch.ones(batch.batch_size)
    try:
        shuffler.shuffle(batch, dist.group.WORLD)
    except BalanceError as error:
        return str(error)
    return ""


def shuffle_by_upstreams_own_class(item_lengths, *, batch_size):
    """A shuffler as upstream writes them, with workloads of its task: after install, its methods are ours."""
    rank = dist.get_rank()

    class SidShuffler(BaseTaskBalancedBatchShuffler):
        def get_workloads(self, batch):
            return SelfAttentionTask().get_workloads(batch.features["item"].lengths(), 4, 256)

    shuffler = SidShuffler()
    installed = recsys.install()
    batch = make_batch(item_lengths[rank], rank=rank, batch_size=batch_size)
    _, row_workloads = shuffler.shuffle(batch, dist.group.WORLD, return_workloads=True)
    installed.undo()
    try:
        shuffler.shuffle(batch, dist.group.WORLD)
    except NotImplementedError as error:
        return row_workloads.tolist(), str(error)
    return row_workloads.tolist(), "not undone"
