"""Plans with dynamic context-parallel sizes beside Megatron dev's scheduler, and with `--gain` measured step times.

MEGATRON_DEV_CHECKOUT names a checkout of Megatron-LM's dev branch, whose scheduler plans the same batches; without one
its column is empty. `--gain` trains on four CPU ranks, ten minutes. What is known of the other part stays published.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training_run import ALLOWANCES

from benchmarks.dynamic_cp.dev_scheduler import CHECKOUT, load_scheduler
from benchmarks.dynamic_cp.gain import FAMILIES, measure_gain, measure_models
from benchmarks.dynamic_cp.measure import measure_cell, measure_time
from benchmarks.dynamic_cp.setups import EXCHANGES, OBJECTIVES, SETUPS, TIMED_SETUPS, batches
from benchmarks.planner.setups import add_length_options, lengths_folder, lengths_said
from benchmarks.publish import Measured, published, say, table

TITLE = "Dynamic context parallelism"
NUM_BATCHES = 6
SHOWN_EXCHANGE = 0.01
"""Of the figures of each setup."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gain", action="store_true", help="train and measure step times, instead of planning")
    parser.add_argument("--rounds", type=int, default=8, help="of --gain: steps of each policy that count (default: 8)")
    parser.add_argument("--steps", type=int, default=6, help="of --gain: steps of each run by itself (default: 6)")
    parser.add_argument(
        "--models",
        nargs="+",
        default=[],
        choices=FAMILIES,
        help="of --gain: train small models of these families instead",
    )
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    known = published("dynamic_cp")
    figures = {part: known[part] for part in ("plans", "gain", "models") if part in known}
    if not args.gain:
        figures["plans"], raw = _plans(args)
        return Measured(
            figures, raw=raw, problems=["a plan breaks the cap"] if figures["plans"]["num_over_cap"] else []
        )
    if args.models:
        figures["models"] = raw = rows = measure_models(args.models, steps=args.steps)
    else:
        raw = measure_gain(rounds=args.rounds, steps=args.steps)
        figures["gain"], rows = _summed(raw), raw["policies"]
    off = max(row["loss_difference"] for row in rows.values())
    return Measured(
        figures, raw=raw, problems=[f"a loss differs by {off:.1e}"] if off > ALLOWANCES["fp32"].loss else []
    )


