"""The figures of a balanced step by name, their means over steps, the log line made of them, and alarms.

Seconds of plan, exchange and waiting are those of the rank that logs, measured ones those of the data-parallel ranks of
one pipeline stage and context-parallel rank. `tokens_at_cp_N` are tokens that ran at context-parallel size N over all.
The watch adds `exposed_seconds`, `num_shapes` and `peak_GiB`. A figure that is not known is absent, and left out of
means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from megatron_balance.planner import DataSchedule, slowest_over_mean, unavoidable_waiting
from megatron_balance.runtime.log import warn_once

Figures = dict[str, float]

REPORTED_LATER = 2
"""Steps after which seconds are reported: the next step is gathered while the one after that runs."""

STEPS_OF_ALARM = 20
MOST_EXPOSED, MOST_UNEVEN = 0.01, 0.1
"""Waiting for data over the time between two steps, and measured imbalance above the planned one, before an alarm."""

EXPOSED = (
    "steps wait for their data {:.1%} of their time: look whether the loader keeps up (--num-workers), and whether "
    "ranks have CPU cores to spare."
)
UNEVEN = (
    "ranks are less even than planned: max/mean of their time is {:.0%} above the plan's. Fit the costs to a record of "
    "this run (megatron-balance fit), or look for a slow device."
)


def figures_of(schedule: DataSchedule, *, step_tokens: int, seconds: NDArray[np.float64]) -> Figures:
    """What the plan tells, with `[dp_size]` seconds of an earlier step (0 where not known) and the tokens that ran."""
    topology, total = schedule.topology, max(int(schedule.lengths.sum()), 1)
    planned = slowest_over_mean(schedule.cost_grid, objective=schedule.objective, topology=topology)
    figures: Figures = {
        "planned_imbalance": planned,
        "over_bound": schedule.predicted_cost / schedule.lower_bound if schedule.lower_bound else 1.0,
        "unavoidable_waiting": unavoidable_waiting(schedule.cost_grid, lower_bound=schedule.lower_bound),
        "oversized_samples": len(schedule.oversized),
        "num_microbatches": schedule.num_microbatches,
        "padding_fraction": 1 - int(schedule.lengths.sum()) / max(step_tokens, 1),
    }
    if (seconds > 0).all():
        figures["measured_imbalance"] = float(seconds.max() / seconds.mean())
        figures["busiest_rank_seconds"] = float(seconds.max())
    if topology.dynamic_cp:
        sizes = schedule.cp_size_grid.ravel()[schedule.microbatch_of]
        shares = {size: int(schedule.lengths[sizes == size].sum()) / total for size in topology.dynamic_cp_sizes}
        figures |= {f"tokens_at_cp_{size}": share for size, share in shares.items()}
        figures["mean_cp_size"] = sum(size * share for size, share in shares.items())
    elif schedule.home_ranks is not None:
        moved = schedule.lengths[schedule.destinations() != schedule.home_ranks]
        figures["moved_fraction"] = int(moved.sum()) / total
    return figures


def mean_figures(steps: Iterable[Figures]) -> Figures:
    """Each figure's mean over the steps where it is known."""
    values: dict[str, list[float]] = {}
    for figures in steps:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    return {name: sum(known) / len(known) for name, known in values.items()}


def log_line(figures: Figures) -> str:
    """The log line of these steps."""
    measured = "unknown"
    if "measured_imbalance" in figures:
        busiest = figures["busiest_rank_seconds"] * 1e3
        measured = f"{figures['measured_imbalance']:.4f} (busiest rank {busiest:.1f} ms)"
    parts = [
        f"max/mean of rank time: planned {figures['planned_imbalance']:.4f}, measured {measured}",
        f"{figures['over_bound']:.4f} of the bound, where {figures['unavoidable_waiting']:.1%} of the time is waiting",
        f"micro-batches {figures['num_microbatches']:.4g} ({figures['num_shapes']:.0f} shapes so far)",
    ]
    if "mean_cp_size" in figures:
        shares = {name.removeprefix("tokens_at_cp_"): share for name, share in figures.items() if "tokens_at" in name}
        of_sizes = ", ".join(f"{size}: {share:.0%}" for size, share in shares.items() if share)
        parts.append(f"context-parallel size {figures['mean_cp_size']:.2f} of the mean token ({of_sizes})")
    parts.append(f"padding {figures['padding_fraction']:.1%}")
    if figures["oversized_samples"]:
        parts.append(f"samples over the cap {figures['oversized_samples']:.4g}")
    if "moved_fraction" in figures:
        parts.append(f"moved {figures['moved_fraction']:.0%} of tokens")
    parts += [f"{name} {figures[f'{name}_seconds'] * 1e3:.1f} ms" for name in ("plan", "exchange", "exposed")]
    return " | ".join(parts)


class Alarms:
    """Warn once of each excess that lasts STEPS_OF_ALARM steps in a row; steps where it is not known are left out."""

    def __init__(self) -> None:
        self._num_steps = {EXPOSED: 0, UNEVEN: 0}
        self._planned: deque[float] = deque(maxlen=REPORTED_LATER + 1)

    def check(self, figures: Figures, *, step_seconds: float | None) -> None:
        """Of one step: the measured imbalance is that of an earlier one; seconds since the step before, if known."""
        self._planned.append(figures["planned_imbalance"])
        if step_seconds is not None:
            self._count(EXPOSED, figures["exposed_seconds"] / step_seconds, most=MOST_EXPOSED)
        if "measured_imbalance" in figures and len(self._planned) > REPORTED_LATER:
            self._count(UNEVEN, figures["measured_imbalance"] / self._planned[0] - 1, most=MOST_UNEVEN)

    def _count(self, text: str, value: float, *, most: float) -> None:
        self._num_steps[text] = self._num_steps[text] + 1 if value > most else 0
        if self._num_steps[text] == STEPS_OF_ALARM:
            warn_once(text.format(value), topic=text)
