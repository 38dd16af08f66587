"""Estimates the GPU memory that a plan needs, from the flags of a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.comparison.policies import PolicyResult
from megatron_balance.cost.resolve import find_shape
from megatron_balance.errors import BalanceError
from megatron_balance.memory.budget import AUTO, derive_cap, gib_to_bytes
from megatron_balance.memory.model import GIB, MemoryModel, TrainingMemory, memory_model
from megatron_balance.memory.shape_buckets import filled_tokens
from megatron_balance.planner.inputs import sum_segments
from megatron_balance.record.step import StepRecord
from megatron_balance.topology import Limits, Topology


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the memory of a GPU and the state kept there."""
    group = parser.add_argument_group("memory, estimated from --model in bf16")
    group.add_argument(
        "--memory-gib",
        type=float,
        metavar="GIB",
        help="GiB of a GPU that training may fill, for instance 72 of 80 (a tenth covers what is not counted); "
        "--max-tokens-per-gpu auto is derived from it",
    )
    group.add_argument(
        "--recompute",
        choices=("none", "selective", "full"),
        default="none",
        help="--recompute-granularity of the run (default: none)",
    )
    group.add_argument("--distributed-optimizer", action="store_true", help="the run has --use-distributed-optimizer")
    group.add_argument(
        "--shape-bucket",
        type=int,
        default=1,
        metavar="N",
        help="--balance-shape-bucket of the run: micro-batches are filled up to a multiple of N tokens on a GPU "
        "(default: 1, not at all)",
    )


def memory_of_flags(args: argparse.Namespace, *, topology: Topology) -> MemoryModel | None:
    """The memory model of --model; None without it.

    Raises:
        BalanceError: a flag needs the model, and it is not given.
    """
    if args.model is None:
        for flag, is_set in (
            ("--max-tokens-per-gpu auto", args.max_tokens_per_gpu == AUTO),
            ("--memory-gib", args.memory_gib is not None),
        ):
            if is_set:
                raise BalanceError(f"{flag} is given without --model, from which bytes are estimated: add it.")
        return None
    training = TrainingMemory(
        recompute_granularity=None if args.recompute == "none" else args.recompute,
        distributed_optimizer=args.distributed_optimizer,
    )
    return memory_model(find_shape(args.model), topology=topology, training=training)


def limits_of_flags(args: argparse.Namespace, *, topology: Topology, memory: MemoryModel | None) -> Limits:
    """The cap that flags give, or that is derived from memory and printed.

    Raises:
        BalanceError: there is no budget, or nothing fits it.
    """
    if args.max_tokens_per_gpu != AUTO:
        return Limits(args.max_tokens_per_gpu)
    assert memory is not None, "memory_of_flags asked for --model"
    if args.memory_gib is None:
        raise BalanceError("--max-tokens-per-gpu is auto: give --memory-gib, the GiB of a GPU that training may fill.")
    cap = derive_cap(
        memory,
        budget_bytes=gib_to_bytes(args.memory_gib, flag="--memory-gib"),
        topology=topology,
        shape_bucket=args.shape_bucket,
    )
    print(f"--max-tokens-per-gpu auto is {cap}.")
    return Limits(cap.tokens)


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


def print_memory(
    memory: MemoryModel, *, names: Sequence[str], shapes: Sequence[Shapes], budget_gib: float | None
) -> None:
    """Print the memory of the fullest micro-batch of the last policy; with a budget, of every policy."""
    peak = shapes[-1].peak_tokens
    stage = memory.fullest(peak)
    print(
        f"Memory, estimated: the fullest micro-batch of the balanced plan, {peak} tokens on a GPU, takes "
        f"{peak * stage.bytes_per_token / GIB:.1f} GiB; weights, gradients and optimizer "
        f"{stage.static_bytes / GIB:.1f} GiB."
    )
    if budget_gib is None:
        return
    budget = gib_to_bytes(budget_gib, flag="--memory-gib")
    fit = memory.max_tokens_per_gpu(budget)
    print(
        f"  A token takes {stage.bytes_per_token:,} bytes on pipeline stage {stage.stage}; its logits on the last "
        f"stage {memory.logits_bytes_per_token:,}. {budget_gib:g} GiB hold micro-batches of {fit} tokens."
    )
    width = max(map(len, names))
    for name, of_policy in zip(names, shapes, strict=True):
        num_bytes = memory.peak_bytes(of_policy.peak_tokens)
        verdict = "fits" if num_bytes <= budget else "DOES NOT FIT"
        print(f"  {name:<{width}}  {num_bytes / GIB:6.1f} of {budget_gib:g} GiB  {verdict}")


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