def _plans(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = lengths_folder(args)
    checkout = os.environ.get(CHECKOUT)
    scheduler = load_scheduler(Path(checkout)) if checkout else None
    cells: list[dict[str, Any]] = []
    for setup in SETUPS:
        ranks = {"num_ranks": setup.topology.dp_cp_size, "max_tokens_per_gpu": setup.max_tokens_per_gpu}
        planned = [
            (batch, scheduler(batch, **ranks) if scheduler else None)
            for batch in batches(setup, num_batches=NUM_BATCHES, folder=folder)
        ]
        for objective in OBJECTIVES:
            for exchange in EXCHANGES:
                cell = measure_cell(setup, exchange=exchange, objective=objective, planned=planned)
                cells.append(asdict(cell))
                say(f"{setup.name}, {objective}, {exchange:g}: {cell.ours:.4f}, dev {cell.dev or 0:.3f}")
    times = [
        asdict(time)
        for setup in TIMED_SETUPS
        for batch in batches(setup, num_batches=1, folder=folder)
        for time in measure_time(batch, setup=setup, exchange=SHOWN_EXCHANGE, announce=say)
    ]
    return {
        "lengths": lengths_said(folder),
        "means": _means(cells),
        "setups": _setups(cells),
        "num_over_cap": sum(cell["num_over_cap"] for cell in cells),
        "times": _times(times),
    }, cells


def _times(times: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    setups: dict[str, dict[str, float]] = {}
    for time in times:
        setups.setdefault(time["setup"], {})[time["objective"]] = time["cpu_ms"]
    return setups


def _means(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    means: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        for exchange in EXCHANGES:
            same_kind = [cell for cell in cells if (cell["objective"], cell["exchange"]) == (objective, exchange)]
            row: dict[str, Any] = {"objective": objective, "exchange": exchange, "num_setups": len(same_kind)}
            for name in ("ours", "bound", "fixed", "dev"):
                known = [cell[name] for cell in same_kind if cell[name] is not None]
                row[name] = statistics.fmean(known) if known else None
            for name in ("dev", "fixed"):
                row[f"below_{name}"] = sum(cell["ours"] < (cell[name] or 0) for cell in same_kind)
            means.append(row)
    return means


def _setups(cells: list[dict[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """Setup → objective → ours, dev's, bound, mean size."""
    setups: dict[str, dict[str, list[float | None]]] = {}
    for cell in cells:
        if cell["exchange"] == SHOWN_EXCHANGE:
            figures = [cell[name] for name in ("ours", "dev", "bound", "mean_size")]
            setups.setdefault(cell["setup"], {})[cell["objective"]] = figures
    return setups


def _summed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of each policy, and the gain of each round."""
    policies = {
        name: {key: statistics.median(value) if isinstance(value, list) else value for key, value in row.items()}
        for name, row in raw["policies"].items()
    }
    static = min((name for name in policies if name != "dynamic"), key=lambda name: policies[name]["cpu_seconds"])
    pairs = zip(raw["policies"][static]["cpu_seconds"], raw["policies"]["dynamic"]["cpu_seconds"], strict=True)
    rounds = [before / after for before, after in pairs]
    return {"policies": policies, "least": min(rounds), "most": max(rounds), "calibration": raw["calibration"]}


def section(figures: Mapping[str, Any]) -> str:
    parts = [_gain_text(figures["gain"])] if "gain" in figures else []
    parts += [_models_text(figures["models"])] if "models" in figures else []
    return "\n\n".join(parts + ([_plans_text(figures["plans"])] if "plans" in figures else []))


def _gain_text(gain: Mapping[str, Any]) -> str:
    policies = gain["policies"]
    fastest = policies["dynamic"]
    rows = [
        f"{name} | {row['cpu_seconds']:.3f} | {row['alone_cpu_seconds']:.3f} | {row['predicted_seconds']:.3f}"
        f" | {row['cpu_seconds'] / fastest['cpu_seconds']:.2f}×"
        f" | {row['predicted_seconds'] / fastest['predicted_seconds']:.2f}×"
        f" | {row['mean_cp_size']:.2f} | {row['loss_difference']:.1e}"
        for name, row in policies.items()
    ]
    columns = "policy | CPU s a step | in a run of its own | predicted s | dynamic is faster | predicted | mean size"
    errors = gain["calibration"]
    return f"""### Measured gain

Four CPU ranks over gloo, fp32, 2 layers of width 64; a step is 31 samples of 128 to 640 tokens and one of 8,192. All
policies plan with `--balance-data --balance-by-flops` and one fit of seconds, made before. Steps take turns between the
policies in one process group; CPU seconds of the busiest rank, medians; single rounds gain {gain["least"]:.2f} to
{gain["most"]:.2f} over the better static size. The seconds are off by {errors["held_out_error"]:.1%} on micro-batches
that were not fitted.

{table(f"{columns} | loss off by", rows)}"""


def _models_text(models: Mapping[str, Any]) -> str:
    rows = [
        f"{name} | {row['CP2']:.3f} | {row['dynamic']:.3f} | {row['CP2'] / row['dynamic']:.2f}×"
        f" | {', '.join(map(str, row['sizes']))} | {row['loss_difference']:.1e}"
        for name, row in models.items()
    ]
    return f"""### Families

Small models of these families on the same ranks and data, with stand-ins for kernels that need a GPU, planned by FLOPs,
in runs of their own; CPU seconds of the busiest rank, medians.

{table("model | CPU s at CP2 | dynamic | dynamic is faster | sizes that ran | loss off by", rows)}"""


def _plans_text(plans: Mapping[str, Any]) -> str:
    means = [
        (
            row["objective"],
            f"{row['exchange']:g}",
            *("–" if row[name] is None else f"{row[name]:.4f}" for name in ("ours", "bound", "dev", "fixed")),
            *(f"{row[f'below_{name}']} of {row['num_setups']}" for name in ("dev", "fixed")),
        )
        for row in plans["means"]
    ]
    far = {each: max(of[each][0] / of[each][2] for of in plans["setups"].values()) for each in OBJECTIVES}
    worst = " and ".join(f"{ratio:.3f} ({each})" for each, ratio in far.items())
    cpu_ms = {each: [setup_times[each] for setup_times in plans["times"].values()] for each in OBJECTIVES}
    spans = [f"{min(ms):,.0f} to {max(ms):,.0f} ({each})" for each, ms in cpu_ms.items() if ms]
    timed = f" Planning 8,192 samples takes {' and '.join(spans)} CPU ms." if spans else ""
    return f"""### Plans of dynamic sizes

Predicted time over the ideal: all work of the batch, evenly on all ranks, without communication or padding. Qwen3-8B,
FLOPs of training; {plans["lengths"]}. Receiving a token's keys and values costs 0, 0.01 or 0.08 of its linear cost:
none, inside a node, between nodes. *Dev*: Megatron dev's `next_hdp_group_packing_aware`, which under `step` is charged
its fullest rank's work only. *Fixed*: a perfect plan at the setup's one size. The bound counts communication and holds
for `step`; at an exchange of {SHOWN_EXCHANGE} no setup's mean is above {worst} times it. Micro-batches of several
samples over the cap: {plans["num_over_cap"]}.{timed}

{table("objective | exchange | ours | bound | dev | fixed | below dev | below fixed", means)}"""
