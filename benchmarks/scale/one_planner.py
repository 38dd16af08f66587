"""Compares ranks of a node that each make the plan with one that makes it and broadcasts it over gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.markdown import table
from benchmarks.scale.samples import Samples, planner_settings
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.runtime.collectives import broadcast_row

DP_SIZE = 1024
NUM_SAMPLES = 65_536
NUM_ROUNDS = 6
"""The first connects ranks and is not counted."""


def plan_in_both_ways(*, lengths_folder: Path | None) -> dict[str, list[float]]:
    """Plan as one rank of a node, an initialised world.

    Returns:
        `each`, `one` and `broadcast` (which is part of `one`): `[seconds, CPU seconds of the process]`, means.
    """
    group = dist.group.WORLD
    assert group is not None, "initialised"
    lengths = Samples(DP_SIZE, NUM_ROUNDS * NUM_SAMPLES // DP_SIZE // 16, lengths_folder).lengths()
    spent: dict[str, list[tuple[float, float]]] = {"each": [], "one": [], "broadcast": []}
    for batch in lengths.reshape(NUM_ROUNDS, NUM_SAMPLES):
        dist.barrier()
        started = _now()
        own = _plan(batch)
        dist.barrier()
        spent["each"].append(_since(started))
        started = _now()
        plan = _plan(batch) if group.rank() == 0 else np.empty(NUM_SAMPLES, dtype=np.int64)
        dist.barrier()
        planned = _now()
        plan = broadcast_row(plan, group=group, what="the plan")
        dist.barrier()
        spent["broadcast"].append(_since(planned))
        spent["one"].append(_since(started))
        assert (plan == own).all(), "one plan"
    return {way: [statistics.fmean(clock) for clock in zip(*of[1:], strict=True)] for way, of in spent.items()}


def _plan(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Slot of each sample, int64 `[num_samples]`: what other ranks need of a plan, beside a few numbers."""
    _, topology, limits, cost_model = planner_settings(DP_SIZE)
    homes = np.repeat(np.arange(DP_SIZE), NUM_SAMPLES // DP_SIZE)
    schedule = build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=limits, home_ranks=homes)
    return schedule.slot_of


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(then: tuple[float, float]) -> tuple[float, float]:
    seconds, cpu_seconds = (now - before for now, before in zip(_now(), then, strict=True))
    return seconds, cpu_seconds


def summary(ranks: Sequence[Mapping[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Of each way, the longest seconds of a rank, and the CPU seconds of all of them."""
    return {
        way: {
            "seconds": max(rank[way][0] for rank in ranks),
            "cpu_seconds": sum(rank[way][1] for rank in ranks),
        }
        for way in ranks[0]
    }


def plans_table(worlds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Both ways side by side."""
    rows = [
        (num_ranks, *(f"{1e3 * ways[way][clock]:.0f}" for way in ways for clock in ("cpu_seconds", "seconds")))
        for num_ranks, ways in worlds.items()
    ]
    columns = (
        "ranks of a node | each plans: CPU ms of all | ms | one plans: CPU ms of all | ms "
        "| of which broadcast: CPU ms of all | ms"
    )
    return table(columns, rows, align="r" * 7)
