"""Moves rows between ranks, as bytes, in one exchange.

A row has entries in one or more columns: the values of a key, its share of a dense tensor, or the bytes of anything
else. A rank sends its rows by destination, and to each destination column after column. All ranks know the number of
entries of all rows, so no sizes are sent. Rows arrive by source rank, ascending within each, hence ascending.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.runtime.comm import exchange_parts

Ints = NDArray[np.int64]


def exchange_rows(
    columns: Sequence[torch.Tensor],
    *,
    num_entries: Ints,
    home_ranks: Ints,
    ranks: Ints,
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Sends every row to its rank; every rank of the group calls it.

    Args:
        columns: `[num_columns]` tensors `[num_entries, *trailing]` of this rank's rows, on one device, with the same
            dtypes and trailing shapes on all ranks.
        num_entries: `[num_columns, num_rows]` of the rows of all ranks, rank after rank.
        home_ranks: `[num_rows]` rank that has each row, ascending.
        ranks: `[num_rows]` rank that gets it.
        group: the ranks.

    Returns:
        The columns of the rows that this rank gets, ascending.
    """
    me, num_ranks, mine = group.rank(), group.size(), home_ranks == group.rank()
    entry_nbytes = [[column.dtype.itemsize * math.prod(column.shape[1:])] for column in columns]
    nbytes = num_entries * np.array(entry_nbytes, dtype=np.int64)
    rows = [
        column.detach().contiguous().view(-1).view(torch.uint8).split(sizes)
        for column, sizes in zip(columns, nbytes[:, mine].tolist(), strict=True)
    ]
    outgoing = [
        [of_column[row] for of_column in rows for row in np.flatnonzero(ranks[mine] == rank)]
        for rank in range(num_ranks)
    ]
    staying, outgoing[me] = outgoing[me], []
    # [num_ranks, num_columns] bytes from each rank.
    from_ranks = [nbytes[:, (ranks == me) & (home_ranks == rank)].sum(axis=1).tolist() for rank in range(num_ranks)]
    receive_sizes = {rank: sum(sizes) if rank != me else 0 for rank, sizes in enumerate(from_ranks)}
    receive = torch.empty(sum(receive_sizes.values()), dtype=torch.uint8, device=columns[0].device)
    if (ranks != home_ranks).any():
        send_sizes = {rank: sum(row.numel() for row in block) for rank, block in enumerate(outgoing)}
        send = torch.cat([receive[:0], *(row for block in outgoing for row in block)])
        what = "rows from the ranks that loaded them (exchange)"
        exchange_parts(receive, send, receive_sizes=receive_sizes, send_sizes=send_sizes, group=group, what=what)
    blocks = list(receive.split([*receive_sizes.values()]))
    blocks[me] = torch.cat([receive[:0], *staying])
    incoming = [block.split(sizes) for block, sizes in zip(blocks, from_ranks, strict=True)]
    totals = num_entries[:, ranks == me].sum(axis=1).tolist()
    return [
        torch.cat(pieces).view(column.dtype).view(total, *column.shape[1:])
        for column, total, pieces in zip(columns, totals, zip(*incoming, strict=True), strict=True)
    ]
