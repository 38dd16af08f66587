"""Counts the shapes of a policy's micro-batches once `--shape-bucket` has filled them up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.comparison.policies import PolicyResult
from megatron_balance.mcore.setup.shape_buckets import filled_tokens
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.record.step import StepRecord
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Shapes:
    """The micro-batches of a policy over all its steps, empty ones left out.

    Attributes:
        num_shapes: distinct numbers of tokens, on any rank.
        peak_tokens: most tokens of one on a GPU.
        filler: part of the tokens run that fills buckets up.
    """

    num_shapes: int
    peak_tokens: int
    filler: float


def shapes_of(result: PolicyResult, *, shape_bucket: int) -> Shapes:
    """Shapes of a policy's micro-batches; stock's are never filled up.

    Args:
        result: the plans.
        shape_bucket: tokens on a GPU.
    """
    topology, limits = result.setting.topology, result.setting.limits
    if topology.dynamic_cp:
        # Parts of micro-batches on one leaf each: these are what runs.
        tokens = np.concatenate([_tokens_on_leaves(step, topology) for step in result.steps])
        topology = topology.at_cp_size(1)
    else:
        tokens = np.concatenate([_tokens(step, topology) for step in result.steps])
    filled = tokens
    if result.policy.cost_model is not None:
        filled = filled_tokens(tokens, topology=topology, limits=limits, shape_bucket=shape_bucket)
    most = int(filled.max(initial=0))
    return Shapes(
        num_shapes=np.unique(filled).size,
        peak_tokens=-(-most // topology.cp_size),
        filler=float((filled - tokens).sum() / max(int(filled.sum()), 1)),
    )


def _tokens(step: StepRecord, topology: Topology) -> NDArray[np.int64]:
    """`[num_filled]` padded tokens of the micro-batches of all ranks that hold samples."""
    padded = sum_segments(topology.padded_seq_len(step.segment_lengths), num_segments=step.num_segments)
    tokens = np.zeros(step.cost_grid.size, dtype=np.int64)
    np.add.at(tokens, step.slot_of, padded)
    return tokens[np.unique(step.slot_of)]


def _tokens_on_leaves(step: StepRecord, topology: Topology) -> NDArray[np.int64]:
    """`[num_filled]` padded tokens on one leaf of every group that holds samples, once for each of its leaves."""
    assert step.cp_sizes is not None, "sizes differ"
    sizes = step.cp_sizes.ravel()
    tokens = np.zeros(step.cost_grid.size, dtype=np.int64)
    of_samples = sizes[step.slot_of]
    of_segments = np.repeat(of_samples, step.num_segments)
    for size in topology.dynamic_cp_sizes:
        padded = topology.at_cp_size(size).padded_seq_len(step.segment_lengths)
        sums = sum_segments(np.where(of_segments == size, padded // size, 0), num_segments=step.num_segments)
        np.add.at(tokens, step.slot_of, sums)
    filled = np.unique(step.slot_of)
    return np.repeat(tokens[filled], sizes[filled])
