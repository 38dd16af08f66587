"""Prints the groups of a plan with dynamic context-parallel sizes, slot by slot."""

from __future__ import annotations

import numpy as np

from megatron_balance.cli.table import print_table
from megatron_balance.planner.dynamic_cp.groups import Groups
from megatron_balance.planner.metrics import ScheduleMetrics
from megatron_balance.record.step import StepRecord

MAX_SLOTS = 24
"""Slots printed of one step."""


def print_groups(step: StepRecord, *, metrics: ScheduleMetrics, steps_metrics: tuple[ScheduleMetrics, ...]) -> None:
    """Print how many groups of each size the slots of a step have, and the sizes of all steps.

    Args:
        step: planned with sizes of their own.
        metrics: its figures.
        steps_metrics: those of all steps.
    """
    assert step.cp_sizes is not None, "one size needs no table"
    groups = Groups.of_slots(step.slot_of, cp_sizes=step.cp_sizes)
    lengths, sizes = step.lengths, 1 << groups.levels
    shown = sorted(set(sizes.tolist()), reverse=True)
    rows: list[list[str]] = []
    for slot in range(min(step.num_microbatches, MAX_SLOTS)):
        here = np.flatnonzero(groups.slots == slot)
        counts = [int((sizes[here] == size).sum()) for size in shown]
        samples = lengths[np.isin(groups.group_of, here)]
        running = int(sizes[here].sum())
        rows.append(
            [
                str(slot),
                *(str(count) if count else "." for count in counts),
                str(len(step.cp_sizes) - running),
                str(samples.size),
                str(samples.sum()),
                str(samples.max(initial=0)),
            ]
        )
    print(
        f"Step 1, groups of each context-parallel size in each slot ({metrics.mean_cp_size:.1f} ranks share a token):"
    )
    columns = ["slot", *(f"CP {size}" for size in shown), "idle ranks", "samples", "tokens", "longest"]
    print_table(columns, rows, emphasized=-1)
    if step.num_microbatches > MAX_SLOTS:
        print(f"and {step.num_microbatches - MAX_SLOTS} slots more")
    tokens: dict[int, int] = {}
    for of_step in steps_metrics:
        for size, count in of_step.tokens_by_cp_size:
            tokens[size] = tokens.get(size, 0) + count
    total = max(sum(tokens.values()), 1)
    parts = ", ".join(f"CP {size} {count / total:.0%}" for size, count in sorted(tokens.items()))
    print(f"Tokens by size, all steps: {parts}.")
