"""verl's and AReaL's own functions, from their wheels; they raise ImportError where they are not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import Setup

LINEAR = 24576
"""verl's workload is `L² + LINEAR * L`, whatever the model."""


def verl_wheel(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """verl 0.9.1: `get_seqlen_balanced_partitions` over ranks, then `rearrange_micro_batches` on each.

    verl agrees on the number of micro-batches by all-reduces: the most that a rank's tokens need, and one more
    while a rank breaks the cap. Here the ranks are planned one after another in one process.
    """
    tokens = setup.padded(lengths)
    parts = over_ranks(tokens, num_ranks=setup.topology.dp_size)
    plan_rank = [rearranger([tokens[sample] for sample in part], cap=setup.cap) for part in parts]
    largest = least_num_microbatches(tokens, parts=parts, cap=setup.cap)
    plans = [plan(largest) for plan in plan_rank]
    while len(set(map(len, plans))) > 1:
        largest = max(map(len, plans))
        # A rank that has found this number on the way plans no more.
        plans = [
            slots if len(slots) == largest else plan(largest) for slots, plan in zip(plans, plan_rank, strict=True)
        ]
    return [[[part[position] for position in slot] for slot in slots] for part, slots in zip(parts, plans, strict=True)]


def over_ranks(tokens: list[int], *, num_ranks: int) -> list[list[int]]:
    """verl's equal-size Karmarkar-Karp of its workload. Returns sample ids of each rank."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    workloads = [length**2 + LINEAR * length for length in tokens]
    return get_seqlen_balanced_partitions(workloads, k_partitions=num_ranks, equal_size=True)


def least_num_microbatches(tokens: list[int], *, parts: list[list[int]], cap: int) -> int:
    """Result of the ranks' first all-reduce: the most micro-batches that a rank's tokens need."""
    return max(-(-sum(tokens[sample] for sample in part) // cap) for part in parts)


def rearranger(tokens: list[int], *, cap: int) -> Callable[[int], list[list[int]]]:
    """verl's `rearrange_micro_batches` on one rank, as a function of the least number of micro-batches.

    The batch holds one number a sample, where verl's holds its tokens: what is timed is the planning, not
    the selecting of rows.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    column = torch.tensor(tokens, dtype=torch.int64)[:, None]
    batch: Any = TensorDict({"input_ids": column, "attention_mask": column}, batch_size=[len(tokens)])

    def plan(num_bins: int) -> list[list[int]]:
        return rearrange_micro_batches(batch, max_token_len=cap, min_num_micro_batch=num_bins)[1]

    return plan


def areal_wheel(lengths: NDArray[np.int64], setup: Setup) -> list[list[list[int]]]:
    """AReaL 1.0.4: `balanced_greedy_partition` over ranks, then `ffd_allocate` under the cap on each.

    Both balance tokens. The loop stands for `allocate_balanced_mbs_synced`, which asks every rank again for
    the largest number of micro-batches. Micro-batches meet in AReaL's own order: by their first sample.
    """
    from areal.utils.seqpack import balanced_greedy_partition, ffd_allocate

    tokens = setup.padded(lengths)
    parts = balanced_greedy_partition(tokens, setup.topology.dp_size)
    bin_tokens = [[tokens[sample] for sample in part] for part in parts]
    count = 1
    while True:
        plans = [ffd_allocate(values, setup.cap, min_groups=count) for values in bin_tokens]
        largest = max(map(len, plans))
        if all(len(slots) == largest for slots in plans):
            break
        count = largest
    return [
        [[part[position] for position in slot] for slot in sorted(sorted(map(int, slot)) for slot in slots)]
        for part, slots in zip(parts, plans, strict=True)
    ]
