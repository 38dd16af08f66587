"""Draws a plan with dynamic context-parallel sizes beside one size for all: `python docs/pictures/dynamic_cp.py`.

What is said in figures, titles included, is computed here from the plans; nothing is drawn by hand.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from panels import Bar, Panel

from megatron_balance import CostModel, DataSchedule, Limits, ModelShape, Topology, build_data_schedule
from megatron_balance.cost.rates import BETWEEN_NODES, exchange_costs

PICTURE = Path(__file__).parent / "dynamic_cp.svg"
SHAPE = ModelShape.preset("Qwen3-8B")
COST_MODEL = replace(
    CostModel.from_shape(SHAPE),
    **exchange_costs(SHAPE, bytes_per_second=BETWEEN_NODES),
)
LIMITS = Limits(4096)
TOPOLOGY = Topology(2, cp_size=4, dynamic_cp=True)
LENGTHS = np.array([15000, 7000, 3900, 3000, 2500, 2000, 1800, *[1200] * 4, *[800] * 6, *[500] * 8, *[250] * 8])
"""Of one global batch, tokens."""

TIME = "predicted time; 1 is a bound that no plan can beat"


def panels() -> tuple[Panel, Panel]:
    """One size for all, then a size for each micro-batch."""
    dynamic = build_data_schedule(LENGTHS, cost_model=COST_MODEL, topology=TOPOLOGY, limits=LIMITS)
    bound = dynamic.lower_bound
    at_one_size = COST_MODEL.summed_over_cp(TOPOLOGY.cp_size)
    fixed = build_data_schedule(
        LENGTHS, cost_model=at_one_size, topology=TOPOLOGY.with_cp_size(TOPOLOGY.cp_size), limits=LIMITS
    )
    return (
        _panel(f"Context-parallel size {TOPOLOGY.cp_size} for all samples", fixed, bound=bound),
        _panel("A size for each micro-batch", dynamic, bound=bound),
    )


def _panel(title: str, schedule: DataSchedule, *, bound: int) -> Panel:
    """Micro-batches end to end, each over the ranks that share it; costs are those of one GPU."""
    cp_size = TOPOLOGY.dp_cp_size // len(schedule.ranks)
    times = schedule.cost_grid / bound
    ends = np.cumsum(times, axis=1)
    bars: list[Bar] = []
    for row, (sizes, slots) in enumerate(zip(schedule.cp_sizes, schedule.ranks, strict=True)):
        for slot, size in enumerate(sizes):
            first_leaf = row * cp_size
            if first_leaf % size:
                continue  # drawn with the group's first leaf
            duration = float(times[row, slot])
            tokens = int(LENGTHS[list(slots[slot])].sum())
            bars.append(
                Bar(
                    first_leaf,
                    start=float(ends[row, slot]) - duration,
                    duration=duration,
                    shade=size / TOPOLOGY.dp_cp_size,
                    label=f"{tokens / 1000:.1f}k" if duration > 0.07 else "",
                    num_rows=size,
                )
            )
    total = float(ends[:, -1].max())
    bars += [
        Bar(row * cp_size, start=end, duration=total - end, shade=None, num_rows=cp_size)
        for row, end in enumerate(ends[:, -1].tolist())
    ]
    rows = [f"rank {leaf}" for leaf in range(TOPOLOGY.dp_cp_size)]
    return Panel(f"{title}: {total:.3f}", rows=rows, bars=bars, meetings=[total])


def main() -> None:
    """Write dynamic_cp.svg beside this file."""
    from timeline import draw  # loads matplotlib

    draw(panels(), time_label=TIME, path=PICTURE)


if __name__ == "__main__":
    main()
