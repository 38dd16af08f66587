"""R30: cost of a recsys-examples shuffle as ranks grow, the gather, the plan, the exchange; torchrec is needed.

Ranks are processes of this machine over gloo, so seconds are of its memory and cores, and more ranks than cores wait
for one another; bytes and plans are those of any machine. The batch is HSTU's: items, actions and labels of lognormal
length, and one context feature. *Exposed* is what a step waits for the shuffle where its first half runs before a
forward pass of 50 ms and its second half after it; *at once* is the same step with the shuffle in one piece.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from megatron_balance.adapters.recsys import shuffler as balanced

COLUMNS = ["gather", "plan", "exchange", "at once", "exposed", "MiB in", "load max/mean"]
SAYS = "Milliseconds of a shuffle, the slowest rank's quickest of 15: 128 rows a rank of 512 items in the mean, gloo."
DP_SIZES = (1, 2, 4, 8)
BATCH_SIZE = 128
MEAN_LENGTH = 512
FORWARD_MS = 50
REPEATS = 15


class Shuffler:
    """Stands for upstream's base class, hooked, which has a thread."""

    shuffle, start_shuffle_async, finish_shuffle = (
        balanced.shuffle,
        balanced.start_shuffle_async,
        balanced.finish_shuffle,
    )

    def __init__(self) -> None:
        self._kk_executor = ThreadPoolExecutor(max_workers=1)


@dataclass
class Batch:
    """The fields of upstream's HSTU batch that matter here."""

    features: KeyedJaggedTensor
    labels: KeyedJaggedTensor
    batch_size: int
    actual_batch_size: int
    item_feature_name: str = "item"


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Ranks → their figures, in the order of `COLUMNS`."""
    return {f"{dp_size} ranks": figures_of(dp_size) for dp_size in DP_SIZES}


def figures_of(dp_size: int) -> list[float]:
    """One row of the table: the slowest rank's figures."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(rank, dp_size, folder, results)) for rank in range(dp_size)]
        for process in ranks:
            process.start()
        rank_results = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    slowest = np.max([figures for figures, _ in rank_results], axis=0)
    loads = np.array([load for _, load in rank_results], dtype=np.float64)
    return [*slowest.tolist(), float(loads.max() / loads.mean())]


def _rank(rank: int, dp_size: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=dp_size)
    group = dist.group.WORLD
    assert group is not None
    shuffler = balanced.make_shuffler_class(Shuffler)(num_heads=4, head_dim=256)
    batch = _make_batch(rank, batch_size=BATCH_SIZE, mean_length=MEAN_LENGTH)

    def forward() -> None:
        time.sleep(FORWARD_MS / 1000)  # a GPU works, its host waits

    def in_halves() -> None:
        handle = shuffler.start_shuffle_async(batch, group)
        forward()
        shuffler.finish_shuffle(batch, handle, group)

    def at_once() -> None:
        shuffler.shuffle(batch, group)
        forward()

    handle = shuffler.start_shuffle_async(batch, group)
    handle.plan.result()
    started = _milliseconds(lambda: shuffler.start_shuffle_async(batch, group))
    planned = _milliseconds(lambda: shuffler.start_shuffle_async(batch, group).plan.result())
    figures = [
        started,
        max(planned - started, 0.0),
        _milliseconds(lambda: shuffler.finish_shuffle(batch, handle, group)),
        _milliseconds(at_once) - FORWARD_MS,
        _milliseconds(in_halves) - FORWARD_MS,
        _mebibytes_received(handle, rank=rank),
    ]
    ranks = handle.plan.result()
    results.put((figures, int(handle.gathered.values[ranks == rank, 0].sum())))
    dist.destroy_process_group()


def _make_batch(rank: int, *, batch_size: int, mean_length: float) -> Batch:
    rng = np.random.default_rng(rank)
    items = np.clip(rng.lognormal(np.log(mean_length) - 0.5, 1, batch_size), 1, 8 * mean_length).astype(np.int64)
    lengths = np.concatenate([items, items, np.ones(batch_size, dtype=np.int64)])
    return Batch(
        features=KeyedJaggedTensor.from_lengths_sync(
            keys=["item", "action", "context"],
            values=torch.arange(int(lengths.sum())),
            lengths=torch.from_numpy(lengths),
        ),
        labels=KeyedJaggedTensor.from_lengths_sync(
            keys=["label"], values=torch.arange(int(items.sum())), lengths=torch.from_numpy(items)
        ),
        batch_size=batch_size,
        actual_batch_size=batch_size,
    )


def _milliseconds(call: Callable[[], Any]) -> float:
    """The quickest of calls that begin together on all ranks: other work on the machine only adds."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds) * 1000


def _mebibytes_received(handle: Any, *, rank: int) -> float:
    """MiB received from other ranks; every column of the batch has int64 entries."""
    gathered, ranks = handle.gathered, handle.plan.result()
    nbytes = 8 * gathered.ragged_lengths.sum(axis=1)
    return nbytes[(ranks == rank) & (gathered.home_ranks != rank)].sum() / 2**20
