"""Moves columns of rows between ranks as bytes, by all-to-all or by all-gather.

A rank lays its rows out by destination, and for each destination column after column; all ranks know all lengths, so
that no sizes are sent. By all-to-all a rank receives its own blocks; by all-gather it receives all blocks and takes its
own. Both give the same bytes in the same order. Rows arrive by source rank, ascending within each, hence ascending.

Either is one collective, whatever the number of columns. There is none where no row moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.samples.sample import KeySpec


def move_rows(
    columns: Sequence[torch.Tensor],
    *,
    specs: Sequence[KeySpec],
    num_entries: NDArray[np.int64],
    home_ranks: NDArray[np.int64],
    ranks: NDArray[np.int64],
    group: dist.ProcessGroup,
    use_all2all: bool,
) -> list[torch.Tensor]:
    """Sends every row to its rank.

    Args:
        columns: `[num_columns]` tensors `[num_entries, *trailing]` of this rank's rows, on one device.
        specs: `[num_columns]` their dtypes and shapes.
        num_entries: `[num_columns, num_rows]` of the rows of all ranks, rank after rank.
        home_ranks: `[num_rows]` rank that has each row.
        ranks: `[num_rows]` rank that gets it.
        group: the ranks.
        use_all2all: all-to-all, or else all-gather.

    Returns:
        The columns of the rows that this rank gets, ascending.
    """
    me, num_ranks = group.rank(), group.size()
    mine, coming = home_ranks == me, ranks == me
    rows = np.argsort(ranks[mine], kind="stable")
    nbytes = num_entries * np.array([[spec.nbytes] for spec in specs], dtype=np.int64)
    to_ranks = _sums(nbytes[:, mine], by=ranks[mine], size=num_ranks)
    from_ranks = _sums(nbytes[:, coming], by=home_ranks[coming], size=num_ranks)

    outgoing = [
        _as_bytes(_take(column, num_entries=entries[mine], rows=rows)).split(sizes)
        for column, entries, sizes in zip(columns, num_entries, to_ranks.tolist(), strict=True)
    ]
    # Column after column for each destination, where `outgoing` is destination after destination for each column.
    send = torch.cat([piece for to_rank in zip(*outgoing, strict=True) for piece in to_rank])
    if (ranks == home_ranks).all():
        blocks = [send if rank == me else send[:0] for rank in range(num_ranks)]
    elif use_all2all:
        blocks = _all_to_all(send, to_ranks=to_ranks.sum(axis=0), from_ranks=from_ranks.sum(axis=0), group=group)
    else:
        pairs = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        np.add.at(pairs, (home_ranks, ranks), nbytes.sum(axis=0))
        blocks = _all_gather(send, pairs=pairs, group=group)

    incoming = [block.split(sizes) for block, sizes in zip(blocks, from_ranks.T.tolist(), strict=True)]
    totals = num_entries[:, coming].sum(axis=1).tolist()
    return [
        torch.cat(pieces).view(spec.dtype).view(total, *spec.shape)
        for spec, total, pieces in zip(specs, totals, zip(*incoming, strict=True), strict=True)
    ]


def _take(column: torch.Tensor, *, num_entries: NDArray[np.int64], rows: NDArray[np.int64]) -> torch.Tensor:
    """The entries of some rows of a column `[num_entries, *trailing]`, in the order of `rows`."""
    taken = num_entries[rows]
    # The distance by which each row's entries move down.
    shifts = (np.cumsum(num_entries) - num_entries)[rows] - (np.cumsum(taken) - taken)
    shift_of_row, repeats = (torch.from_numpy(values).to(column.device) for values in (shifts, taken))
    entries = torch.repeat_interleave(shift_of_row, repeats, output_size=int(taken.sum()))
    entries += torch.arange(entries.numel(), device=column.device)
    return column.index_select(0, entries)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _sums(values: NDArray[np.int64], *, by: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """`[num_columns, num_rows]` summed over the rows of each rank: `[num_columns, size]`."""
    sums = np.zeros((size, values.shape[0]), dtype=np.int64)
    np.add.at(sums, by, values.T)
    return sums.T


def _all_to_all(
    send: torch.Tensor, *, to_ranks: NDArray[np.int64], from_ranks: NDArray[np.int64], group: dist.ProcessGroup
) -> Sequence[torch.Tensor]:
    """The block of every rank for this one; `to_ranks` and `from_ranks` `[num_ranks]` bytes."""
    receive = torch.empty(int(from_ranks.sum()), dtype=torch.uint8, device=send.device)
    dist.all_to_all_single(receive, send, from_ranks.tolist(), to_ranks.tolist(), group=group)
    return receive.split(from_ranks.tolist())


def _all_gather(send: torch.Tensor, *, pairs: NDArray[np.int64], group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """The block of every rank for this one; `pairs` `[from_rank, to_rank]` bytes."""
    me, width = group.rank(), int(pairs.sum(axis=1).max())
    padded = torch.zeros(width, dtype=torch.uint8, device=send.device)
    padded[: send.numel()] = send
    everything = torch.empty(group.size() * width, dtype=torch.uint8, device=send.device)
    dist.all_gather_into_tensor(everything, padded, group=group)
    starts = pairs[:, :me].sum(axis=1)
    return [
        block[start : start + size]
        for block, start, size in zip(everything.split(width), starts.tolist(), pairs[:, me].tolist(), strict=True)
    ]
