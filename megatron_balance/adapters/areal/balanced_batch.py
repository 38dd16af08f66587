"""`balance_batch`: padded batches of all ranks in, one padded batch a rank out.

Invariants: every row comes out once, with equal bits in all it holds; where `dp_num` divides their number every batch
has the same number of rows, else they differ by what the costs ask for and none is empty; rows keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_balance.adapters.areal.planning import ids_per_rank, plan_ranks
from megatron_balance.adapters.areal.trajectories import Batch, join_rows, row_lengths, split_rows
from megatron_balance.cost.resolve import Model, resolve_cost


def balance_batch(
    batches: Sequence[Mapping[str, Any]],
    dp_num: int,
    *,
    cost: str | None = None,
    model: Model | None = None,
    ep_size: int = 1,
) -> list[Batch]:
    """Deals the rows of padded batches out to ranks and pads each rank's to its own longest.

    Args:
        batches: one or more dicts of tensors `[num_rows, padded_seq_len, ...]` with `attention_mask`; each may have
            its own number of rows and its own padding.
        dp_num: data-parallel ranks. The one argument that AReaL's callers pass by position.
        cost: `tokens` or `flops`; by default flops where there is a model, else tokens.
        model: preset name, path of a Hugging Face config.json, or ModelShape.
        ep_size: expert-parallel ranks.

    Returns:
        `[dp_num]` batches.

    Raises:
        BalanceError: a batch has no mask, keys differ, or there are fewer rows than ranks.

    Example:
        >>> import torch
        >>> lengths = [8, 1, 2, 7]
        >>> batch = {"attention_mask": torch.arange(8) < torch.tensor(lengths)[:, None]}
        >>> [part["attention_mask"].sum(1).tolist() for part in balance_batch([batch], 2)]
        [[8, 1], [2, 7]]
    """
    lengths = [length for batch in batches for length in row_lengths(batch)]
    rows = [row for batch in batches for row in split_rows(batch)]
    schedule = plan_ranks(
        lengths,
        num_rows=[1] * len(rows),
        dp_size=dp_num,
        cost_model=resolve_cost(cost, model=model, ep_size=ep_size),
        ep_size=ep_size,
    )
    return [join_rows([rows[index] for index in ids]) for ids in ids_per_rank(schedule)]
