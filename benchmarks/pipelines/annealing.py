"""Reference plans of pipelines by simulated annealing, a small C program that is compiled here.

It shares no code with the planner: the order of passes comes from Megatron's own functions, and costs from the batch.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.publish import RAW
from megatron_balance.planner import Batch

SOURCE = Path(__file__).with_name("anneal.c")
HOT, COLD = 2e-3, 2e-6
"""Temperatures, as parts of the time of the step."""

Ints = NDArray[np.int64]


class _Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("samples", "groups", "span", "expert_span", "slots", "passes")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("before", "source", "slot", "factor", "own", "shared", "weight")]
    _fields_ += [("cap", ctypes.c_int64), ("launch", ctypes.c_int64)]


@dataclass(frozen=True)
class Passes:
    """All passes of a pipeline, each after those that it waits for; -1 where it waits for none."""

    before: NDArray[np.int32]
    source: NDArray[np.int32]
    slot: NDArray[np.int32]
    factor: NDArray[np.int32]  # 1 forward, 2 backward


@lru_cache(maxsize=64)
def megatron_passes(num_stages: int, num_chunks: int, group_size: int, num_microbatches: int) -> Passes:
    """The passes in the order of Megatron's `get_schedule_table` and `get_pp_rank_microbatches`."""
    from megatron.core.pipeline_parallel import schedules

    table = schedules.get_schedule_table(num_microbatches, num_chunks, group_size)
    orders: list[list[tuple[bool, int, int]]] = []
    for stage in range(num_stages):
        state: dict[str, Any] = {
            "get_pipeline_model_parallel_world_size": lambda: num_stages,
            "get_pipeline_model_parallel_rank": lambda stage=stage: stage,
            "get_virtual_pipeline_model_parallel_world_size": lambda: num_chunks if num_chunks > 1 else None,
        }
        with mock.patch.multiple(schedules.parallel_state, **state):
            _, _, warmup, remaining = schedules.get_pp_rank_microbatches(num_microbatches, num_chunks, group_size)
        forwards = [(False, slot, chunk) for slot, chunk in table]
        backwards = [(True, slot, num_chunks - 1 - chunk) for slot, chunk in table]
        order = forwards[:warmup]
        for index in range(remaining):
            order += [forwards[warmup + index], backwards[index]]
        orders.append(order + backwards[remaining:])
    number: dict[tuple[int, bool, int, int], int] = {}
    rows: list[tuple[int, int, int, int]] = []
    position, last = [0] * num_stages, [-1] * num_stages
    while any(position[stage] < len(orders[stage]) for stage in range(num_stages)):
        for stage in range(num_stages):
            while position[stage] < len(orders[stage]):
                backward, slot, chunk = orders[stage][position[stage]]
                depth = chunk * num_stages + stage
                source = depth + 1 if backward else depth - 1
                dependency = (source % num_stages, backward, slot, source // num_stages)
                if source == num_stages * num_chunks:
                    dependency = (stage, False, slot, chunk)
                if source >= 0 and dependency not in number:
                    break
                number[stage, backward, slot, chunk] = len(rows)
                rows.append((last[stage], number[dependency] if source >= 0 else -1, slot, 1 + backward))
                last[stage] = len(rows) - 1
                position[stage] += 1
    return Passes(*np.array(rows, dtype=np.int32).T.copy())


@lru_cache(maxsize=1)
def _library() -> Any:
    RAW.mkdir(parents=True, exist_ok=True)
    built = RAW / "anneal.so"
    subprocess.run(
        ["gcc", "-O2", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(built), "-lm"], check=True
    )
    library = ctypes.CDLL(str(built))
    library.anneal.restype = ctypes.c_int64
    library.anneal.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_double)
    ]
    return library


def anneal(batch: Batch, microbatch_of: Ints, num_microbatches: int, *, steps: int, seed: int = 1) -> float:
    """The makespan, in units of the batch's costs, of the best plan that annealing finds from this one on."""
    pipeline, span = batch.waiting.pipeline, batch.sync_size
    chunks, group = pipeline.num_chunks, pipeline.group_size
    passes = megatron_passes(pipeline.num_stages, chunks, group, num_microbatches)
    rank, slot = np.divmod(microbatch_of, num_microbatches)
    bins = ((rank // span * num_microbatches + slot) * span + rank % span).astype(np.int32)
    arrays = [
        np.ascontiguousarray(values, dtype=np.int64)
        for values in (batch.costs.sum(axis=0), batch.expert_cost, batch.weights)
    ]
    problem = _Problem(
        batch.num_samples,
        batch.num_groups,
        span,
        batch.ep_dp_size,
        num_microbatches,
        passes.slot.size,
        *(values.ctypes.data for values in (passes.before, passes.source, passes.slot, passes.factor, *arrays)),
        batch.cap,
        batch.per_microbatch,
    )
    time = _library().anneal(ctypes.byref(problem), bins.ctypes.data, steps, seed, HOT, COLD)
    return time / (3 * pipeline.num_stages * chunks)


def longest_first(batch: Batch, num_microbatches: int) -> Ints | None:
    """Longest first onto the least loaded rank, there into the emptiest micro-batch with room; None without room."""
    costs = batch.costs.sum(axis=0) + batch.expert_cost
    loads = np.zeros((batch.num_ranks, num_microbatches), dtype=np.int64)
    room = np.full(loads.shape, batch.cap, dtype=np.int64)
    microbatch_of = np.zeros(batch.num_samples, dtype=np.int64)
    for sample in np.argsort(-costs, kind="stable").tolist():
        fits = room >= batch.weights[sample]
        ranks = np.flatnonzero(fits.any(axis=1))
        if not ranks.size:
            return None
        rank = int(ranks[loads[ranks].sum(axis=1).argmin()])
        slot = int(np.where(fits[rank], loads[rank], np.iinfo(np.int64).max).argmin())
        microbatch_of[sample] = rank * num_microbatches + slot
        loads[rank, slot] += costs[sample]
        room[rank, slot] -= batch.weights[sample]
    order = np.argsort(np.argsort(loads, axis=1, kind="stable"), axis=1, kind="stable")
    position = np.concatenate([np.arange(num_microbatches)[::2], np.arange(num_microbatches)[1::2][::-1]])
    organ_pipe = np.argsort(position)[order]  # small ones at both ends
    rank, slot = np.divmod(microbatch_of, num_microbatches)
    return rank * num_microbatches + organ_pipe[rank, slot]
