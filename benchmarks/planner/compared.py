"""The table Compared with: ways that one may have already, on one dense, one expert and one pipeline setup.

Every way plans the same batches in one process and one cost model judges all. A cell is how much longer a step is than
under this package's plan. Dev's scheduler runs from its checkout (MEGATRON_DEV_CHECKOUT), verl's own functions from its
wheel where it is installed, and else its way as written here.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.dynamic_cp.dev_scheduler import CHECKOUT, Rows, load_scheduler
from benchmarks.planner.baselines import (
    Ranks,
    equal_size_kk,
    first_fit,
    first_fit_then_kk,
    kk_by_flops,
    lpt,
    next_fit,
    ours,
    round_robin,
    split_bins,
)
from benchmarks.planner.measure import judged, timed
from benchmarks.planner.setups import MIXED_LENGTHS, Setup, global_batches
from benchmarks.planner.wheels import verl_wheel
from benchmarks.publish import table
from megatron_balance import CostModel, ModelShape, Topology, build_data_schedule
from megatron_balance.planner import Assignment, Problem


class LaunchedSetup(Setup):
    """Micro-batches cost a launch, so that many small ones are not free."""

    @cached_property
    def cost_model(self) -> CostModel:
        """FLOPs, and of a micro-batch those of some tokens."""
        return CostModel.from_shape(ModelShape.preset(self.model), ep_size=self.topology.ep_size)


SETUPS = tuple(
    LaunchedSetup(
        name,
        model=model,
        topology=topology,
        max_tokens_per_gpu=16384,
        global_batch_size=256,
        length_names=MIXED_LENGTHS,
        num_batches=0,
    )
    for name, model, topology in (
        ("dense: Qwen3-8B, DP8", "Qwen3-8B", Topology(8)),
        ("experts: Qwen3-30B-A3B, DP8 EP8", "Qwen3-30B-A3B", Topology(8, ep_size=8)),
        ("pipeline: Llama-3.1-70B, DP8 TP8 PP4", "Llama-3.1-70B", Topology(8, tp_size=8, pp_size=4)),
    )
)
EXCHANGE = 0.01
"""Cost of receiving a token's keys and values, of its linear cost: inside a node."""

Way = Callable[[NDArray[np.int64], Setup], Ranks | Assignment]


def packed(lengths: NDArray[np.int64], setup: Setup) -> Ranks:
    """First fit of each rank's own samples; no sample moves."""
    tokens, dp_size = setup.padded(lengths), setup.topology.dp_size
    ranks: list[list[list[int]]] = []
    for rank in range(dp_size):
        of_rank = range(rank, lengths.size, dp_size)
        bins = first_fit([tokens[sample] for sample in of_rank], capacity=setup.cap)
        ranks.append([[of_rank[position] for position in held] for held in bins])
    most = max(map(len, ranks))
    return [split_bins(bins, tokens=tokens, num_bins=most) for bins in ranks]


def _with_sizes(setup: Setup) -> dict[str, Any]:
    """What dynamic context-parallel sizes are planned and judged by."""
    model, topology = setup.cost_model, replace(setup.topology, dynamic_cp=True)
    return {
        "cost_model": replace(model, cp_exchange=round(EXCHANGE * model.linear)),
        "topology": topology,
        "limits": setup.limits,
    }


def dev_sizes(lengths: NDArray[np.int64], setup: Setup, *, scheduler: Callable[..., Rows]) -> Assignment:
    """Rows of dev's scheduler, whose groups stand by size so that each is of neighbouring ranks."""
    num_ranks = setup.topology.dp_cp_size
    rows = scheduler(lengths, num_ranks=num_ranks, max_tokens_per_gpu=setup.max_tokens_per_gpu)
    microbatch_of = np.zeros(lengths.size, dtype=np.int64)
    sizes = np.ones((num_ranks, len(rows)), dtype=np.int64)
    for slot, row in enumerate(rows):
        groups: dict[tuple[int, ...], int] = {}
        for ids in row:
            groups[tuple(ids)] = groups.get(tuple(ids), 0) + 1
        rank = 0
        for ids, size in sorted(groups.items(), key=lambda group: -group[1]):
            microbatch_of[list(ids)] = rank * len(rows) + slot
            sizes[rank : rank + size, slot] = size
            rank += size
    problem = Problem.of(lengths, objective=setup.objective, **_with_sizes(setup))
    return Assignment(**vars(problem), microbatch_of=microbatch_of, cp_size_grid=sizes)


