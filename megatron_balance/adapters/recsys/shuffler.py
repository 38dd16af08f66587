"""The shuffler's methods with upstream's signatures: `shuffle`, or its two halves around the model's forward pass.

    1. the shuffler computes the cost of each row, int64: FLOPs of one layer, forward and backward
    2. all ranks learn the workloads and lengths of all real rows             `batch_rows.py`
    3. every rank gets nearly the same workload, and as many rows or one fewer
    4. the rows move, all columns in one exchange                             `kit/rows.py`
    5. the batch is put together again, real rows ascending, padding last

Step 3 may run in the shuffler's thread while the model computes; collectives run on the calling thread alone. The
handle between the halves holds everything, so that several batches may be under way. All-gather and all-to-all, which
upstream lets its caller choose, give the same batch, so rows always move by all-to-all.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.adapters.kit import even_parts
from megatron_balance.adapters.kit.rows import exchange_rows
from megatron_balance.adapters.recsys.batch_rows import (
    GlobalRows,
    Ints,
    gather_rows,
    join_columns,
    num_entries,
    split_columns,
)
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape

MODELS = ("hstu", "sid_gr")
"""Names of the layers with known FLOPs, as upstream's shufflers have them."""


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
    plan: Future[Ints]


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
        return_indices: also return the position that each row comes from, in the old batches of all ranks, one after
            the other: `[batch_size]` int64, padding last.
        return_workloads: also return the workloads of the new batch, `[batch_size]` int64, 0 for padding.
        use_all2all: no matter.
        *args: of `get_workloads`.
        **kwargs: of `get_workloads`.

    Returns:
        The new batch, or a tuple of it and the indices and workloads asked for.

    Raises:
        BalanceError: on every rank: batches differ, or one cannot be cut into rows.
    """
    del use_all2all
    group = _group(pg_group)
    rows = gather_rows(batch, workloads=self.get_workloads(batch, *args, **kwargs), group=group)
    ranks = plan_rows(rows, dp_size=group.size())
    returned = [_move(batch, rows, ranks=ranks, group=group)]
    if return_indices or return_workloads:
        indices = _indices(rows, ranks=ranks, dp_size=group.size())[group.rank()]
        row_workloads = np.zeros(group.size() * rows.batch_size, dtype=np.int64)
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
    rows = gather_rows(batch, workloads=self.get_workloads(batch, *args, **kwargs), group=group)
    return PendingShuffle(rows, group, self._kk_executor.submit(plan_rows, rows, dp_size=group.size()))


def finish_shuffle(
    self: Any,
    batch: Any,
    handle: PendingShuffle,
    pg_group: dist.ProcessGroup | None = None,
    use_all2all: bool = False,
) -> Any:
    """The second half: waits for the plan and moves the rows; the ranks are those of the first half."""
    del self, pg_group, use_all2all
    return _move(batch, handle.rows, ranks=handle.plan.result(), group=handle.group)


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


@lru_cache
def layer_cost(model: str, *, num_heads: int, head_dim: int) -> CostModel:
    """The cost of one layer, `num_heads * head_dim` wide. Attention is causal, and its heads are counted once.

    HSTU has four projections (query, key, value and the gate U) and no MLP; SID-GR has three and an MLP of four times
    the width. Both are layers that the planner's FLOPs know: U is an output gate as wide as the queries.

    Args:
        model: `hstu` or `sid_gr`.
        num_heads: attention heads.
        head_dim: width of one.

    Raises:
        BalanceError: there is no such model, or a size is not a positive integer.

    Example:
        >>> layer_cost("hstu", num_heads=4, head_dim=256).quadratic  # 3.5 times 2 FLOPs a head's channel
        7168
    """
    if model not in MODELS:
        raise BalanceError(f"model is {model!r}: it must be one of {', '.join(MODELS)}.")
    hidden_size = num_heads * head_dim
    shape = ModelShape(
        hidden_size=hidden_size,
        num_layers=1,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=head_dim,
        ffn_hidden_size=4 * hidden_size,
        # ModelShape needs an output layer; one of a single row adds next to nothing.
        padded_vocab_size=1,
        gated_linear_unit=False,
        attention_output_gate=model == "hstu",
        hybrid_layer_pattern="*" if model == "hstu" else "",
    )
    return CostModel.from_shape(shape)


def workloads(lengths: Any, *, cost_model: CostModel, tokens_per_entry: int = 1) -> Any:
    """The cost of sequences in int64, whatever the integer type of their lengths: a tensor, an array or an int.

    int32 lengths, which a KeyedJaggedTensor often has, would wrap: 8192 tokens at 4 heads of 256 are far over 2**31.
    """
    if isinstance(lengths, torch.Tensor):
        lengths = lengths.to(torch.int64)
    elif not isinstance(lengths, int):
        lengths = np.asarray(lengths, dtype=np.int64)
    num_tokens = lengths * tokens_per_entry
    return cost_model.linear * num_tokens + cost_model.quadratic * num_tokens * num_tokens


def plan_rows(rows: GlobalRows, *, dp_size: int) -> Ints:
    """`[num_rows]` the rank of every row. Padding costs nothing, is not planned, and goes where there is room."""
    ranks = np.arange(rows.workloads.size) % dp_size
    if rows.workloads.size > dp_size:
        for rank, part in enumerate(even_parts(rows.workloads, num_parts=dp_size, equal_count=True)):
            ranks[part] = rank
    return ranks


def _indices(rows: GlobalRows, *, ranks: Ints, dp_size: int) -> Ints:
    """The positions of every rank's new rows, `[dp_size, batch_size]`: real ones ascending, then padding ascending."""
    padding = np.setdiff1d(np.arange(dp_size * rows.batch_size), rows.positions, assume_unique=True)
    rank_of_padding = np.repeat(np.arange(dp_size), rows.batch_size - np.bincount(ranks, minlength=dp_size))
    # A stable sort by rank keeps real rows before padding, and each of them ascending.
    order = np.argsort(np.concatenate([ranks, rank_of_padding]), kind="stable")
    return np.concatenate([rows.positions, padding])[order].reshape(dp_size, rows.batch_size)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None, "a shuffle needs torch.distributed to be initialised"
    return group


def _move(batch: Any, rows: GlobalRows, *, ranks: Ints, group: dist.ProcessGroup) -> Any:
    columns = exchange_rows(
        split_columns(batch, lengths=rows.own_lengths),
        num_entries=num_entries(batch, lengths=rows.lengths),
        home_ranks=rows.home_ranks,
        ranks=ranks,
        group=group,
    )
    return join_columns(batch, columns, lengths=rows.lengths[:, ranks == group.rank()])
