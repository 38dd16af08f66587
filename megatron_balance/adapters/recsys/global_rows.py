"""Gathers workloads and lengths of all real rows on all ranks, in one gather.

A problem with one rank's batch raises on every rank. Padding is known from `actual_batch_size`, never from a workload
of 0: a real row may have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.adapters.recsys.layout import BatchLayout, lengths_on_host
from megatron_balance.errors import BalanceError
from megatron_balance.runtime.gather import gather_lengths


@dataclass(frozen=True, eq=False)
class GlobalRows:
    """The real rows of all ranks, rank after rank.

    Attributes:
        layout: of every rank's batch.
        own_lengths: `[num_keys, batch_size]` int64 of this rank's batch, padding included.
        lengths: `[num_keys, num_rows]` int64.
        workloads: `[num_rows]` int64.
        home_ranks: `[num_rows]` rank that has each row.
        positions: `[num_rows]` where each row is in the batches of all ranks, one after the other, padding counted.
    """

    layout: BatchLayout
    own_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]
    workloads: NDArray[np.int64]
    home_ranks: NDArray[np.int64]
    positions: NDArray[np.int64]


def gather_rows(batch: Any, *, workloads: torch.Tensor, group: dist.ProcessGroup, fingerprint: int) -> GlobalRows:
    """Gathers the rows that the plan and the exchange need.

    Args:
        batch: this rank's.
        workloads: `[batch_size]` non-negative integers, on the batch's device.
        group: the data-parallel ranks.
        fingerprint: of settings that must be equal on all ranks.

    Raises:
        BalanceError: on every rank: batches differ, or one cannot be cut into rows.
    """
    layout, problem = None, None
    table = np.zeros((1, 0), dtype=np.int64)
    num_rows = 0
    try:
        _check(batch, workloads=workloads)
        layout = BatchLayout.of(batch)
        table = lengths_on_host(batch, workloads=workloads)
        num_rows = batch.actual_batch_size
    except BalanceError as error:
        problem = str(error)
    gathered = gather_lengths(
        # A row is a sample of several sequences: its workload, and the lengths of its keys.
        table[:, :num_rows].T.reshape(-1),
        num_segments=np.full(num_rows, table.shape[0]),
        group=group,
        schema=None if layout is None else layout.schema(),
        fingerprint=fingerprint,
        problem=problem,
        device=batch.features.values().device,
    )
    assert layout is not None, "gather_lengths raises where there is a problem"
    of_all = gathered.segment_lengths.reshape(-1, layout.num_keys + 1).T
    homes, counts = gathered.home_ranks, gathered.num_samples_per_rank
    within_rank = np.arange(homes.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return GlobalRows(
        layout=layout,
        own_lengths=table[1:],
        lengths=of_all[1:],
        workloads=of_all[0],
        home_ranks=homes,
        positions=homes * layout.batch_size + within_rank,
    )


def _check(batch: Any, *, workloads: torch.Tensor) -> None:
    size, num_rows = batch.batch_size, batch.actual_batch_size
    if not 0 <= num_rows <= size:
        raise BalanceError(f"actual_batch_size is {num_rows}: it must be 0 to batch_size, {size}.")
    if workloads.shape != (size,) or workloads.is_floating_point() or workloads.is_complex():
        raise BalanceError(
            f"get_workloads gave {workloads.dtype} {list(workloads.shape)}: it must be integers, [{size}], one a row."
        )