def our_sizes(lengths: NDArray[np.int64], setup: Setup) -> Assignment:
    return build_data_schedule(lengths, **_with_sizes(setup))


def ways() -> dict[str, Way | None]:
    """Name → how it plans; None where what it needs is not there."""
    checkout = os.environ.get(CHECKOUT)
    dev = functools.partial(dev_sizes, scheduler=load_scheduler(Path(checkout))) if checkout else None
    try:
        import verl  # noqa: F401

        of_verl: dict[str, Way | None] = {"verl 0.9.1, its own functions": verl_wheel}
    except ImportError:
        of_verl = {"verl's way": equal_size_kk}
    return {
        "no balancing (Megatron's sampler)": round_robin,
        "packing, no sample moves": packed,
        "LPT by FLOPs, then first fit": lpt,
        "Megatron main, `dp_balanced`": next_fit,
        "Megatron dev, dynamic CP, its own functions": dev,
        "slime, `--balance-data`": first_fit_then_kk,
        "slime, `--balance-by-flops` (no cap)": kk_by_flops,
        **of_verl,
        "**ours**": ours,
        "**ours, dynamic CP**": our_sizes,
    }


def compared(*, lengths_folder: Path | None, num_batches: int) -> dict[str, Any]:
    """Way → setup → time over ours, part of micro-batches over the cap, CPU ms."""
    known = {name: way for name, way in ways().items() if way is not None}
    figures: dict[str, Any] = {name: {} for name in known}
    bounds: dict[str, float] = {}
    for setup in SETUPS:
        batches = list(global_batches(replace(setup, num_batches=num_batches), lengths_folder=lengths_folder))
        reference = [judged(ours(batch, setup), batch=batch, setup=setup) for batch in batches]
        bounds[setup.name] = statistics.fmean(metrics.over_bound for metrics in reference)
        for name, way in known.items():
            way(batches[0], setup)  # imports and caches
            timings = [timed(functools.partial(way, batch, setup)) for batch in batches]
            plans = [judged(plan, batch=batch, setup=setup) for (plan, _), batch in zip(timings, batches, strict=True)]
            ratios = [plan.predicted_cost / best.predicted_cost for plan, best in zip(plans, reference, strict=True)]
            num_microbatches = setup.topology.dp_size * sum(plan.num_microbatches for plan in plans)
            figures[name][setup.name] = [
                statistics.fmean(ratios),
                sum(plan.num_over_cap for plan in plans) / num_microbatches,
                statistics.median(cpu_ms for _, cpu_ms in timings),
            ]
    return {"ways": figures, "bounds": bounds, "num_batches": len(batches)}


def compared_text(figures: Mapping[str, Any]) -> str:
    made, ways_of = figures["made"], figures["ways"]
    rows = [
        (
            name,
            *(f"{ratio:.3f}, {cpu_ms:.1f}" for ratio, _, cpu_ms in cells.values()),
            f"{over_cap:.0%}" if (over_cap := max(cell[1] for cell in cells.values())) else "none",
        )
        for name, cells in ways_of.items()
    ]
    bounds = ", ".join(f"{bound:.4f} ({name.partition(':')[0]})" for name, bound in figures["bounds"].items())
    columns = " | ".join(["way", *figures["bounds"], "over cap"])
    return f"""### Compared with

`{made["command"]}`, {made["date"]}, revision {made["revision"]}, {made["device"]}. How long a step takes, in steps of
this package's plan, and CPU milliseconds to plan it; all ways in one process. Each setup: 256 samples a step, cap
16,384 tokens, {figures["num_batches"]} batches of {", ".join(MIXED_LENGTHS)} ({figures["lengths"]}). FLOPs and a launch
of each micro-batch count, gradients and optimizer do not. *Over cap*: part of the micro-batches, at most. *Dev*:
`next_hdp_group_packing_aware` from `{CHECKOUT}`.

**LPT alone is enough** where ranks meet once a step and no sample needs several ranks: it is then as good as any plan.
**Packing alone is enough** where lengths are alike. Experts and pipelines make ranks meet in every micro-batch, which
neither knows. In the pipeline this package makes more and smaller micro-batches than the cap asks for, which leaves a
smaller bubble; a lower cap would give others part of that. This package's plans stand at {bounds} of a lower bound,
which in a pipeline may not be attainable.

{table(columns, rows)}"""
