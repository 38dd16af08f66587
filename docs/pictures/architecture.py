"""Draw architecture.svg: the rooms of the package, from the import contract in pyproject.toml.

python docs/pictures/architecture.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).with_name("architecture.svg")

PURPOSE = {
    "cli": "the command megatron-balance",
    "launch": "runs a training script with the hooks",
    "__main__": "python -m megatron_balance",
    "devkit": "CPU in place of a GPU, demo training",
    "mcore": "flags, hooks and a step in Megatron",
    "adapters": "slime, verl, AReaL, TorchSpec, recsys",
    "report": "a run as a page and as a trace",
    "hooking": "checked, undoable patches",
    "record": "every step of a run, in files",
    "runtime": "gather lengths, move samples",
    "planner": "lengths and costs → schedule",
    "cost": "a sample's cost, an integer",
    "model": "the model's shape and FLOPs",
    "lengths": "sample lengths from files",
    "samples": "tensors, bytes, rows, packs",
    "files": "atomic writes, untrusted reads",
    "topology": "ranks and limits",
    "errors": "BalanceError",
}
"""Room → its purpose."""

_BOX = 'fill="#e8eef7" stroke="#5b7aa8"'
_NAME = 'text-anchor="middle" fill="#1b2a41"'
_PURPOSE = 'text-anchor="middle" fill="#44546a"'
_WIDTH, _ROW, _GAP = 940, 54, 10


def rooms() -> list[list[str]]:
    """Rooms from the top row down, as the contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (contract["layers"] for contract in contracts["contracts"] if contract["id"] == "layers")
    return [[room.strip() for room in layer.split("|")] for layer in layers]


def picture() -> str:
    """The drawing as SVG."""
    rows = rooms()
    height = len(rows) * (_ROW + _GAP) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" role="img">',
        "<title>Rooms of megatron_balance: a room imports from rows below its own, never from one above</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, row in enumerate(rows):
        width = (_WIDTH - _GAP * (len(row) + 1)) / len(row)
        top = _GAP + index * (_ROW + _GAP)
        for place, room in enumerate(row):
            left = _GAP + place * (width + _GAP)
            middle = left + width / 2
            parts += [
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_ROW}" rx="6" {_BOX}/>',
                f'<text x="{middle:.0f}" y="{top + 23}" font-size="16" {_NAME}>{room}</text>',
                f'<text x="{middle:.0f}" y="{top + 42}" font-size="12" {_PURPOSE}>{escape(PURPOSE[room])}</text>',
            ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
