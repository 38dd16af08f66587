"""Plans of 64 to 8,192 data-parallel ranks, dense and with experts, without and with a pipeline: time and distance.

    python -m benchmarks.planner.scale --out benchmarks/results     # two minutes

64 samples a rank of real lengths. Large batches are planned as copies of the plan of a part
(`megatron_balance/planner/packing/copies.py`); beside each plan stand that of the batch searched as a whole, and the
cheapest level, to which a run comes whose plans take more than a tenth of a step (`mcore/step/plan_budget.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.markdown import table
from benchmarks.planner.measure import timed
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.setups import Setup, global_batches
from benchmarks.results_file import made_by, page_head, page_of, write_results
from megatron_balance import DataSchedule, Topology, build_data_schedule
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.planner.packing import place
from megatron_balance.planner.problem import CHEAPEST_LEVEL

SAMPLES_PER_RANK = 64
SIZES = (64, 256, 1024, 4096, 8192)
EXPERTS = (1, 8, 64)
STAGES = (1, 8)
STEP_SECONDS = 5
"""Of the step that a tenth is compared with."""


@dataclass(frozen=True)
class Row:
    """One cell: a batch planned as a run plans it, as a whole, and at the cheapest level.

    Attributes:
        dp_size: data-parallel ranks.
        ep_size: expert-parallel ranks; 1 for a dense model.
        pp_size: pipeline stages.
        cpu_ms: of the plan, milliseconds.
        over_bound: predicted cost over the lower bound.
        whole_cpu_ms: of the plan of the batch as a whole.
        whole_over_bound: its predicted cost over the bound.
        cheapest_cpu_ms: of the plan at the cheapest level.
        cheapest_over_bound: its predicted cost over the bound.
    """

    dp_size: int
    ep_size: int
    pp_size: int
    cpu_ms: float
    over_bound: float
    whole_cpu_ms: float
    whole_over_bound: float
    cheapest_cpu_ms: float
    cheapest_over_bound: float


def main() -> int:
    """Plans every cell, and writes planner_scale.json and .md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, command="python -m benchmarks.planner.scale --out benchmarks/results")
    args = parser.parse_args()
    run_scale(
        SIZES,
        folder=lengths_folder(args),
        command=args.command,
        out=args.out,
        announce=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    )
    return 0


def run_scale(
    sizes: Sequence[int], *, folder: Path | None, command: str, out: Path, announce: Callable[[str], None]
) -> None:
    """Plans every cell of these numbers of ranks, and writes planner_scale.json and .md."""
    rows: list[Row] = []
    for row in plan_cells(sizes, folder=folder):
        rows.append(row)
        announce(" ".join(_cells(row)))
    result = made_by(command, rows=[asdict(row) for row in rows], real_lengths=folder is not None)
    write_results("planner_scale", result, report=_report, out=out)


def plan_cells(sizes: Sequence[int], *, folder: Path | None) -> Iterator[Row]:
    """The rows of all cells."""
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
        plan, timing = timed(lambda arguments=arguments: build_data_schedule(**arguments))
        with patch.object(place, "num_parts", return_value=1):
            whole, of_whole = timed(lambda arguments=arguments: build_data_schedule(**arguments))
        cheapest, of_cheapest = timed(
            lambda arguments=arguments: build_data_schedule(**arguments, level=CHEAPEST_LEVEL)
        )
        yield Row(
            dp_size,
            ep_size,
            pp_size,
            cpu_ms=timing.cpu_ms,
            over_bound=_over_bound(plan),
            whole_cpu_ms=of_whole.cpu_ms,
            whole_over_bound=_over_bound(whole),
            cheapest_cpu_ms=of_cheapest.cpu_ms,
            cheapest_over_bound=_over_bound(cheapest),
        )


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


def _over_bound(plan: DataSchedule) -> float:
    plan.check()
    return plan.predicted_cost / plan.lower_bound


def _cells(row: Row) -> list[str]:
    kind = "dense" if row.ep_size == 1 else f"EP{row.ep_size}"
    return [
        f"DP{row.dp_size:,} {kind} PP{row.pp_size}",
        f"{row.dp_size * SAMPLES_PER_RANK:,}",
        f"{row.cpu_ms:.0f}",
        f"{row.cpu_ms / STEP_SECONDS / 10:.1f}",
        f"{row.over_bound:.4f}",
        f"{row.whole_cpu_ms:.0f}",
        f"{row.whole_over_bound:.4f}",
        f"{row.cheapest_cpu_ms:.0f}",
        f"{row.cheapest_over_bound:.4f}",
    ]


def page_table(result: dict[str, Any], *, cheapest: bool = False) -> str:
    """The table of docs/scale.md: CPU ms and, in brackets, the distance of each cell's plan.

    Args:
        result: of planner_scale.json.
        cheapest: of the cheapest level, where plans are those of the size.
    """
    columns = list(product(EXPERTS, STAGES))
    cells: dict[tuple[int, int, int], str] = {}
    for row in (Row(**row) for row in result["rows"]):
        shown = (row.cheapest_cpu_ms, row.cheapest_over_bound) if cheapest else (row.cpu_ms, row.over_bound)
        cells[row.dp_size, row.ep_size, row.pp_size] = "{:.0f} ({:.4f})".format(*shown)
    sizes = list(dict.fromkeys(dp_size for dp_size, _, _ in cells))
    lines = [[f"{size:,}", *(cells[(size, *column)] for column in columns)] for size in sizes]
    return table("data-parallel ranks | " + " | ".join(_kind(*column) for column in columns), lines, align="r" * 7)


def _kind(ep_size: int, pp_size: int) -> str:
    return f"{'dense' if ep_size == 1 else f'EP{ep_size}'}, PP{pp_size}"


def _report(result: dict[str, Any]) -> str:
    rows = [Row(**row) for row in result["rows"]]
    lengths = "real" if result["real_lengths"] else "drawn from the built-in fits"
    return page_of(
        [
            page_head("Planning at scale", result["command"]),
            f"{SAMPLES_PER_RANK} samples a rank, 16,384 tokens a micro-batch, Qwen3-8B or Qwen3-30B-A3B; lengths:",
            f"{lengths}.",
            f"*As a whole*: the batch searched without parts. *Cheapest*: level {CHEAPEST_LEVEL}.",
            f"PP1 counts no fixed cost of a micro-batch, PP8 that of {MICROBATCH_TOKENS} tokens.",
            "The bound of a pipeline counts a bubble of empty micro-batches only: no plan comes near it.",
            "",
            table(
                f"ranks | samples | CPU ms | % of {STEP_SECONDS} s | over bound | as a whole: CPU ms | over bound"
                " | cheapest: CPU ms | over bound",
                map(_cells, rows),
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
