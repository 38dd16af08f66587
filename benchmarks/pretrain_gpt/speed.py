"""Speed of Megatron's `--sft` on two data-parallel ranks: stock, without its padding, and balanced.

Stock `--sft` fills every row up to `--seq-length` and computes the filling. `--use-dynamic-batch-size` packs the rows
without it; `--balance-data` and `--balance-by-flops` then even out the ranks. So the table has a row for each flag, and
each factor is that flag's own. One conversation a row, the whole built-in corpus, the model of the quickstart.

Invariant: every run trains on the same samples from the same weights, and its losses are stock's within rounding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstart import FLAGS as MODEL_FLAGS
from quickstart import NUM_RANKS, SEQ_LENGTH, TRAIN_ITERS, WARM_UP_STEPS
from rounding import ALLOWANCES
from training_run import Recorded, largest_difference

from benchmarks.markdown import table
from benchmarks.results_file import add_checkout

NAME = "pretrain_gpt_speed"

_PACKED = f"--use-dynamic-batch-size --max-tokens-per-gpu {SEQ_LENGTH}"
POLICIES = {
    "stock": "",
    "without padding": _PACKED,
    "+ `--balance-data`": f"{_PACKED} --balance-data",
    "+ `--balance-by-flops`": f"{_PACKED} --balance-data --balance-by-flops",
}
"""Name → balance flags, each policy one flag more than the one before."""

_HEAD = """# Speed of Megatron's `--sft`

Made by `scripts/check_upstream.sh CHECKOUT --speed --publish`; do not edit. Megatron's own pretrain_gpt.py, unedited,
trains the quickstart's model on {ranks} data-parallel CPU ranks, on conversations made of Python's standard library,
one a row of {seq_length} tokens. Seconds are CPU seconds of the busiest rank, the mean of {steps} steps; a factor is
that of the row above over this one. *Without padding* (`--use-dynamic-batch-size`) packs samples instead of filling
rows up.
"""


def measure(run: Callable[[Sequence[str]], Recorded]) -> dict[str, Any]:
    """Train under every policy.

    Args:
        run: trains with these flags beside the checkout's own.

    Returns:
        dict: for every policy, `cpu_seconds`, `seconds` and `loss_difference`.
    """
    runs = {name: run([*MODEL_FLAGS, *flags.split()]) for name, flags in POLICIES.items()}
    return {"policies": {name: _figures(recorded, stock=runs["stock"]) for name, recorded in runs.items()}}


def _figures(run: Recorded, *, stock: Recorded) -> dict[str, float]:
    steps = [list(of_step) for of_step in zip(*run.ranks, strict=True)][WARM_UP_STEPS:]
    return {
        "cpu_seconds": statistics.mean(max(rank["cpu_seconds"] for rank in ranks) for ranks in steps),
        "seconds": statistics.mean(max(rank["seconds"] for rank in ranks) for ranks in steps),
        "loss_difference": largest_difference(run, reference=stock, key="lm_loss"),
    }


def is_equal(result: Mapping[str, Any]) -> bool:
    """All losses are stock's within rounding."""
    return all(row["loss_difference"] <= ALLOWANCES["fp32"].loss for row in result["policies"].values())


def table_of(result: Mapping[str, Any]) -> str:
    """The policies, each with its own factor and that over stock."""
    of_policies: dict[str, dict[str, float]] = result["policies"]
    stock = above = of_policies["stock"]["cpu_seconds"]
    rows: list[tuple[str, ...]] = []
    for name, row in of_policies.items():
        seconds = row["cpu_seconds"]
        factor = "–" if name == "stock" else f"{above / seconds:.2f}×"
        difference = "–" if name == "stock" else f"{row['loss_difference']:.1e}"
        rows.append((name, f"{seconds:.2f}", factor, f"{stock / seconds:.2f}×", difference))
        above = seconds
    columns = "policy | busiest rank, CPU s a step | this flag's factor | speed over stock | largest loss difference"
    return table(columns, rows, align="lllll") + "\n"


def publish(result: Mapping[str, Any], *, checkout: str, folder: Path) -> None:
    """Write the result of this checkout beside those of others."""
    add_checkout(NAME, result, checkout=checkout, report=_page, out=folder)


def _page(known: Mapping[str, Any]) -> str:
    tables = [f"\n## {name}, {each['environment']['device']}\n\n{table_of(each)}" for name, each in known.items()]
    head = _HEAD.format(ranks=NUM_RANKS, seq_length=SEQ_LENGTH, steps=TRAIN_ITERS - WARM_UP_STEPS)
    return head + "".join(tables)
