"""The data of one step on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.mcore.step.figures import Figures
from megatron_balance.mcore.step.leaf_slots import LeafSlots
from megatron_balance.mcore.step.own_slots import Microbatch
from megatron_balance.planner import DataSchedule


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank.

    Attributes:
        num_microbatches: the same on every rank, unless `cp_sizes` are given.
        microbatch_tokens: `[num_microbatches]`, tokens of this replica's micro-batches as they run, filler included.
        step_tokens: those of all replicas; 0 on a rank that reads no data.
        sequence_lengths: `[num_microbatches]`, tokens of each sequence of theirs, without padding and filler; None on a
            rank that reads no data and was not sent them.
        microbatches: packed, or None on a rank that reads no data.
        schedule: the plan, or None on a rank that reads no data.
        fingerprint: of the plan and the tokens, in [0, 2**63): equal on all ranks of a model replica that read data.
        plan_seconds: spent planning.
        exchange_seconds: spent splitting, gathering, rerouting, packing and agreeing.
        exposed_seconds: spent waiting for all that when the step began; the rest ran during the step before.
        new_iterator: whether some rank of the data-parallel group read it from another iterator than its last step.
        num_left: items pulled ahead from an earlier iterator, which wait for it to come again.
        cp_sizes: `[num_microbatches]` context-parallel ranks of each, or None where all have the run's. With sizes,
            other ranks may have another num_microbatches.
        number: of the step, counted from 0 on a rank that reads data.
        reported: `[dp_size, NUM_REPORTED]` numbers that each data-parallel rank sent with the lengths of its samples.
        figures: for the log, where they are known.
        leaves: what each context-parallel rank of this replica runs, where sizes differ; None elsewhere.
    """

    num_microbatches: int
    microbatch_tokens: list[int]
    step_tokens: int = 0
    sequence_lengths: list[list[int]] | None = None
    microbatches: list[Microbatch] | None = None
    schedule: DataSchedule | None = None
    fingerprint: int = 0
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0
    new_iterator: bool = False
    num_left: int = 0
    cp_sizes: list[int] | None = None
    leaves: tuple[LeafSlots, ...] | None = None
    number: int = 0
    reported: NDArray[np.int64] | None = None
    figures: Figures | None = None
