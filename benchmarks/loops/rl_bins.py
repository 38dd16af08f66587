"""Imbalance of the bins of Megatron's RL loop: dealt out in its two ways, and reordered by FLOPs before.

scripts/bench_loops.sh rl_bins --out benchmarks/results
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.markdown import table
from benchmarks.planner.options import add_options, lengths_folder
from benchmarks.planner.setups import RL_LENGTHS, draw_lengths
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from megatron_balance.cost.model import CostModel
from megatron_balance.mcore.rl_bins import order_of_bins
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.rank_seconds import busiest_over_mean

COMMAND = "scripts/bench_loops.sh rl_bins"
MODEL = "Qwen3-8B"
BIN_SIZE, MOST_IN_A_BIN, SEQUENCES_A_RANK, NUM_ROLLOUTS = 8192, 50, 64, 8
DP_SIZES = (8, 64)
DEALT = {"one after the other (fifo, the default)": False, "in turns (round-robin)": True}


def main() -> int:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    add_options(parser, command=f"{COMMAND} --out benchmarks/results")
    args = parser.parse_args()
    folder = lengths_folder(args)
    rows: list[dict[str, Any]] = []
    for name in RL_LENGTHS:
        for dp_size in DP_SIZES:
            num_sequences = SEQUENCES_A_RANK * dp_size
            drawn = draw_lengths(name, num_samples=NUM_ROLLOUTS * num_sequences, longest=BIN_SIZE, folder=folder)
            rollouts = drawn.reshape(NUM_ROLLOUTS, num_sequences).tolist()
            rows += [
                {"lengths": name, "dp_size": dp_size, "dealt": dealt}
                | measured(rollouts, dp_size=dp_size, in_turns=DEALT[dealt])
                for dealt in DEALT
            ]
    result = made_by(args.command, synthetic=folder is None, rows=rows)
    sys.stdout.write(write_results("rl_bins", result, report=report, out=args.out))
    return 0


def pack(lengths: Sequence[int]) -> list[list[int]]:
    """The lengths in each bin, as `SequencePacker` packs them: the longest first, into the newest bin or a new one."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        if not bins or sum(bins[-1]) + length > BIN_SIZE or len(bins[-1]) == MOST_IN_A_BIN:
            bins.append([])
        bins[-1].append(length)
    return bins


def loads(costs: Sequence[int], *, dp_size: int, in_turns: bool) -> NDArray[np.float64]:
    """The cost of each rank, as `distribute_packed_bins` deals bins out: `[dp_size]`."""
    of_bins = np.array(costs, dtype=np.float64)
    parts = [of_bins[rank::dp_size] for rank in range(dp_size)] if in_turns else np.array_split(of_bins, dp_size)
    return np.array([part.sum() for part in parts])


def measured(rollouts: Sequence[Sequence[int]], *, dp_size: int, in_turns: bool) -> dict[str, Any]:
    """Means over rollouts of busiest/mean, and the median milliseconds of a plan."""
    cost_model = CostModel.from_shape(ModelShape.preset(MODEL))
    figures: dict[str, list[float]] = {"num_bins": [], "stock": [], "balanced": [], "plan_ms": []}
    for lengths in rollouts:
        bins = pack(lengths)
        padding = [BIN_SIZE - sum(of_bin) for of_bin in bins]  # runs as a sequence
        costs = [
            sum(cost_model(length) for length in [*of_bin, rest] if length)
            for of_bin, rest in zip(bins, padding, strict=True)
        ]
        started = time.process_time()
        order = order_of_bins(costs, dp_size=dp_size, in_turns=in_turns)
        figures["plan_ms"].append(1e3 * (time.process_time() - started))
        figures["num_bins"].append(len(bins))
        for way, dealt in (("stock", costs), ("balanced", [costs[index] for index in order])):
            figures[way].append(busiest_over_mean(loads(dealt, dp_size=dp_size, in_turns=in_turns)[:, None]))
    return {name: median(values) if name == "plan_ms" else mean(values) for name, values in figures.items()}


def report(result: Mapping[str, Any]) -> str:
    """The page of the results."""
    rows = [
        (
            row["lengths"],
            row["dp_size"],
            row["dealt"],
            f"{row['num_bins']:.0f}",
            *(f"{row[way]:.3f}" for way in ("stock", "balanced")),
            f"{row['plan_ms']:.1f}",
        )
        for row in result["rows"]
    ]
    columns = "lengths | DP | bins are dealt out | bins | busiest/mean, Megatron's order | ours | plan, CPU ms"
    source = "drawn from the built-in fits of the length sets" if result["synthetic"] else "of the length sets"
    return f"""{page_head("Bins of the RL loop", result["command"])}
Sequences of a rollout, {SEQUENCES_A_RANK} a data-parallel rank, lengths {source},
packed into bins of {BIN_SIZE:,} tokens as Megatron packs them (at most {MOST_IN_A_BIN} in a bin). Planned FLOPs of
{MODEL} in the bins of a rank, padding included; means over {NUM_ROLLOUTS} rollouts. In a slot, ours gives ranks the
bins that Megatron gives them, in another order. {versions_of(result)}.

{table(columns, rows, align="lrlrrrr")}
"""


if __name__ == "__main__":
    sys.exit(main())
