"""Prints comparisons as text; `compare --help` explains the columns."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_balance.cli.comparison.results import Comparison, PolicyMeans
from megatron_balance.cli.table import print_table


def print_policies(shown: Sequence[PolicyMeans], *, comparison: Comparison, advised: str) -> None:
    """Print one row per policy, stock first, and the flags of each. `advised`: name of the policy to highlight."""
    names = [figures.name for figures in shown]
    rows = [_cells(figures, comparison) for figures in shown]
    print_table(_columns(comparison), rows, emphasized=names.index(advised))
    print("Flags:")
    width = max(map(len, names))
    for figures in shown[1:]:
        print(f"  {figures.name:<{width}}  {figures.flags}")


def _columns(comparison: Comparison) -> list[str]:
    timed = ["step s", "tokens/s/GPU"] if comparison.rate.is_absolute else []
    imbalances = [("step", "step"), ("microbatch", "micro-batch"), ("pipeline", "pipeline")]
    free = ["no comm."] if comparison.counts_communication else []
    sizes = ["CP"] if _has_sizes(comparison) else []
    marked = [name + "*" * (objective == comparison.waiting) for objective, name in imbalances]
    shown = ["over bound", "padding", "headroom", *sizes, "micro-batches", "plan ms"]
    return ["policy", *timed, "speed", *free, *marked, *shown]


def _has_sizes(comparison: Comparison) -> bool:
    return any(result.policy.dynamic_cp for result in comparison.results)


def _cells(figures: PolicyMeans, comparison: Comparison) -> list[str]:
    timed = [f"{figures.seconds_per_step:.4g}", f"{figures.tokens_per_second_per_gpu:.0f}"]
    return [
        figures.name,
        *(timed if comparison.rate.is_absolute else []),
        f"{figures.speedup:.2f}x",
        *([] if figures.free_speedup is None else [f"{figures.free_speedup:.2f}x"]),
        f"{figures.step_imbalance:.3f}",
        f"{figures.microbatch_imbalance:.3f}",
        f"{figures.pipeline_imbalance:.3f}",
        f"+{figures.over_bound:.1%}",
        f"{figures.padding:.1%}",
        f"{figures.cap_headroom:.1%}",
        *([f"{figures.mean_cp_size:.1f}"] if _has_sizes(comparison) else []),
        f"{figures.num_microbatches:.1f}",
        f"{figures.plan_seconds * 1e3:.1f}",
    ]
