"""Plans of this package beside other systems' own, their speed, and what a wrong cost model loses.

Every way plans the same batches; one cost model judges all: the FLOPs of the model, over a lower bound that no plan can
beat. verl's and AReaL's own functions run where their wheels are installed: `scripts/bench planner --with-wheels`.
`--compared` makes the short table of compared.py instead; what is known of the other part stays published.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from benchmarks.planner.baselines import BASELINES
from benchmarks.planner.compared import compared, compared_text
from benchmarks.planner.measure import measure_row
from benchmarks.planner.setups import (
    SETUPS,
    Setup,
    add_length_options,
    global_batches,
    lengths_folder,
    lengths_said,
)
from benchmarks.publish import Measured, made_by, published, say, table

TITLE = "Planner"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compared", action="store_true", help="three setups in ways that one may have, instead")
    add_length_options(parser)


def measure(args: argparse.Namespace) -> Measured:
    folder, known = lengths_folder(args), published("planner")
    if args.compared:
        measured = compared(lengths_folder=folder, num_batches=4)
        known["compared"] = {
            "made": made_by("python -m benchmarks planner --compared"),
            "lengths": lengths_said(folder),
            **measured,
        }
        return Measured(known, raw=measured)
    rows: list[dict[str, Any]] = []
    for setup in SETUPS:
        batches = list(global_batches(setup, lengths_folder=folder))
        say(f"{setup.name}: {len(batches)} batches of {setup.global_batch_size} samples")
        for planner in BASELINES:
            row = asdict(measure_row(planner, setup=setup, batches=batches))
            say(f"    {planner:50} {row['mean_over_bound']} {row['note']}")
            rows.append(row)
    figures = {key: known[key] for key in ("compared",) if key in known} | {
        "lengths": lengths_said(folder),
        "wheels": {name: _version(name) for name in ("verl", "areal")},
        "setups": {setup.name: _described(setup) for setup in SETUPS},
        "plans": _plans(rows),
    }
    return Measured(figures, raw=rows)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _described(setup: Setup) -> str:
    return (
        f"{setup.model}, ranks meet by {setup.objective}, {setup.global_batch_size} samples a step, cap "
        f"{setup.max_tokens_per_gpu} tokens, {setup.num_batches * len(setup.length_names)} batches of "
        f"{', '.join(setup.length_names)}"
    )


def _plans(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Planner → setup → mean and largest distance over the bound, part over the cap, CPU ms; or a note."""
    plans: dict[str, dict[str, Any]] = {}
    for row in rows:
        cells = plans.setdefault(row["planner"], {})
        if row["mean_over_bound"] is None:
            cells[row["setup"]] = row["note"]
        else:
            over_cap = row["num_over_cap"] / row["num_microbatches"]
            cells[row["setup"]] = [row["mean_over_bound"], row["max_over_bound"], over_cap, row["plan_cpu_ms"]]
    return plans


def section(figures: Mapping[str, Any]) -> str:
    parts = [_plans_text(figures)] if "plans" in figures else []
    return "\n\n".join(parts + ([compared_text(figures["compared"])] if "compared" in figures else []))


def _plans_text(figures: Mapping[str, Any]) -> str:
    setups = figures["setups"]
    wheels = ", ".join(f"{name} {version}" for name, version in figures["wheels"].items() if version)
    described = "\n".join(f"- {name}: {text}" for name, text in setups.items())
    columns = " | ".join(["planner", *setups])
    return f"""Time of a plan over a lower bound that no plan can beat, by the model's FLOPs: mean over batches; 1
is best.
{figures["lengths"].capitalize()}; samples longer than a micro-batch are left out. Ways of other systems are written
from their description, on this package's first fit and Karmarkar-Karp, which are quicker than the originals'; *its own
functions* runs the wheel's code ({wheels or "not installed"}). *Over cap*: micro-batches of two samples or more that
exceed the cap, of all, in
the setup with most.

{described}

{table(f"{columns} | over cap", [_plan(planner, cells, setups) for planner, cells in figures["plans"].items()])}

CPU milliseconds to plan a batch, median; of other systems all ranks one after another:

{table(columns, [_milliseconds(planner, cells, setups) for planner, cells in figures["plans"].items()])}"""


def _plan(planner: str, cells: Mapping[str, Any], setups: Mapping[str, str]) -> list[str]:
    known = [cells[name] for name in setups]
    over_cap = max((cell[2] for cell in known if not isinstance(cell, str)), default=0.0)
    texts = [cell if isinstance(cell, str) else f"{cell[0]:.4f}" for cell in known]
    return _emphasized([planner, *texts, f"≤ {over_cap:.0%}" if over_cap else "none"])


def _milliseconds(planner: str, cells: Mapping[str, Any], setups: Mapping[str, str]) -> list[str]:
    known = [cells[name] for name in setups]
    return _emphasized([planner, *("" if isinstance(cell, str) else f"{cell[3]:.1f}" for cell in known)])


def _emphasized(row: list[str]) -> list[str]:
    """The row in bold where it is this package's."""
    return [f"**{cell}**" for cell in row] if row[0] == "ours" else row
