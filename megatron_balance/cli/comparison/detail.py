"""Shows one policy's plan: a table of its first step, and the file that `report` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_balance.cli.comparison.policies import PolicyResult
from megatron_balance.cli.table import print_table
from megatron_balance.errors import BalanceError
from megatron_balance.planner import ScheduleMetrics
from megatron_balance.record.judging import samples_of_ranks
from megatron_balance.record.step import StepRecord

MAX_SLOTS = 24
"""Slots printed of one step."""


def named_policy(results: Sequence[PolicyResult], *, name: str) -> PolicyResult:
    """The policy of `--policy`: its name in the table, also with hyphens for commas and spaces, or the end of it.

    Raises:
        BalanceError: there is none of this name, or there are several.
    """
    names = [result.policy.name.replace(", ", "-").replace(" ", "-").lower() for result in results]
    wanted = name.replace(", ", "-").replace(" ", "-").lower()
    found = [index for index, known in enumerate(names) if known == wanted]
    found = found or [index for index, known in enumerate(names) if known.endswith(f"-{wanted}")]
    if len(found) != 1:
        raise BalanceError(f"--policy is {name!r}: it must be one of {', '.join(names)}.")
    return results[found[0]]


def print_plan(result: PolicyResult) -> None:
    """Print the first step: its ranks, or the groups of each size in each slot."""
    step = result.steps[0]
    if step.cp_sizes is not None:
        _print_groups(step, metrics=result.metrics[0], steps_metrics=result.metrics)
        return
    ranks, lengths = samples_of_ranks(step), step.lengths
    costs = step.cost_grid.sum(axis=1)
    rows = [
        [
            str(rank),
            str(sum(bool(slot) for slot in slots)),
            str(sum(map(len, slots))),
            str(int(sum(lengths[slot].sum() for slot in slots))),
            str(max((int(lengths[slot].max()) for slot in slots if slot), default=0)),
            f"{costs[rank] / max(costs.mean(), 1e-300):.3f}",
        ]
        for rank, slots in enumerate(ranks)
    ]
    print(f"Step 1 under {result.policy.name}:")
    print_table(["rank", "micro-batches", "samples", "tokens", "longest", "cost over mean"], rows, emphasized=-1)


def plan_file(result: PolicyResult) -> dict[str, Any]:
    """The plan of every step, for `report`; with dynamic sizes ranks are leaves."""
    setting = result.setting
    return {
        "cost_model": asdict(setting.cost_model),
        "cost_name": setting.cost_name,
        "topology": asdict(setting.topology),
        "limits": asdict(setting.limits),
        "steps": [
            {
                "lengths": step.segment_lengths.tolist(),
                "num_microbatches": step.num_microbatches,
                "ranks": samples_of_ranks(step),
                **_cp_sizes(step),
                "metrics": asdict(metrics),
            }
            for step, metrics in zip(result.steps, result.metrics, strict=True)
        ],
    }


def _cp_sizes(step: StepRecord) -> dict[str, Any]:
    """`cp_sizes[leaf][slot]`, where sizes differ."""
    if step.cp_sizes is None:
        return {}
    sizes: list[list[int]] = step.cp_sizes.tolist()
    return {"cp_sizes": [[size for size in of_leaf if size] for of_leaf in sizes]}


def _print_groups(step: StepRecord, *, metrics: ScheduleMetrics, steps_metrics: tuple[ScheduleMetrics, ...]) -> None:
    """Print how many groups of each size the slots of a step have, and the sizes of all steps.

    Args:
        step: planned with sizes of their own.
        metrics: its figures.
        steps_metrics: those of all steps.
    """
    assert step.cp_sizes is not None, "one size needs no table"
    places, group_of = np.unique(step.slot_of, return_inverse=True)
    lengths, sizes = step.lengths, step.cp_sizes.reshape(-1)[places]
    shown = sorted(set(sizes.tolist()), reverse=True)
    rows: list[list[str]] = []
    for slot in range(min(step.num_microbatches, MAX_SLOTS)):
        here = np.flatnonzero(places % step.num_microbatches == slot)
        counts = [int((sizes[here] == size).sum()) for size in shown]
        samples = lengths[np.isin(group_of, here)]
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
