"""What unlike speeds of ranks cost a step, and how much of that plans would win back that knew them.

Blind: plans whose ranks carry the same work. Known: those of `--balance-rank-speeds` by the true speeds, in whole per
mille; learned: by speeds that ten steps have shown, each off by 1 %. A speed is that of a data-parallel rank: of its
slowest GPU. Speeds are drawn from a normal distribution.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import MIXED_LENGTHS, add_length_options, draw_lengths, lengths_folder, lengths_said
from benchmarks.publish import Measured, table
from megatron_balance import CostModel, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.mcore.setup.rules import TUNED_STEPS
from megatron_balance.planner.speeds import with_speeds

TITLE = "Ranks of unlike speed"
SPREADS = (0.005, 0.01, 0.02)
NUM_DRAWS = 60
MODEL, CAP = "Qwen3-8B", 16384


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    """Draws speeds for each setup and spread."""
    folder = lengths_folder(args)
    losses = {f"DP{dp_size}": _losses(Topology(dp_size), folder=folder) for dp_size in (8, 32, 128)}
    return Measured({"losses": losses, "lengths": lengths_said(folder)})


def _losses(topology: Topology, *, folder: Path | None) -> dict[str, list[float]]:
    """By spread the mean percent of a step, over shares in proportion to speeds: blind, known, learned."""
    rng, ranks = np.random.default_rng(0), topology.dp_size
    cost_model = CostModel.from_shape(ModelShape.preset(MODEL))
    rows: dict[str, list[NDArray[np.float64]]] = {f"{spread:.1%}": [] for spread in SPREADS}
    for name in MIXED_LENGTHS:
        batch = draw_lengths(name, num_samples=32 * ranks, longest=CAP, folder=folder)
        blind = build_data_schedule(batch, cost_model=cost_model, topology=topology, limits=Limits(CAP))
        for spread in SPREADS:
            for _ in range(NUM_DRAWS):
                speeds = 1 + rng.normal(0, spread, ranks)
                learned = speeds * (1 + rng.normal(0, 0.01 / TUNED_STEPS**0.5, ranks))
                plans = (
                    blind,
                    *(with_speeds(blind, (1000 * of).round().astype(int).tolist()) for of in (speeds, learned)),
                )
                work = np.array([plan.cost_grid.sum(axis=1) for plan in plans], dtype=float)
                rows[f"{spread:.1%}"].append((work / speeds).max(axis=1) / (work.sum(axis=1) / speeds.sum()))
    return {spread: (100 * (np.mean(ratios, axis=0) - 1)).tolist() for spread, ratios in rows.items()}


def section(figures: Mapping[str, Any]) -> str:
    """Markdown of the figures."""
    rows = [
        [spread, *(" / ".join(f"{value:.2f}" for value in losses[spread]) for losses in figures["losses"].values())]
        for spread in next(iter(figures["losses"].values()))
    ]
    return f"""
Percent of a step above shares in proportion to speeds, blind / known / learned, mean over {NUM_DRAWS} draws of speeds
and batches of {figures["lengths"]}: {MODEL}, cap {CAP} tokens, 32 samples a rank. *Learned* by ten steps, each off by
1 %. The spread is that of data-parallel ranks, each as slow as its slowest GPU; that of healthy GPUs is not known here.

{table(" | ".join(["spread", *figures["losses"]]), rows)}
"""
