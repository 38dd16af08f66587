"""The shuffler's methods with upstream's signatures: `shuffle`, or its two halves around the model's forward pass.

The first half gathers and hands the plan to the shuffler's thread; the second waits for it and moves the rows.
Collectives run on the calling thread alone. The handle between them holds everything, so that several batches may be
under way.

Returned indices are positions in the old batches of all ranks, one after the other, and describe the new batch row by
row; returned workloads are those of the new batch. All-gather and all-to-all give the same batch.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_balance.adapters.recsys.global_rows import GlobalRows, gather_rows
from megatron_balance.adapters.recsys.layout import join_columns, split_columns
from megatron_balance.adapters.recsys.plan import plan_rows, rows_of_batches
from megatron_balance.adapters.recsys.settings import prefers_all_to_all
from megatron_balance.adapters.recsys.transport import move_rows
from megatron_balance.adapters.recsys.workloads import layer_cost, workloads


@dataclass(frozen=True, eq=False)
class PendingShuffle:
    """A batch between the two halves; pass it back as it is.

    Attributes:
        rows: of all ranks.
        group: the ranks.
        plan: future of the `[num_rows]` rank of each row.
    """

    rows: GlobalRows
    group: dist.ProcessGroup
    plan: Future[NDArray[np.int64]]


def shuffle(
    self: Any,
    batch: Any,
    pg_group: dist.ProcessGroup | None = None,
    return_indices: bool = False,
    return_workloads: bool = False,
    use_all2all: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Exchanges rows with the other ranks, so that all have nearly the same workload.

    Args:
        self: the shuffler.
        batch: this rank's.
        pg_group: the data-parallel ranks; all ranks by default.
        return_indices: also return the position that each row comes from, `[batch_size]` int64, padding last.
        return_workloads: also return the workloads of the new batch, `[batch_size]` int64, 0 for padding.
        use_all2all: by all-to-all; else by all-gather, unless SHUFFLE_WITH_ALL2ALL is 1.
        *args: of `get_workloads`.
        **kwargs: of `get_workloads`.

    Returns:
        The new batch, or a tuple of it and the indices and workloads asked for.

    Raises:
        BalanceError: on every rank: batches differ, or one cannot be cut into rows.
    """
    group = _group(pg_group)
    rows = _gather(self, batch, *args, group=group, **kwargs)
    ranks = _plan(rows, dp_size=group.size())
    returned = [_move(batch, rows, ranks=ranks, group=group, use_all2all=use_all2all)]
    if return_indices or return_workloads:
        size, dp_size = rows.layout.batch_size, group.size()
        indices = rows_of_batches(ranks, positions=rows.positions, dp_size=dp_size, batch_size=size)[group.rank()]
        row_workloads = np.zeros(dp_size * size, dtype=np.int64)
        row_workloads[rows.positions] = rows.workloads
        wanted = [indices] * return_indices + [row_workloads[indices]] * return_workloads
        returned += [torch.from_numpy(values).to(batch.features.values().device) for values in wanted]
    return tuple(returned) if len(returned) > 1 else returned[0]


def start_shuffle_async(
    self: Any, batch: Any, pg_group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any
) -> PendingShuffle:
    """The first half: gathers workloads and lengths, and plans in the shuffler's thread.

    Raises:
        BalanceError: as `shuffle`.
    """
    group = _group(pg_group)
    rows = _gather(self, batch, *args, group=group, **kwargs)
    return PendingShuffle(rows, group, self._kk_executor.submit(_plan, rows, dp_size=group.size()))


def finish_shuffle(
    self: Any,
    batch: Any,
    handle: PendingShuffle,
    pg_group: dist.ProcessGroup | None = None,
    use_all2all: bool = False,
) -> Any:
    """The second half: waits for the plan and moves the rows; the ranks are those of the first half."""
    del self, pg_group
    return _move(batch, handle.rows, ranks=handle.plan.result(), group=handle.group, use_all2all=use_all2all)


def make_shuffler_class(base: type) -> type:
    """The class that is registered as "megatron_balance".

    Args:
        base: upstream's BaseTaskBalancedBatchShuffler, hooked or not.
    """

    class MegatronBalanceShuffler(base):
        """Balances by the FLOPs of a layer.

        Args:
            num_heads: attention heads.
            head_dim: width of one.
            action_interleaved: every item is followed by an action, which doubles its sequence; by default for HSTU.
            model: `hstu` (four projections) or `sid_gr` (three, and an MLP).

        Raises:
            BalanceError: there is no such model, or a size is not a positive integer.
        """

        def __init__(
            self,
            num_heads: int = 1,
            head_dim: int = 1,
            action_interleaved: bool | None = None,
            *,
            model: str = "hstu",
        ) -> None:
            super().__init__()
            self.cost_model = layer_cost(model, num_heads=num_heads, head_dim=head_dim)
            self.model = model
            self.action_interleaved = model == "hstu" if action_interleaved is None else action_interleaved

        def get_workloads(self, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            """FLOPs of every row, `[batch_size]` int64."""
            name = batch.item_feature_name if self.model == "hstu" else batch.history_feature_name
            lengths = batch.features[name].lengths()
            return workloads(lengths, cost_model=self.cost_model, tokens_per_entry=1 + self.action_interleaved)

    for method in (shuffle, start_shuffle_async, finish_shuffle):
        setattr(MegatronBalanceShuffler, method.__name__, method)
    return MegatronBalanceShuffler


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None, "a shuffle needs torch.distributed to be initialised"
    return group


def _gather(self: Any, batch: Any, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> GlobalRows:
    # Ranks with different settings would wait in different collectives.
    fingerprint = int(prefers_all_to_all())
    row_workloads = self.get_workloads(batch, *args, **kwargs)
    return gather_rows(batch, workloads=row_workloads, group=group, fingerprint=fingerprint)


def _plan(rows: GlobalRows, *, dp_size: int) -> NDArray[np.int64]:
    nbytes = rows.layout.row_nbytes(rows.lengths)
    size = rows.layout.batch_size
    return plan_rows(rows.workloads, nbytes=nbytes, home_ranks=rows.home_ranks, dp_size=dp_size, batch_size=size)


def _move(
    batch: Any, rows: GlobalRows, *, ranks: NDArray[np.int64], group: dist.ProcessGroup, use_all2all: bool
) -> Any:
    columns = move_rows(
        split_columns(batch, layout=rows.layout, lengths=rows.own_lengths),
        specs=rows.layout.columns,
        num_entries=rows.layout.num_entries(rows.lengths),
        home_ranks=rows.home_ranks,
        ranks=ranks,
        group=group,
        use_all2all=use_all2all or prefers_all_to_all(),
    )
    lengths = rows.lengths[:, ranks == group.rank()]
    return join_columns(batch, columns, layout=rows.layout, lengths=lengths)
