"""Each system's own planning beside its adapter's: one of slime, torchspec, verl, areal, recsys. And R41's ablation.

verl, areal and recsys run in the environments that `scripts/check adapters NAME` makes; slime's own schedule needs a
checkout. What is known of the other systems stays published.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.publish import Measured, published, table

TITLE = "Adapters"
SYSTEMS = ("ablation", "slime", "torchspec", "verl", "areal", "recsys")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--seeds", type=int, default=50, help="of verl and areal: batches to average over")
    parser.add_argument(
        "--checkout", type=Path, metavar="DIR", help="of slime, whose own schedule plans the same batches"
    )


def measure(args: argparse.Namespace) -> Measured:
    module = importlib.import_module(f"benchmarks.adapters.{args.system}")
    rows = module.measure(args)
    sections = {name: section for name, section in published("adapters").items() if name in SYSTEMS}
    return Measured(sections | {args.system: {"says": module.SAYS, "columns": module.COLUMNS, "rows": rows}})


def section(figures: Mapping[str, Any]) -> str:
    return "\n\n".join(_system(name, figures[name]) for name in SYSTEMS if name in figures)


def _system(name: str, figures: Mapping[str, Any]) -> str:
    rows = [[way, *("–" if value is None else f"{value:.5g}" for value in row)] for way, row in figures["rows"].items()]
    return f"**{name}.** {figures['says']}\n\n{table(' | '.join(['way', *figures['columns']]), rows)}"
