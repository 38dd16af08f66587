"""Approach C: the data set of an epoch in an order of like lengths.

Prompts are handed to inference in the order that `_prepare_dataset` returns, and their samples fill the pool about
in that order. Here every `dispatch_batch_size` prompts in a row are of like lengths, and the dispatches are
shuffled (`planner/selection/bucketing.py`).

Samples do not come back quite in order: inference runs several batches at once, may fail on some, and the rest of
an epoch stays in the pool until the next. Any of these shifts all dispatches that follow, so that each would hold
the end of one batch and the start of another. With a window, as approach B has, the dispatches form again around the
oldest sample; with `window=1` they do not.

Invariants: every sample once an epoch; the order depends on lengths, `seed`, epoch and sizes alone, so that a run
resumes at `skip`.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_balance.adapters.torchspec.sample_lengths import data_lengths
from megatron_balance.adapters.torchspec.settings import Settings
from megatron_balance.hooking.patches import Function
from megatron_balance.planner.selection.bucketing import bucketed_order


def with_presorted_data(prepare_dataset: Function, *, settings: Settings) -> Function:
    """`_prepare_dataset` that sorts what it returns into buckets."""

    @functools.wraps(prepare_dataset)
    def wrapper(controller: Any, skip: int = 0) -> list[Any]:
        # All of the epoch: what is skipped is skipped in the order made here.
        samples = prepare_dataset(controller, skip=0)
        order = bucketed_order(
            data_lengths(samples),
            batch_size=controller.dispatch_batch_size,
            bucket_batches=settings.bucket_batches,
            seed=controller._dataset_seed,
            epoch=controller._dataset_epoch,
        )
        return [samples[index] for index in order[max(skip, 0) :].tolist()]

    return wrapper
