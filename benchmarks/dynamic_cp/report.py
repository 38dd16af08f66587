"""The page of results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dynamic_cp.dev_scheduler import CHECKOUT
from benchmarks.dynamic_cp.setups import EXCHANGES, OBJECTIVES
from benchmarks.markdown import table
from benchmarks.results_file import page_head, versions_of

GOALS = {"step": 1.003, "microbatch": 1.012}
"""Mean time over the ideal without communication that is aimed at."""


def report(result: Mapping[str, Any]) -> str:
    """The page, from the content of the results file."""
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    lengths = "the real length sets" if result["real_lengths"] else "the fits built into the package"
    dev = result["dev"] or f"not run: {CHECKOUT} names no checkout"
    tables = "\n\n".join(f"## {objective}\n\n{_table(cells, objective)}" for objective in OBJECTIVES)
    times = table(
        "setup | objective | CPU ms | over the bound",
        (
            (time["setup"], time["objective"], f"{time['cpu_ms']:.0f}", f"{time['over_bound']:.4f}")
            for time in result["times"]
        ),
        align="llrr",
    )
    return f"""{page_head("Plans with dynamic context-parallel sizes", result["command"])}
Predicted time over the ideal: all work of the batch, evenly on all ranks, without communication or padding. Qwen3-8B,
FLOPs of training, mean of {result["num_batches"]} batches; named sets are {lengths}. Receiving a token's keys and
values costs 0, 0.01 or 0.08 of its linear cost: none, inside a node, between nodes.

Cells are *this package* / *Megatron dev's scheduler* / *bound*. The bound counts communication and holds for `step`;
under `microbatch`, where ranks meet in every slot, it says less. *Without dummies* is this package's plan as dev's
executor takes it: a sample on every rank in every micro-batch; *below dev* counts it. *Fixed* is a perfect plan in
which every sample runs at the setup's CP. *Mean size* is the ranks that share a token. Under `step` dev's scheduler
is charged its fullest rank's work, not what its groups wait for.

Megatron dev: {dev}. {versions_of(result)}.

{tables}

## Means, and what must hold

{_verdicts(cells)}

## Time to plan

Lengths to schedule, `build_data_schedule`, one core, median of five; communication 0.01.

{times}
"""


def _table(cells: Sequence[Mapping[str, Any]], objective: str) -> str:
    chosen = {(cell["setup"], cell["exchange"]): cell for cell in cells if cell["objective"] == objective}
    names = list(dict.fromkeys(setup for setup, _ in chosen))
    rows = [
        (
            name,
            *(_cell(chosen[name, exchange]) for exchange in EXCHANGES),
            " / ".join(f"{chosen[name, exchange]['filled']:.4f}" for exchange in EXCHANGES),
            " / ".join(f"{chosen[name, exchange]['fixed']:.3f}" for exchange in EXCHANGES),
            " / ".join(f"{chosen[name, exchange]['mean_size']:.1f}" for exchange in EXCHANGES),
        )
        for name in names
    ]
    columns = (
        "setup | " + " | ".join(f"{exchange:g}" for exchange in EXCHANGES) + " | without dummies | fixed | mean size"
    )
    return table(columns, rows)


def _cell(cell: Mapping[str, Any]) -> str:
    dev = "–" if cell["dev"] is None else f"{cell['dev']:.3f}"
    return f"**{cell['ours']:.4f}** / {dev} / {cell['bound']:.4f}"


def _verdicts(cells: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = []
    for objective, goal in GOALS.items():
        for exchange in EXCHANGES:
            chosen = [cell for cell in cells if (cell["objective"], cell["exchange"]) == (objective, exchange)]
            mean = statistics.fmean(cell["ours"] for cell in chosen)
            filled = statistics.fmean(cell["filled"] for cell in chosen)
            judged = [cell for cell in chosen if cell["dev"] is not None]
            devs = f"{statistics.fmean(cell['dev'] for cell in judged):.4f}" if judged else "–"
            below_dev = f"{sum(cell['filled'] < cell['dev'] for cell in judged)} of {len(judged)}"
            below_fixed = f"{sum(cell['ours'] < cell['fixed'] for cell in chosen)} of {len(chosen)}"
            aim = f"≤ {goal}" if not exchange else ""
            rows.append((objective, f"{exchange:g}", f"{mean:.4f}", aim, f"{filled:.4f}", devs, below_dev, below_fixed))
    columns = "objective | communication | mean | aimed at | without dummies | dev's mean | below dev | below fixed"
    over = sum(cell["num_over_cap"] for cell in cells)
    return (
        f"{table(columns, rows)}\n\nMicro-batches of several samples over the cap: {over}. Every plan passed its check."
    )
