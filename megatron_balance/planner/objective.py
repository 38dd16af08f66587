"""Objectives: when ranks wait for one another, and the exact time of their micro-batches on the stages of a pipeline.

    step        ranks meet once a step, at the gradient reduction: the largest sum over a rank's micro-batches
    microbatch  ranks meet in every micro-batch (`Topology.sync_size`: experts, FSDP, FP8's delayed scaling): the
                sum over slots of the costliest rank that meets there, of the slowest group; with pipeline stages, which
                wait for their group in each slot, the largest makespan of the groups' costliest micro-batches
    pipeline    ranks meet once, after the pipeline: the largest makespan of a rank

A stage holds `num_chunks` model chunks. One chunk: stage s of P runs P-1-s forwards, then one forward and one backward
in turn, then the remaining backwards (D. Narayanan et al., "Efficient large-scale language model training on GPU
clusters using Megatron-LM", 2021). Several chunks: forwards follow Megatron's schedule table, groups of `group_size`
micro-batches chunk by chunk; backwards follow it with the chunks reversed; stage s starts with
2(P-1-s) + (V-1)*group_size forwards (megatron.core.pipeline_parallel.schedules of 0.19: `get_schedule_table`,
`get_pp_rank_microbatches`).

A pass waits for the pass before it on its stage and for its input: the same pass on the stage before, a backward on the
stage behind, at the ends on the neighbouring chunk. All this depends on the numbers of stages, chunks and micro-batches
alone, so the passes are sorted once by the longest chain of waits that leads to them (their level), and the times of
many candidates are computed at once, level by level.

Assumed: a backward takes as long as two forwards, and messages between stages take no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

Ints = NDArray[np.int64]

OBJECTIVES = ("auto", "step", "microbatch", "pipeline")
"""Names that `build_data_schedule` takes."""

PeerWait = Callable[[Ints, Ints], Ints]
"""Maps times `[num_ranks, n]` at which ranks are ready for slots `[n]` to those at which their peers are ready too."""

Pass = tuple[bool, int, int]
"""Whether it is a backward, the micro-batch, the chunk."""


@dataclass(frozen=True)
class Pipeline:
    """The stages that every micro-batch passes.

    Attributes:
        num_stages: pipeline-parallel ranks.
        num_chunks: model chunks of a stage (virtual pipeline).
        group_size: micro-batches that pass a chunk before the next chunk starts, under several chunks.
        kinds: `[num_stages][num_chunks]` kind of each chunk, a row of the costs; all of kind 0 where it is empty.
    """

    num_stages: int = 1
    num_chunks: int = 1
    group_size: int = 1
    kinds: tuple[tuple[int, ...], ...] = ()

    def passes(self, stage: int, num_microbatches: int) -> list[Pass]:
        """The passes of a stage, in the order in which it runs them."""
        chunks, width = self.num_chunks, num_microbatches if self.num_chunks == 1 else self.group_size
        table = [
            (microbatch, chunk)
            for start in range(0, num_microbatches, max(width, 1))
            for chunk in range(chunks)
            for microbatch in range(start, min(start + width, num_microbatches))
        ]
        behind = self.num_stages - 1 - stage
        warmup = min(behind if chunks == 1 else 2 * behind + (chunks - 1) * self.group_size, len(table))
        forwards = [(False, microbatch, chunk) for microbatch, chunk in table]
        backwards = [(True, microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        return order + backwards[len(table) - warmup :]


@lru_cache(maxsize=256)
def _levels(pipeline: Pipeline, num_microbatches: int) -> tuple[list[Ints], Ints, Ints]:
    """All passes sorted by level.

    Of each level `[2, passes]` the pass before each on its stage and the pass whose output it needs, the number of all
    passes where there is none; of each pass its slot, and its row of times, `(kind * 2 + backward) * num_microbatches +
    slot`.
    """
    stages, chunks, inputs, rows = pipeline.num_stages, pipeline.num_chunks, list[Ints](), list[int]()
    orders = [pipeline.passes(stage, num_microbatches) for stage in range(stages)]
    no_pass, position, before = sum(map(len, orders)), [0] * stages, [sum(map(len, orders))] * stages
    number: dict[tuple[int, int], int] = {}  # of a micro-batch and of its steps down all chunks and back up
    while len(rows) < no_pass:
        level, start = list[tuple[int, int]](), len(rows)
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            backward, slot, chunk = order[position[stage]]
            depth = chunk * stages + stage
            step = 2 * stages * chunks - 1 - depth if backward else depth
            source = number.get((slot, step - 1), start) if step else no_pass
            if start <= source < no_pass:
                continue
            level.append((before[stage], source))
            number[slot, step] = before[stage] = len(rows)
            kind = pipeline.kinds[stage][chunk] if pipeline.kinds else 0
            rows.append((2 * kind + backward) * num_microbatches + slot)
            position[stage] += 1
        assert level, "the order of Megatron's passes has no circle"
        inputs.append(np.array(level, dtype=np.int64).T.copy())
    row = np.array(rows, dtype=np.int64)
    return inputs, row % num_microbatches, row


def makespans(costs: Ints, pipeline: Pipeline, *, peers: PeerWait | None = None) -> Ints:
    """Time from the first forward to the last backward, `[num_candidates]`.

    Args:
        costs: `[num_candidates, num_kinds, num_microbatches]` of each micro-batch in slot order: the time that all
            stages together would take if every chunk were of this kind. A chunk takes `1 / (num_stages*num_chunks)`.
        peers: who waits for whom before each pass of a slot, where candidates are ranks that meet.
    """
    num_candidates, num_kinds, num_microbatches = costs.shape
    num_parts = 3 * pipeline.num_stages * pipeline.num_chunks
    if pipeline.num_stages == 1:
        return costs.sum(axis=(1, 2))
    # Times are whole in units of 1/num_parts of a cost; costs too large for that lose their last bits, upwards.
    largest = num_parts * int(costs.max(initial=0)) * num_microbatches
    shift = max(0, largest.bit_length() - 62)
    forward = (-(-costs // (1 << shift)) if shift else costs).transpose(1, 2, 0)
    times = np.stack([forward, 2 * forward], axis=1).reshape(2 * num_kinds * num_microbatches, num_candidates)
    inputs, slots, rows = _levels(pipeline, num_microbatches)
    end = np.zeros((rows.size + 1, num_candidates), dtype=np.int64)
    np.take(times, rows, axis=0, out=end[:-1], mode="clip")
    stop = 0
    for passes in inputs:
        start, stop = stop, stop + passes.shape[1]
        ready = np.maximum(*end.take(passes, axis=0))
        end[start:stop] += ready if peers is None else peers(ready.T, slots[start:stop]).T
    return -(-end.max(axis=0) // num_parts) << shift


@dataclass(frozen=True)
class Waiting:
    """Where ranks wait for one another under an objective."""

    sync_size: int  # neighbouring ranks that meet in every micro-batch; 1 where ranks meet once a step
    in_slots: bool  # they meet in every micro-batch even without shared work: reports draw slots aligned
    pipeline: Pipeline  # that micro-batches pass; one stage where their times add up

    @property
    def is_makespan(self) -> bool:
        """True if micro-batches pass several stages."""
        return self.pipeline.num_stages > 1

    def times(self, slot_times: Ints) -> Ints:
        """Time of each group, `[num_groups]`, for `[num_groups, num_kinds, num_microbatches]` costs in slot order."""
        return makespans(slot_times, self.pipeline)

    def at_least(self, work: int, *, empty: int, longest: int = 0) -> int:
        """A time that a group of this much work cannot beat; `longest`: lower bound on its costliest micro-batch.

        A pipeline's stage also idles while one empty micro-batch passes one chunk of each other stage.
        """
        stages, chunks = self.pipeline.num_stages, self.pipeline.num_chunks
        return max(-(-(work * chunks + (stages - 1) * empty) // (stages * chunks)), longest)


def waiting(objective: str, *, topology: Topology) -> Waiting:
    """Where ranks wait under an objective that is resolved.

    Of DP×CP ranks, with dynamic context parallelism, expert-parallel groups meet through the groups that reach over
    several, so that all ranks meet or none.
    """
    in_slots = objective == "microbatch"
    is_synced = topology.sync_size > 1
    has_stages = objective == "pipeline" or (in_slots and is_synced and topology.pp_size > 1)
    if topology.dynamic_cp:
        sync_size = topology.dp_cp_size if in_slots else 1
    elif in_slots:
        sync_size = topology.sync_size if is_synced else topology.dp_size
    else:
        sync_size = topology.ep_dp_size if objective == "pipeline" else 1
    pipeline = Pipeline(topology.pp_size, topology.vpp_size, topology.microbatch_multiple) if has_stages else Pipeline()
    return Waiting(sync_size, in_slots=in_slots, pipeline=pipeline)


def resolve_objective(objective: str, *, topology: Topology) -> str:
    """The name of the objective; `auto` is resolved by the topology."""
    if objective not in OBJECTIVES:
        raise BalanceError(f"objective is {objective!r}: it must be one of {', '.join(OBJECTIVES)}.")
    if objective != "auto":
        return objective
    if topology.sync_size > 1:
        return "microbatch"
    return "pipeline" if topology.pp_size > 1 else "step"


def is_makespan(objective: str, *, topology: Topology) -> bool:
    """True if the predicted time is a pipeline's makespan, False if it is the work of all stages together."""
    return waiting(objective, topology=topology).is_makespan or objective == "pipeline"


def organ_pipe_order(costs: Ints) -> Ints:
    """The micro-batch of each slot of a pipeline: small ones at both ends, the largest in the middle.

    The other stages wait for the first forwards and the last backwards, so these should be small.
    """
    ascending = np.argsort(costs, axis=1, kind="stable")
    return np.concatenate([ascending[:, ::2], ascending[:, 1::2][:, ::-1]], axis=1)
