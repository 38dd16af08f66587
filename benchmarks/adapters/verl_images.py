"""verl's plans for image-text rows: `python -m benchmarks.adapters.verl_images`, where verl is installed.

    ranks          128 rows over 8 ranks, one step: the costliest rank over the mean rank
    micro-batches  64 rows of one rank under 24576 tokens: how many, and the costliest over the mean

Rows are those of benchmarks/planner/images.py, which says what is published of them and what is assumed. Work is FLOPs
of both parts of Qwen2.5-VL-7B throughout. verl's side is its own code; `tokens only` is the adapter on rows whose
`multi_modal_inputs` were left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.adapters.verl import DP_SIZE, trainer_of  # before verl: it chooses verl's platform

# isort: split
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import seqlen_balancing, tensordict_utils

from benchmarks.planner.images import MIXTURES, MODEL, Batch, draw_batch
from megatron_balance.adapters.verl import install
from megatron_balance.adapters.verl.workload import choose_workload, workloads
from megatron_balance.planner.images import Images

CAP = 24576
ROWS_PER_RANK = 16
ROWS_OF_ONE_RANK = 64
WAYS = ("as loaded", "verl", "adapter, tokens only", "adapter")


@dataclass(frozen=True)
class Row:
    """One way of planning rows of a mixture, means over seeds.

    Attributes:
        mixture: of samples.
        way: one of `WAYS`.
        ranks: the costliest rank over the mean.
        micro_batches: the costliest micro-batch over the mean; None where rows are not packed.
        num_micro_batches: of one rank; None likewise.
    """

    mixture: str
    way: str
    ranks: float
    micro_batches: float | None
    num_micro_batches: float | None


def measure(mixture: str, *, way: str, seeds: int) -> Row:
    """All figures of one way of planning."""
    ranks, micro_batches, counts = [], [], []
    for seed in range(seeds):
        with _planned_by(way):
            batch = draw_batch(mixture, num_samples=ROWS_PER_RANK * DP_SIZE, seed=seed)
            ranks.append(_imbalance(_rows_of_ranks(batch, way=way), batch=batch))
            if way != "as loaded":
                batch = draw_batch(mixture, num_samples=ROWS_OF_ONE_RANK, seed=seed)
                planned = _rows_of_micro_batches(batch, way=way)
                micro_batches.append(_imbalance(planned, batch=batch))
                counts.append(len(planned))
    means = [float(np.mean(found)) if found else None for found in (micro_batches, counts)]
    return Row(mixture, way, float(np.mean(ranks)), *means)


@contextmanager
def _planned_by(way: str) -> Iterator[None]:
    adapter = install(MODEL) if way.startswith("adapter") else None
    try:
        yield
    finally:
        if adapter is not None:
            adapter.undo()


def _rows_of_ranks(batch: Batch, *, way: str) -> list[NDArray[np.int64]]:
    num_rows = len(batch.lengths)
    rows = torch.arange(num_rows)
    if way != "as loaded":
        lengths = torch.tensor(batch.lengths)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(torch.int8)
        data = DataProto.from_dict({"row": rows, "attention_mask": mask}, _column(batch, way=way))
        RayPPOTrainer._balance_batch(trainer_of(minibatch_rows=num_rows), data, {})
        rows = data.batch["row"]
    return list(rows.numpy().reshape(DP_SIZE, -1))


def _rows_of_micro_batches(batch: Batch, *, way: str) -> list[list[int]]:
    ids = [torch.zeros(length, dtype=torch.int8) for length in batch.lengths]
    nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    data = TensorDict({"input_ids": nested}, batch_size=[len(ids)])
    for name, column in _column(batch, way=way).items():
        tensordict_utils.assign_non_tensor(data, **{name: column.tolist()})
    return seqlen_balancing.rearrange_micro_batches(data, max_token_len=CAP)[1]


def _column(batch: Batch, *, way: str) -> dict[str, NDArray[np.object_]]:
    """verl's `multi_modal_inputs`, grids alone; none where images are not to be counted."""
    if way == "adapter, tokens only":
        return {}
    column = np.empty(len(batch.lengths), dtype=object)
    for row, patches in enumerate(batch.image_patches):
        column[row] = {"image_grid_thw": torch.tensor([[1, 1, size] for size in patches])} if patches else {}
    return {"multi_modal_inputs": column}


def _imbalance(parts: list[NDArray[np.int64]] | list[list[int]], *, batch: Batch) -> float:
    images = Images.of(batch.image_patches, num_samples=len(batch.lengths))
    work = workloads(np.array(batch.lengths), cost_model=choose_workload(MODEL), images=images)
    loads = [int(work[part].sum()) for part in parts]
    return max(loads) * len(loads) / sum(loads)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="batches to average over")
    seeds = parser.parse_args().seeds
    print(f"{'rows':10} {'planned by':22} {'ranks':>8} {'micro-batches':>14} {'number':>7}")
    for mixture in MIXTURES:
        for way in WAYS:
            row = measure(mixture, way=way, seeds=seeds)
            packed = "" if row.micro_batches is None else f"{row.micro_batches:14.4f} {row.num_micro_batches:7.2f}"
            print(f"{mixture:10} {way:22} {row.ranks:8.4f} {packed}")


if __name__ == "__main__":
    main()
