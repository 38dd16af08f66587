"""Plans of up to 8,192 data-parallel ranks: CPU time, and distance from the bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.measure import timed
from benchmarks.planner.setups import Setup, global_batches
from megatron_balance import Topology, build_data_schedule
from megatron_balance.cost.model import MICROBATCH_TOKENS

SAMPLES_PER_RANK = 64
SIZES = (64, 256, 1024, 4096, 8192)
EXPERTS = (1, 8, 64)
STAGES = (1, 8)


@dataclass(frozen=True)
class PlanTime:
    dp_size: int
    ep_size: int
    pp_size: int
    cpu_ms: float
    over_bound: float


def measure_plans(sizes: Sequence[int], *, folder: Path | None) -> Iterator[PlanTime]:
    """Plans a batch of every number of ranks, kind of model and number of stages."""
    for dp_size, ep_size, pp_size in product(sizes, EXPERTS, STAGES):
        setup = Setup(
            f"DP{dp_size} EP{ep_size} PP{pp_size}",
            model="Qwen3-8B" if ep_size == 1 else "Qwen3-30B-A3B",
            topology=Topology(dp_size, ep_size=ep_size, pp_size=pp_size),
            max_tokens_per_gpu=16384,
            global_batch_size=SAMPLES_PER_RANK * dp_size,
            length_names=("servegen_mlarge",),
            num_batches=1,
        )
        arguments = _arguments(setup, folder=folder)
        build_data_schedule(**arguments)  # caches that a run fills once
        plan, cpu_ms = timed(lambda arguments=arguments: build_data_schedule(**arguments))
        plan.check()
        yield PlanTime(dp_size, ep_size, pp_size, cpu_ms, plan.predicted_cost / plan.lower_bound)


def _arguments(setup: Setup, *, folder: Path | None) -> dict[str, Any]:
    cost_model = setup.cost_model
    if setup.topology.pp_size > 1:  # as runs count a micro-batch
        cost_model = replace(cost_model, per_microbatch=cost_model(MICROBATCH_TOKENS))
    return {
        "lengths": next(global_batches(setup, lengths_folder=folder)),
        "cost_model": cost_model,
        "topology": setup.topology,
        "limits": setup.limits,
        "home_ranks": np.repeat(np.arange(setup.topology.dp_size), SAMPLES_PER_RANK),
    }
